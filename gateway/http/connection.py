"""One HTTP connection, with deadlines and limits that uvicorn does not have, and framing that reads in one way only.

    head     within 10 s of its first byte (or of the connection), at most 16 KiB
    body     within 30 s, never slower than 256 bytes a second over 5 s, in at most 16384 pieces
    answer   a client that takes nothing of it for 30 s is cut off; the kernel tells of what was taken when a third of
             its buffer is free, so less than 3 KiB a second of a large backlog is nothing
    order    one request at a time. What comes before an answer has ended is dropped, and the connection ends after
             that answer; the client sends it again (RFC 9112, section 9.3.2). So a disconnect is always noticed,
             nothing piles up, and what hides behind a request is never answered.
    framing  bare line feeds, folded lines, bad chunks and bad lengths are refused by llhttp, what else is ambiguous
             by `head_fault`: 400, and the connection ends (RFC 9112, sections 2.2, 5 and 6)
    TLS      the handshake has the seconds of a head; who was closed has 30 s to take what is left and to close too.
             64 KiB more of an answer than without TLS may wait unnoticed until then.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.protocols.utils import is_ssl

from gateway.http.body import MAX_BODY_BYTES
from gateway.http.errors import LINGER_BYTES, LINGER_SECONDS, ApiError
from gateway.http.routing import MAX_HEADER_BYTES, RawHeaders, new_request_id

HEAD_SECONDS = 10.0
BODY_SECONDS = 30.0
RATE_WINDOW_SECONDS = 5.0
RATE_WINDOW_BYTES = 5 * 256
# Chunks, or packets of a body that is not chunked: each costs as much as a kilobyte of a large one.
MAX_BODY_PIECES = 1 << 14
STALLED_READER_SECONDS = 30.0
# How often it is looked whether a client took something, in parts of that.
STALLED_READER_CHECKS = 6


def malformed() -> ApiError:
    return ApiError(400, "This is not a well-formed HTTP request.")


def head_too_large() -> ApiError:
    return ApiError(431, f"The head of the request has more than {MAX_HEADER_BYTES} bytes.")


def head_fault(version: str, target: bytes, headers: RawHeaders, upgrade: bool) -> str | None:
    """Why another recipient might read this request differently; None when none would.

    Args:
        headers: names in lower case.
        upgrade: whether it asks for another protocol, as llhttp understands it.
    """
    lengths, codings, hosts = (
        [value for name, value in headers if name == wanted]
        for wanted in (b"content-length", b"transfer-encoding", b"host")
    )
    if version not in ("1.0", "1.1"):
        return "This server speaks HTTP/1.1 and HTTP/1.0."
    if len(hosts) > 1 or (version == "1.1" and not hosts):
        return "A request has one Host header."
    if target.startswith(b"//"):
        return "The path begins with two slashes."
    if len(lengths) + len(codings) > 1:
        return "A request has one Content-Length or one Transfer-Encoding."
    if codings and (version == "1.0" or codings[0].strip().lower() != b"chunked"):
        return "The only Transfer-Encoding is chunked, in HTTP/1.1."
    if upgrade and (lengths or codings):
        # llhttp takes what follows the head for the other protocol, which is not spoken here.
        return "A request with a body can't ask for another protocol; send it without the Upgrade header."
    return None


class Connection(HttpToolsProtocol):
    """uvicorn's protocol, held to the above. One timer for what is read, one for what is written."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        # Between the end of the head and the end of the message.
        self._in_body = False
        self._body_bytes = 0
        self._body_pieces = 0
        self._body_deadline = 0.0
        # What the parser took since it last handed a head or a part of the body on.
        self._withheld_bytes = 0
        # Whatever comes now is dropped.
        self._deaf = False
        self._dropped_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Anything that the kernel does not take pauses writing, so that the timer sees every client that stalls. TLS
        # counts from the limit on and not from above it: with 0 it would pause where nothing is left to be taken.
        transport.set_write_buffer_limits(high=1 if is_ssl(transport) else 0)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_reading_timer()
        self._stop_writing_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            self._dropped_bytes += len(data)
            if self._dropped_bytes > LINGER_BYTES:
                self.transport.abort()
            return
        self._unset_keepalive_if_required()
        if self._reading is None:
            self._await_head()
        self._withheld_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # The request is served as it is. The parser has lost what follows it.
            self._end_after_answer()
        except httptools.HttpParserError as error:
            self._refuse(error.__context__ if isinstance(error.__context__, ApiError) else malformed())
        else:
            if self._withheld_bytes > MAX_HEADER_BYTES:
                self._refuse(head_too_large())

    # --- what the parser calls; an exception ends it

    def on_message_begin(self) -> None:
        if self._answering:
            raise malformed()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_HEADER_BYTES:
            raise head_too_large()

    def on_header(self, name: bytes, value: bytes) -> None:
        # A trailer must not become a header of the request that is already being served (RFC 9110, section 6.5.1).
        if not self._in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        version, upgrade = self.parser.get_http_version(), self.parser.should_upgrade()
        if fault := head_fault(version, self.url, self.headers, upgrade):
            raise ApiError(400, fault)
        super().on_headers_complete()
        self._in_body = True
        self._withheld_bytes = self._body_bytes = self._body_pieces = 0
        self._body_deadline = self.loop.time() + BODY_SECONDS
        self._stop_reading_timer()
        self._reading = self.loop.call_later(RATE_WINDOW_SECONDS, self._check_body, 0)

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._withheld_bytes = 0
        self._body_bytes += len(body)
        self._body_pieces += 1
        if self._body_bytes > MAX_BODY_BYTES + LINGER_BYTES or self._body_pieces > MAX_BODY_PIECES:
            message = f"The body has {self._body_bytes} bytes so far, and came in {self._body_pieces} pieces"
            raise ApiError(400, f"{message}; at most {MAX_BODY_PIECES} pieces are read. Send it in larger ones.")

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_body = False
        self._withheld_bytes = 0
        self._stop_reading_timer()
        if not self._answering:
            # The answer came before the end of the request, and no end of an answer will watch over what comes next.
            self._await_head()

    # --- what the answer and the transport call

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_body and self.expect_100_continue:
            # Whether the body follows all the same is the client's choice (RFC 9110, section 10.1.1).
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_taking(self.transport.get_write_buffer_size(), STALLED_READER_CHECKS)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_writing_timer()

    # --- deadlines

    def _await_head(self) -> None:
        self._reading = self.loop.call_later(HEAD_SECONDS, self._check_head)

    def _check_head(self) -> None:
        if self._withheld_bytes:
            self._time_out("The headers came too slowly.")
        else:
            # Nothing was asked; an answer might be taken for that of a request just sent.
            self.transport.close()
            # Who has TLS closed is waited for.
            self._reading = self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def _check_body(self, before_bytes: int) -> None:
        # What is not read because its handler is behind, or was not asked for yet, is not the client's slowness.
        waiting_for_client = not (self.flow.read_paused or self.cycle.waiting_for_100_continue)
        too_slow = self._body_bytes - before_bytes < RATE_WINDOW_BYTES and waiting_for_client
        if too_slow or self.loop.time() > self._body_deadline:
            self._time_out("The body came too slowly.")
        else:
            self._reading = self.loop.call_later(RATE_WINDOW_SECONDS, self._check_body, self._body_bytes)

    def _await_taking(self, left_bytes: int, checks: int) -> None:
        seconds = STALLED_READER_SECONDS / STALLED_READER_CHECKS
        self._writing = self.loop.call_later(seconds, self._check_taking, left_bytes, checks - 1)

    def _check_taking(self, before_bytes: int, checks: int) -> None:
        left_bytes = self.transport.get_write_buffer_size()
        if left_bytes < before_bytes:
            checks = STALLED_READER_CHECKS
        if checks:
            self._await_taking(left_bytes, checks)
        else:
            self.transport.abort()

    def _stop_reading_timer(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _stop_writing_timer(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    # --- ends

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _time_out(self, message: str) -> None:
        self._refuse(ApiError(408, message))
        if not self._answering:
            # So slow a client has nothing under way.
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer what is being read, unless its answer or another's is under way, and end the connection."""
        if self._deaf or self.transport.is_closing():
            return
        if self._in_body and self._answering and not self.cycle.response_started:
            # The handler hears of a disconnect, and says nothing any more.
            self.cycle.disconnected = True
            self.cycle.waiting_for_100_continue = False
            self.cycle.response_complete = True
            self.cycle.message_event.set()
        elif self._in_body or self._answering:
            return self._end_after_answer()
        self._deaf = True
        body = error.encode()
        self.transport.write(
            STATUS_LINE[error.status] + b"content-type: application/json\r\nconnection: close\r\n"
            b"x-request-id: %s\r\ncontent-length: %d\r\n\r\n" % (new_request_id().encode("ascii"), len(body)) + body
        )
        # Closed with bytes unread, the connection would be reset, and the reset overtake the answer. Half of a TLS
        # connection can't be closed: there, its length and `connection: close` tell the client to close.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._stop_reading_timer()
        self._reading = self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def _end_after_answer(self) -> None:
        self._deaf = True
        self._stop_reading_timer()
        if self._answering:
            self.cycle.keep_alive = False
        else:
            self.transport.close()
