"""Lines 38 to 40 of the promise over a whole server, on both listeners: paths, hosts, framing, sizes, deadlines."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.gateway.http.sockets import Answer, Client
from tests.system.support import Server, Tenant

pytestmark = pytest.mark.anyio

TENANT_PATH, ADMIN_PATH = "/v1/models", "/admin/v1/tenants"


async def connect(url: str) -> Client:
    address = urlsplit(url)
    return Client(*await asyncio.open_connection(address.hostname, address.port))


async def exchange(url: str, request: bytes) -> list[Answer]:
    """What comes back until the server ends the connection."""
    client = await connect(url)
    try:
        return await client.send(request).rest()
    finally:
        client.close()


def request(target: str | bytes, key: str | None, host: bytes = b"Host: a\r\n", more: bytes = b"") -> bytes:
    target = target.encode("latin-1") if isinstance(target, str) else target
    credential = b"" if key is None else b"Authorization: Bearer %s\r\n" % key.encode()
    return b"GET %s HTTP/1.1\r\n%s%s%sConnection: close\r\n\r\n" % (target, host, credential, more)


def admin_key(server: Server) -> str:
    return (server.data_dir / "admin-key").read_text().strip()


# How a path may be disguised, and whether what is meant by it is the path itself.
DISGUISES = {
    "{path}": True,
    "{path}?": True,
    "{path}#/livez": True,
    "http://elsewhere:1{path}": True,
    "http://user:password@elsewhere{path}": True,
    "{escaped}": True,
    "{slashes}": True,
    "/{path}": False,
    "//elsewhere{path}": False,
    "{doubled}": False,
    "{path}/": False,
    "{path}//": False,
    "/.{path}": False,
    "/livez/..{path}": False,
    "/livez/%2e%2e{path}": False,
    "/livez%2f..{path}": False,
    "/livez;{path}": False,
    "/livez%3f{path}": False,
    "/livez%23{path}": False,
    "/livez%00{path}": False,
    "{path}%00": False,
    "{path}%0a": False,
    "{path}%20": False,
    "{path}%3f": False,
    "{path};livez": False,
    "{path}/../../livez": False,
    "{path}\\": False,
    "{upper}": False,
    "\\{path}": False,
    "*": False,
    "https://elsewhere": False,
}


def disguised(disguise: str, path: str) -> str:
    return disguise.format(
        path=path,
        escaped="".join("/" if c == "/" else f"%{ord(c):02X}" for c in path),
        slashes="/" + path[1:].replace("/", "%2f"),
        doubled=path.replace("/", "//")[1:],
        upper=path.upper(),
    )


@pytest.mark.parametrize("disguise", DISGUISES)
async def test_line_38_no_disguise_of_a_path_gets_past_the_key(disguise: str, server: Server, tenant: Tenant) -> None:
    doors = [(server.url, TENANT_PATH, tenant.key), (server.admin_url, ADMIN_PATH, admin_key(server))]
    for url, path, key in doors:
        target = disguised(disguise, path)
        (anonymous,) = await exchange(url, request(target, None))
        (known,) = await exchange(url, request(target, key))
        if DISGUISES[disguise]:
            assert (anonymous.status, known.status) == (401, 200)
            assert known.body == (await exchange(url, request(path, key)))[0].body
        elif target.startswith(TENANT_PATH + "/"):
            # The path of a model by its name: a route of its own, behind the same key.
            assert (anonymous.status, known.status) == (401, 404)
        else:
            assert anonymous.status == known.status
            assert known.status in (400, 404)
        # A key of one listener is none on the other, however the path is spelt.
        other = admin_key(server) if key == tenant.key else tenant.key
        assert (await exchange(url, request(target, other)))[0].status == anonymous.status


HOSTS = [b"localhost", b"127.0.0.1:8001", b"", b"a, b", b"[::1]", b"a/../livez", b"http://a/livez", b"x" * 99, b"\xff"]
REWRITES = (
    b"X-Original-URL: /livez\r\nX-Rewrite-URL: /livez\r\nX-Forwarded-Prefix: /livez\r\nX-Forwarded-For: 127.0.0.1\r\n"
    b"X-Forwarded-Host: a\r\nForwarded: for=127.0.0.1\r\nX-HTTP-Method-Override: HEAD\r\nTransfer_Encoding: chunked\r\n"
)


async def test_line_38_no_host_and_no_header_of_a_proxy_changes_what_is_asked(server: Server, tenant: Tenant) -> None:
    doors = [(server.url, TENANT_PATH, tenant.key), (server.admin_url, ADMIN_PATH, admin_key(server))]
    for url, path, key in doors:
        (plain,) = await exchange(url, request(path, key))
        assert plain.status == 200
        for host in HOSTS:
            lines = b"Host: %s\r\n" % host
            assert [a.status for a in await exchange(url, request(path, None, lines, REWRITES))] == [401]
            assert [a.body for a in await exchange(url, request(path, key, lines, REWRITES))] == [plain.body]
        for lines in (b"", b"Host: a\r\nHost: b\r\n"):
            assert [a.status for a in await exchange(url, request(path, key, lines))] == [400]


async def test_line_39_what_hides_behind_ambiguous_framing_is_never_answered(server: Server, tenant: Tenant) -> None:
    doors = [(server.url, TENANT_PATH, tenant.key), (server.admin_url, ADMIN_PATH, admin_key(server))]
    for url, path, key in doors:
        hidden = request(path, key)
        # It would be answered if it were asked.
        assert [answer.status for answer in await exchange(url, hidden)] == [200]
        post = b"POST %s HTTP/1.1\r\nHost: a\r\n%%s\r\n%%s" % path.encode()
        chunks = b"0\r\n\r\n" + hidden
        attempts = [
            post % (b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n" % len(chunks), chunks),
            post % (b"Transfer-Encoding: chunked\r\nContent-Length: %d\r\n" % len(chunks), chunks),
            post % (b"Content-Length: 0\r\nContent-Length: %d\r\n" % len(hidden), hidden),
            post % (b"Content-Length: %d\r\nContent-Length: %d\r\n" % (len(hidden), len(hidden)), hidden),
            post % (b"Content-Length: 0, %d\r\n" % len(hidden), hidden),
            post % (b"Content-Length: +0\r\n", hidden),
            post % (b"Transfer-Encoding: chunked\r\n", b"0\n\n" + hidden),
            post % (b"Transfer-Encoding: chunked\r\n", b"-1\r\n" + hidden),
            post % (b"Transfer-Encoding: xchunked\r\n", hidden),
            post % (b"Transfer-Encoding : chunked\r\n", chunks),
            post % (b"X: a\r\n Transfer-Encoding: chunked\r\n", chunks),
            post % (b"Connection: upgrade\r\nUpgrade: h2c\r\nContent-Length: %d\r\n" % len(hidden), hidden),
            b"GET / HTTP/1.1\nHost: a\n\n" + hidden,
            b"GET /livez\r\n\r\n" + hidden,
        ]
        for attempt in attempts:
            answers = await exchange(url, attempt)
            assert [answer.status for answer in answers] == [400], attempt
            assert answers[0].closes
            assert json.loads(answers[0].body)["error"]["type"] == "invalid_request_error"
        # Well framed, it is a body, or it comes before the answer: dropped.
        for framing in (b"Content-Length: %d\r\n" % len(hidden), b"Connection: close\r\n"):
            (answer,) = await exchange(url, post % (framing, hidden) + hidden)
            assert answer.status in (401, 405)


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the kernel does not say")


async def test_line_40_heads_without_end_take_no_memory(server: Server) -> None:
    endless = b"GET /livez HTTP/1.1\r\nHost: a\r\nX: " + b"x" * (1 << 20)

    async def send_all(count: int) -> None:
        for answers in await asyncio.gather(*(exchange(server.url, endless) for _ in range(count))):
            assert [answer.status for answer in answers] == [431]

    await send_all(20)
    before = resident_bytes(server.process.pid)
    for _ in range(5):
        await send_all(40)
    grown = resident_bytes(server.process.pid) - before
    print(f"200 heads of a mebibyte: {grown} bytes more")
    assert grown < 16 << 20


@pytest.mark.once
async def test_line_40_two_thousand_half_open_connections_are_closed_by_their_deadline_and_stop_nobody(
    server: Server, tenant: Tenant
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    heads = [b"", b"G", request("/livez", None)[:-2], b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX: "]
    began = time.monotonic()
    half_open = []
    for number in range(2000):
        half_open.append((await connect(server.url)).send(heads[number % len(heads)]))
    opened = time.monotonic()
    closing = asyncio.gather(*(client.ended() for client in half_open))
    waits, body = [], json.dumps({"model": server.model, "prompt": "1 2 3", "max_tokens": 1}).encode()
    post = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\n"
    post = post % tenant.key.encode() + b"Content-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(body), body)
    while not closing.done():
        asked = time.monotonic()
        assert [answer.status for answer in await exchange(server.url, post)] == [200]
        waits.append(time.monotonic() - asked)
    await closing
    ended = time.monotonic()
    print(f"2000 opened in {opened - began:.1f} s, all closed {ended - opened:.1f} s later")
    print(f"{len(waits)} requests were served meanwhile, the slowest in {max(waits):.2f} s")
    assert 9 < ended - began < 12 + opened - began
    assert max(waits) < 2
    for client in half_open:
        client.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_line_40_a_client_that_closes_half_of_its_connection_has_left(server: Server, tenant: Tenant) -> None:
    """As with every server of this kind: who will not send any more is taken to be gone, so nothing runs for nobody."""
    before = server.wait_until_idle()
    body = json.dumps({"model": server.model, "prompt": "1 2 3", "max_tokens": 2000, "ignore_eos": True}).encode()
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer %s\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (tenant.key.encode(), len(body), body)
        )
        while not server.stats().running:
            pass
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
        after = server.wait_until_idle(1.5)
    assert after.computed_tokens - before.computed_tokens < 2000
