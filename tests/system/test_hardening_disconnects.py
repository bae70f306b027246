"""Line 41 of the promise: a client that leaves, or takes nothing, stops what it asked for and frees its blocks.

Real sockets, gateway, store and engine; the model is a double whose steps take the time that a test wants.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cachestore.client import StoreClient
from cachestore.protocol import StatsReport
from cachestore.scheduler import Row
from gateway.completions import TOKENISING_THREADS
from gateway.http import connection
from gateway.prompt.template import ChatTemplate
from gateway.prompt.tokens import Tokenizer
from tests.gateway.http.sockets import Client, Served, served
from tests.system.in_process import Customer, InProcess, in_process
from tests.system.support import random_prompt

pytestmark = pytest.mark.anyio

WITHIN_SECONDS = 1.0
BLOCKS = 160
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """The loop that the gateway runs on."""
    return "asyncio", {"use_uvloop": True}


class Steps:
    """The steps of the model: each takes `seconds`, and none ends while `held`."""

    def __init__(self, saltern: InProcess) -> None:
        self.seconds = 0.0
        self.count = 0
        self._free = threading.Event()
        self._free.set()
        self._launch = saltern.runner.launch
        saltern.runner.launch = self.launch  # type: ignore[method-assign]

    def launch(self, rows: Sequence[Row]) -> list[int]:
        self.count += 1
        self._free.wait()
        time.sleep(self.seconds)
        return self._launch(rows)

    def hold(self) -> None:
        self._free.clear()

    def go_on(self) -> None:
        self._free.set()


class House:
    """A gateway behind a port, its store, and two tenants, of whom the first asks."""

    def __init__(
        self, saltern: InProcess, port: Served, store: StoreClient, customer: Customer, other: Customer
    ) -> None:
        self.saltern = saltern
        self.port = port
        self.steps = Steps(saltern)
        self._store = store
        self.customer = customer
        self.other = other

    async def report(self) -> StatsReport:
        return await self._store.stats()

    def request(self, path: str, customer: Customer | None = None, *, tokens: int = 20, **fields: Any) -> bytes:
        """Of a prompt of about so many tokens, none of it cached."""
        name = f"{path} {time.monotonic_ns()}"
        if path == TEXT:
            asked: dict[str, Any] = {"prompt": random_prompt(name, tokens)}
        else:
            asked = {"messages": [{"role": "user", "content": " ".join(map(str, random_prompt(name, tokens // 6)))}]}
        body = {"model": self.saltern.model, "max_tokens": 1000, "ignore_eos": True} | asked | fields
        content = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {(customer or self.customer).key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content

    async def until(self, *, running: int = 0, waiting: int = 0, seconds: float = 10) -> StatsReport:
        """Wait until so many requests run and wait at the store."""
        async with asyncio.timeout(seconds):
            while True:
                report = await self.report()
                if (report.running, report.waiting) == (running, waiting):
                    return report
                await asyncio.sleep(0.005)

    async def until_nothing_is_held(self, seconds: float = WITHIN_SECONDS) -> None:
        async with asyncio.timeout(seconds):
            while True:
                report = await self.until(seconds=seconds)
                if not report.ended and not report.held_blocks:
                    break
                await asyncio.sleep(0.005)
        assert report.free_blocks + report.cached_blocks == report.total_blocks

    async def serves(self) -> None:
        """Who stays is answered, whole, and leaves nothing held."""
        self.steps.seconds = 0
        for path in (TEXT, CHAT):
            client = await self.port.open()
            answer = await client.send(self.request(path, max_tokens=3)).answer()
            assert answer.status == 200
            assert json.loads(answer.body)["usage"]["completion_tokens"] == 3
            client.close()
        await self.until_nothing_is_held()
        await self.saltern.check()


@asynccontextmanager
async def open_house(data_dir: Path, model_dir: Path) -> AsyncIterator[House]:
    async with in_process(data_dir, model_dir, BLOCKS) as saltern, served(saltern.gateway.tenant_app) as port:
        store = await StoreClient.connect(saltern.store.socket_path)
        try:
            yield House(saltern, port, store, await saltern.customer("leaving"), await saltern.customer("other"))
        finally:
            store.close()


@pytest.fixture(scope="module")
async def house(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> AsyncIterator[House]:
    async with open_house(tmp_path_factory.mktemp("house"), default_model) as opened:
        yield opened


every_kind = pytest.mark.parametrize(
    ("path", "stream"), [(path, stream) for path in (CHAT, TEXT) for stream in (True, False)]
)


async def leave(client: Client, house: House) -> None:
    """Disconnect, and wait until nothing at the gateway answers any more."""
    client.close()
    await house.port.until_idle(WITHIN_SECONDS)


@every_kind
async def test_line_41_a_client_that_leaves_within_its_body_asks_for_nothing(
    path: str, stream: bool, house: House
) -> None:
    request = house.request(path, stream=stream)
    client = await house.port.open()
    client.send(request[:-10])
    await house.port.until(lambda: bool(house.port.state.tasks))
    before = house.steps.count
    await leave(client, house)
    assert house.steps.count == before
    await house.serves()


@every_kind
async def test_line_41_a_client_that_leaves_while_its_prompt_is_tokenised_submits_nothing(
    path: str, stream: bool, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, release = threading.Event(), threading.Event()
    owner, name = (ChatTemplate, "prompt") if path == CHAT else (Tokenizer, "given")
    original = getattr(owner, name)

    def slow(*arguments: Any) -> Any:
        begun.set()
        release.wait()
        return original(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, slow)
        before = house.steps.count
        client = await house.port.open()
        client.send(house.request(path, stream=stream))
        await house.port.until(begun.is_set)
        await leave(client, house)
        # Whoever stays is served when the thread is free, and is the only one that is.
        staying = await house.port.open()
        staying.send(house.request(path, max_tokens=3))
        release.set()
        assert (await staying.answer()).status == 200
        staying.close()
    assert house.steps.count <= before + 4
    await house.serves()


async def test_line_41_clients_that_leave_do_not_take_the_threads_that_others_need(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenising, release = threading.Semaphore(0), threading.Event()
    original = ChatTemplate.prompt

    def slow(*arguments: Any) -> Any:
        tokenising.release()
        release.wait()
        return original(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(ChatTemplate, "prompt", slow)
        for _ in range(2 * TOKENISING_THREADS):
            client = await house.port.open()
            client.send(house.request(CHAT))
            await house.port.until(lambda: bool(house.saltern.gateway.completions._running))
            await leave(client, house)
        # One tenant has one thread, until it is free and not until whoever asked has left.
        assert tokenising.acquire(blocking=False)
        assert not tokenising.acquire(blocking=False)
        staying, other = await house.port.open(), await house.port.open()
        staying.send(house.request(CHAT, max_tokens=3))
        other.send(house.request(TEXT, house.other, max_tokens=3))
        assert (await other.answer()).status == 200
        assert not tokenising.acquire(blocking=False)
        release.set()
        assert (await staying.answer()).status == 200
        assert tokenising.acquire(blocking=False)
        staying.close()
        other.close()
    await house.serves()


@every_kind
async def test_line_41_a_client_that_leaves_while_it_waits_leaves_the_queue(
    path: str, stream: bool, house: House
) -> None:
    house.steps.seconds = 0.002
    blocking = await house.port.open()
    blocking.send(house.request(TEXT, tokens=1900, stream=True, max_tokens=140))
    await house.until(running=1)
    client = await house.port.open()
    client.send(house.request(path, tokens=1500, stream=stream, max_tokens=1))
    await house.until(running=1, waiting=1)
    client.close()
    await house.until(running=1, seconds=WITHIN_SECONDS)
    # The place was real: whoever else waits gets it, and who blocked it was never disturbed.
    waiting = await house.port.open()
    waiting.send(house.request(path, tokens=1500, max_tokens=1))
    await house.until(running=1, waiting=1)
    assert (await blocking.answer()).body.endswith(b"data: [DONE]\n\n")
    assert (await waiting.answer()).status == 200
    blocking.close()
    waiting.close()
    await house.serves()


@every_kind
async def test_line_41_a_client_that_leaves_during_prefill_has_it_stopped(
    path: str, stream: bool, house: House
) -> None:
    house.steps.hold()
    before = house.steps.count
    client = await house.port.open()
    client.send(house.request(path, tokens=900, stream=stream))
    await house.port.until(lambda: house.steps.count > before)
    # The gateway hears of it although the store is busy.
    await leave(client, house)
    house.steps.go_on()
    await house.until_nothing_is_held()
    assert house.steps.count <= before + 3
    await house.serves()


@every_kind
async def test_line_41_a_client_that_leaves_during_decode_has_it_stopped(
    path: str, stream: bool, house: House
) -> None:
    house.steps.seconds = 0.005
    before = house.steps.count
    client = await house.port.open()
    client.send(house.request(path, stream=stream))
    await house.port.until(lambda: house.steps.count > before + 20)
    assert (await house.report()).held_blocks > 0
    await leave(client, house)
    await house.until_nothing_is_held()
    after = house.steps.count
    assert after < before + 500, "a thousand were asked for"
    await house.until_nothing_is_held()
    assert house.steps.count == after
    await house.serves()


@pytest.mark.parametrize("stream", [True, False])
async def test_line_41_all_answers_of_one_request_end_with_it(stream: bool, house: House) -> None:
    house.steps.seconds = 0.005
    prompts = [random_prompt(f"one of many {time.monotonic_ns()} {number}", 20) for number in range(3)]
    client = await house.port.open()
    client.send(house.request(TEXT, prompt=prompts, n=2, stream=stream))
    await house.until(running=6)
    await leave(client, house)
    await house.until_nothing_is_held()
    await house.serves()


async def test_line_41_what_a_client_sent_ahead_does_not_hide_that_it_left(house: House) -> None:
    house.steps.seconds = 0.005
    for stream in (True, False):
        client = await house.port.open()
        client.send(house.request(TEXT, stream=stream) + house.request(CHAT) * 50)
        await house.until(running=1)
        await leave(client, house)
        await house.until_nothing_is_held()
    await house.serves()


async def test_line_41_a_client_that_takes_nothing_of_its_stream_is_cut_off_and_its_blocks_are_freed(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "STALLED_READER_SECONDS", 0.5)
    stream = {"n": 8, "stream": True, "max_tokens": 1900}
    stalled, reading = await house.port.open_narrow(), await house.port.open()
    reading.send(house.request(TEXT, stream=True, max_tokens=400))
    stalled.send(house.request(TEXT, **stream))
    answering = asyncio.create_task(reading.answer())
    began, before = time.monotonic(), house.steps.count
    await house.port.until(lambda: len(house.port.state.connections) == 1)
    assert time.monotonic() - began > 0.5
    # Who reads is not cut off, whatever becomes of others.
    assert (await answering).body.endswith(b"data: [DONE]\n\n")
    reading.close()
    await house.port.until_idle()
    await house.until_nothing_is_held()
    assert house.steps.count < before + 1900
    stalled.abort()
    await house.serves()
