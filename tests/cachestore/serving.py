"""A store on a real Unix socket, with the engine's thread and a runner that computes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from cachestore.client import Output, StoreClient, StoreRequest
from cachestore.engine import Engine, Sampled
from cachestore.protocol import (
    KEY_VERSION,
    LAYOUT_VERSION,
    MAX_FRAME_TO_GATEWAY_BYTES,
    MAX_FRAME_TO_STORE_BYTES,
    PROTOCOL,
    Finished,
    Geometry,
    Hello,
    Limits,
    Message,
    Ping,
    Rejected,
    Started,
    StatsReport,
    Submit,
    Welcome,
    decode_to_gateway,
    encode_frame,
    read_message,
)
from cachestore.scheduler import Row
from cachestore.server import StoreServer
from tests.cachestore.support import ALICE, GREEDY, VOCABULARY_TOKENS, RememberingRunner, chain_keys, token_bytes

BLOCK_TOKENS = 4
# A test that waits for what never comes ends here.
PATIENCE_SECONDS = 20
WELCOME = Welcome(
    store="a-store",
    model_dir="/models/a-model",
    model_fingerprint=b"m" * 32,
    tokenizer_fingerprint=b"t" * 32,
    geometry=Geometry(
        layers=1,
        kv_heads=1,
        key_dim=8,
        value_dim=8,
        block_tokens=BLOCK_TOKENS,
        kv_dtype="fp32",
        layout_version=LAYOUT_VERSION,
        rope_context_tokens=0,
        bytes_per_token=64,
    ),
    dtype="fp32",
    limits=Limits(
        blocks=1024, max_context_tokens=4096, max_running=8, step_tokens=64, vocabulary_tokens=VOCABULARY_TOKENS
    ),
)


class GatedRunner(RememberingRunner):
    """Computes a step only when the test lets it: `let(steps)`; after `open()` it never waits again."""

    def __init__(self) -> None:
        super().__init__(BLOCK_TOKENS)
        self._gate = threading.Semaphore(0)
        self._is_open = False
        self._asked = 0
        self._let = 0

    @property
    def waiting(self) -> bool:
        """A step was planned and waits to be let."""
        return not self._is_open and self._asked > self._let

    def let(self, steps: int = 1) -> None:
        self._let += steps
        self._gate.release(steps)

    def take_back(self) -> None:
        """A step that nobody needed."""
        if self._gate.acquire(blocking=False):
            self._let -= 1

    def open(self) -> None:
        self._is_open = True
        self._gate.release()

    def launch(self, rows: Sequence[Row]) -> list[Sampled]:
        self._asked += 1
        if not self._is_open:
            assert self._gate.acquire(timeout=30), "the test forgot to let a step through"
        return super().launch(rows)


@contextlib.asynccontextmanager
async def serving(
    folder: Path, runner: RememberingRunner | None = None, *, allowed_uid: int | None = None
) -> AsyncIterator[StoreServer]:
    """A store that serves at `folder`/run/store.sock until the block ends."""
    runner = runner or RememberingRunner(BLOCK_TOKENS)
    server = StoreServer(
        folder / "run" / "store.sock",
        WELCOME,
        lambda emit: Engine(
            runner,
            limits=WELCOME.limits,
            block_tokens=BLOCK_TOKENS,
            block_bytes=512,
            emit=emit,
            clock_ns=time.monotonic_ns,
        ),
        allowed_uid=allowed_uid,
    )
    stopped = asyncio.Event()
    task = asyncio.create_task(server.serve(stopped))
    # One turn of the loop runs it up to its first wait: it listens.
    await asyncio.sleep(0)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            yield server
    finally:
        if isinstance(runner, GatedRunner):
            runner.open()
        stopped.set()
        await task
    server.engine.check()
    assert not runner.mistakes, runner.mistakes


@contextlib.asynccontextmanager
async def connected(server: StoreServer) -> AsyncIterator[StoreClient]:
    client = await StoreClient.connect(server.socket_path)
    try:
        yield client
    finally:
        client.close()


def submit(
    client: StoreClient, prompt: list[int], *, account: bytes = ALICE, epoch: int = 1, max_tokens: int = 4
) -> StoreRequest:
    return client.submit(
        account=account,
        epoch=epoch,
        tokens=token_bytes(prompt),
        keys=chain_keys(account, epoch, prompt, BLOCK_TOKENS),
        sampling=GREEDY,
        max_tokens=max_tokens,
        queue_deadline_ns=time.monotonic_ns() + 3_600_000_000_000,
    )


async def answer(request: StoreRequest) -> tuple[Started | None, list[int], Finished | Rejected]:
    """All of a request's events: what it started with, its tokens, its end."""
    started, tokens = None, []
    while True:
        event = await request.next()
        if isinstance(event, Started):
            started = event
        elif isinstance(event, Output):
            tokens += event.tokens
        else:
            return started, tokens, event


async def complete(client: StoreClient, prompt: list[int], **options: int | bytes) -> tuple[int, list[int]]:
    """Cached tokens and the answer of a request that is run to its end and sealed."""
    request = submit(client, prompt, **options)  # type: ignore[arg-type]
    started, tokens, end = await answer(request)
    assert started is not None
    assert isinstance(end, Finished)
    request.seal([], last=True)
    return started.cached_tokens, tokens


def submissions(engine: Engine) -> list[Submit]:
    """A list to which every `Submit` from now on is added, when the engine takes it."""
    submitted: list[Submit] = []
    submit = engine.submit

    def noted(connection: int, message: Submit) -> None:
        submitted.append(message)
        submit(connection, message)

    engine.submit = noted  # type: ignore[method-assign]
    return submitted


Kind = TypeVar("Kind")


class Arrivals:
    """Everything that reaches a store from now on, before its engine looks at it."""

    def __init__(self, server: StoreServer) -> None:
        self._by_kind: defaultdict[type, list[Any]] = defaultdict(list)
        put = server._thread.put

        def noted(connection: int, message: Any) -> None:
            self._by_kind[type(message)].append(message)
            put(connection, message)

        server._thread.put = noted  # type: ignore[method-assign]

    def of(self, kind: type[Kind]) -> list[Kind]:
        """All of that kind, in order; it grows."""
        return self._by_kind[kind]


class Gated(Protocol):
    """A runner that computes a step only when the test lets it."""

    @property
    def waiting(self) -> bool: ...
    def let(self) -> None: ...


Result = TypeVar("Result")


async def stepping(runner: Gated, work: Coroutine[Any, Any, Result]) -> Result:
    """Let steps through until it is done: the store looks at its messages between them, and which is a race.

    Never one ahead of the engine: an engine that was kept waiting would take all of them at once, and a request
    that shall run for long would be over.
    """
    task = asyncio.create_task(work)
    while not task.done():
        if runner.waiting:
            runner.let()
        await asyncio.sleep(0.001)
    return await task


async def report_where(client: StoreClient, **expected: int) -> StatsReport:
    """The first report in which these figures are so. Asked for again and again: the caller bounds the time."""
    while True:
        report = await client.stats()
        if all(getattr(report, name) == value for name, value in expected.items()):
            return report


class RawPeer:
    """A peer that may send anything, and answers no ping by itself."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, server: StoreServer, *, hello: bool = True) -> RawPeer:
        peer = cls(*await asyncio.open_unix_connection(str(server.socket_path)))
        if hello:
            peer.send(Hello(protocol=PROTOCOL, key_version=KEY_VERSION))
            assert isinstance(await peer.receive(), Welcome)
        return peer

    def send(self, message: Message) -> None:
        self.send_bytes(encode_frame(message, MAX_FRAME_TO_STORE_BYTES))

    def send_bytes(self, data: bytes) -> None:
        self._writer.write(data)

    def send_frame(self, body: bytes) -> None:
        self.send_bytes(len(body).to_bytes(4, "big") + body)

    def end(self) -> None:
        self._writer.write_eof()

    async def receive(self) -> Message:
        """The next message but pings and pushed reports."""
        while True:
            message = await read_message(self._reader, decode_to_gateway, MAX_FRAME_TO_GATEWAY_BYTES)
            if not isinstance(message, Ping) and not (isinstance(message, StatsReport) and message.pushed):
                return message

    async def rest(self) -> bytes:
        """All that still comes, up to the end of the connection."""
        with contextlib.suppress(ConnectionError):
            return await self._reader.read()
        return b""

    def close(self) -> None:
        self._writer.transport.abort()
