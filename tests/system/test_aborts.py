"""A client that leaves in each phase of its request: the engine stops, and blocks and names are released.

Real sockets on both sides of the gateway. The model is gated, so that a client leaves exactly where the test wants it.
"""

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

import pytest

from cachestore.engine_thread import Outgoing
from cachestore.protocol import Abort, Finished, Submit
from cachestore.sequence import Phase, Sequence
from tests.system.in_process import InProcess, in_process
from tests.system.scripted import CHAT, TEXT, ScriptedRunner, Words, arrivals, events_of, idle, listening, until

pytestmark = pytest.mark.anyio

KINDS = [(path, stream) for path in (CHAT, TEXT) for stream in (False, True)]
# Of each kind: five make twenty in a phase.
each = pytest.mark.parametrize("each", [5, pytest.param(20, marks=pytest.mark.once)])
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
    def __init__(self, inside: InProcess, runner: ScriptedRunner, url: str, key: str) -> None:
        self.inside = inside
        self.runner = runner
        self.arrived = arrivals(inside)
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
        """Send a request, wait until the store has it, and let one step through."""
        before = sum(isinstance(message, Submit) for message in self.arrived)
        client = await self.ask(path, stream, **fields)
        await self.submitted(before + 1)
        await self.step()
        return client, list(self.inside.engine._sequences.values())[-1]

    async def submitted(self, count: int) -> None:
        """Wait until so many submissions have reached the store."""
        await until(lambda: sum(isinstance(message, Submit) for message in self.arrived) == count)

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
        aborts = sum(isinstance(message, Abort) for message in self.arrived)
        left_at = time.monotonic()
        client.leave()
        await until(lambda: sum(isinstance(message, Abort) for message in self.arrived) > aborts)
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
async def scene(folder: Path, **limited: int) -> AsyncIterator[Scene]:
    runner = ScriptedRunner()
    model = Words.write(folder / "model")
    async with (
        in_process(folder, model.directory, 256, runner=runner, step_tokens=STEP_TOKENS, **limited) as inside,
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


@each
async def test_aborts_hit_requests_that_wait(tmp_path: Path, each: int) -> None:
    async with scene(tmp_path, max_running=1) as s:
        staying = await s.ask(TEXT, True, max_tokens=1900)
        await s.submitted(1)
        await s.step()
        for path, stream in KINDS * each:
            client, sequence = await s.begin(path, stream)
            assert sequence.phase is Phase.WAITING
            await s.leave(client, sequence)
            assert s.rows(sequence) == 0
            assert s.inside.engine.scheduler.waiting.head() is None
        assert s.ended() == {"aborted": len(KINDS) * each}
        # What they waited behind was not disturbed.
        s.runner.open()
        assert (await staying.answer()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@each
async def test_aborts_hit_requests_that_prefill(tmp_path: Path, each: int) -> None:
    async with scene(tmp_path, max_running=8) as s:
        for path, stream in KINDS * each:
            client, sequence = await s.begin(path, stream)
            assert sequence.phase is Phase.RUNNING
            assert 0 < sequence.computed_tokens < sequence.prompt_tokens
            await s.leave(client, sequence)
            assert sequence.output_tokens == 0
            assert s.inside.engine.pool.held == 0
        assert s.ended() == {"aborted": len(KINDS) * each}


@each
async def test_aborts_hit_requests_that_decode(tmp_path: Path, each: int) -> None:
    async with scene(tmp_path, max_running=8) as s:
        for path, stream in KINDS * each:
            client, sequence = await s.begin(path, stream)
            while sequence.output_tokens < 3:
                await s.step()
            assert sequence.phase is Phase.RUNNING
            await s.leave(client, sequence)
            assert sequence.output_tokens <= 4
            assert s.inside.engine.pool.held == 0
        assert s.ended() == {"aborted": len(KINDS) * each}


@each
async def test_aborts_hit_requests_that_have_finished(tmp_path: Path, each: int) -> None:
    """The engine has finished and waits for the last names; its gateway does not know yet when the client leaves."""
    async with scene(tmp_path, max_running=8) as s:
        for path, stream in KINDS * each:
            client, sequence = await s.begin(path, stream, max_tokens=3)
            while sequence.output_tokens < 2:
                await s.step()
            s.held.hold()
            await s.step()
            assert sequence.phase is Phase.ENDED
            assert s.inside.engine.pool.held > 0
            await s.leave(client, sequence)
            assert s.inside.engine.pool.held == 0
        assert s.ended() == {"length": len(KINDS) * each}


async def test_a_client_that_leaves_ends_all_choices_of_all_prompts(tmp_path: Path) -> None:
    async with scene(tmp_path, max_running=5) as s:
        for stream in (False, True) * 3:
            prompts = [f"{next(s._numbers)} ".ljust(40, "x") for _ in range(2)]
            before = sum(isinstance(message, Submit) for message in s.arrived)
            client = await s.ask(TEXT, stream, prompt=prompts, n=3)
            await s.submitted(before + 2)
            while len(s.inside.engine._sequences) < 6:
                await s.step()
                await asyncio.sleep(0.005)
            sequences = list(s.inside.engine._sequences.values())
            # Five have a place, one waits.
            assert Counter(each.phase for each in sequences) == {Phase.RUNNING: 5, Phase.WAITING: 1}
            rows = {each: s.rows(each) for each in sequences}
            left_at = time.monotonic()
            client.leave()
            await until(lambda: s.arrived and not s.inside.gateway.completions._choices)
            s.runner.open()
            await until(lambda: not s.inside.engine._sequences)
            assert time.monotonic() - left_at < WITHIN_SECONDS
            s.runner.close()
            assert all(s.rows(each) <= count + 1 for each, count in rows.items())
            assert s.inside.engine.pool.held == 0
