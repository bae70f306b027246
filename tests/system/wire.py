"""HTTP/1.1 by hand: what no client library would send, and the bytes that none would show."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPResponse
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.system.support import Tenant

DONE = "[DONE]"
BLOCK_TOKENS = 16
TIMEOUT_SECONDS = 60


@dataclass(frozen=True)
class RawResponse:
    """`headers`: names in lower case; `body`: without its chunked framing."""

    status: int
    headers: dict[str, str]
    body: bytes

    def error(self) -> dict[str, Any]:
        """The error object; asserts the form that clients read."""
        assert self.headers["content-type"] == "application/json"
        return error_form(json.loads(self.body))


def connect(url: str) -> socket.socket:
    address = urlsplit(url)
    return socket.create_connection((address.hostname or "", address.port or 0), timeout=TIMEOUT_SECONDS)


def exchange(url: str, request: bytes) -> RawResponse:
    """Send these bytes and read one response."""
    with connect(url) as connection:
        connection.sendall(request)
        response = HTTPResponse(connection)
        response.begin()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return RawResponse(response.status, headers, response.read())


def post(tenant: Tenant, path: str, fields: dict[str, Any]) -> RawResponse:
    """A POST over a connection of its own, its answer as it came."""
    return exchange(tenant.server.url, _post(tenant, path, fields))


@contextmanager
def send_only(tenant: Tenant, path: str, fields: dict[str, Any]) -> Iterator[None]:
    """A POST whose client reads nothing and leaves at the end of the block."""
    with connect(tenant.server.url) as connection:
        connection.sendall(_post(tenant, path, fields))
        yield


def _post(tenant: Tenant, path: str, fields: dict[str, Any]) -> bytes:
    content = json.dumps({"model": tenant.server.model} | fields).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: test\r\nauthorization: Bearer {tenant.key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + content


def error_form(body: Any) -> dict[str, Any]:
    """The error object of a body that is one and nothing else."""
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    return error


def refusal(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object of a response that refused with `status`."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"].startswith("req_")
    return error_form(response.json())


def events(body: bytes) -> list[Any]:
    """What each event of a stream says, decoded; `[DONE]` as it is.

    Asserts that an event is one `data:` line, that all else is comments, and that no line ends in anything but LF.
    """
    assert b"\r" not in body
    blocks = body.split(b"\n\n")
    assert blocks.pop() == b"", "the stream ends within an event"
    said = []
    for block in blocks:
        (line,) = block.split(b"\n")
        if line.startswith(b":"):
            continue
        name, data = line[: len(b"data: ")], line[len(b"data: ") :].decode("utf-8")
        assert name == b"data: "
        said.append(DONE if data == DONE else json.loads(data))
    return said


def streamed(response: httpx.Response | RawResponse) -> list[Any]:
    """The chunks of a complete stream, without the `[DONE]` that ends it."""
    status = response.status if isinstance(response, RawResponse) else response.status_code
    body = response.body if isinstance(response, RawResponse) else response.content
    assert status == 200, body
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events(body)
    assert last == DONE
    assert DONE not in chunks
    return chunks


def text_of(chunks: list[Any]) -> str:
    """The text of all chunks, of either route."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


def finish_reasons(chunks: list[Any]) -> list[str | None]:
    return [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]


@contextmanager
def another_stream(tenant: Tenant) -> Iterator[None]:
    """A stream of a tenant that asked nothing before: it began before the block, runs through it, and ends normally.

    Nothing that the block asks for may be computed or stored: what the store did is what the stream needs, exactly.
    """
    tokens, before = 24, tenant.server.wait_until_idle()
    body = {
        "model": tenant.server.model,
        "prompt": "1 2 3 4 5",
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with tenant.server.http.stream("POST", "/v1/completions", json=body, headers=tenant.headers) as response:
        pieces = response.iter_bytes()
        received = next(pieces)
        yield
        assert tenant.server.stats().running == 1
        received += b"".join(pieces)
    *chunks, usage, done = events(received)
    assert done == DONE
    assert " 6 7 8 9 10 11 12 13 14 15".startswith(text_of(chunks))
    assert finish_reasons(chunks)[-1] == "length"
    assert usage["usage"]["completion_tokens"] == tokens
    # The last sampled token is not computed on.
    computed_tokens = usage["usage"]["total_tokens"] - 1
    after = tenant.server.wait_until_idle()
    assert after.computed_tokens - before.computed_tokens == computed_tokens
    stored = after.cached_blocks + after.evictions - before.cached_blocks - before.evictions
    assert stored == computed_tokens // BLOCK_TOKENS
