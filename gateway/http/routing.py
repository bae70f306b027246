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
from typing import Any, Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http.errors import CLOSE, ApiError

logger = logging.getLogger(__name__)

RawHeaders = list[tuple[bytes, bytes]]
Handler = Callable[[Request], Awaitable[ASGIApp]]

MAX_HEADERS = 100
MAX_HEADER_BYTES = 16 << 10
# Between name and value and at the end of the line.
_HEADER_LINE_BYTES = len(b": \r\n")

_AUTH = re.compile(r"public|tenant|admin:[a-z-]+:(read|write)")


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
        auth: `public`, `tenant` or `admin:<resource>:<read|write>`.
        handler: returns the response as an ASGI application. On `tenant` and `admin` routes
            `request.state.principal` is who called; `request.state.request_id` is always there.

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
    """

    def __init__(
        self,
        routes: Iterable[Route],
        *,
        authenticate_tenant: Callable[[RawHeaders], Awaitable[object]],
        authenticate_admin: Callable[[RawHeaders], Awaitable[AdminPrincipal]],
    ) -> None:
        self.routes = tuple(routes)
        self._authenticate_tenant = authenticate_tenant
        self._authenticate_admin = authenticate_admin
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
        request_id = new_request_id()
        scope.setdefault("state", {})["request_id"] = request_id
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode("ascii"))]
                message = {**message, "headers": headers}
            await send(message)

        try:
            check_headers(scope["headers"])
            response = await self._respond(scope, receive, send_with_id)
            await response(scope, receive, send_with_id)
        except ClientDisconnect:
            return
        except ApiError as error:
            failure = error
        except Exception as error:
            # Neither the exception's text nor its traceback is logged: both may quote what a tenant sent.
            where = traceback.extract_tb(error.__traceback__)[-1]
            kind = type(error).__name__
            logger.error("request %s failed: %s at %s:%s", request_id, kind, where.filename, where.lineno)
            message = "The server failed on this request; its log names the cause under the request id."
            failure = ApiError(500, message, "server_error")
        else:
            return
        # A response that began can only be cut short: the server closes its connection.
        if not started:
            await failure.response()(scope, receive, send_with_id)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> ASGIApp:
        route, path_params = self._match(scope["path"], scope["method"])
        scope["path_params"] = path_params
        request = Request(scope, receive, send)
        headers = list(scope["headers"])
        if route.auth == "tenant":
            request.state.principal = await self._authenticate_tenant(headers)
        elif route.auth != "public":
            admin = await self._authenticate_admin(headers)
            needed = route.auth.removeprefix("admin:")
            if needed not in admin.scopes:
                raise ApiError(403, f"This key lacks the scope {needed}.", "permission_error")
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
