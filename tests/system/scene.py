"""Requests over real sockets that a test holds exactly where it wants them: the model is gated, step by step."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cachestore.engine_thread import Outgoing
from cachestore.protocol import Abort, Finished, Submit
from cachestore.sequence import Sequence
from gateway.telemetry.telemetry import Telemetry
from tests.cachestore.serving import Arrivals
from tests.system.in_process import InProcess, in_process
from tests.system.scripted import CHAT, TEXT, ScriptedRunner, Words, events_of, idle, listening, until

KINDS = [(path, stream) for path in (CHAT, TEXT) for stream in (False, True)]
WITHIN_SECONDS = 1.0
STEP_TOKENS = 32
PROMPT_CHARACTERS = 100


class Client:
    """One request over a connection of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def leave(self) -> None:
        self._writer.transport.abort()

    async def received(self, events: int) -> None:
        """Wait until so many events of the stream have come."""
        for _ in range(events):
            await self._reader.readuntil(b"data: ")

    async def answer(self) -> bytes:
        """All that comes; the connection ends with it."""
        return await self._reader.read()


class Held:
    """Messages of the engine that its gateway does not get yet, once one of them is `Finished`."""

    def __init__(self, inside: InProcess) -> None:
        self._deliver = inside.store._thread._deliver
        self._lock = threading.Lock()
        self._held: list[Outgoing] | None = None
        inside.store._thread._deliver = self.deliver

    def deliver(self, outgoing: Outgoing) -> None:
        with self._lock:
            if self._held is not None:
                self._held.append(outgoing)
                return
        self._deliver(outgoing)

    def hold(self) -> None:
        with self._lock:
            self._held = []

    def release(self) -> None:
        with self._lock:
            held, self._held = self._held or [], None
            for outgoing in held:
                self._deliver(outgoing)


class Scene:
    """A gateway behind a real port, its store, and a tenant's key. The model waits to be let."""

    def __init__(self, inside: InProcess, runner: ScriptedRunner, url: str, key: str) -> None:
        self.inside = inside
        self.runner = runner
        self.arrived = Arrivals(inside.store)
        self.said = events_of(inside)
        self.held = Held(inside)
        self._address = urlsplit(url)
        self._key = key
        self._numbers = itertools.count()

    async def ask(self, path: str, stream: bool, **fields: Any) -> Client:
        """Send a request of a prompt that nobody sent before."""
        text = f"{next(self._numbers)} ".ljust(PROMPT_CHARACTERS, "x")
        prompt = {"prompt": text} if path == TEXT else {"messages": [{"role": "user", "content": text}]}
        body = {"model": self.inside.model, "max_tokens": 1000, "stream": stream, "ignore_eos": True} | prompt | fields
        content = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(self._address.hostname, self._address.port)
        writer.write(
            f"POST {path} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {self._key}\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n".encode()
        )
        writer.write(content)
        return Client(reader, writer)

    async def begin(self, path: str, stream: bool, **fields: Any) -> tuple[Client, Sequence]:
        """Send a request of one prompt, wait until the store has it, and let one step through; its first choice."""
        before, choices = len(self.arrived.of(Submit)), fields.get("n", 1)
        client = await self.ask(path, stream, **fields)
        await self.submitted(before + choices)
        await self.step()
        return client, list(self.inside.engine._sequences.values())[-choices]

    async def submitted(self, count: int) -> None:
        """Wait until so many submissions have reached the store."""
        await until(lambda: len(self.arrived.of(Submit)) == count)

    async def step(self) -> None:
        """Let one step through and wait for the next one, or for the end of all work."""
        done = len(self.runner.steps)
        await until(lambda: self.runner.waiting)
        self.runner.let()
        await until(lambda: len(self.runner.steps) > done)
        await until(lambda: self.runner.waiting or not self.inside.engine.has_work)

    async def leave(self, client: Client, sequence: Sequence) -> None:
        """The client leaves; the engine computes at most the step it is in, and knows nothing of it a second later."""
        rows = self.rows(sequence)
        aborts = len(self.arrived.of(Abort))
        left_at = time.monotonic()
        client.leave()
        await until(lambda: len(self.arrived.of(Abort)) > aborts)
        self.held.release()
        # Others may go on: a step is what the engine looks at its messages between.
        while sequence in self.inside.engine._sequences.values():
            if self.runner.waiting:
                self.runner.let()
            await asyncio.sleep(0.001)
        assert time.monotonic() - left_at < WITHIN_SECONDS
        assert self.rows(sequence) <= rows + 1
        assert sequence.table == []
        assert sum(isinstance(e, Finished) and e.request == sequence.request for e in self.said) == 1
        await until(lambda: self.runner.waiting or not self.inside.engine.has_work)

    def rows(self, sequence: Sequence) -> int:
        return sum(row[0] == sequence.request for step in self.runner.steps for row in step)

    def ended(self) -> Counter[str]:
        return Counter(event.reason for event in self.said if isinstance(event, Finished))


@asynccontextmanager
async def scene(folder: Path, telemetry: Telemetry | None = None, **limited: int) -> AsyncIterator[Scene]:
    runner = ScriptedRunner()
    model = Words.write(folder / "model")
    async with (
        in_process(
            folder, model.directory, 256, runner=runner, telemetry=telemetry, step_tokens=STEP_TOKENS, **limited
        ) as inside,
        listening(inside.gateway.tenant_app) as url,
    ):
        made = Scene(inside, runner, url, (await inside.customer("a")).key)
        runner.close()
        yield made
        # Nothing is left in the store or of the gateway's bookkeeping, and whoever stays is served.
        runner.open()
        await idle(inside)
        completions = inside.gateway.completions
        await until(lambda: not (completions._running or completions._choices or completions._closing))
        for path, stream in KINDS:
            answer = await (await made.ask(path, stream, max_tokens=3)).answer()
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert b'"finish_reason":"length"' in answer
        await idle(inside)
