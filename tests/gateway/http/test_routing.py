from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from gateway.http.errors import ApiError, Unauthorized
from gateway.http.routing import RawHeaders, Route, Router

pytestmark = pytest.mark.anyio


@dataclass(frozen=True)
class Admin:
    scopes: frozenset[str]


@dataclass(frozen=True)
class Tenant:
    tenant_id: str
    scopes: frozenset[str] = frozenset()


async def tenant(headers: RawHeaders) -> Tenant:
    if dict(headers).get(b"authorization") != b"Bearer tenant":
        raise Unauthorized
    return Tenant("tenant")


async def admin(headers: RawHeaders) -> Admin:
    keys = {b"Bearer reader": {"tenants:read"}, b"Bearer writer": {"tenants:read", "tenants:write"}}
    if (scopes := keys.get(dict(headers).get(b"authorization", b""))) is None:
        raise Unauthorized
    return Admin(frozenset(scopes))


async def answer(request: Request) -> Response:
    who = getattr(request.state, "principal", None)
    return JSONResponse({"who": getattr(who, "tenant_id", None), "id": request.path_params.get("id")})


async def read(request: Request) -> Response:
    return JSONResponse({"bytes": len(await request.body())})


async def refuse(request: Request) -> Response:
    raise ApiError(429, "Slow down.", "rate_limit_error", "rate_limit_exceeded", headers=(("retry-after", "1"),))


async def fail(request: Request) -> Response:
    raise RuntimeError("canary-prompt")


async def fail_midway(request: Request) -> Response:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"one"
        raise RuntimeError("canary-prompt")

    return StreamingResponse(pieces())


ROUTES = [
    Route("GET", "/livez", "public", answer),
    Route("GET", "/v1/models/{id}", "tenant", answer),
    Route("POST", "/v1/completions", "tenant", read),
    Route("GET", "/refuse", "public", refuse),
    Route("GET", "/fail", "public", fail),
    Route("GET", "/admin/v1/tenants", "admin:tenants:read", answer),
    Route("POST", "/admin/v1/tenants", "admin:tenants:write", read),
]
ROUTER = Router(ROUTES, authenticate_tenant=tenant, authenticate_admin=admin)


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(ROUTER), base_url="http://test") as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def error_of(answer: httpx.Response) -> dict[str, str | None]:
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return dict(error)


async def test_line_37_anonymously_only_public_routes_answer(client: httpx.AsyncClient) -> None:
    for route in ROUTER.routes:
        answer = await client.request(route.method, route.path.replace("{id}", "x"))
        assert (answer.status_code == 401) == (route.auth != "public"), route.path


async def test_line_46_keys_of_the_other_kind_are_401_and_a_missing_scope_is_403(client: httpx.AsyncClient) -> None:
    path = "/admin/v1/tenants"
    assert (await client.get(path, headers=bearer("tenant"))).status_code == 401
    assert (await client.get("/v1/models/x", headers=bearer("writer"))).status_code == 401
    assert (await client.get(path, headers=bearer("reader"))).status_code == 200
    assert (await client.post(path, headers=bearer("writer"))).status_code == 200
    refused = await client.post(path, headers=bearer("reader"))
    assert refused.status_code == 403
    assert error_of(refused)["type"] == "permission_error"
    assert "tenants:write" in str(error_of(refused)["message"])


async def test_the_handler_knows_who_called_and_what_was_asked(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/models/m", headers=bearer("tenant"))).json() == {"who": "tenant", "id": "m"}
    assert (await client.get("/livez")).json() == {"who": None, "id": None}


async def test_b129_errors_have_the_form_that_clients_read(client: httpx.AsyncClient) -> None:
    unknown = await client.get("/v1/nothing", headers=bearer("tenant"))
    anonymous = await client.get("/v1/nothing")
    wrong_key = await client.get("/v1/models/x", headers=bearer("other"))
    method = await client.delete("/v1/completions", headers=bearer("tenant"))
    refused = await client.get("/refuse")
    assert [a.status_code for a in (unknown, anonymous, wrong_key, method, refused)] == [404, 404, 401, 405, 429]
    assert error_of(unknown)["code"] == error_of(anonymous)["code"] == "not_found"
    assert error_of(wrong_key)["code"] == "invalid_api_key"
    assert error_of(method)["type"] == "invalid_request_error"
    assert method.headers["allow"] == "POST"
    assert (await client.delete("/livez")).headers["allow"] == "GET, HEAD"
    assert error_of(refused) == {
        "message": "Slow down.",
        "type": "rate_limit_error",
        "param": None,
        "code": "rate_limit_exceeded",
    }
    assert refused.headers["retry-after"] == "1"


async def test_every_answer_has_an_id_of_its_own(client: httpx.AsyncClient) -> None:
    asked = {"x-request-id": "req_forged"}
    answers = [await client.get(path, headers=asked) for path in ("/livez", "/livez", "/nothing", "/refuse", "/fail")]
    ids = [answer.headers.get_list("x-request-id") for answer in answers]
    assert all(len(each) == 1 and each[0].startswith("req_") for each in ids)
    assert len({each[0] for each in ids}) == len(ids)
    assert ["req_forged"] not in ids


@pytest.mark.parametrize(
    "path",
    [
        "//v1/models/x",
        "/v1/models/x/",
        "/v1//models/x",
        "/V1/models/x",
        "/livez\n",
        "/livez/../v1/models/x",
        "/v1/models/",
        "",
    ],
)
async def test_no_other_spelling_of_a_path_reaches_a_route(path: str) -> None:
    """The decoded path alone decides, so a spelling either is a route's path or is unknown."""
    assert await status_of(path) == 404
    assert await status_of("/v1/models/x") == 401


async def status_of(path: str) -> int:
    sent = []

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    async def receive() -> dict[str, object]:
        return {"type": "http.request"}

    raw = [(b"host", b"livez"), (b"x-forwarded-prefix", b"/livez"), (b"x-original-url", b"/livez")]
    scope = {"type": "http", "method": "GET", "path": path, "root_path": "/v1", "headers": raw, "query_string": b""}
    await ROUTER(scope, receive, send)  # type: ignore[arg-type]
    return int(str(sent[0]["status"]))


async def test_authentication_comes_before_the_body_is_read() -> None:
    sent = []

    async def receive() -> dict[str, object]:
        raise AssertionError("the body was read")

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    await ROUTER(scope, receive, send)  # type: ignore[arg-type]
    assert sent[0]["status"] == 401


async def test_an_unexpected_exception_is_a_500_that_tells_nothing(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    answer = await client.get("/fail")
    assert answer.status_code == 500
    assert error_of(answer)["type"] == "server_error"
    assert "canary-prompt" not in answer.text + caplog.text
    assert answer.headers["x-request-id"] in caplog.text
    assert "RuntimeError at " in caplog.text
    assert "test_routing.py" in caplog.text


async def test_a_response_that_fails_midway_is_not_completed(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[dict[str, object]] = []

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    async def receive() -> dict[str, object]:
        return {"type": "http.request"}

    routes = [Route("GET", "/midway", "public", fail_midway)]
    router = Router(routes, authenticate_tenant=tenant, authenticate_admin=admin)
    scope = {"type": "http", "method": "GET", "path": "/midway", "headers": [], "asgi": {"spec_version": "2.4"}}
    await router(scope, receive, send)  # type: ignore[arg-type]
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[1]["more_body"]
    assert "canary-prompt" not in caplog.text
    assert "failed" in caplog.text


async def test_head_is_answered_where_get_is(client: httpx.AsyncClient) -> None:
    assert (await client.head("/livez")).status_code == 200
    assert (await client.head("/v1/models/x")).status_code == 401


async def test_websockets_are_closed() -> None:
    sent = []

    async def send(message: dict[str, object]) -> None:
        sent.append(message["type"])

    await ROUTER({"type": "websocket", "path": "/v1/completions"}, None, send)  # type: ignore[arg-type]
    assert sent == ["websocket.close"]


@pytest.mark.parametrize("auth", ["", "private", "admin", "admin:tenants", "admin:tenants:delete"])
async def test_a_route_without_a_known_auth_class_cannot_be_declared(auth: str) -> None:
    with pytest.raises(ValueError, match="no auth class"):
        Route("GET", "/x", auth, answer)


async def test_a_route_cannot_be_declared_twice() -> None:
    with pytest.raises(ValueError, match="twice"):
        Router([ROUTES[0], ROUTES[0]], authenticate_tenant=tenant, authenticate_admin=admin)
