"""The asyncio client of a store: one connection, many requests.

    StoreError
    ├── StoreLost      the connection is gone; every request of it ended
    └── StoreRefused   the store does not speak with us, and why

It knows nothing of tenants; whoever holds it speaks to *a* store.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cachestore.protocol import (
    KEY_VERSION,
    MAX_FRAME_TO_GATEWAY_BYTES,
    MAX_FRAME_TO_STORE_BYTES,
    MAX_UNSENT_BYTES,
    PING_INTERVAL_SECONDS,
    PROTOCOL,
    SILENCE_LIMIT_SECONDS,
    Abort,
    AccountReport,
    DropAccount,
    Fence,
    Fenced,
    Finished,
    Flush,
    Flushed,
    Hello,
    Message,
    OpenAccount,
    Ping,
    Pong,
    Probe,
    ProbeResult,
    ProtocolError,
    Refused,
    Rejected,
    Sampling,
    Seal,
    Started,
    Stats,
    StatsReport,
    Submit,
    ToGateway,
    TokenLogprobs,
    Tokens,
    Welcome,
    decode_to_gateway,
    encode_frame,
    read_message,
)

log = logging.getLogger("saltern.gateway")


@dataclass(slots=True)
class Output:
    """Generated tokens; `logprobs` has one for each of them, or is empty when none were asked for."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]


Event = Started | Output | Finished | Rejected
Answer = TypeVar("Answer", bound=Message)


class StoreError(Exception):
    """Base of what a store connection can raise."""


class StoreLost(StoreError):
    """The connection is gone. What ran on it has ended and may be sent again."""


class StoreRefused(StoreError):
    """The store answered `Hello` with a refusal."""


class StoreRequest:
    """One submitted request: its events in order, ending with `Finished`, `Rejected` or `StoreLost`.

    Tokens that arrive faster than they are taken are handed out together.
    """

    def __init__(self, client: StoreClient, request: int, prompt_blocks: int) -> None:
        self._client = client
        self._request = request
        self._sealed_blocks = prompt_blocks
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()
        self._lost = False
        self.finished: Finished | None = None

    def put(self, event: Event) -> None:
        if isinstance(event, Output) and self._events and isinstance(last := self._events[-1], Output):
            last.tokens += event.tokens
            last.logprobs += event.logprobs
        else:
            self._events.append(event)
        if isinstance(event, Finished):
            self.finished = event
        self._arrived.set()

    def lose(self) -> None:
        self._lost = True
        self._arrived.set()

    async def next(self) -> Event:
        """The next event. Raises StoreLost when the connection went before it came."""
        while not self._events:
            if self._lost:
                raise StoreLost("the store went away while the request ran")
            self._arrived.clear()
            await self._arrived.wait()
        return self._events.popleft()

    def seal(self, keys: list[bytes], *, last: bool = False) -> None:
        """Name the next full blocks; the last call, after `Finished`, lets the store release the request."""
        self._client.send_if_open(
            Seal(request=self._request, first_block=self._sealed_blocks, keys=b"".join(keys), last=last)
        )
        self._sealed_blocks += len(keys)
        if last:
            self._client.forget(self._request)

    def abort(self) -> None:
        """Stop it; `Finished` follows unless it came already."""
        self._client.send_if_open(Abort(request=self._request))


class StoreClient:
    """A connection to a store. Made by `connect`.

    Attributes:
        closed: set when it is gone, whatever the cause.
        heard_at: monotonic seconds, when its last message came.
        report: the last `StatsReport`.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, welcome: Welcome) -> None:
        self.welcome = welcome
        self.closed = asyncio.Event()
        self.report: StatsReport | None = None
        self._reader = reader
        self._writer = writer
        self._requests: dict[int, StoreRequest] = {}
        self._numbers = itertools.count(1)
        # Who waits for an answer of that type about that: the first that asked gets the first one.
        self._waiting: dict[tuple[object, ...], deque[asyncio.Future[Any]]] = {}
        self._opened: dict[bytes, int] = {}
        # What the store last said of its engine, and whether anything ran when the connection was lost.
        self._said_step_age_ms = 0
        self._lost_work = False
        self.heard_at = time.monotonic()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]

    @classmethod
    async def connect(cls, path: Path) -> StoreClient:
        """Raises StoreLost when nobody serves there, StoreRefused when the store does not speak with us."""
        try:
            async with asyncio.timeout(SILENCE_LIMIT_SECONDS):
                reader, writer = await asyncio.open_unix_connection(str(path))
                try:
                    hello = Hello(protocol=PROTOCOL, key_version=KEY_VERSION)
                    writer.write(encode_frame(hello, MAX_FRAME_TO_STORE_BYTES))
                    answer = await read_message(reader, decode_to_gateway, MAX_FRAME_TO_GATEWAY_BYTES)
                except BaseException:
                    writer.transport.abort()
                    raise
        except (OSError, TimeoutError, EOFError, ProtocolError) as error:
            raise StoreLost(f"no store at {path}: {error or type(error).__name__}") from None
        if isinstance(answer, Welcome):
            return cls(reader, writer, answer)
        writer.transport.abort()
        if isinstance(answer, Refused):
            raise StoreRefused(answer.detail)
        raise StoreLost(f"{path} answered Hello with {type(answer).__name__}")

    @property
    def step_age_ms(self) -> int:
        """How long ago the engine made a step, as far as is known, also once the connection is lost; 0 without work."""
        if not (self._requests or self._said_step_age_ms or self._lost_work):
            return 0
        return self._said_step_age_ms + int(1000 * (time.monotonic() - self.heard_at))

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._end()

    def submit(
        self,
        *,
        account: bytes,
        epoch: int,
        tokens: bytes,
        keys: list[bytes],
        sampling: Sampling,
        max_tokens: int,
        queue_deadline_ns: int,
        ttl_seconds: int = 0,
    ) -> StoreRequest:
        """Start a request; opens the account at that epoch first where this connection has not.

        Raises:
            StoreLost: the connection is gone.
        """
        if self._opened.get(account, -1) < epoch:
            # Of revision 0: the limits that the store knows of it stay.
            self.open_account(OpenAccount(account=account, epoch=epoch))
        number = next(self._numbers)
        request = StoreRequest(self, number, len(keys))
        self._send(
            Submit(
                request=number,
                account=account,
                epoch=epoch,
                tokens=tokens,
                keys=b"".join(keys),
                sampling=sampling,
                max_tokens=max_tokens,
                queue_deadline_ns=queue_deadline_ns,
                ttl_seconds=ttl_seconds,
            )
        )
        self._requests[number] = request
        return request

    def open_account(self, message: OpenAccount) -> None:
        """Before what is submitted for it after this. Raises StoreLost: the connection is gone."""
        self._send(message)
        self._opened[message.account] = max(message.epoch, self._opened.get(message.account, 0))

    async def drain(self) -> None:
        """Until most of what was sent is on its way, for who sends much at once. Raises StoreLost."""
        try:
            await self._writer.drain()
        except OSError:
            raise StoreLost("the store went away") from None

    async def fence(self, account: bytes, epoch: int) -> Fenced:
        """Make everything older than `epoch` unreachable. Raises StoreLost when no answer came."""
        return await self._ask(Fence(account=account, epoch=epoch), Fenced, account, epoch)

    async def drop_account(self, account: bytes) -> Fenced:
        """Make all of the account unreachable for good. Raises StoreLost when no answer came."""
        self._opened.pop(account, None)
        return await self._ask(DropAccount(account=account), Fenced, account, None)

    async def flush(self, account: bytes) -> Flushed:
        """Make all that is cached of the account unreachable. Raises StoreLost when no answer came."""
        return await self._ask(Flush(account=account), Flushed, account)

    async def probe(self, account: bytes, epoch: int, keys: list[bytes]) -> ProbeResult:
        """What a prompt with these keys would find now. Raises StoreLost when no answer came."""
        return await self._ask(Probe(account=account, epoch=epoch, keys=b"".join(keys)), ProbeResult, account, epoch)

    async def stats(self) -> StatsReport:
        """Raises StoreLost when no answer came."""
        return await self._ask(Stats(), StatsReport)

    async def account_report(self, account: bytes) -> AccountReport:
        """What an account has, once all that was sent before is in force. Raises StoreLost when no answer came."""
        return await self._ask(Stats(account=account), AccountReport, account)

    async def _ask(self, message: Message, answer: type[Answer], *about: object) -> Answer:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._send(message)
        self._waiting.setdefault((answer, *about), deque()).append(future)
        return await future

    def _answer(self, message: Message, *about: object) -> None:
        waiting = self._waiting.get(key := (type(message), *about))
        if waiting:
            future = waiting.popleft()
            if not future.done():
                future.set_result(message)
            if not waiting:
                del self._waiting[key]

    def forget(self, request: int) -> None:
        self._requests.pop(request, None)

    def send_if_open(self, message: Message) -> None:
        """What a lost store no longer needs to hear is dropped."""
        with contextlib.suppress(StoreLost):
            self._send(message)

    def _send(self, message: Message) -> None:
        # The transport ends before its end is read: in between it may take nothing, not even a look.
        if self.closed.is_set() or self._writer.transport.is_closing():
            raise StoreLost("the store is not connected")
        frame = encode_frame(message, MAX_FRAME_TO_STORE_BYTES)
        # What waits from before: one frame alone may be larger.
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            log.warning("store connection closed: it does not read")
            self._end()
            raise StoreLost("the store does not read")
        self._writer.write(frame)
        if self._writer.transport.is_closing():
            raise StoreLost("the store went away")

    async def _read(self) -> None:
        try:
            while True:
                self._take(await read_message(self._reader, decode_to_gateway, MAX_FRAME_TO_GATEWAY_BYTES))
                self.heard_at = time.monotonic()
        except ProtocolError as error:
            log.error("store connection closed: %s", error)
        except (EOFError, OSError):
            pass
        finally:
            self._end()

    def _take(self, message: ToGateway) -> None:
        match message:
            case Tokens():
                for number, tokens, logprobs in message.entries:
                    if request := self._requests.get(number):
                        request.put(Output(tokens, logprobs))
            case Started() | Finished() | Rejected():
                if request := self._requests.get(message.request):
                    request.put(message)
                    if isinstance(message, Rejected):
                        self.forget(message.request)
            case Fenced() | ProbeResult():
                self._answer(message, message.account, message.epoch)
            case Flushed() | AccountReport():
                self._answer(message, message.account)
            case StatsReport():
                self.report = message
                # A pushed report may be older than what was asked for after it.
                if not message.pushed:
                    self._answer(message)
            case Ping():
                self.send_if_open(Pong())
            case Pong():
                self._said_step_age_ms = message.step_age_ms

    async def _watch(self) -> None:
        while (left := self.heard_at + SILENCE_LIMIT_SECONDS - time.monotonic()) > 0:
            await asyncio.sleep(min(PING_INTERVAL_SECONDS, left))
            self.send_if_open(Ping())
        log.warning("store connection closed: silent for %g s", SILENCE_LIMIT_SECONDS)
        self._end()

    def _end(self) -> None:
        if self.closed.is_set():
            return
        self.closed.set()
        self._writer.transport.abort()
        self._lost_work = bool(self._requests)
        for request in self._requests.values():
            request.lose()
        self._requests.clear()
        for future in itertools.chain.from_iterable(self._waiting.values()):
            if not future.done():
                future.set_exception(StoreLost("the store went away before it answered"))
        self._waiting.clear()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
