"""What a connection takes and refuses: framing, sizes, order, and the headers that a client may not play with."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator

import pytest
from starlette.types import Receive, Scope, Send

from gateway.http.connection import MAX_BODY_PIECES, head_fault
from gateway.http.errors import LINGER_BYTES
from gateway.http.routing import MAX_HEADER_BYTES
from tests.gateway.http.sockets import Served, served

pytestmark = pytest.mark.anyio

HOST = b"Host: a\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """The loop that the gateway runs on."""
    return "asyncio", {"use_uvloop": True}


class App:
    """Answers what it was asked. `/early` does so before the body; `/hold` waits until the test says go, or left.

    Attributes:
        asked: the paths of all requests that reached it.
        left: paths whose clients left before the answer.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.left: list[str] = []
        self.go = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        self.asked.append(path)
        size_bytes = 0
        more = path != "/early"
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.append(path)
                return
            size_bytes += len(message.get("body", b""))
            more = message.get("more_body", False)
        if path == "/hold":
            leaving = asyncio.create_task(self._disconnected(receive))
            going = asyncio.create_task(self.go.wait())
            await asyncio.wait((leaving, going), return_when=asyncio.FIRST_COMPLETED)
            if leaving.done():
                self.left.append(path)
            leaving.cancel()
            going.cancel()
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        body = json.dumps({"path": path, "bytes": size_bytes, "headers": headers}).encode()
        length = (b"content-length", str(len(body)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": body})

    async def _disconnected(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass


@pytest.fixture
async def app() -> App:
    return App()


@pytest.fixture
async def server(app: App) -> AsyncIterator[Served]:
    async with served(app) as running:
        yield running


def post(headers: bytes, body: bytes = b"", path: bytes = b"/", version: bytes = b"1.1") -> bytes:
    return b"POST %s HTTP/%s\r\n%s\r\n%s" % (path, version, headers, body)


def get(path: bytes = b"/", headers: bytes = HOST) -> bytes:
    return b"GET %s HTTP/1.1\r\n%s\r\n" % (path, headers)


def chunked(body: bytes) -> bytes:
    return post(HOST + b"Transfer-Encoding: chunked\r\n", body)


CHUNKED = chunked(b"3\r\nabc\r\n0\r\n\r\n")
SIZED = post(HOST + b"Content-Length: 3\r\n", b"abc")

WELL_FORMED = {
    "a length": SIZED,
    "chunks": CHUNKED,
    "a chunk with an extension": chunked(b"3;a=b\r\nabc\r\n0\r\n\r\n"),
    "a trailer": chunked(b"3\r\nabc\r\n0\r\nAuthorization: Bearer x\r\n\r\n"),
    "the coding in capitals": post(HOST + b"Transfer-Encoding: CHUNKED\r\n", b"3\r\nabc\r\n0\r\n\r\n"),
    "a length with blanks around it": post(HOST + b"Content-Length:  3 \r\n", b"abc"),
    "version 1.0 without a host": post(b"Content-Length: 3\r\n", b"abc", version=b"1.0"),
    "absolute form": post(HOST + b"Content-Length: 3\r\n", b"abc", b"http://other:1/x"),
    "an empty line before the request": b"\r\n" + SIZED,
}

MALFORMED = {
    "a length and a coding": post(HOST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n", b"0\r\n\r\n"),
    "a coding and a length": post(HOST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n", b"0\r\n\r\n"),
    "two equal lengths": post(HOST + b"Content-Length: 3\r\nContent-Length: 3\r\n", b"abc"),
    "two lengths": post(HOST + b"Content-Length: 3\r\nContent-Length: 80\r\n", b"abc"),
    "a list of lengths": post(HOST + b"Content-Length: 3, 3\r\n", b"abc"),
    "a length with a sign": post(HOST + b"Content-Length: +3\r\n", b"abc"),
    "a negative length": post(HOST + b"Content-Length: -3\r\n", b"abc"),
    "a hexadecimal length": post(HOST + b"Content-Length: 0x3\r\n", b"abc"),
    "a length with a fraction": post(HOST + b"Content-Length: 3.0\r\n", b"abc"),
    "no length at all": post(HOST + b"Content-Length:\r\n", b"abc"),
    "a length of two words": post(HOST + b"Content-Length: 3 3\r\n", b"abc"),
    "a length of 80 bits": post(HOST + b"Content-Length: 1208925819614629174706176\r\n", b"abc"),
    "an unknown coding": post(HOST + b"Transfer-Encoding: gzip\r\n", b"abc"),
    "two codings": post(HOST + b"Transfer-Encoding: gzip, chunked\r\n", b"0\r\n\r\n"),
    "a coding twice": post(HOST + b"Transfer-Encoding: chunked\r\n" * 2, b"0\r\n\r\n"),
    "chunked not last": post(HOST + b"Transfer-Encoding: chunked, identity\r\n", b"0\r\n\r\n"),
    "something like chunked": post(HOST + b"Transfer-Encoding: xchunked\r\n", b"0\r\n\r\n"),
    "a coding after a tabulator": post(HOST + b"Transfer-Encoding:\x0bchunked\r\n", b"0\r\n\r\n"),
    "a coding in version 1.0": post(HOST + b"Transfer-Encoding: chunked\r\n", b"0\r\n\r\n", version=b"1.0"),
    "a chunk size that is no number": chunked(b"x\r\nabc\r\n0\r\n\r\n"),
    "a chunk size with a prefix": chunked(b"0x3\r\nabc\r\n0\r\n\r\n"),
    "a negative chunk size": chunked(b"-3\r\nabc\r\n0\r\n\r\n"),
    "a chunk size of 72 bits": chunked(b"ffffffffffffffffff\r\nabc\r\n0\r\n\r\n"),
    "a chunk longer than it says": chunked(b"3\r\nabcd\r\n0\r\n\r\n"),
    "a chunk without its line end": chunked(b"3\r\nabc0\r\n\r\n"),
    "a line feed after a chunk size": chunked(b"3\nabc\r\n0\r\n\r\n"),
    "a line feed after an extension": chunked(b"3;a\nabc\r\n0\r\n\r\n"),
    "a line feed after a chunk": chunked(b"3\r\nabc\n0\r\n\r\n"),
    "line feeds alone": b"POST / HTTP/1.1\nHost: a\nContent-Length: 3\n\nabc",
    "a line feed after a header": b"POST / HTTP/1.1\r\nHost: a\nContent-Length: 3\r\n\r\nabc",
    "a line feed before the body": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\nabc",
    "a carriage return in a header": get(headers=HOST + b"X: a\rContent-Length: 40\r\n"),
    "a folded line": get(headers=HOST + b"X: a\r\n b\r\n"),
    "a folded length": post(HOST + b"Content-Length:\r\n 3\r\n", b"abc"),
    "a first header that is indented": get(headers=b" Content-Length: 40\r\n" + HOST),
    "a blank before the colon": post(HOST + b"Content-Length : 3\r\n", b"abc"),
    "a blank within a name": get(headers=HOST + b"Content Length: 3\r\n"),
    "a header without a colon": get(headers=HOST + b"Content-Length\r\n"),
    "a header without a name": get(headers=HOST + b": 3\r\n"),
    "a NUL in a value": get(headers=HOST + b"X: a\0b\r\n"),
    "a NUL in a name": get(headers=HOST + b"X\0: a\r\n"),
    "a control character in a value": get(headers=HOST + b"X: a\x01b\r\n"),
    "no host": get(headers=b""),
    "two hosts": get(headers=HOST + HOST),
    "version 0.9": b"GET /\r\n\r\n",
    "version 0.9 by name": b"GET / HTTP/0.9\r\n\r\n",
    "version 1.2": b"GET / HTTP/1.2\r\nHost: a\r\n\r\n",
    "version 2": b"GET / HTTP/2.0\r\nHost: a\r\n\r\n",
    "the preface of version 2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "another protocol": b"OPTIONS rtsp://a RTSP/1.0\r\nHost: a\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "a method in lower case": b"get / HTTP/1.1\r\nHost: a\r\n\r\n",
    "an unknown method": b"SALT / HTTP/1.1\r\nHost: a\r\n\r\n",
    "something after the version": b"GET / HTTP/1.1 x\r\nHost: a\r\n\r\n",
    "a blank in the path": get(b"/ x"),
    "a NUL in the path": get(b"/\0"),
    "a path that is not ASCII": get(b"/\xff"),
    "a path with two slashes": get(b"//livez"),
    "a path without a slash": get(b"livez"),
    "a backslash for a slash": get(b"\\livez"),
    "absolute form without a path": get(b"http://a"),
    "a body and an upgrade": post(HOST + b"Connection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 3\r\n", b"abc"),
    "chunks and an upgrade": post(
        HOST + b"Connection: upgrade\r\nUpgrade: websocket\r\nTransfer-Encoding: chunked\r\n", b"0\r\n\r\n"
    ),
}


@pytest.mark.parametrize("form", WELL_FORMED)
async def test_a_well_formed_request_is_answered(form: str, server: Served) -> None:
    client = await server.open()
    answer = await client.send(WELL_FORMED[form]).answer()
    assert answer.status == 200
    assert json.loads(answer.body)["bytes"] == 3
    client.close()


@pytest.mark.parametrize("together", [True, False], ids=["in one packet", "byte by byte"])
@pytest.mark.parametrize("form", MALFORMED)
async def test_a_malformed_request_is_400_and_what_follows_it_is_never_read(
    form: str, together: bool, app: App, server: Served
) -> None:
    request = MALFORMED[form] + SMUGGLED
    client = await server.open()
    if together:
        client.send(request)
    else:
        for position in range(len(request)):
            client.send(request[position : position + 1])
            await client.writer.drain()
            await asyncio.sleep(0)
    answers = await client.rest()
    assert [answer.status for answer in answers] == [400]
    assert answers[0].closes
    assert answers[0].headers["x-request-id"].startswith("req_")
    assert json.loads(answers[0].body)["error"]["type"] == "invalid_request_error"
    client.close()
    await server.until_idle()
    assert "/smuggled" not in app.asked
    # After a well-formed request, and after its answer, it is read.
    client = await server.open()
    assert (await client.send(SIZED).answer()).status == 200
    assert (await client.send(SMUGGLED).answer()).status == 200
    assert "/smuggled" in app.asked
    client.close()


def test_what_is_refused_says_why() -> None:
    host = [(b"host", b"a")]
    length, coding = (b"content-length", b"3"), (b"transfer-encoding", b"chunked")
    assert head_fault("1.1", b"/", [*host, length], False) is None
    assert head_fault("1.1", b"/", [*host, coding], False) is None
    assert head_fault("1.0", b"/", [], False) is None
    assert head_fault("1.1", b"/", host, True) is None
    faults: dict[str, tuple[str, bytes, list[tuple[bytes, bytes]], bool]] = {
        "HTTP/1.1 and HTTP/1.0": ("2.0", b"/", host, False),
        "one Host": ("1.0", b"/", host * 2, False),
        "two slashes": ("1.1", b"//", host, False),
        "one Content-Length or one Transfer-Encoding": ("1.1", b"/", [*host, length, coding], False),
        "is chunked": ("1.0", b"/", [coding], False),
        "without the Upgrade header": ("1.1", b"/", [*host, length], True),
    }
    for words, head in faults.items():
        fault = head_fault(*head)
        assert fault
        assert words in fault


async def test_a_trailer_does_not_become_a_header(server: Served) -> None:
    body = b"3\r\nabc\r\n0\r\nAuthorization: Bearer x\r\nX-Trailer: y\r\n\r\n"
    client = await server.open()
    headers = json.loads((await client.send(chunked(body)).answer()).body)["headers"]
    assert headers == {"host": "a", "transfer-encoding": "chunked"}
    # The next head has its headers again.
    headers = json.loads((await client.send(get(headers=HOST + b"Authorization: x\r\n")).answer()).body)["headers"]
    assert headers == {"host": "a", "authorization": "x"}
    client.close()


# --- sizes


async def test_a_head_that_drips_is_refused_at_its_limit_and_takes_no_memory(server: Served) -> None:
    client = await server.open()
    client.send(b"GET / HTTP/1.1\r\nHost: a\r\nX: ")
    sent_bytes = 0
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    answer = asyncio.create_task(client.answer())
    while sent_bytes < 1 << 20 and not answer.done():
        client.send(b"x" * 64)
        sent_bytes += 64
        await asyncio.sleep(0)
    refused = await answer
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert refused.status == 431
    assert refused.closes
    assert str(MAX_HEADER_BYTES) in json.loads(refused.body)["error"]["message"]
    assert MAX_HEADER_BYTES - 64 < sent_bytes < 3 * MAX_HEADER_BYTES
    assert peak - before < 8 * MAX_HEADER_BYTES
    await client.ended()
    client.close()
    fitting = get(headers=HOST + b"X: " + b"x" * (MAX_HEADER_BYTES - 100) + b"\r\n")
    assert (await (await server.open()).send(fitting).answer()).status == 200


TOO_LARGE = {
    "a header": b"GET / HTTP/1.1\r\nHost: a\r\nX: %s\r\n\r\n" % (b"x" * (1 << 20)),
    "a target": b"GET /%s HTTP/1.1\r\nHost: a\r\n\r\n" % (b"x" * (1 << 20)),
    "a target in one packet": b"GET /%s HTTP/1.1\r\nHost: a\r\n\r\n" % (b"x" * (MAX_HEADER_BYTES + 1)),
    "a header name": b"GET / HTTP/1.1\r\nHost: a\r\n%s: x\r\n\r\n" % (b"x" * (1 << 20)),
    "empty lines": b"\r\n" * (1 << 19),
    "many headers": b"GET / HTTP/1.1\r\nHost: a\r\n%s\r\n" % (b"X: x\r\n" * (1 << 17)),
    "a trailer": CHUNKED[:-2] + b"X: %s\r\n\r\n" % (b"x" * (1 << 20)),
    "many trailers": CHUNKED[:-2] + b"X: x\r\n" * (1 << 17) + b"\r\n",
    "a chunk extension": chunked(b"3;%s\r\nabc\r\n0\r\n\r\n" % (b"x" * (1 << 20))),
    "a chunk size with zeros": chunked(b"%s3\r\nabc\r\n0\r\n\r\n" % (b"0" * (1 << 20))),
}


@pytest.mark.parametrize("what", TOO_LARGE)
async def test_what_is_too_large_is_refused_and_the_client_hears_why(what: str, server: Served) -> None:
    client = await server.open()
    # Sent without a look at what comes back: the answer arrives although much of this is never read.
    (refused,) = await client.send(TOO_LARGE[what]).rest()
    assert refused.status in (400, 431)
    assert refused.closes
    client.close()
    assert (await (await server.open()).send(SIZED).answer()).status == 200


async def test_a_client_that_never_stops_sending_after_its_refusal_is_cut_off(server: Served) -> None:
    client = await server.open()
    client.send(b"nonsense\r\n\r\n")
    (refused,) = await client.rest()
    assert refused.status == 400
    assert LINGER_BYTES / 2 < await client.flood(bytes(1 << 20)) < 8 * LINGER_BYTES
    client.abort()


async def test_a_body_that_nobody_wants_is_read_only_so_far(server: Served) -> None:
    client = await server.open()
    client.send(post(HOST + b"Transfer-Encoding: chunked\r\n", path=b"/early"))
    assert (await client.answer()).status == 200
    assert LINGER_BYTES < await client.flood(b"100000\r\n" + bytes(1 << 20) + b"\r\n") < 8 * LINGER_BYTES
    client.abort()
    # One that ends is read, and the connection is used again.
    again = await server.open()
    again.send(post(HOST + b"Content-Length: 1000000\r\n", path=b"/early"))
    assert (await again.answer()).status == 200
    assert (await again.send(bytes(1_000_000) + get()).answer()).status == 200
    again.close()


async def test_a_body_comes_in_so_many_chunks_and_no_more(server: Served) -> None:
    chunk, end = b"1\r\nx\r\n", b"0\r\n\r\n"
    head = post(HOST + b"Transfer-Encoding: chunked\r\n")
    client = await server.open()
    # A packet may end within a chunk, which makes two pieces of it.
    answer = await client.send(head + chunk * (MAX_BODY_PIECES - 100) + end).answer()
    assert (answer.status, answer.closes) == (200, False)
    client.close()
    (refused,) = await server.exchange(head + chunk * (MAX_BODY_PIECES + 1) + end)
    assert refused.status == 400
    assert refused.closes
    assert f"{MAX_BODY_PIECES + 1} pieces" in json.loads(refused.body)["error"]["message"]
    # What was answered before is not answered again, but its connection ends all the same.
    client = await server.open()
    assert (await client.send(post(HOST + b"Transfer-Encoding: chunked\r\n", path=b"/early")).answer()).status == 200
    assert await client.send(chunk * (MAX_BODY_PIECES + 1)).rest() == []
    client.close()


# --- order


async def test_a_connection_is_used_again(app: App, server: Served) -> None:
    client = await server.open()
    for request in (SIZED, CHUNKED, get(), post(HOST + b"Content-Length: 0\r\n")):
        answer = await client.send(request).answer()
        assert answer.status == 200
        assert not answer.closes
    assert len(app.asked) == 4
    (last,) = await client.send(get(headers=HOST + b"Connection: close\r\n")).rest()
    assert last.closes
    client.close()


@pytest.mark.parametrize("first", [SIZED, CHUNKED, get(), get(headers=HOST + b"Connection: close\r\n")])
async def test_what_is_sent_before_the_answer_is_dropped_and_the_connection_ends(
    first: bytes, app: App, server: Served
) -> None:
    (answer,) = await server.exchange(first + SMUGGLED * 1000)
    assert answer.status == 200
    assert answer.closes
    await server.until_idle()
    assert app.asked == ["/"]


async def test_nothing_that_is_sent_during_an_answer_disturbs_it(app: App, server: Served) -> None:
    interruptions = (SMUGGLED, b"nonsense\r\n\r\n", b"G", b"\r\n")
    for interruption in interruptions:
        app.go.clear()
        client = await server.open()
        client.send(get(b"/hold"))
        await server.until(lambda: app.asked[-1:] == ["/hold"])
        client.send(interruption)
        # By the time that another was answered, it has been received.
        await server.exchange(get(headers=HOST + b"Connection: close\r\n"))
        app.go.set()
        assert json.loads((await client.answer()).body)["path"] == "/hold"
        client.close()
        await server.until_idle()
    assert app.asked == ["/hold", "/"] * len(interruptions)
    assert not app.left


@pytest.mark.parametrize("ahead", [b"", SMUGGLED, SMUGGLED * 10_000], ids=["nothing", "a request", "many requests"])
async def test_a_client_that_leaves_is_noticed_whatever_it_sent_ahead(ahead: bytes, app: App, server: Served) -> None:
    client = await server.open()
    client.send(get(b"/hold") + ahead)
    await server.until(lambda: "/hold" in app.asked)
    await client.writer.drain()
    assert not app.left
    client.close()
    await server.until_idle(1)
    assert app.left == ["/hold"]
    assert "/smuggled" not in app.asked


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
async def test_a_request_for_another_protocol_is_answered_in_this_one_and_ends_the_connection(
    protocol: bytes, app: App, server: Served
) -> None:
    upgrade = HOST + b"Connection: upgrade\r\nUpgrade: %s\r\n" % protocol
    (answer,) = await server.exchange(get(headers=upgrade) + SMUGGLED)
    assert answer.status == 200
    assert answer.closes
    client = await server.open()
    client.send(get(b"/hold", upgrade))
    await server.until(lambda: "/hold" in app.asked)
    client.send(SMUGGLED)
    app.go.set()
    (answer,) = await client.rest()
    assert answer.status == 200
    client.close()
    assert app.asked == ["/", "/hold"]


async def test_connect_opens_nothing(app: App, server: Served) -> None:
    assert [a.status for a in await server.exchange(b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n" + SMUGGLED)] == [400]
    assert [a.status for a in await server.exchange(b"CONNECT /x HTTP/1.1\r\nHost: a\r\n\r\n" + SMUGGLED)] == [200]
    assert app.asked == ["/x"]


# --- Expect: 100-continue

EXPECTING = HOST + b"Content-Length: 3\r\nExpect: 100-continue\r\n"


async def test_a_client_that_asks_whether_to_send_its_body_is_told(server: Served) -> None:
    client = await server.open()
    assert (await client.send(post(EXPECTING)).answer()).status == 100
    answer = await client.send(b"abc").answer()
    assert json.loads(answer.body)["bytes"] == 3
    assert (await client.send(SIZED).answer()).status == 200
    client.close()


async def test_a_body_that_was_not_asked_for_is_no_request(app: App, server: Served) -> None:
    client = await server.open()
    assert (await client.send(post(EXPECTING, path=b"/early")).answer()).status == 200
    # What comes now could be the body or a request: neither is read.
    assert await client.send(SMUGGLED).rest() == []
    client.close()
    assert app.asked == ["/early"]


async def test_nothing_is_said_after_a_refusal(app: App, server: Served) -> None:
    expecting = HOST + b"Transfer-Encoding: chunked\r\nExpect: 100-continue\r\n"
    (refused,) = await server.exchange(post(expecting, b"x\r\n"))
    assert refused.status == 400
    await server.until_idle()
    assert app.left == app.asked


