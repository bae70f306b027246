from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from benchmarks import serving
from benchmarks.measured_server import Answer, MeasuredServer, WrongAnswer
from benchmarks.scenarios import SCENARIOS, Draw, decode
from tests.system.scripted import listening

# Of the double one answer comes in one piece, so it has no speed.
UNTIMED = [scenario for scenario in SCENARIOS if scenario is not decode]


class Double:
    """A server that says 7 as often as it is asked to.

    Attributes:
        caches: whether it tells how much of a prompt it knew: all that a prompt or an answer to it has in common.
        tells_ids: whether events have token ids.
        joins: whether the first event has two tokens.
        lies: replaces fields of usage.
        known: prompts with their answers.
    """

    def __init__(
        self, *, says: str = "salt", caches: bool = True, tells_ids: bool = True, joins: bool = False, **lies: int
    ) -> None:
        self.says, self.caches, self.tells_ids, self.joins, self.lies = says, caches, tells_ids, joins, lies
        self.bodies: list[dict[str, Any]] = []
        self.known: list[list[Any]] = []
        self.app = Starlette(
            routes=[Route("/v1/models", self.models), Route("/v1/completions", self.complete, methods=["POST"])]
        )

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "double"}]})

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        cached = max((_common(body["prompt"], known) for known in self.known), default=0)
        self.bodies.append(body)
        self.known.append([*body["prompt"], *[7] * body["max_tokens"]])
        if not body.get("stream"):
            return JSONResponse({"choices": [{"text": self.says}]})
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]} | self.lies
        if self.caches:
            usage["prompt_tokens_details"] = {"cached_tokens": self.lies.get("cached_tokens", cached)}
        return StreamingResponse(self.events(body["max_tokens"], usage), media_type="text/event-stream")

    async def events(self, tokens: int, usage: dict[str, Any]) -> AsyncIterator[bytes]:
        events = [[7, 7], *[[7]] * (tokens - 2)] if self.joins else [[7]] * tokens
        for token_ids in events:
            choice = {"text": "", "token_ids": token_ids} if self.tells_ids else {"text": self.says}
            yield b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
        yield b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"


def _common(prompt: Any, other: Any) -> int:
    pairs = zip(prompt, other, strict=False)
    return next((index for index, (mine, theirs) in enumerate(pairs) if mine != theirs), min(len(prompt), len(other)))


async def measured(*doubles: Double, repetitions: int = 2) -> dict[str, Any]:
    """The report of all scenarios but those of speed, on servers of these."""
    if not doubles[1:]:
        async with listening(doubles[0].app) as url:
            return await _report([MeasuredServer("server", url, None, None)], repetitions)
    async with listening(doubles[0].app) as url, listening(doubles[1].app) as peer_url:
        servers = [MeasuredServer("server", url, "key", None), MeasuredServer("peer", peer_url + "/v1/", None, "other")]
        return await _report(servers, repetitions)


async def _report(servers: list[MeasuredServer], repetitions: int) -> dict[str, Any]:
    try:
        return (await serving.measure(servers, "seed", repetitions, UNTIMED)).report()
    finally:
        for server in servers:
            await server.close()


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "PAUSE_SECONDS", 0)


@pytest.mark.anyio
async def test_every_scenario_runs_and_reports_what_was_cached() -> None:
    double = Double()
    report = await measured(double)
    figures = report["figures"]
    assert len(figures["cold first token, ms"]["server"]["samples"]) == 2
    assert figures["warm cached, tok"]["server"]["median"] == 1024
    # The whole turn before, its answer included.
    assert [figures[f"turn {turn} cached, tok"]["server"]["median"] for turn in (1, 2, 3)] == [0, 160, 240]
    assert set(figures["eight at once, cold, tok/s"]) == {"server"}
    assert report["warnings"] == []
    asked = double.bodies[1:]
    assert {len(body["prompt"]) for body in asked[:2]} == {1024, 1040}
    assert all(body["temperature"] == 0 and body["ignore_eos"] and body["stream"] for body in asked)
    assert {body["model"] for body in asked} == {"double"}


@pytest.mark.anyio
async def test_both_servers_are_asked_the_same_in_turns() -> None:
    server, peer = Double(), Double()
    report = await measured(server, peer, repetitions=1)
    assert [body["prompt"] for body in server.bodies] == [body["prompt"] for body in peer.bodies]
    figures = report["figures"]
    cold = figures["cold first token, ms"]
    assert cold["ratio"]["median"] == cold["server"]["median"] / cold["peer"]["median"]
    assert "ratio" not in figures["warm cached, tok"]
    assert report["servers"]["peer"]["model"] == "other"
    assert "key" not in json.dumps(report["servers"])
    assert "ratio: median (least - greatest)" in serving.text(report)


@pytest.mark.anyio
async def test_who_is_first_changes_with_every_repetition() -> None:
    asked: list[str] = []

    async def noting(server: MeasuredServer, draw: Draw) -> dict[str, float]:
        asked.append(server.name)
        return {"nothing, ms": 1.0}

    async with listening(Double().app) as url:
        servers = [MeasuredServer(name, url, None, "double") for name in ("a", "b")]
        await serving.measure(servers, "seed", 2, [noting])
        for server in servers:
            await server.close()
    assert asked == ["a", "b", "b", "a", "a", "b"]


@pytest.mark.anyio
async def test_first_events_with_several_tokens_are_warned_of() -> None:
    (warning,) = (await measured(Double(joins=True), repetitions=1))["warnings"]
    # Two prompts, twice eight requests and six turns, in two repetitions.
    assert "in 48 of 48 answers the first event had several tokens" in warning


@pytest.mark.anyio
async def test_servers_of_different_models_are_warned_of() -> None:
    report = await measured(Double(says="salt"), Double(says="sugar"), repetitions=1)
    (warning,) = report["warnings"]
    assert "may not be one model" in warning
    assert "sugar" in warning
    assert f"warning: {warning}" in serving.text(report)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("lies", "message"),
    [
        ({"prompt_tokens": 1025}, "the prompt has 1025 tokens and should have 1024"),
        ({"completion_tokens": 3}, "the answer has 3 tokens and should have 4"),
        ({"cached_tokens": 16}, "knew 16 tokens of a prompt that should be new"),
    ],
)
async def test_an_answer_that_is_not_what_was_asked_for_ends_the_run(lies: dict[str, int], message: str) -> None:
    with pytest.raises(WrongAnswer, match=message):
        await measured(Double(**lies))


@pytest.mark.anyio
async def test_what_a_server_does_not_tell_is_left_out() -> None:
    silent = Double(caches=False)
    figures = (await measured(silent))["figures"]
    assert not [name for name in figures if name.endswith("tok") and "cached" in name]
    with pytest.raises(WrongAnswer, match="does not tell token ids"):
        await measured(Double(tells_ids=False))


@pytest.mark.anyio
async def test_a_refusal_is_told_with_its_status() -> None:
    async with listening(Starlette()) as url:
        server = MeasuredServer("server", url, None, None)
        with pytest.raises(WrongAnswer, match="server answered 404"):
            await server.open()
        await server.close()


def answer(**changes: Any) -> Answer:
    fields = {"sent_at": 1.0, "first_at": 1.5, "last_at": 3.5, "first_tokens": 1, "tokens": 128}
    return Answer(**(fields | changes), token_ids=[], cached_tokens=None)


def test_speed_is_of_the_tokens_after_the_first_event() -> None:
    assert answer().first_token_ms == 500
    assert answer().decode_tokens_per_second == 127 / 2
    assert answer(first_tokens=28).decode_tokens_per_second == 50
    with pytest.raises(WrongAnswer, match="came at once"):
        _ = answer(last_at=1.5).decode_tokens_per_second


def test_a_prompt_is_the_same_for_the_same_seed_and_shares_nothing_with_another() -> None:
    assert Draw("a").tokens(64) == Draw("a").tokens(64)
    assert _common(Draw("a").tokens(64), Draw("b").tokens(64)) < 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--url"),
        (["--url", "http://127.0.0.1", "--repetitions", "0"], "--repetitions 0 measures nothing"),
        (["--url", "http://127.0.0.1", "--peer-key", "x"], "need --peer-url"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        serving.parse(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_nobody_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    # Port 9 is discard's, which nobody serves.
    assert serving.main(["--url", "http://127.0.0.1:9"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("benchmarks.serving: ")
