"""The OpenAPI document of one listener, made of its routes and the structs that they read and answer.

    what is read    null and absent are the same, so null is no default
    what is sent    a field with a default is always there

Source: OpenAPI Specification 3.1.1. It has no schema for a single server-sent event; as is usual, that of
`text/event-stream` describes one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.http.errors import JSON, ErrorBody
from gateway.http.routing import Route
from gateway.secret import Secret

Schema = dict[str, Any]

DESCRIPTION = (
    "Paths are case-sensitive and end without a slash. A path that is not listed is 404 and a method that a path lacks "
    "is 405, each with or without a key. What answers GET also answers HEAD."
)
SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}

# What any request may be answered: not well-formed, too slow, headers too large, our own mistake.
_ALWAYS = (400, 408, 431, 500)
_WITH_KEY = (401, 503)
_WITH_SCOPE = (*_WITH_KEY, 403)
_WITH_BODY = (413, 415)
_ERRORS = sorted({*_ALWAYS, *_WITH_SCOPE, *_WITH_BODY, 404, 405, 409, 412, 429})

_TEXT = {"type": "string"}
_NUMBER = {"type": "integer", "minimum": 0}
_HEADERS: dict[int, dict[str, Schema]] = {
    201: {"location": _TEXT},
    401: {"www-authenticate": _TEXT},
    405: {"allow": _TEXT},
    429: {"x-should-retry": {"enum": ["true", "false"]}},
    503: {"retry-after": _NUMBER, "retry-after-ms": _NUMBER, "x-should-retry": {"enum": ["true", "false"]}},
}


def described(routes: Sequence[Route], path: str, title: str) -> list[Route]:
    """The routes, and one more that answers at `path` with the document of them all."""

    async def document(request: Request) -> Response:
        return Response(body, media_type=JSON)

    every = [*routes, Route("GET", path, "public", document, summary="This document", answers=dict[str, Any])]
    body = msgspec.json.encode(describe(every, title))
    return every


def describe(routes: Iterable[Route], title: str) -> Schema:
    """The document, as JSON values.

    Raises:
        ValueError: two schemas would have the same name.
    """
    components = _Components()
    paths: dict[str, Schema] = {}
    for route in routes:
        path = re.sub(r":\w+}", "}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, components)
    errors = {str(status): _response(status, {JSON: components.sent(ErrorBody)}) for status in _ERRORS}
    return {
        "openapi": "3.1.1",
        "info": {"title": title, "description": DESCRIPTION, "version": version("saltern")},
        "paths": paths,
        "components": {"schemas": components.schemas, "responses": errors, "securitySchemes": SECURITY_SCHEMES},
    }


class _Components:
    """The named schemas of the document, filled as types are asked for."""

    def __init__(self) -> None:
        self.schemas: dict[str, Schema] = {}

    def read(self, type: Any) -> Schema:
        return self._schema(type, _accept_null_as_absent)

    def sent(self, type: Any) -> Schema:
        return self._schema(type, _send_every_field)

    def _schema(self, type: Any, mend: Callable[[Schema], None]) -> Schema:
        schema, found = _generate(type)
        for name, component in found.items():
            mend(component)
            if self.schemas.setdefault(name, component) != component:
                raise ValueError(f"two schemas are called {name}: of two types, or of one that is read and sent")
        return schema


def _generate(type: Any) -> tuple[Schema, dict[str, Schema]]:
    template = "#/components/schemas/{name}"
    (schema,), found = msgspec.json.schema_components([type], schema_hook=_secret, ref_template=template)
    return schema, found


def _secret(type: Any) -> Schema:
    if type is Secret:
        return _TEXT
    # How a hook tells msgspec that a type is not its own; msgspec then refuses the type by name.
    raise NotImplementedError


def _accept_null_as_absent(component: Schema) -> None:
    for field in component["properties"].values():
        if "default" in field and field["default"] is None:
            del field["default"]


def _send_every_field(component: Schema) -> None:
    for name, field in component["properties"].items():
        if "default" in field:
            del field["default"]
            component["required"].append(name)


def _operation(route: Route, components: _Components) -> Schema:
    operation: Schema = {
        "summary": route.summary,
        "operationId": route.handler.__name__,
        "security": _security(route.auth),
        "responses": _answers(route, components) | _refusals(route),
    }
    if parameters := [*_path_parameters(route), *_query_parameters(route)]:
        operation["parameters"] = parameters
    if route.reads is not None:
        content = {JSON: {"schema": components.read(route.reads)}}
        operation["requestBody"] = {"content": content, "required": not route.may_be_empty}
    return operation


def _security(auth: str) -> list[dict[str, list[str]]]:
    if auth == "public":
        return []
    _, _, needed = auth.partition(":")
    scopes = [needed] if needed else []
    return [{scheme: scopes} for scheme in SECURITY_SCHEMES]


def _path_parameters(route: Route) -> list[Schema]:
    schema = {"type": "string", "minLength": 1}
    names = re.findall(r"{(\w+)", route.path)
    return [{"name": name, "in": "path", "required": True, "schema": schema} for name in names]


def _query_parameters(route: Route) -> list[Schema]:
    if route.query is None:
        return []
    _, found = _generate(route.query)
    fields = found[route.query.__name__]["properties"]
    return [{"name": name, "in": "query", "schema": schema} for name, schema in fields.items()]


def _answers(route: Route, components: _Components) -> dict[str, Schema]:
    content: dict[str, Schema] = {}
    if route.answers is not None:
        content["text/plain" if route.answers is str else JSON] = components.sent(route.answers)
    if route.streams is not None:
        content["text/event-stream"] = _event(components.sent(route.streams), components.sent(ErrorBody))
    return {str(status): _response(status, content) for status in route.statuses}


def _event(chunk: Schema, error: Schema) -> Schema:
    """One event. Either `[DONE]` is the last, or an error is."""
    encoded = _TEXT | {"contentMediaType": JSON, "contentSchema": {"anyOf": [chunk, error]}}
    data = {"anyOf": [{"const": "[DONE]"}, encoded]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _refusals(route: Route) -> dict[str, Schema]:
    statuses = {*_ALWAYS, *route.refusals}
    if route.auth != "public":
        statuses.update(_WITH_SCOPE if ":" in route.auth else _WITH_KEY)
    if route.reads is not None:
        statuses.update(_WITH_BODY)
    if "{" in route.path:
        statuses.add(404)
    statuses.difference_update(route.statuses)
    return {str(status): {"$ref": f"#/components/responses/{status}"} for status in sorted(statuses)}


def _response(status: int, content: dict[str, Schema]) -> Schema:
    headers = {"x-request-id": _TEXT} | _HEADERS.get(status, {})
    response: Schema = {
        "description": HTTPStatus(status).phrase,
        "headers": {name: {"schema": schema, "required": True} for name, schema in headers.items()},
    }
    if content:
        response["content"] = {media_type: {"schema": schema} for media_type, schema in content.items()}
    return response
