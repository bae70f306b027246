"""One HTTP connection with deadlines and limits that uvicorn does not have.

    head    within 10 s of its first byte (or of the connection), at most 16 KiB before it is complete
    body    within 30 s, and never slower than 256 bytes a second over 5 s
    answer  a client that takes nothing for 30 s is cut off

A request whose framing can be read in two ways is 400, and the connection ends: two lengths, a length beside a transfer
encoding, bare line feeds (the last two are refused by llhttp itself; RFC 9112, sections 6.3 and 2.2).
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from gateway.http.errors import ApiError
from gateway.http.routing import MAX_HEADER_BYTES

HEAD_SECONDS = 10.0
BODY_SECONDS = 30.0
RATE_WINDOW_SECONDS = 5.0
RATE_WINDOW_BYTES = 5 * 256
STALLED_READER_SECONDS = 30.0


class AmbiguousFraming(Exception):
    """Where the message ends can be read in two ways."""


class Connection(HttpToolsProtocol):
    """uvicorn's protocol, with deadlines. One timer for what is read, one for what is written."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._head_complete = False
        self._body_bytes = 0
        self._body_deadline = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop(self._reading)
        self._stop(self._writing)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._reading is None and not self._head_complete:
            self._await_head()
        if not self._head_complete:
            self._head_bytes += len(data)
        super().data_received(data)
        if not self._head_complete and self._head_bytes > MAX_HEADER_BYTES:
            self._refuse(ApiError(431, f"The headers have more than {MAX_HEADER_BYTES} bytes."))

    def on_headers_complete(self) -> None:
        if sum(name == b"content-length" for name, _ in self.headers) > 1:
            raise AmbiguousFraming
        self._head_complete = True
        self._head_bytes = 0
        super().on_headers_complete()
        self._stop(self._reading)
        self._body_bytes = 0
        self._body_deadline = self.loop.time() + BODY_SECONDS
        self._reading = self.loop.call_later(RATE_WINDOW_SECONDS, self._check_body, 0)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._stop(self._reading)
        self._reading = None
        self._head_complete = False
        super().on_message_complete()

    def pause_writing(self) -> None:
        self._writing = self.loop.call_later(STALLED_READER_SECONDS, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stop(self._writing)
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "This is not a well-formed HTTP request."))

    def _await_head(self) -> None:
        self._reading = self.loop.call_later(HEAD_SECONDS, self._refuse, ApiError(408, "The headers came too slowly."))

    def _check_body(self, before_bytes: int) -> None:
        # What we don't read because its handler is behind is not the client's slowness.
        waiting_for_client = not self.flow.read_paused
        too_slow = self._body_bytes - before_bytes < RATE_WINDOW_BYTES and waiting_for_client
        if too_slow or self.loop.time() > self._body_deadline:
            self._refuse(ApiError(408, "The body came too slowly."))
        else:
            self._reading = self.loop.call_later(RATE_WINDOW_SECONDS, self._check_body, self._body_bytes)

    def _refuse(self, error: ApiError) -> None:
        """Answer, where no answer has begun, and end the connection."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = error.encode()
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()

    @staticmethod
    def _stop(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()
