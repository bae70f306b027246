from __future__ import annotations

import sys
from typing import Any

import pytest

from benchmarks import bookkeeping
from benchmarks.bookkeeping_sides import ACCOUNTS, MEMORY_BLOCKS, SLICES, Bench, Saltern


def test_our_side_is_measured_in_every_way() -> None:
    samples = bookkeeping.measure({"saltern": sys.executable}, 3, 256)
    slices = samples["saltern"]
    assert set(slices) == {*SLICES, *map(str, MEMORY_BLOCKS)}
    for name in SLICES:
        assert len(slices[name]) == 3
        assert all(0 < each < 1e6 for each in slices[name])
    # A key alone is an object of 65 bytes.
    assert all(65 < slices[str(blocks)][0] < 400 for blocks in MEMORY_BLOCKS)
    assert len(bookkeeping.text(samples).splitlines()) == 1 + len(SLICES) + len(MEMORY_BLOCKS)


def test_slices_do_what_they_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(Saltern, 256)
    for name in SLICES:
        pool, matched = bench._pools[name]._pool, 0

        def match(*prompt: Any, match: Any = pool.index.match) -> list[int]:
            nonlocal matched
            matched += len(blocks := match(*prompt))
            return blocks

        monkeypatch.setattr(pool.index, "match", match)
        for _ in range(2):
            evictions, matched = pool.evictions, 0
            assert bench.cost(name) > 0
            assert matched == (255 if name == "warm" else 0)
            assert pool.evictions - evictions == (256 if name in ("pressure", "accounts") else 0)
            assert pool.cached == {"cold": 256, "warm": 257}.get(name, 512)
            pool.check([])
    assert len({name.account for name, _ in bench._pools["accounts"]._index.names()}) > len(ACCOUNTS) // 2


def test_a_ratio_says_how_many_times_as_fast_we_are() -> None:
    ours = {name: [2.0] for name in (*SLICES, *map(str, MEMORY_BLOCKS))}
    peer = {name: [5.0] for name in ours}
    rows = bookkeeping.text({"saltern": ours, "vllm": peer}).splitlines()
    assert rows[1].endswith("2.5 (2.5 – 2.5)")


def test_a_python_without_the_peer_is_told_of(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="the process of vllm ended: exit status 1"):
        bookkeeping.measure({"vllm": sys.executable}, 1, 256)
    assert "vllm" in capfd.readouterr().err


def test_wrong_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bookkeeping.parse(["--rounds", "0"])
    assert ended.value.code == 2
    assert "--rounds 0 measures nothing" in capsys.readouterr().err
