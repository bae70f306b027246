"""A load generator for one HTTP/1.1 server: requests at times that were set before, or as fast as they are answered.

It is made to cost little beside what it measures: requests are bytes that were made before, connections stay open, and
an answer is read only as far as to know where it ends.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

# After the last request was sent; what is not answered by then never will be.
PATIENCE_SECONDS = 60.0
# Before the first request of an open loop is due.
LEAD_SECONDS = 0.1


class LoadError(Exception):
    """There is nobody to connect to, or answers do not come: one line."""


@dataclass(slots=True)
class Reply:
    """
    Attributes:
        first_at, last_at: `time.perf_counter()` seconds, when the first and the last byte of the body came.
        events: server-sent events in it.
    """

    status: int
    first_at: float
    last_at: float
    events: int


class HttpConnection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self.is_open = True
        self._received = bytearray()
        self._done: Callable[[Reply | None], None] | None = None
        self._first_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def ask(self, request: bytes, done: Callable[[Reply | None], None]) -> None:
        """`done` is called with the reply, or with None when the connection ends before it."""
        self._received.clear()
        self._done, self._first_at = done, 0.0
        self._transport.write(request)

    def close(self) -> None:
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0 or self._done is None:
            return
        if len(self._received) > end + 4:
            self._first_at = self._first_at or now
        head = bytes(self._received[:end]).lower()
        if b"\r\ntransfer-encoding: chunked" in head:
            is_whole = self._received.endswith(b"\r\n0\r\n\r\n")
        else:
            _, _, length = head.partition(b"\r\ncontent-length:")
            is_whole = len(self._received) >= end + 4 + int(length.split(b"\r\n")[0])
        if is_whole:
            status = int(head.split(b" ", 2)[1])
            self._end(Reply(status, self._first_at or now, now, self._received.count(b"data: ")))

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._end(None)

    def _end(self, reply: Reply | None) -> None:
        if done := self._done:
            self._done = None
            done(reply)


@dataclass(slots=True)
class Outcome:
    """What a load came to: one entry for each request that was answered with 200, in seconds.

    Attributes:
        whole, first: from when the request should have been sent to the last and to the first byte of the answer.
        late: from when it should have been sent to when it was.
        failed: requests with another answer, or with none as their connection ended.
        seconds: from the first request to the last answer.
    """

    whole: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    failed: int = 0
    seconds: float = 0.0

    @property
    def per_second(self) -> float:
        return len(self.whole) / self.seconds


def arrivals(per_second: float, seconds: float, seed: str) -> list[float]:
    """When requests are due, in seconds from the start: one in each of equal slots, somewhere in it by chance."""
    draw = random.Random(seed)
    return [(slot + draw.random()) / per_second for slot in range(round(per_second * seconds))]


class Load:
    """Asks one server on loopback over connections that stay open."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[HttpConnection] = []
        self._loop = asyncio.get_running_loop()
        # Held, as the loop itself holds tasks weakly.
        self._opening: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        for connection in self._idle:
            connection.close()

    async def at_times(self, requests: Sequence[bytes], due: Sequence[float]) -> Outcome:
        """An open loop: each request is sent at its time, whatever became of those before it.

        Raises:
            LoadError: no connection, no answer for a long time, or none with 200.
        """
        outcome = Outcome()
        ended: asyncio.Future[None] = self._loop.create_future()
        start = time.perf_counter() + LEAD_SECONDS

        def answered() -> None:
            if len(outcome.whole) + outcome.failed == len(requests):
                ended.set_result(None)

        def send(index: int) -> None:
            self._ask(requests[index], start + due[index], outcome, ended, answered)

        def keep_time() -> None:
            # The loop's own timers are a millisecond coarse, which is as long as what is measured.
            for index, moment in enumerate(due):
                time.sleep(max(0.0, start + moment - time.perf_counter()))
                self._loop.call_soon_threadsafe(send, index)

        threading.Thread(target=keep_time, daemon=True).start()
        return await _when(ended, outcome, start, due[-1])

    async def at_once(self, requests: Iterator[bytes], concurrency: int, seconds: float) -> Outcome:
        """A closed loop: each of `concurrency` clients sends its next request when the last one is answered.

        Raises:
            LoadError: no connection, no answer for a long time, or none with 200.
        """
        outcome = Outcome()
        ended: asyncio.Future[None] = self._loop.create_future()
        start = time.perf_counter()
        running = concurrency

        def send() -> None:
            nonlocal running
            now = time.perf_counter()
            if now < start + seconds:
                self._ask(next(requests), now, outcome, ended, send)
                return
            running -= 1
            if not running:
                ended.set_result(None)

        for _ in range(concurrency):
            send()
        return await _when(ended, outcome, start, seconds)

    def _ask(
        self,
        request: bytes,
        due_at: float,
        outcome: Outcome,
        ended: asyncio.Future[None],
        answered: Callable[[], None],
    ) -> None:
        """Send, note the answer, and say that it came."""

        def send(connection: HttpConnection) -> None:
            outcome.late.append(time.perf_counter() - due_at)
            connection.ask(request, lambda reply: take(connection, reply))

        def take(connection: HttpConnection, reply: Reply | None) -> None:
            if ended.done():
                return
            if reply is not None:
                self._idle.append(connection)
            if reply is None or reply.status != 200:
                outcome.failed += 1
            else:
                outcome.whole.append(reply.last_at - due_at)
                outcome.first.append(reply.first_at - due_at)
                outcome.events.append(reply.events)
            answered()

        async def open_and_send() -> None:
            try:
                _, connection = await self._loop.create_connection(HttpConnection, "127.0.0.1", self._port)
            except OSError as error:
                if not ended.done():
                    ended.set_exception(LoadError(f"no connection: {error}"))
            else:
                send(connection)

        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                send(connection)
                return
        task = self._loop.create_task(open_and_send())
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)


async def _when(ended: asyncio.Future[None], outcome: Outcome, start: float, seconds: float) -> Outcome:
    try:
        async with asyncio.timeout(LEAD_SECONDS + seconds + PATIENCE_SECONDS):
            await ended
    except TimeoutError:
        sent, answered = len(outcome.late), len(outcome.whole) + outcome.failed
        raise LoadError(f"{sent - answered} of {sent} requests had no answer after {PATIENCE_SECONDS:g} s") from None
    if not outcome.whole:
        raise LoadError(f"all {outcome.failed} requests failed")
    outcome.seconds = time.perf_counter() - start
    return outcome
