from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from typing import Annotated

import httpx
import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse

from gateway.http.body import MAX_BODY_BYTES, MAX_DEPTH, MERGE_PATCH, read_struct
from gateway.http.errors import JSON, ApiError
from gateway.http.routing import Route, Router

pytestmark = pytest.mark.anyio


class Note(msgspec.Struct):
    text: str = ""
    count: Annotated[int, msgspec.Meta(ge=1)] | None = None
    weight: float = 1.0
    parts: list[dict[str, int]] = []


async def nobody(_: object) -> object:
    raise AssertionError("a public route asks for no key")


async def echo(request: Request) -> JSONResponse:
    note = await read_struct(request, Note)
    return JSONResponse({"text": note.text, "count": note.count})


async def patch(request: Request) -> JSONResponse:
    note = await read_struct(request, Note, (JSON, MERGE_PATCH))
    return JSONResponse({"text": note.text})


ROUTES = [Route("POST", "/echo", "public", echo), Route("PATCH", "/echo", "public", patch)]


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    router = Router(ROUTES, authenticate_tenant=nobody, authenticate_admin=nobody)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(router), base_url="http://test") as client:
        yield client


async def post(client: httpx.AsyncClient, body: bytes, content_type: str = JSON) -> httpx.Response:
    return await client.post("/echo", content=body, headers={"content-type": content_type})


async def refused(client: httpx.AsyncClient, body: bytes, status: int = 400) -> dict[str, str | None]:
    answer = await post(client, body)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == JSON
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return dict(error)


async def test_a_json_object_becomes_a_struct(client: httpx.AsyncClient) -> None:
    body = '{"text": "café", "count": 3, "other": null}'.encode()
    answer = await post(client, body, "Application/JSON; charset=utf-8")
    assert answer.json() == {"text": "café", "count": 3}


async def test_b099_a_leading_byte_order_mark_is_dropped_and_one_in_a_string_is_kept(client: httpx.AsyncClient) -> None:
    leading = await post(client, b'\xef\xbb\xbf{"text": "x"}')
    inside = await post(client, '{"text": "\ufeffx"}'.encode())
    assert (leading.status_code, leading.json()["text"]) == (200, "x")
    assert (inside.status_code, inside.json()["text"]) == (200, "\ufeffx")


async def test_b100_only_utf_8_is_read(client: httpx.AsyncClient) -> None:
    body = '{"text": "café"}'
    codes = ["utf-16-le", "utf-16", "utf-32", "utf-32-be", "latin-1", "utf-8"]
    assert [(await post(client, body.encode(code))).status_code for code in codes] == [400] * 5 + [200]


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/jsonx", MERGE_PATCH, "multipart/form-data"])
async def test_another_content_type_is_415(client: httpx.AsyncClient, content_type: str) -> None:
    answer = await post(client, b"{}", content_type)
    assert answer.status_code == 415
    assert JSON in answer.json()["error"]["message"]


async def test_merge_patch_is_read_where_the_route_says_so(client: httpx.AsyncClient) -> None:
    for content_type, status in ((JSON, 200), (MERGE_PATCH, 200), ("text/plain", 415)):
        answer = await client.patch("/echo", content=b'{"text": "x"}', headers={"content-type": content_type})
        assert answer.status_code == status


async def test_a_body_over_the_limit_is_413_declared_or_streamed(client: httpx.AsyncClient) -> None:
    async def pieces(size_bytes: int) -> AsyncIterator[bytes]:
        yield b'{"text": "'
        for _ in range(size_bytes // 65536):
            yield b"x" * 65536
        yield b'"}'

    fits = b'{"text": "' + b"x" * (MAX_BODY_BYTES - 12) + b'"}'
    assert (await post(client, fits)).status_code == 200
    for body in (fits + b" ", pieces(MAX_BODY_BYTES)):
        answer = await client.post("/echo", content=body, headers={"content-type": JSON})
        assert answer.status_code == 413
        assert str(MAX_BODY_BYTES) in answer.json()["error"]["message"]
        assert answer.headers["connection"] == "close"
    streamed = await client.post("/echo", content=pieces(MAX_BODY_BYTES // 2), headers={"content-type": JSON})
    assert streamed.status_code == 200


async def test_a_declared_length_is_refused_before_anything_is_read() -> None:
    async def receive() -> dict[str, object]:
        raise AssertionError("the body was read")

    headers = [(b"content-type", b"application/json"), (b"content-length", str(MAX_BODY_BYTES + 1).encode())]
    with pytest.raises(ApiError) as caught:
        await read_struct(Request({"type": "http", "headers": headers}, receive), Note)  # type: ignore[arg-type]
    assert caught.value.status == 413


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"{}{}",
        b"{'text': 1}",
        b"[]",
        b"null",
        b'"x"',
        b'{"weight": NaN}',
        b'{"weight": Infinity}',
        b'{"weight": -Infinity}',
        b'{"text": "a", "text": "b"}',
        b'{"other": {"a": 1, "a": 1}}',
        b'{"text": "\\ud83d"}',
        b'{"text": "\\uDE00 \\ud83d\\ude00"}',
        b'{"\\ud83d": 1}',
        b'{"text": "\xff"}',
        b'{"text": "\xed\xa0\xbd"}',
        b'{"count": ' + b"9" * 5000 + b"}",
        b'{"count": ' + b"9" * 400 + b"}",
        b'{"weight": ' + b"9" * 400 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
    ids=range(22),
)
async def test_what_is_not_one_strict_json_object_is_refused(client: httpx.AsyncClient, body: bytes) -> None:
    await refused(client, body)


async def test_integers_have_64_bits_wherever_they_stand(client: httpx.AsyncClient) -> None:
    for number, status in ((2**64 - 1, 200), (-(2**63), 200), (2**64, 400), (-(2**63) - 1, 400), (10**4000, 400)):
        answer = await post(client, b'{"other": [%d]}' % number)
        assert answer.status_code == status


async def test_whole_surrogate_pairs_are_characters(client: httpx.AsyncClient) -> None:
    assert (await post(client, b'{"text": "\\ud83d\\ude00 \\\\ud83d"}')).json()["text"] == "\U0001f600 \\ud83d"


async def test_nesting_is_bounded_everywhere(client: httpx.AsyncClient) -> None:
    def nested(depth: int) -> bytes:
        return b'{"other": ' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"

    assert (await post(client, nested(MAX_DEPTH))).status_code == 200
    error = await refused(client, nested(MAX_DEPTH + 1))
    assert str(MAX_DEPTH) in str(error["message"])
    mixed = {"other": None}
    for index in range(MAX_DEPTH):
        mixed = {"other": mixed} if index % 2 else {"a": [mixed]}  # type: ignore[dict-item]
    await refused(client, json.dumps(mixed).encode())


async def test_param_is_the_path_of_what_does_not_fit(client: httpx.AsyncClient) -> None:
    cases = {
        b'{"count": 0}': "count",
        b'{"count": true}': "count",
        b'{"parts": [{}, {"a": "secret-word"}]}': "parts[1][...]",
        b'{"parts": [1]}': "parts[0]",
    }
    for body, param in cases.items():
        error = await refused(client, body)
        assert (error["param"], error["code"]) == (param, "unsupported_value")
        assert "secret-word" not in str(error["message"])


async def test_random_bytes_are_never_an_internal_error(client: httpx.AsyncClient) -> None:
    choose = random.Random(2)
    seed = b'{"text": "\\ud83d\\ude00", "count": 3, "parts": [{"a": 1}], "weight": 1e3}'
    for _ in range(500):
        body = bytearray(seed)
        for _ in range(choose.randrange(1, 6)):
            body[choose.randrange(len(body))] = choose.randrange(256)
        assert (await post(client, bytes(body))).status_code in (200, 400)
