from __future__ import annotations

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from gateway.http.errors import ApiError, Unauthorized
from gateway.http.routing import MAX_HEADER_BYTES, MAX_HEADERS, RawHeaders, Route, Router, check_headers

pytestmark = pytest.mark.anyio

LINE_BYTES = len(b": \r\n")


def headers_of(size_bytes: int, count: int = 1) -> RawHeaders:
    """`count` header lines of `size_bytes` together."""
    lines = [(b"n", b"") for _ in range(count)]
    lines[0] = (b"n", b"x" * (size_bytes - count * (1 + LINE_BYTES)))
    return lines


def test_as_many_headers_as_are_allowed_pass_and_one_more_does_not() -> None:
    check_headers([(b"n", b"v")] * MAX_HEADERS)
    with pytest.raises(ApiError, match="101 headers of 606 bytes; at most 100 of 16384 bytes") as refused:
        check_headers([(b"n", b"v")] * (MAX_HEADERS + 1))
    assert refused.value.status == 431


@pytest.mark.parametrize("count", [1, 50])
def test_headers_may_have_all_their_bytes_and_not_one_more(count: int) -> None:
    check_headers(headers_of(MAX_HEADER_BYTES, count))
    with pytest.raises(ApiError, match=f"of {MAX_HEADER_BYTES + 1} bytes") as refused:
        check_headers(headers_of(MAX_HEADER_BYTES + 1, count))
    assert refused.value.status == 431


async def test_large_headers_are_refused_before_anything_looks_at_them() -> None:
    looked_at = []

    async def authenticate(headers: RawHeaders) -> object:
        looked_at.append(headers)
        raise Unauthorized

    async def answer(request: Request) -> PlainTextResponse:
        return PlainTextResponse("live\n")

    routes = [Route("GET", "/livez", "public", answer), Route("GET", "/v1/models", "tenant", answer)]
    router = Router(routes, authenticate_tenant=authenticate, authenticate_admin=authenticate)  # type: ignore[arg-type]
    large = {"authorization": "Bearer " + "x" * MAX_HEADER_BYTES}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(router), base_url="http://test") as client:
        for path in ("/livez", "/v1/models", "/nothing"):
            refused = await client.get(path, headers=large)
            assert refused.status_code == 431
            assert refused.headers["connection"] == "close"
            assert refused.headers["x-request-id"]
            assert refused.json()["error"]["type"] == "invalid_request_error"
        assert not looked_at
        assert (await client.get("/livez", headers={"authorization": "Bearer x"})).status_code == 200
        assert (await client.get("/v1/models", headers={"authorization": "Bearer x"})).status_code == 401
        assert len(looked_at) == 1
