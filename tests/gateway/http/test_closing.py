from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.http import errors
from gateway.http.errors import CLOSE, LINGER_BYTES, ApiError

pytestmark = pytest.mark.anyio

PIECE_BYTES = 1 << 20


class Connection:
    """What the application sent, and how much of the body it has read of a client that has `pieces` to send."""

    def __init__(self, pieces: Iterator[bool]) -> None:
        self.sent: list[dict[str, Any]] = []
        self.read_bytes = 0
        self._pieces = pieces

    async def receive(self) -> dict[str, Any]:
        # The answer has left before the rest of the body is read.
        assert [message["type"] for message in self.sent] == ["http.response.start", "http.response.body"]
        more = next(self._pieces, None)
        if more is None:
            return {"type": "http.disconnect"}
        self.read_bytes += PIECE_BYTES
        return {"type": "http.request", "body": bytes(PIECE_BYTES), "more_body": more}

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    async def refuse(self, error: ApiError) -> None:
        await error.response()({"type": "http"}, self.receive, self.send)  # type: ignore[arg-type]
        assert b"".join(message.get("body", b"") for message in self.sent) == error.encode()
        assert not self.sent[-1].get("more_body", False)


def too_large() -> ApiError:
    return ApiError(413, "Too large.", headers=(CLOSE,))


async def test_a_refused_body_is_read_to_its_end_so_that_the_answer_arrives() -> None:
    connection = Connection(iter([True, True, False]))
    await connection.refuse(too_large())
    assert connection.read_bytes == 3 * PIECE_BYTES


async def test_a_client_that_leaves_ends_the_wait() -> None:
    connection = Connection(iter([True]))
    await connection.refuse(too_large())
    assert connection.read_bytes == PIECE_BYTES


async def test_a_body_without_end_is_not_read_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = Connection(iter(lambda: True, None))
    await connection.refuse(too_large())
    assert connection.read_bytes == LINGER_BYTES

    async def never() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(errors, "LINGER_SECONDS", 0.01)
    silent = Connection(iter([]))
    silent.receive = never  # type: ignore[method-assign]
    await silent.refuse(too_large())


async def test_a_refusal_that_read_the_request_waits_for_nothing() -> None:
    connection = Connection(iter([True]))
    await connection.refuse(ApiError(400, "Wrong."))
    assert connection.read_bytes == 0
