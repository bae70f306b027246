"""One table of routes, each with its auth class, and the ASGI application that serves it.

Order for every request: size of the headers → match path and method → authenticate and authorise → handler (which
reads the body).
So a path that no route has is 404 and a method it lacks is 405 with or without a credential: the table is
public knowledge, and nothing behind it is reached. Matching and authorisation look at the same
`scope["path"]`, never at a URL rebuilt from headers, and slashes are not redirected.
"""

from __future__ import annotations

import logging
import re
import secrets
import traceback
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http.errors import CLOSE, ApiError
from gateway.telemetry.record import RequestRecord, Span, now_ns

log = logging.getLogger("saltern.gateway")

P = TypeVar("P")
RawHeaders = list[tuple[bytes, bytes]]
Handler = Callable[[Request], Awaitable[ASGIApp]]

MAX_HEADERS = 100
MAX_HEADER_BYTES = 16 << 10
# Between name and value and at the end of the line.
_HEADER_LINE_BYTES = len(b": \r\n")

_AUTH = re.compile(r"public|tenant(:[a-z:]+)?|admin:[a-z-]+:(read|write)")


def new_request_id() -> str:
    """For the header `x-request-id` of one answer, and for what the log says of it."""
    return f"req_{secrets.token_hex(12)}"


def check_headers(headers: RawHeaders) -> None:
    """
    Raises:
        ApiError: 431 for more than `MAX_HEADERS` headers, or more than `MAX_HEADER_BYTES` of header lines (RFC 6585).
    """
    size_bytes = sum(len(name) + len(value) + _HEADER_LINE_BYTES for name, value in headers)
    if len(headers) > MAX_HEADERS or size_bytes > MAX_HEADER_BYTES:
        message = (
            f"The request has {len(headers)} headers of {size_bytes} bytes; at most {MAX_HEADERS} of "
            f"{MAX_HEADER_BYTES} bytes together are read."
        )
        raise ApiError(431, message, headers=(CLOSE,))


class TenantPrincipal(Protocol):
    """Whoever holds a tenant's key, which has these `scopes`."""

    @property
    def tenant_id(self) -> str: ...

    @property
    def scopes(self) -> Collection[str]: ...


class AdminPrincipal(Protocol):
    """Whoever holds an admin key: `scopes` are `<resource>:read` or `<resource>:write`."""

    @property
    def scopes(self) -> Collection[str]: ...


@dataclass(frozen=True, slots=True)
class Route:
    """One method on one path.

    Attributes:
        method: in capitals; a GET route also answers HEAD.
        path: with `{name}` for a segment, found in `request.path_params`.
        auth: `public`, `tenant`, `tenant:<scope>` or `admin:<resource>:<read|write>`.
        handler: returns the response as an ASGI application. On `tenant` and `admin` routes
            `request.state.principal` is who called; `request.state.record` is what is noted of the request.

        The others describe it in the OpenAPI document; types are what msgspec reads and writes.

        summary: what it does, in a line.
        query: a struct whose fields are the query parameters.
        reads: the JSON body.
        may_be_empty: the body may be left out.
        answers: the JSON of an answer, `str` for plain text, None for no content.
        streams: one event, on routes that answer with events when they are asked to.
        statuses: those of `answers`.
        refusals: statuses of errors besides those that every route of its kind has.
    """

    method: str
    path: str
    auth: str
    handler: Handler
    _: KW_ONLY
    summary: str = ""
    query: Any = None
    reads: Any = None
    may_be_empty: bool = False
    answers: Any = None
    streams: Any = None
    statuses: tuple[int, ...] = (200,)
    refusals: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not _AUTH.fullmatch(self.auth):
            raise ValueError(f"{self.method} {self.path}: no auth class is called {self.auth!r}")


class Router:
    """The ASGI application of one listener.

    Args:
        routes: the table.
        authenticate_tenant: answers who sent these raw headers, or raises `Unauthorized`.
        authenticate_admin: the same for admin keys.
        observe: told of every request when it is over; nobody is by default.
    """

    def __init__(
        self,
        routes: Iterable[Route],
        *,
        authenticate_tenant: Callable[[RawHeaders], Awaitable[TenantPrincipal]],
        authenticate_admin: Callable[[RawHeaders], Awaitable[AdminPrincipal]],
        observe: Callable[[RequestRecord], None] = lambda record: None,
    ) -> None:
        self.routes = tuple(routes)
        self._authenticate_tenant = authenticate_tenant
        self._authenticate_admin = authenticate_admin
        self._observe = observe
        self._paths: dict[str, dict[str, Route]] = {}
        for route in self.routes:
            methods = self._paths.setdefault(route.path, {})
            if route.method in methods:
                raise ValueError(f"{route.method} {route.path} is in the table twice")
            methods[route.method] = route
            if route.method == "GET":
                methods["HEAD"] = route
        self._patterns = [(compile_path(path)[0], methods) for path, methods in self._paths.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})
        if scope["type"] != "http":
            return
        record = RequestRecord(
            request_id=new_request_id(), method=scope["method"], headers=scope["headers"], observe=self._observe
        )
        scope.setdefault("state", {})["record"] = record
        try:
            await self._answer(scope, receive, send, record)
        finally:
            record.release()

    async def _answer(self, scope: Scope, receive: Receive, send: Send, record: RequestRecord) -> None:
        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", record.request_id.encode("ascii"))]
                message = {**message, "headers": headers}
            await send(message)

        try:
            check_headers(scope["headers"])
            response = await self._respond(scope, receive, send_with_id, record)
            await response(scope, receive, send_with_id)
        except ClientDisconnect:
            record.disconnected = True
            return
        except ApiError as error:
            failure = error
        except Exception as error:
            # Neither the exception's text nor its traceback is logged: both may quote what a tenant sent.
            where = traceback.extract_tb(error.__traceback__)[-1]
            kind = type(error).__name__
            log.error("request %s failed: %s at %s:%s", record.request_id, kind, where.filename, where.lineno)
            message = "The server failed on this request; its log names the cause under the request id."
            failure = ApiError(500, message, "server_error")
        else:
            return
        record.fail(failure)
        # A response that began can only be cut short: the server closes its connection.
        if not record.status:
            await failure.response()(scope, receive, send_with_id)

    async def _respond(self, scope: Scope, receive: Receive, send: Send, record: RequestRecord) -> ASGIApp:
        route, path_params = self._match(scope["path"], scope["method"])
        record.route, record.is_public = route.path, route.auth == "public"
        scope["path_params"] = path_params
        request = Request(scope, receive, send)
        headers = list(scope["headers"])
        kind, _, needed = route.auth.partition(":")
        if kind == "tenant":
            tenant = await _timed(record, self._authenticate_tenant(headers))
            record.tenant_id = tenant.tenant_id
            _check_scope(needed, tenant.scopes)
            request.state.principal = tenant
        elif kind == "admin":
            admin = await _timed(record, self._authenticate_admin(headers))
            _check_scope(needed, admin.scopes)
            request.state.principal = admin
        return await route.handler(request)

    def _match(self, path: str, method: str) -> tuple[Route, dict[str, Any]]:
        for pattern, methods in self._patterns:
            # `$` of the compiled pattern would also match before a trailing line feed.
            if match := pattern.fullmatch(path):
                if route := methods.get(method):
                    return route, match.groupdict()
                allow = ", ".join(sorted(methods))
                raise ApiError(405, f"This path answers {allow}.", headers=(("allow", allow),))
        raise ApiError(404, "No such path. Paths are case-sensitive and end without a slash.", code="not_found")


def _check_scope(needed: str, scopes: Collection[str]) -> None:
    """Raises ApiError: 403; a route that needs none is everybody's who has a key."""
    if needed and needed not in scopes:
        raise ApiError(403, f"This key lacks the scope {needed}.", "permission_error")


async def _timed(record: RequestRecord, authentication: Awaitable[P]) -> P:
    """Note when it was and how it ended."""
    start_ns, error = now_ns(), None
    try:
        return await authentication
    except ApiError as refusal:
        error = refusal.code or str(refusal.status)
        raise
    finally:
        record.authenticated = Span(start_ns, now_ns(), error)
