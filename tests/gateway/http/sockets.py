"""ASGI applications behind real sockets, each connection a `Connection`, and clients that send any bytes they like."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvicorn.server
from starlette.types import ASGIApp

from gateway.process import _bind, _server
from gateway.tls import server_context
from tests.gateway.certificates import Identity

PATIENCE_SECONDS = 20


@dataclass(frozen=True)
class Served:
    """A listener on loopback. `state` knows its connections and the tasks that answer."""

    port: int
    state: uvicorn.server.ServerState
    trust: ssl.SSLContext | None = None

    async def open(self) -> Client:
        return Client(*await asyncio.open_connection("127.0.0.1", self.port, ssl=self.trust))

    async def open_narrow(self) -> Client:
        """A client whose socket holds little of what it does not take."""
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self.port))
        name = "127.0.0.1" if self.trust else None
        return Client(
            *await asyncio.open_connection(sock=connection, limit=1024, ssl=self.trust, server_hostname=name)
        )

    async def exchange(self, request: bytes) -> list[Answer]:
        """What comes back until the server closes the connection."""
        client = await self.open()
        try:
            return await client.send(request).rest()
        finally:
            client.close()

    async def until(self, condition: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until it holds, at most so long."""
        async with asyncio.timeout(seconds):
            while True:
                if condition():
                    return
                await asyncio.sleep(0.002)

    async def until_idle(self, seconds: float = PATIENCE_SECONDS) -> None:
        """No connection is left, and nothing answers any more."""
        await self.until(lambda: not self.state.connections and not self.state.tasks, seconds)


@asynccontextmanager
async def served(app: ASGIApp, identity: Identity | None = None) -> AsyncIterator[Served]:
    """The application behind a listener that is bound and configured as the gateway's are, with TLS or without."""
    listener = _bind("--port", "127.0.0.1", 0)
    server = _server(app, identity and server_context(identity.pair))
    server.config.load()
    await server.startup(sockets=[listener])
    running = Served(listener.getsockname()[1], server.server_state, identity and identity.trust)
    try:
        yield running
    finally:
        server.servers[0].close()
        for connection in list(running.state.connections):
            connection.transport.abort()  # type: ignore[union-attr]
        await running.until_idle()


@dataclass(frozen=True)
class Answer:
    """`headers`: names in lower case; `body`: without its chunked framing."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def closes(self) -> bool:
        return self.headers.get("connection") == "close"


class Client:
    """One connection of a client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> Client:
        self.writer.write(data)
        return self

    async def answer(self) -> Answer:
        """The next answer, whole. Raises IncompleteReadError when the connection ends before it."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            head = await self.reader.readuntil(b"\r\n\r\n")
            line, *lines = head.decode("ascii").split("\r\n")[:-2]
            headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
            status = int(line.removeprefix("HTTP/1.1 ")[:3])
            body = b""
            if status >= 200:
                body = await (self._chunks() if "transfer-encoding" in headers else self._sized(headers))
            return Answer(status, headers, body)

    async def rest(self) -> list[Answer]:
        """All answers until the connection ends, and no byte that belongs to none."""
        answers = []
        while True:
            try:
                answers.append(await self.answer())
            except asyncio.IncompleteReadError as end:
                left = end.partial
                break
            except ConnectionResetError:
                left = b""
                break
        assert not left
        return answers

    async def flood(self, piece: bytes) -> int:
        """Send it again and again until the server cuts the connection off; how many bytes it took before that."""
        sent_bytes = 0
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                try:
                    self.send(piece)
                    await self.writer.drain()
                except ConnectionError:
                    return sent_bytes
                sent_bytes += len(piece)

    async def ended(self) -> None:
        """Wait until the server ends the connection, whatever it still says."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            try:
                while await self.reader.read(1 << 16):
                    pass
            except ConnectionResetError:
                pass

    async def _sized(self, headers: dict[str, str]) -> bytes:
        return await self.reader.readexactly(int(headers["content-length"]))

    async def _chunks(self) -> bytes:
        body = b""
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            body += await self.reader.readexactly(size)
            assert await self.reader.readexactly(2) == b"\r\n"
        assert await self.reader.readexactly(2) == b"\r\n"
        return body

    def close(self) -> None:
        self.writer.close()

    def abort(self) -> None:
        self.writer.transport.abort()
