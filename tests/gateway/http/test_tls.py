"""A listener with TLS: what a connection is held to holds there too, and what TLS adds has a deadline of its own."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from starlette.types import Receive, Scope, Send

from gateway.http import connection
from tests.gateway.certificates import Identity
from tests.gateway.http.sockets import Client, Served, served

pytestmark = pytest.mark.anyio

GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
SHORT_SECONDS = 0.3


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """The loop that the gateway runs on."""
    return "asyncio", {"use_uvloop": True}


class App:
    """Answers with 256 KiB, in two pieces."""

    def __init__(self) -> None:
        self.schemes: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.schemes.append(scope["scheme"])
        while (await receive()).get("more_body", False):
            pass
        piece = bytes(128 << 10)
        length = (b"content-length", str(2 * len(piece)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": piece})


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
async def server(app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    monkeypatch.setattr(connection, "LINGER_SECONDS", SHORT_SECONDS)
    async with served(app, Identity.make(tmp_path)) as running:
        yield running


async def handshaken(server: Served) -> tuple[socket.socket, ssl.SSLObject, ssl.MemoryBIO]:
    """A client that does nothing by itself: not even what TLS asks of it at the end."""
    assert server.trust is not None
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = server.trust.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    raw = socket.create_connection(("127.0.0.1", server.port))
    raw.setblocking(False)
    loop = asyncio.get_running_loop()
    while True:
        try:
            tls.do_handshake()
            break
        except ssl.SSLWantReadError:
            await loop.sock_sendall(raw, outgoing.read())
            incoming.write(await loop.sock_recv(raw, 1 << 16))
    await loop.sock_sendall(raw, outgoing.read())
    return raw, tls, outgoing


async def test_a_connection_is_used_again_and_the_application_knows_it_is_https(app: App, server: Served) -> None:
    client = await server.open()
    for _ in range(3):
        answer = await client.send(GET).answer()
        assert (answer.status, len(answer.body)) == (200, 256 << 10)
    assert app.schemes == ["https"] * 3
    client.close()


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * (1 << 15), 431),
    ],
)
async def test_a_refusal_arrives_and_ends_the_connection(text: bytes, status: int, server: Served) -> None:
    client = await server.open()
    (refused,) = await client.send(text).rest()
    assert refused.status == status
    assert refused.closes
    assert json.loads(refused.body)["error"]["type"] == "invalid_request_error"
    await server.until_idle()
    client.close()


async def test_who_was_refused_and_never_closes_is_cut_off(server: Served) -> None:
    raw, tls, outgoing = await handshaken(server)
    tls.write(b"nonsense\r\n\r\n")
    await asyncio.get_running_loop().sock_sendall(raw, outgoing.read())
    await server.until(lambda: bool(server.state.connections))
    await server.until_idle()
    raw.close()


async def test_who_asks_nothing_and_never_closes_is_cut_off(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", SHORT_SECONDS)
    raw, _, _ = await handshaken(server)
    await server.until(lambda: bool(server.state.connections))
    await server.until_idle()
    raw.close()


async def test_who_takes_nothing_and_never_closes_is_cut_off(
    app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "STALLED_READER_SECONDS", SHORT_SECONDS)
    async with served(app, Identity.make(tmp_path)) as server:
        raw, tls, outgoing = await handshaken(server)
        tls.write(GET.replace(b"Host: a\r\n", b"Host: a\r\nConnection: close\r\n"))
        await asyncio.get_running_loop().sock_sendall(raw, outgoing.read())
        await server.until(lambda: bool(app.schemes))
        await server.until_idle()
        raw.close()


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01"], ids=["nothing", "the beginning of a handshake"])
async def test_a_handshake_has_a_deadline(
    sent: bytes, app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", SHORT_SECONDS)
    async with served(app, Identity.make(tmp_path)) as server:
        client = Client(*await asyncio.open_connection("127.0.0.1", server.port))
        assert await client.send(sent).rest() == []
        client.close()


async def test_plain_http_is_not_answered_and_does_not_wait(app: App, server: Served) -> None:
    client = Client(*await asyncio.open_connection("127.0.0.1", server.port))
    client.send(GET)
    # An alert of TLS at most.
    async with asyncio.timeout(connection.HEAD_SECONDS / 2):
        assert not (await client.reader.read()).startswith(b"HTTP")
    client.close()
    assert app.schemes == []


@pytest.mark.parametrize(("newest", "is_spoken"), [("TLSv1_1", False), ("TLSv1_2", True)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_nothing_older_than_tls_12_is_spoken(newest: str, is_spoken: bool, server: Served) -> None:
    assert server.trust is not None
    # What this machine's own OpenSSL would not offer any more is offered.
    server.trust.set_ciphers("ALL:@SECLEVEL=0")
    server.trust.minimum_version = ssl.TLSVersion.TLSv1
    server.trust.maximum_version = ssl.TLSVersion[newest]
    if is_spoken:
        (await server.open()).close()
    else:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await server.open()
