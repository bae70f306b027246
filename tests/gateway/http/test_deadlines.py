"""What a connection waits for, and how long: heads, bodies, and clients that take nothing. Seconds are shortened."""

from __future__ import annotations

import asyncio
import resource
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from starlette.types import Receive, Scope, Send

from gateway import process
from gateway.http import connection
from tests.gateway.certificates import Identity
from tests.gateway.http.sockets import Client, Served, served

pytestmark = pytest.mark.anyio

HEAD_SECONDS = 0.3
BODY_SECONDS = 0.8
WINDOW_SECONDS = 0.2
WINDOW_BYTES = 64
STALLED_SECONDS = 0.5
# For a loop that shares its cores with others.
LATE_SECONDS = 1.0

HOST = b"Host: a\r\n"
GET = b"GET / HTTP/1.1\r\n" + HOST + b"\r\n"
PIECE_BYTES = 64 << 10


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """The loop that the gateway runs on."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", HEAD_SECONDS)
    monkeypatch.setattr(connection, "BODY_SECONDS", BODY_SECONDS)
    monkeypatch.setattr(connection, "RATE_WINDOW_SECONDS", WINDOW_SECONDS)
    monkeypatch.setattr(connection, "RATE_WINDOW_BYTES", WINDOW_BYTES)
    monkeypatch.setattr(connection, "STALLED_READER_SECONDS", STALLED_SECONDS)


class App:
    """Answers when it has the body. `/early` before it, `/late` reads it when told so; `/stream` never ends by itself.

    Attributes:
        left: paths whose clients left, or were cut off, before the end.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.left: list[str] = []
        self.go = asyncio.Event()
        self.sent_bytes = 0
        self.large_bytes = 4 << 20

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        self.asked.append(path)
        if path == "/late":
            await self.go.wait()
        more = path != "/early"
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.append(path)
                return
            more = message.get("more_body", False)
        if path == "/stream":
            await self._stream(receive, send)
            self.left.append(path)
            return
        body = bytes(self.large_bytes) if path == "/large" else b"done"
        length = (b"content-length", str(len(body)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, receive: Receive, send: Send) -> None:
        async def stream() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": bytes(1024), "more_body": True})
                self.sent_bytes += 1024
                await asyncio.sleep(0)

        streaming = asyncio.create_task(stream())
        while (await receive())["type"] != "http.disconnect":
            pass
        streaming.cancel()


@pytest.fixture
async def app() -> App:
    return App()


@pytest.fixture
async def plain(app: App) -> AsyncIterator[Served]:
    async with served(app) as running:
        yield running


@pytest.fixture(params=["plain", "TLS"])
async def server(
    app: App, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Served]:
    # Half of a TLS connection can't be closed: a client that was refused and waits for the end waits for so long.
    monkeypatch.setattr(connection, "LINGER_SECONDS", HEAD_SECONDS)
    async with served(app, Identity.make(tmp_path) if request.param == "TLS" else None) as running:
        yield running


class Stopwatch:
    def __init__(self) -> None:
        self.began = time.monotonic()

    def assert_about(self, seconds: float) -> None:
        passed = time.monotonic() - self.began
        assert seconds * 0.95 < passed < seconds + LATE_SECONDS


async def drip(client: Client, data: bytes, pause_seconds: float) -> None:
    for position in range(len(data)):
        client.send(data[position : position + 1])
        await asyncio.sleep(pause_seconds)


# --- heads


async def test_a_connection_on_which_nothing_is_asked_is_closed_without_a_word(server: Served) -> None:
    watch = Stopwatch()
    assert await server.exchange(b"") == []
    watch.assert_about(HEAD_SECONDS)
    await server.until_idle()


@pytest.mark.parametrize("head", [b"G", b"GET /", GET[:-2], GET[:-1], b"\r\n\r\n", b"GET /\r\n"])
async def test_half_a_head_is_refused_at_its_deadline(head: bytes, server: Served) -> None:
    watch = Stopwatch()
    (refused,) = await server.exchange(head)
    assert refused.status == 408
    assert refused.closes
    watch.assert_about(HEAD_SECONDS)
    await server.until_idle()


async def test_no_byte_of_a_head_postpones_its_deadline(app: App, server: Served) -> None:
    client, watch = await server.open(), Stopwatch()
    dripping = asyncio.create_task(drip(client, GET[:-2] + b"X: " + b"x" * 1000, 0.02))
    (refused,) = await client.rest()
    watch.assert_about(HEAD_SECONDS)
    dripping.cancel()
    assert refused.status == 408
    assert not app.asked
    # Closed, whatever the client does with its end.
    await server.until(lambda: not server.state.connections, LATE_SECONDS)
    client.close()
    # As slow a client is served when it is done in time.
    steady = await server.open()
    await drip(steady, GET, HEAD_SECONDS / 4 / len(GET))
    assert (await steady.answer()).status == 200
    steady.close()


async def test_the_deadline_counts_anew_for_each_request_and_not_between_them(server: Served) -> None:
    client = await server.open()
    for _ in range(2):
        await drip(client, GET, HEAD_SECONDS / 4 / len(GET))
        assert (await client.answer()).status == 200
        await asyncio.sleep(1.5 * HEAD_SECONDS)
    watch = Stopwatch()
    (refused,) = await client.send(GET[:9]).rest()
    assert refused.status == 408
    watch.assert_about(HEAD_SECONDS)
    client.close()


async def test_a_connection_on_which_nothing_more_is_asked_is_kept_for_a_while_and_no_longer(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "KEEPALIVE_SECONDS", 1)
    async with served(app) as server:
        client = await server.open()
        for _ in range(2):
            assert (await client.send(GET).answer()).status == 200
            await asyncio.sleep(2 * HEAD_SECONDS)
        assert (await client.send(GET).answer()).status == 200
        watch = Stopwatch()
        assert await client.rest() == []
        watch.assert_about(1)
        client.close()


@pytest.fixture
def descriptors() -> Iterator[None]:
    """As many as the system allows, as the gateway itself asks for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("descriptors")
@pytest.mark.parametrize(("count", "seconds"), [(500, 1.5), pytest.param(2000, 10.0, marks=pytest.mark.once)])
async def test_half_open_connections_are_closed_by_their_deadline_while_others_are_served(
    count: int, seconds: float, plain: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", seconds)
    heads = [b"", b"G", GET[:-2], b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nX: "]
    watch, half_open = Stopwatch(), []
    for number in range(count):
        half_open.append(await plain.open())
        half_open[-1].send(heads[number % len(heads)])
    opened = time.monotonic()
    assert opened - watch.began < seconds, "the first was closed before the last was open"
    # Held open from before the first deadline until after the last.
    used, waits = await plain.open(), []
    closing = asyncio.gather(*(client.ended() for client in half_open))
    while not closing.done():
        began = time.monotonic()
        assert (await used.send(GET).answer()).status == 200
        waits.append(time.monotonic() - began)
        # Others that come are let in.
        assert [answer.status for answer in await plain.exchange(GET.replace(HOST, HOST + b"Connection: close\r\n"))]
        await asyncio.sleep(0.01)
    await closing
    Stopwatch.assert_about(watch, seconds + opened - watch.began)
    print(f"{count} half-open connections: median wait {statistics.median(waits):.4f} s, longest {max(waits):.3f} s")
    assert len(waits) > 10
    assert max(waits) < 0.5
    for client in [*half_open, used]:
        client.close()
    await plain.until_idle()


# --- bodies


def post(path: bytes = b"/", headers: bytes = b"", length: int = 10_000) -> bytes:
    return b"POST %s HTTP/1.1\r\n%sContent-Length: %d\r\n%s\r\n" % (path, HOST, length, headers)


async def test_a_body_that_does_not_come_is_refused_and_its_handler_told(app: App, server: Served) -> None:
    for begun in (b"", b"x" * 10):
        watch = Stopwatch()
        (refused,) = await server.exchange(post() + begun)
        assert refused.status == 408
        watch.assert_about(WINDOW_SECONDS)
    await server.until_idle()
    assert app.left == ["/", "/"]


async def test_a_body_slower_than_the_least_rate_is_refused_and_one_that_is_faster_is_not(server: Served) -> None:
    slow, watch = await server.open(), Stopwatch()
    dripping = asyncio.create_task(drip(slow.send(post()), b"x" * 10_000, WINDOW_SECONDS / WINDOW_BYTES * 4))
    (refused,) = await slow.rest()
    assert refused.status == 408
    watch.assert_about(WINDOW_SECONDS)
    dripping.cancel()
    slow.close()

    steady = await server.open()
    steady.send(post(length=20 * WINDOW_BYTES))
    for _ in range(10):
        steady.send(bytes(2 * WINDOW_BYTES))
        await asyncio.sleep(WINDOW_SECONDS / 4)
    assert (await steady.answer()).status == 200
    steady.close()


async def test_a_body_that_goes_on_and_on_is_refused_at_its_deadline(server: Served) -> None:
    client, watch = await server.open(), Stopwatch()
    client.send(b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n")

    async def go_on() -> None:
        while True:
            client.send(b"400\r\n" + bytes(1024) + b"\r\n")
            await asyncio.sleep(WINDOW_SECONDS / 20)

    going = asyncio.create_task(go_on())
    (refused,) = await client.rest()
    assert refused.status == 408
    watch.assert_about(BODY_SECONDS)
    going.cancel()
    client.close()


async def test_what_was_answered_is_not_answered_again_when_the_rest_is_late(server: Served) -> None:
    watch = Stopwatch()
    assert [answer.status for answer in await server.exchange(post(b"/early") + b"x")] == [200]
    watch.assert_about(WINDOW_SECONDS)
    client = await server.open()
    assert (await client.send(post(b"/early", length=3)).answer()).status == 200
    assert (await client.send(b"abc" + GET).answer()).status == 200
    client.close()


async def test_after_the_rest_of_an_answered_request_a_connection_is_still_watched(server: Served) -> None:
    client = await server.open()
    assert (await client.send(post(b"/early", length=3)).answer()).status == 200
    watch = Stopwatch()
    assert await client.send(b"abc").rest() == []
    watch.assert_about(HEAD_SECONDS)
    client.close()


async def test_a_client_that_leaves_after_its_refusal_is_noticed_though_its_handler_is_behind(
    app: App, server: Served
) -> None:
    """What the handler has not read yet had stopped the reading."""
    client = await server.open()
    client.send(b"POST /late HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n")
    client.send(b"%x\r\n%s\r\nno size\r\n" % (PIECE_BYTES + 64, bytes(PIECE_BYTES + 64)))
    (refused,) = await client.rest()
    assert refused.status == 400
    client.close()
    await server.until(lambda: not server.state.connections, LATE_SECONDS)
    app.go.set()
    await server.until_idle()
    assert app.left == ["/late"]


@pytest.mark.parametrize("expecting", [False, True])
async def test_a_handler_that_is_late_to_read_is_not_the_clients_slowness(
    expecting: bool, app: App, server: Served
) -> None:
    client = await server.open()
    length = 500_000
    client.send(post(b"/late", b"Expect: 100-continue\r\n" if expecting else b"", length))
    if not expecting:
        client.send(bytes(length))
    await server.until(lambda: "/late" in app.asked)
    await asyncio.sleep(2 * WINDOW_SECONDS)
    app.go.set()
    if expecting:
        assert (await client.answer()).status == 100
        client.send(bytes(length))
    assert (await client.answer()).status == 200
    client.close()


# --- clients that take nothing


async def test_a_client_that_takes_nothing_of_a_stream_is_cut_off_and_its_handler_told(
    app: App, server: Served
) -> None:
    client = await server.open_narrow()
    client.send(b"GET /stream HTTP/1.1\r\n" + HOST + b"\r\n")
    sent = -1
    while app.sent_bytes > sent:
        sent = app.sent_bytes
        await asyncio.sleep(0.05)
    watch = Stopwatch()
    assert not app.left
    await server.until_idle()
    assert app.left == ["/stream"]
    watch.assert_about(STALLED_SECONDS - 0.2)
    assert app.sent_bytes == sent
    client.abort()


async def test_a_client_that_takes_little_but_steadily_is_not_cut_off(app: App, server: Served) -> None:
    client = await server.open_narrow()
    client.send(b"GET /stream HTTP/1.1\r\n" + HOST + b"\r\n")
    watch = Stopwatch()
    while time.monotonic() - watch.began < 3 * STALLED_SECONDS:
        assert await client.reader.readexactly(PIECE_BYTES // 4)
        await asyncio.sleep(STALLED_SECONDS / 20)
    assert not app.left
    client.abort()
    await server.until_idle(1)
    assert app.left == ["/stream"]


async def test_a_large_answer_may_take_long_as_long_as_it_is_taken(app: App, server: Served) -> None:
    client = await server.open_narrow()
    client.send(b"GET /large HTTP/1.1\r\n" + HOST + b"\r\n")
    watch, left_bytes = Stopwatch(), app.large_bytes
    await client.reader.readuntil(b"\r\n\r\n")
    while left_bytes:
        slowly = time.monotonic() - watch.began < 2 * STALLED_SECONDS
        size = min(left_bytes, PIECE_BYTES // 4 if slowly else PIECE_BYTES)
        await client.reader.readexactly(size)
        left_bytes -= size
        if slowly:
            await asyncio.sleep(STALLED_SECONDS / 20)
    client.abort()


@pytest.mark.parametrize("headers", [b"", b"Connection: close\r\n"], ids=["kept alive", "closing"])
async def test_an_answer_that_nobody_takes_does_not_keep_its_connection(
    headers: bytes, app: App, plain: Served
) -> None:
    client = await plain.open_narrow()
    client.send(b"GET /stream HTTP/1.1\r\n" + HOST + b"\r\n")
    await plain.until(lambda: "/stream" in app.left)
    client.abort()
    # So little more than the kernel holds that nothing but its not being taken tells of it.
    app.large_bytes = app.sent_bytes + (48 << 10)
    client = await plain.open_narrow()
    client.send(b"GET /large HTTP/1.1\r\n" + HOST + headers + b"\r\n")
    await plain.until(lambda: "/large" in app.asked and not plain.state.tasks)
    (kept,) = plain.state.connections
    assert 0 < kept.transport.get_write_buffer_size() < PIECE_BYTES  # type: ignore[union-attr]
    watch = Stopwatch()
    await plain.until_idle()
    watch.assert_about(STALLED_SECONDS)
    client.abort()
    # One that takes it gets all of it.
    client = await plain.open_narrow()
    answer = await client.send(b"GET /large HTTP/1.1\r\n" + HOST + headers + b"\r\n").answer()
    assert len(answer.body) == app.large_bytes
    client.abort()
