"""The socket server around the engine thread.

A Unix stream socket, mode 0600 in a 0700 directory, whose peers must have our uid. The loop owns the sockets, the
engine thread owns everything else; they exchange messages and never wait for each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path

from cachestore.engine import Engine
from cachestore.engine_thread import Crashed, Disconnected, EngineThread, Outgoing, ReportDue, Violation
from cachestore.protocol import (
    KEY_VERSION,
    MAX_FRAME_TO_GATEWAY_BYTES,
    MAX_FRAME_TO_STORE_BYTES,
    MAX_UNSENT_BYTES,
    PING_INTERVAL_SECONDS,
    PROTOCOL,
    SILENCE_LIMIT_SECONDS,
    Hello,
    Message,
    Ping,
    Pong,
    ProtocolError,
    Refused,
    Welcome,
    decode_to_store,
    encode_frame,
    read_message,
)
from cachestore.start_error import StartError

log = logging.getLogger("saltern.store")

_UCRED = struct.Struct("3i")


class _Connection:
    """One gateway. `number` is ours; request ids are unique within it."""

    def __init__(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.number = number
        self.reader = reader
        self.writer = writer
        self.heard_at = time.monotonic()

    async def receive(self) -> Message:
        """Raises as `read_message`."""
        message = await read_message(self.reader, decode_to_store, MAX_FRAME_TO_STORE_BYTES)
        self.heard_at = time.monotonic()
        return message

    def send(self, message: Message) -> None:
        if self.writer.transport.is_closing():
            return
        self.writer.write(encode_frame(message, MAX_FRAME_TO_GATEWAY_BYTES))
        if (unsent := self.writer.transport.get_write_buffer_size()) > MAX_UNSENT_BYTES:
            log.warning("connection %d closed: %d bytes unsent", self.number, unsent)
            self.writer.transport.abort()


class StoreServer:
    """Serves one engine to any number of gateways.

    Args:
        socket_path: its directory is made with mode 0700 when missing.
        allowed_uid: the only uid whose processes may connect; ours.
    """

    def __init__(
        self,
        socket_path: Path,
        welcome: Welcome,
        make_engine: Callable[[Callable[[int, Message], None]], Engine],
        *,
        allowed_uid: int | None = None,
    ) -> None:
        self.socket_path = socket_path
        self.welcome = welcome
        self.allowed_uid = os.geteuid() if allowed_uid is None else allowed_uid
        self.refused_peers = 0
        self._connections: dict[int, _Connection] = {}
        # Of every peer, welcomed or not.
        self._handlers: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._numbers = itertools.count(1)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = asyncio.Event()
        self._crash: Exception | None = None
        self._thread = EngineThread(make_engine, self._deliver_soon)

    @property
    def engine(self) -> Engine:
        """The engine, for tests that look at it while no request runs."""
        return self._thread.engine

    async def serve(self, stopped: asyncio.Event) -> None:
        """Serve until `stopped` is set; leaves no socket behind.

        Raises:
            StartError: the socket's directory is not ours alone, or another store serves there.
            RuntimeError: the engine failed; what it held can't be trusted any more.
        """
        self._loop = asyncio.get_running_loop()
        self._stopped = stopped
        listener = _bind(self.socket_path)
        self._thread.start()
        server = await asyncio.start_unix_server(self._handle, sock=listener)
        statistics = asyncio.create_task(self._push_statistics())
        try:
            await stopped.wait()
        finally:
            # Before nobody listens: another store may take the place as soon as that is so.
            self.socket_path.unlink(missing_ok=True)
            statistics.cancel()
            server.close()
            for writer in self._handlers.values():
                writer.transport.abort()
            if self._handlers:
                await asyncio.wait(self._handlers)
            self._thread.stop()
        if self._crash:
            raise RuntimeError("the engine failed, so the store ends") from self._crash

    def _deliver_soon(self, outgoing: Outgoing) -> None:
        assert self._loop is not None
        # The loop may be closing while the last step ends: then nobody is left to hear it.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._deliver, outgoing)

    def _deliver(self, outgoing: Outgoing) -> None:
        for number, message in outgoing:
            if isinstance(message, Crashed):
                # A store without an engine would answer pings for ever: ended, it is started anew.
                self._crash = message.error
                self._stopped.set()
                return
            connection = self._connections.get(number)
            if connection is None:
                continue
            if isinstance(message, Violation):
                log.warning("connection %d closed: %s", number, message.error)
                connection.writer.transport.abort()
            else:
                connection.send(message)

    async def _push_statistics(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            for number in self._connections:
                self._thread.put(number, ReportDue())

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handler = asyncio.current_task()
        assert handler is not None
        self._handlers[handler] = writer
        connection = _Connection(next(self._numbers), reader, writer)
        try:
            if (uid := _peer_uid(writer.get_extra_info("socket"))) != self.allowed_uid:
                self.refused_peers += 1
                raise ProtocolError(f"a peer with uid {uid} is not allowed")
            await self._welcome(connection)
            self._connections[connection.number] = connection
            watch = asyncio.create_task(self._watch(connection))
            try:
                while True:
                    self._take(connection, await connection.receive())
            finally:
                watch.cancel()
                del self._connections[connection.number]
                self._thread.put(connection.number, Disconnected())
        except ProtocolError as error:
            log.warning("connection %d closed: %s", connection.number, error)
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            pass
        finally:
            writer.transport.abort()
            del self._handlers[handler]

    async def _welcome(self, connection: _Connection) -> None:
        async with asyncio.timeout(SILENCE_LIMIT_SECONDS):
            hello = await connection.receive()
        if not isinstance(hello, Hello):
            raise ProtocolError("the first message must be Hello")
        if hello.protocol != PROTOCOL:
            detail = f"this store speaks protocol {PROTOCOL}, the gateway {hello.protocol}: install the same version"
            connection.send(Refused(code="protocol", detail=detail))
        elif hello.key_version != KEY_VERSION:
            detail = f"this store expects key version {KEY_VERSION}, not {hello.key_version}: install the same version"
            connection.send(Refused(code="key_version", detail=detail))
        else:
            connection.send(self.welcome)
            return
        await connection.writer.drain()
        raise ProtocolError(detail)

    def _take(self, connection: _Connection, message: Message) -> None:
        match message:
            case Ping():
                connection.send(Pong(step_age_ms=self._thread.step_age_ms()))
            case Pong():
                pass
            case Hello():
                raise ProtocolError("Hello comes once")
            case _:
                self._thread.put(connection.number, message)

    async def _watch(self, connection: _Connection) -> None:
        """Ping every second; a peer that was silent too long has its connection closed, to the moment."""
        while (left := connection.heard_at + SILENCE_LIMIT_SECONDS - time.monotonic()) > 0:
            await asyncio.sleep(min(PING_INTERVAL_SECONDS, left))
            connection.send(Ping())
        log.warning("connection %d closed: silent for %g s", connection.number, SILENCE_LIMIT_SECONDS)
        connection.writer.transport.abort()


def _peer_uid(peer: socket.socket) -> int:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    _, uid, _ = _UCRED.unpack(credentials)
    return int(uid)


def check_socket(path: Path) -> None:
    """Make the socket's directory, and see that nobody else can reach it and no store serves there.

    Raises:
        StartError: others can, or one does, or the path is no path for a socket.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = path.parent.stat()
    if folder.st_uid != os.geteuid() or stat.S_IMODE(folder.st_mode) & 0o077:
        raise StartError(f"{path.parent} must be owned by us with mode 0700: the socket would be open to others")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            taken = probe.connect_ex(str(path)) == 0
        except OSError as error:
            raise StartError(f"the socket {path} can't be made: {error.strerror or error}") from error
    if taken:
        raise StartError(f"another store serves at {path}: stop it, or choose another --socket")


def _bind(path: Path) -> socket.socket:
    """A listening socket at `path` that only we can reach."""
    check_socket(path)
    # Left behind by a store that was killed.
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise StartError(f"the socket {path} can't be made: {error.strerror or error}") from error
    finally:
        os.umask(before)
    listener.listen(64)
    listener.setblocking(False)
    return listener
