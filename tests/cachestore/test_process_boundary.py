"""Who may speak with the store, and what it does with what is no message."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import pickle
import random
import re
import resource
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

import cachestore
from cachestore import protocol
from cachestore.protocol import (
    KEY_VERSION,
    MAX_FRAME_TO_STORE_BYTES,
    PROTOCOL,
    Abort,
    DropAccount,
    Fence,
    Hello,
    OpenAccount,
    Pong,
    ProtocolError,
    Rejected,
    Seal,
    Stats,
    StatsReport,
    encode_frame,
    frame_length,
)
from cachestore.server import StoreServer
from tests.cachestore.serving import BLOCK_TOKENS, WELCOME, RawPeer, complete, connected, serving
from tests.cachestore.support import ALICE, expected_answer, token_bytes

pytestmark = pytest.mark.anyio

NOBODY = 65534
LISTENING = "0A"


class Exploit:
    """Unpickled, it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.folder),)


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def changed(message: protocol.Message, **fields: object) -> bytes:
    """A frame like that of `message`, with some fields added or given another value."""
    return framed(msgspec.msgpack.encode({"type": type(message).__name__, **msgspec.to_builtins(message), **fields}))


HELLO = Hello(protocol=PROTOCOL, key_version=KEY_VERSION)
SEAL = Seal(request=1, first_block=0, keys=b"")
GOOD_SUBMIT = {
    "type": "Submit",
    "request": 1,
    "account": ALICE,
    "epoch": 1,
    "tokens": token_bytes([1, 2]),
    "keys": b"",
    "sampling": {"temperature": 0},
    "max_tokens": 1,
    "queue_deadline_ns": 1 << 62,
}


def submitting(**fields: object) -> bytes:
    return framed(msgspec.msgpack.encode(GOOD_SUBMIT | fields))


BAD_FRAMES: dict[str, bytes] = {
    "a length of 1 GB": (1 << 30).to_bytes(4, "big"),
    "a length of 4 GB": b"\xff\xff\xff\xff",
    "one byte over the limit": (MAX_FRAME_TO_STORE_BYTES + 1).to_bytes(4, "big"),
    "a length of nothing": bytes(4),
    "random bytes": random.Random(198).randbytes(4096),
    "random bytes in a frame": framed(random.Random(198).randbytes(4096)),
    "text": b"GET / HTTP/1.1\r\nHost: store\r\n\r\n",
    "arrays in arrays": framed(b"\x91" * 100_000),
    "maps in maps": framed(b"\x81\xa1a" * 100_000),
    "arrays in arrays as a field": framed(b"\x82\xa4type\xa4Ping\xa1x" + b"\x91" * 100_000),
    "arrays in arrays as a known field": framed(b"\x82\xa4type\xa5Abort\xa7request" + b"\x91" * 100_000),
    "an array of four thousand million": framed(b"\xdd\xff\xff\xff\xff"),
    "a string of four thousand million": framed(b"\xdb\xff\xff\xff\xff"),
    "a message cut short": framed(msgspec.msgpack.encode(GOOD_SUBMIT)[:-5]),
    "something after the message": framed(msgspec.msgpack.encode({"type": "Ping"}) + b"\x00"),
    "an unknown type": framed(msgspec.msgpack.encode({"type": "Shutdown"})),
    "no type": framed(msgspec.msgpack.encode({"request": 1})),
    "an unknown field": changed(Stats(), tenant=ALICE),
    "an unknown field inside": submitting(sampling={"temperature": 0, "logit_bias": {}}),
    "a missing field": framed(msgspec.msgpack.encode({"type": "Abort"})),
    "a text for a number": changed(SEAL, request="1"),
    "a number for bytes": changed(SEAL, keys=1),
    "a negative id": changed(SEAL, request=-1),
    "an id beyond 63 bits": changed(SEAL, request=1 << 63),
    "a short account": submitting(account=ALICE[:-1]),
    "a long account": submitting(account=ALICE + b"A"),
    "a temperature that is no number": submitting(sampling={"temperature": float("nan")}),
    "a top-p of nothing": submitting(sampling={"top_p": 0.0}),
    "no token wanted": submitting(max_tokens=0),
    "no token given": submitting(tokens=b""),
    "half a token": submitting(tokens=b"abc"),
    "keys for blocks that there are not": submitting(keys=bytes(32)),
    "another hello": encode_frame(HELLO, 1 << 20),
    "a message of the store's own": encode_frame(WELCOME, 1 << 20),
}


async def assert_still_serving(server: StoreServer) -> None:
    async with connected(server) as client:
        assert (await complete(client, [1] * 5))[1] == expected_answer([1] * 5, 4)


@pytest.mark.parametrize("what", BAD_FRAMES)
async def test_line_35_a_bad_frame_closes_that_connection_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    async with serving(tmp_path) as server, connected(server) as other:
        before = await complete(other, [1] * 5)
        peer = await RawPeer.connect(server)
        peer.send(OpenAccount(account=ALICE, epoch=1))
        peer.send_bytes(BAD_FRAMES[what])
        await peer.rest()
        assert re.search(r"connection 2 closed: .+", caplog.text)
        # Not because it answered no ping either.
        assert "silent" not in caplog.text
        # The connection that was there before, and a new one.
        assert (await complete(other, [1] * 5))[1] == before[1]
        await assert_still_serving(server)


@pytest.mark.parametrize("what", ["a length of 1 GB", "random bytes in a frame", "another hello"])
async def test_line_35_a_bad_first_frame_closes_that_connection_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    first = encode_frame(Stats(), 1 << 20) if what == "another hello" else BAD_FRAMES[what]
    async with serving(tmp_path) as server, connected(server) as other:
        peer = await RawPeer.connect(server, hello=False)
        peer.send_bytes(first)
        assert await peer.rest() == b""
        assert "connection 2 closed" in caplog.text
        assert (await complete(other, [1] * 5))[1] == expected_answer([1] * 5, 4)


@pytest.mark.parametrize("cut", [1, 4, 20])
async def test_line_35_a_truncated_frame_ends_that_connection_only(tmp_path: Path, cut: int) -> None:
    async with serving(tmp_path) as server, connected(server) as other:
        peer = await RawPeer.connect(server)
        peer.send_bytes(submitting()[:cut])
        peer.end()
        await peer.rest()
        assert (await complete(other, [1] * 5))[1] == expected_answer([1] * 5, 4)
        whole = await RawPeer.connect(server)
        whole.send(OpenAccount(account=ALICE, epoch=1))
        whole.send_bytes(submitting())
        whole.end()
        await assert_still_serving(server)


async def test_line_35_unknown_handles_are_ignored_and_the_connection_goes_on(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        peer = await RawPeer.connect(server)
        for message in (
            Seal(request=7, first_block=3, keys=b"k" * 32, last=True),
            Abort(request=1 << 62),
            Pong(),
            Fence(account=b"?" * 16, epoch=5),
            DropAccount(account=b"!" * 16),
            Stats(),
        ):
            peer.send(message)
        answers = [await peer.receive() for _ in range(3)]
        assert isinstance(answers[-1], StatsReport)
        await assert_still_serving(server)


async def test_line_35_memory_does_not_grow_with_what_is_announced(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        await assert_still_serving(server)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        waiting = []
        for _ in range(20):
            for what in ("a length of 1 GB", "an array of four thousand million", "a string of four thousand million"):
                peer = await RawPeer.connect(server)
                peer.send_bytes(BAD_FRAMES[what])
                await peer.rest()
            # Announced within the limit, and never sent.
            waiting.append(await RawPeer.connect(server))
            waiting[-1].send_bytes(MAX_FRAME_TO_STORE_BYTES.to_bytes(4, "big"))
        await assert_still_serving(server)
        grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown_kib < 32 << 10
        for peer in waiting:
            peer.close()


async def test_a_frame_of_nearly_the_largest_size_is_answered(tmp_path: Path) -> None:
    """The positive control of the limit: a prompt of over a million tokens is told that it is too long."""
    blocks = (MAX_FRAME_TO_STORE_BYTES - 4096) // (4 * BLOCK_TOKENS + 32)
    keys = b"".join(block.to_bytes(32, "big") for block in range(blocks))
    async with serving(tmp_path) as server:
        peer = await RawPeer.connect(server)
        peer.send(OpenAccount(account=ALICE, epoch=1))
        peer.send_bytes(submitting(tokens=token_bytes([1] * BLOCK_TOKENS * blocks), keys=keys))
        rejected = await peer.receive()
        assert isinstance(rejected, Rejected)
        assert rejected.code == "too_long"
        peer.send(Stats())
        assert isinstance(await peer.receive(), StatsReport)


def test_a_length_is_checked_at_its_ends() -> None:
    for length in (0, MAX_FRAME_TO_STORE_BYTES + 1, (1 << 32) - 1):
        with pytest.raises(ProtocolError, match=f"a frame of {length} bytes is outside"):
            frame_length(length.to_bytes(4, "big"), MAX_FRAME_TO_STORE_BYTES)
    for length in (1, MAX_FRAME_TO_STORE_BYTES):
        assert frame_length(length.to_bytes(4, "big"), MAX_FRAME_TO_STORE_BYTES) == length
    with pytest.raises(ProtocolError, match="over the limit of 10"):
        encode_frame(HELLO, 10)


async def test_b198_nothing_that_comes_is_unpickled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "made by a pickle"
    payload = pickle.dumps(Exploit(folder))
    async with serving(tmp_path) as server, connected(server) as other:
        attempts = (payload, framed(payload), random.Random(1).randbytes(512), (1 << 30).to_bytes(4, "big") + payload)
        for number, attempt in enumerate(attempts, start=2):
            peer = await RawPeer.connect(server)
            peer.send_bytes(attempt)
            assert await peer.rest() == b""
            assert f"connection {number} closed: a frame of" in caplog.text
            assert (await complete(other, [number] * 5))[1] == expected_answer([number] * 5, 4)
    assert not folder.exists()
    # Positive control: unpickled, it would have been made.
    pickle.loads(payload)  # noqa: S301
    assert folder.exists()


def test_b198_the_store_imports_nothing_that_unpickles() -> None:
    code = "".join(path.read_text() for path in Path(cachestore.__path__[0]).glob("*.py"))
    assert "import msgspec" in code
    assert not re.search(r"import .*\b(pickle|marshal|shelve|dill|yaml)\b|\btorch\.load\b", code)


# --- who may connect


async def test_line_33_a_peer_with_another_uid_gets_no_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(tmp_path / "theirs", allowed_uid=os.geteuid() + 1) as server:
        peer = await RawPeer.connect(server, hello=False)
        with contextlib.suppress(ConnectionError):
            peer.send(HELLO)
        assert await peer.rest() == b""
        assert server.refused_peers == 1
        assert f"a peer with uid {os.geteuid()} is not allowed" in caplog.text
    async with serving(tmp_path / "ours", allowed_uid=os.geteuid()) as server:
        await assert_still_serving(server)
        assert server.refused_peers == 0


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that others may pass through, unlike those of the tests."""
    folder = Path(tempfile.mkdtemp(prefix="saltern-"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)


async def test_line_33_a_process_of_another_user_cannot_connect(open_folder: Path) -> None:
    """Neither past the permissions of folder and socket, nor, where these were opened, past the check of its uid."""
    if os.geteuid() != 0:
        # Only root can become somebody else; the test above is the same check from the other side.
        return
    async with serving(open_folder) as server:
        assert await _connect_as(NOBODY, server.socket_path) == errno.EACCES
        server.socket_path.parent.chmod(0o711)
        assert await _connect_as(NOBODY, server.socket_path) == errno.EACCES
        server.socket_path.chmod(0o666)
        assert await _connect_as(NOBODY, server.socket_path) == CLOSED_WITHOUT_AN_ANSWER
        assert server.refused_peers == 1
        assert await _connect_as(0, server.socket_path) == ANSWERED
        await assert_still_serving(server)


CLOSED_WITHOUT_AN_ANSWER, ANSWERED = 200, 201


async def _connect_as(uid: int, path: Path) -> int:
    """What a process of that user comes to: an errno of connecting, or one of the two above."""
    pid = os.fork()
    if pid == 0:
        os._exit(_try_hello(uid, path))
    _, status = await asyncio.to_thread(os.waitpid, pid, 0)
    return os.waitstatus_to_exitcode(status)


def _try_hello(uid: int, path: Path) -> int:
    try:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.settimeout(10)
            peer.connect(str(path))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                peer.sendall(encode_frame(HELLO, 1 << 20))
                return ANSWERED if peer.recv(1) else CLOSED_WITHOUT_AN_ANSWER
            return CLOSED_WITHOUT_AN_ANSWER
    except OSError as error:
        return error.errno or 255


async def test_line_33_the_store_listens_on_no_network(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        await assert_still_serving(server)
        assert _network_listeners() == 0
        # Positive control: a listener of this process is seen.
        with socket.create_server(("127.0.0.1", 0)):
            assert _network_listeners() == 1


def _network_listeners() -> int:
    """TCP sockets of this process that listen."""
    listening = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        if Path(table).exists():
            for line in Path(table).read_text().splitlines()[1:]:
                _, _, _, state, *_ = fields = line.split()
                if state == LISTENING:
                    listening.add(f"socket:[{fields[9]}]")
    mine = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            mine.add(os.readlink(descriptor))
    return len(listening & mine)
