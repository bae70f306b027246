from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import echo, gateway
from benchmarks.gateway import Chats, Target, WrongSetUp, check, measure, summary
from benchmarks.load import Outcome
from benchmarks.processes import Measured
from tests.system.scripted import listening


class Still(Measured):
    """A process that uses nothing."""

    def cpu_seconds(self) -> float:
        return 0.0


def target(port: int, name: str = "gateway") -> Target:
    return Target(name, Still(None, time.perf_counter(), Path()), port, "a-model", ["key-1", "key-2"])  # type: ignore


def test_no_two_chats_have_a_prompt_in_common() -> None:
    chats = Chats(target(1), "seed")
    requests = [chats.request(is_streamed=streamed) for streamed in (False, True, False)]
    heads, bodies = zip(*(request.split(b"\r\n\r\n") for request in requests), strict=True)
    asked = [json.loads(body) for body in bodies]
    assert len({json.dumps(body["messages"][0]) for body in asked}) == 3
    assert [body.get("stream") for body in asked] == [None, True, None]
    assert [b"Bearer key-1" in head for head in heads] == [True, False, True]
    assert all(f"content-length: {len(body)}".encode() in head for head, body in zip(heads, bodies, strict=True))


def test_a_summary_is_of_what_was_answered() -> None:
    outcome = Outcome([0.002] * 99 + [0.5], [0.001] * 100, [0.0] * 101, [5] * 100, failed=1, seconds=2.0)
    figures = summary(outcome, cpu_seconds=0.3)
    assert figures["answered per s"] == 50
    assert (figures["p50"], figures["p99"], figures["first byte p50"]) == (2.0, 2.0, 1.0)
    assert figures["cpu ms per request"] == pytest.approx(3)
    assert figures["failed"] == 1


@pytest.mark.anyio
async def test_both_targets_carry_every_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "CONCURRENCIES", (1, 2))
    monkeypatch.setattr(gateway, "SATURATION_SECONDS", 0.05)
    monkeypatch.setattr(gateway, "WARM_UP_SECONDS", 0.1)
    async with listening(echo.app) as url:
        targets = [target(int(url.rpartition(":")[2]), name) for name in ("gateway", "echo")]
        measured = await measure(targets, argparse.Namespace(rates=[100], seconds=0.1, rounds=2))
    assert [(load["answer"], load["per_second"]) for load in measured["open"]] == [("whole", 100), ("streamed", 100)]
    assert [load["clients"] for load in measured["closed"]] == [1, 2, 1, 2]
    report: dict[str, Any] = measured | {
        "prompt_tokens": 250,
        "first_start_seconds": 1.0,
        "start_seconds": {"median": 1.0, "least": 1.0, "greatest": 1.0},
        "resident_bytes": {"ready": 1 << 20},
    }
    assert "streamed, difference" in gateway.text(report)
    assert "resident memory, ready: 1 MiB" in gateway.text(report)


@pytest.mark.anyio
async def test_an_answer_of_something_else_is_refused() -> None:
    async with listening(echo.app) as url:
        with pytest.raises(WrongSetUp, match="no usage"):
            await asyncio.to_thread(check, target(int(url.rpartition(":")[2])))


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--rates", "0.01"]])
def test_wrong_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gateway.parse(arguments)
    assert ended.value.code == 2
    assert "nothing to measure" in capsys.readouterr().err
