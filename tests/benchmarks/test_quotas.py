from __future__ import annotations

import pytest

from benchmarks import quotas


@pytest.mark.anyio
async def test_every_run_is_measured_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "MANY_TENANTS", 20)
    monkeypatch.setattr(quotas, "SLICES", 2)
    found = await quotas.measure(64)
    for run in ("busy", "offered", "tenants"):
        ways = found[run]
        assert isinstance(ways, dict)
        assert {way: figures.requests for way, figures in ways.items()} == {"with quotas": 64, "without": 64}
        assert all(0 < figures.p50_ms <= figures.p99_ms for figures in ways.values())
        assert ways["with quotas"].cpu_ms > ways["without"].cpu_ms > 0
