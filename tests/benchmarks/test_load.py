from __future__ import annotations

from itertools import repeat

import pytest
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from benchmarks import echo
from benchmarks.load import Load, LoadError, Outcome, arrivals
from tests.system.scripted import listening


def request(body: str) -> bytes:
    return f"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()


WHOLE, STREAMED = request('{"stream":false}'), request('{"stream":true}')


def test_one_request_is_due_in_each_slot() -> None:
    due = arrivals(100, 2, "seed")
    assert [int(100 * moment) for moment in due] == list(range(200))
    assert due == arrivals(100, 2, "seed")
    assert due != arrivals(100, 2, "other")
    # Somewhere in it, not always at its beginning.
    assert len({round(100 * moment % 1, 6) for moment in due}) > 100


async def loaded(app: ASGIApp, requests: list[bytes]) -> Outcome:
    """All of them at once."""
    async with listening(app) as url:
        load = Load(int(url.rpartition(":")[2]))
        try:
            return await load.at_times(requests, [0.0] * len(requests))
        finally:
            load.close()


@pytest.mark.anyio
async def test_every_request_is_answered_however_the_answer_is_framed() -> None:
    outcome = await loaded(echo.app, [WHOLE, STREAMED, STREAMED])
    assert sorted(outcome.events) == [0, echo.EVENTS + 1, echo.EVENTS + 1]
    assert outcome.failed == 0
    assert len(outcome.late) == 3
    assert all(0 < first <= whole for first, whole in zip(outcome.first, outcome.whole, strict=True))


@pytest.mark.anyio
async def test_a_closed_loop_asks_again_over_the_same_connections() -> None:
    connections: set[object] = set()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        connections.add(tuple(scope["client"]))
        await echo.app(scope, receive, send)

    async with listening(app) as url:
        load = Load(int(url.rpartition(":")[2]))
        outcome = await load.at_once(repeat(STREAMED), 3, 0.2)
        load.close()
    assert len(outcome.whole) > 3
    assert len(connections) == 3


@pytest.mark.anyio
async def test_requests_that_fail_are_counted_and_not_timed() -> None:
    answers = iter([200, 503])

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", b"0")]
        if (status := next(answers, None)) is None:
            raise RuntimeError("answered 500")
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body"})

    outcome = await loaded(app, [WHOLE] * 3)
    assert (len(outcome.whole), outcome.failed) == (1, 2)


@pytest.mark.anyio
async def test_nothing_but_failures_is_an_error() -> None:
    with pytest.raises(LoadError, match="all 2 requests failed"):
        await loaded(Starlette(), [WHOLE] * 2)


@pytest.mark.anyio
async def test_nobody_there_is_an_error() -> None:
    # Port 9 is discard's, which nobody serves.
    with pytest.raises(LoadError, match="no connection"):
        await Load(9).at_times([WHOLE], [0.0])
