from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import jsonschema_rs
import msgspec
import pytest
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.routes import admin_routes
from gateway.admin.shapes import KeyBody, KeyInput, Page, TenantBody
from gateway.app import Health
from gateway.completions import Completions
from gateway.http.body import convert, parse_object
from gateway.http.errors import ApiError
from gateway.http.openapi import describe, described
from gateway.http.routing import Route, Router
from gateway.http.shapes import ChatRequest, CompletionRequest, read_generation_request
from gateway.secret import Secret

pytestmark = pytest.mark.anyio


async def answer(request: Request) -> Response:
    return Response()


class Nobody:
    """Stands in for the directory and the link, which routes only keep."""

    def __getattr__(self, name: str) -> Any:
        return None


NOBODY: Any = Nobody()
TENANT_ROUTES = [*Health(NOBODY, NOBODY).routes(), *Completions(NOBODY, NOBODY, NOBODY).routes()]
ADMIN_ROUTES = admin_routes(NOBODY, NOBODY)
TENANT_DOCUMENT = describe(TENANT_ROUTES, "Saltern")
ADMIN_DOCUMENT = describe(ADMIN_ROUTES, "Saltern, administration")
both = pytest.mark.parametrize(
    ("routes", "document"), [(TENANT_ROUTES, TENANT_DOCUMENT), (ADMIN_ROUTES, ADMIN_DOCUMENT)], ids=["tenant", "admin"]
)


def operation(document: dict[str, Any], route: Route) -> dict[str, Any]:
    found: dict[str, Any] = document["paths"][route.path.replace(":path", "")][route.method.lower()]
    return found


def validator(document: dict[str, Any], schema: dict[str, Any]) -> Any:
    return jsonschema_rs.Draft202012Validator({"components": document["components"]} | schema, validate_formats=True)


def body_validator(document: dict[str, Any], path: str) -> Any:
    body = document["paths"][path]["post"]["requestBody"]
    return validator(document, body["content"]["application/json"]["schema"])


@both
def test_every_route_is_described(routes: list[Route], document: dict[str, Any]) -> None:
    found = [operation(document, route) for route in routes]
    assert sum(len(operations) for operations in document["paths"].values()) == len(routes)
    assert all(each["summary"] for each in found)
    assert len({each["operationId"] for each in found}) == len(routes)


@both
def test_what_a_route_may_answer_follows_from_what_it_is(routes: list[Route], document: dict[str, Any]) -> None:
    for route in routes:
        described_route = operation(document, route)
        answers = {int(status) for status in described_route["responses"]}
        assert {400, 408, 431, 500} <= answers
        assert (401 in answers) == (route.auth != "public") == bool(described_route["security"])
        assert (":" in route.auth) <= (403 in answers) <= (route.auth != "public")
        assert ({413, 415} <= answers) == (route.reads is not None) == ("requestBody" in described_route)
        assert ("{" in route.path) <= (404 in answers)
        # A method that a path lacks is no operation.
        assert 405 not in answers
    assert "405" in document["components"]["responses"]


@both
def test_every_answer_has_its_headers(routes: list[Route], document: dict[str, Any]) -> None:
    shared = document["components"]["responses"]
    for route in routes:
        for status, response in operation(document, route)["responses"].items():
            response = shared[status] if "$ref" in response else response
            assert response["headers"]["x-request-id"]["required"]
            assert ("location" in response["headers"]) == (status == "201")
    for status, name in (("401", "www-authenticate"), ("405", "allow"), ("503", "retry-after")):
        assert shared[status]["headers"][name]["required"]


def test_an_admin_operation_names_its_scope() -> None:
    for route in ADMIN_ROUTES:
        scope = route.auth.removeprefix("admin:")
        assert operation(ADMIN_DOCUMENT, route)["security"] == [{"bearer": [scope]}, {"x-api-key": [scope]}]
    assert ADMIN_DOCUMENT["components"]["securitySchemes"].keys() == {"bearer", "x-api-key"}


def test_a_stream_is_another_content_type_of_the_same_answer() -> None:
    for path, chunk in (("/v1/chat/completions", "ChatChunk"), ("/v1/completions", "TextCompletion")):
        content = TENANT_DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"]
        assert content.keys() == {"application/json", "text/event-stream"}
        done, piece = content["text/event-stream"]["schema"]["properties"]["data"]["anyOf"]
        assert done == {"const": "[DONE]"}
        assert piece["contentSchema"]["anyOf"][0] == {"$ref": f"#/components/schemas/{chunk}"}
    assert TENANT_DOCUMENT["paths"]["/readyz"]["get"]["responses"]["503"]["content"].keys() == {"text/plain"}


def test_no_content_and_an_optional_body_are_told_apart_from_others() -> None:
    tenants = ADMIN_DOCUMENT["paths"]["/admin/v1/tenants/{tenant_id}"]
    assert "content" not in tenants["delete"]["responses"]["204"]
    assert "content" in tenants["get"]["responses"]["200"]
    bodies = {path: o["post"]["requestBody"]["required"] for path, o in ADMIN_DOCUMENT["paths"].items() if "post" in o}
    assert [path for path, required in bodies.items() if not required] == [
        "/admin/v1/tenants/{tenant_id}/keys/{key_id}/rotate",
        "/admin/v1/tenants/{tenant_id}/salts/rotate",
    ]


def test_the_query_of_a_list_is_described() -> None:
    parameters = {each["name"]: each for each in ADMIN_DOCUMENT["paths"]["/admin/v1/tenants"]["get"]["parameters"]}
    assert parameters.keys() == {"limit", "cursor", "name"}
    assert all(each["in"] == "query" and "required" not in each for each in parameters.values())
    assert parameters["limit"]["schema"] == {"type": "integer", "minimum": 1, "maximum": 200, "default": 50}
    keys = ADMIN_DOCUMENT["paths"]["/admin/v1/tenants/{tenant_id}/keys"]["get"]["parameters"]
    assert [(each["name"], each["in"]) for each in keys] == [
        ("tenant_id", "path"),
        ("limit", "query"),
        ("cursor", "query"),
    ]


MESSAGE = {"role": "user", "content": "x"}
CHAT_BODIES: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"whatever": {"a": [1]}, "user": 5, "metadata": {"a": "b"}}, True),
    ({"temperature": None, "stop": None, "stream_options": None, "cache_salt": None, "tools": None}, True),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, True),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [], "function_call": None}]}, True),
    ({"n": 1, "logprobs": False, "tool_choice": "auto", "response_format": {"type": "text"}, "min_p": 0}, True),
    ({"cache_salt": " a ", "prompt_cache_key": ""}, True),
    ({"prompt_cache_options": {"ttl": "30m", "mode": "implicit"}, "prompt_cache_retention": "24h"}, True),
    ({"prompt_cache_options": {"ttl": None, "mode": None}}, True),
    ({"prompt_cache_options": None}, True),
    ({"stop": ["a", "b", "c", "d"], "seed": -(2**63), "top_p": 1, "max_tokens": 2**31 - 1}, True),
    ({"model": None}, False),
    ({"messages": []}, False),
    ({"messages": [{"role": "tool", "content": "x"}]}, False),
    ({"messages": [{"role": "user"}]}, False),
    ({"messages": [{"role": "user", "content": None}]}, False),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, False),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}, False),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "text": "a"}]}]}, False),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, False),
    ({"messages": [{"role": "assistant", "content": "x", "function_call": {"name": "f"}}]}, False),
    ({"temperature": 2.1}, False),
    ({"top_p": 0}, False),
    ({"seed": 2**63}, False),
    ({"max_tokens": 0}, False),
    ({"n": 129}, False),
    ({"stop": ["a", "b", "c", "d", "e"]}, False),
    ({"stop": ""}, False),
    ({"cache_salt": ""}, False),
    ({"cache_salt": " \t"}, False),
    ({"cache_salt": "x" * 257}, False),
    ({"prompt_cache_key": "x" * 257}, False),
    ({"prompt_cache_options": {"ttl": "0s"}}, False),
    ({"prompt_cache_options": {"ttl": "1d"}}, False),
    ({"prompt_cache_options": {"ttl": 1800}}, False),
    ({"prompt_cache_options": {"mode": "explicit"}}, False),
    ({"prompt_cache_options": {"ttl": "30m", "whatever": 1}}, False),
    ({"prompt_cache_options": "30m"}, False),
    ({"prompt_cache_retention": "48h"}, False),
    ({"tools": [{}]}, False),
    ({"logprobs": 0}, False),
    ({"logprobs": True, "top_logprobs": 20, "return_token_ids": True, "min_tokens": 0}, True),
    ({"logprobs": True, "top_logprobs": 21}, False),
    ({"logit_bias": {"0": 100, "4294967295": -100}, "stop_token_ids": [0]}, True),
    ({"logit_bias": {"01": 1}}, False),
    ({"logit_bias": {"-1": 1}}, False),
    ({"logit_bias": {"1": 100.1}}, False),
    ({"logit_bias": {"1": True}}, False),
    ({"logit_bias": {str(token): 0 for token in range(1025)}}, False),
    ({"stop_token_ids": [0] * 257}, False),
    ({"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 0.01}, True),
    ({"repetition_penalty": 0}, False),
    ({"min_p": 1.1}, False),
    ({"add_generation_prompt": False, "chat_template_kwargs": {"enable_thinking": False, "a": [{}]}}, True),
    ({"chat_template_kwargs": {"messages": []}}, False),
    ({"chat_template_kwargs": []}, False),
    ({"continue_final_message": 1}, False),
    ({"response_format": {"type": "json_object"}}, False),
    ({"chat_template": ""}, False),
]
PROMPTS: list[tuple[Any, bool]] = [
    ("a", True),
    (" ", True),
    (["a", "b"], True),
    ([0, 2**32 - 1], True),
    ([[1, 2], [3]], True),
    ("", False),
    ([], False),
    ([""], False),
    ([[]], False),
    ([[1], []], False),
    ([0, "a"], False),
    ([[1], 2], False),
    (["a", [1]], False),
    ([-1], False),
    ([2**32], False),
    ([True], False),
    (5, False),
    (None, False),
]
TEXT_LOGPROBS = [(None, True), (0, True), (20, True), (False, True), (True, False), (21, False), (-1, False)]


@pytest.mark.parametrize(("logprobs", "valid"), TEXT_LOGPROBS)
def test_the_document_knows_how_completions_ask_for_log_probabilities(logprobs: Any, valid: bool) -> None:
    body = {"model": "m", "prompt": "x", "logprobs": logprobs}
    assert taken(lambda: read_generation_request(body, CompletionRequest)) == valid
    assert body_validator(TENANT_DOCUMENT, "/v1/completions").is_valid(body) == valid


@pytest.mark.parametrize(("fields", "valid"), CHAT_BODIES)
def test_the_document_allows_what_chat_takes_and_nothing_else(fields: dict[str, Any], valid: bool) -> None:
    body = {"model": "m", "messages": [MESSAGE]} | fields
    assert taken(lambda: read_generation_request(body, ChatRequest)) == valid
    assert body_validator(TENANT_DOCUMENT, "/v1/chat/completions").is_valid(body) == valid


@pytest.mark.parametrize(("prompt", "valid"), PROMPTS)
def test_the_document_allows_the_four_forms_of_a_prompt_and_nothing_else(prompt: Any, valid: bool) -> None:
    body = {"model": "m", "prompt": prompt}
    assert taken(lambda: read_generation_request(body, CompletionRequest)) == valid
    assert body_validator(TENANT_DOCUMENT, "/v1/completions").is_valid(body) == valid


@pytest.mark.parametrize(
    ("fields", "valid"),
    [
        ({}, True),
        ({"name": None, "expires_at": None}, True),
        ({"name": "é b", "scopes": ["completions"], "expires_at": "2999-01-01T00:00:00Z"}, True),
        ({"expires_at": "2999-01-01T00:00:00"}, False),
        ({"scopes": []}, False),
        ({"scopes": ["tenants:write"]}, False),
        ({"salt": "x"}, False),
    ],
)
def test_the_document_allows_what_makes_a_key_and_nothing_else(fields: dict[str, Any], valid: bool) -> None:
    assert taken(lambda: convert(fields, KeyInput)) == valid
    assert body_validator(ADMIN_DOCUMENT, "/admin/v1/tenants/{tenant_id}/keys").is_valid(fields) == valid


@pytest.mark.parametrize("name", ["", "A", "a b", "a" * 65, "a\n", "ä"])
def test_the_document_knows_what_a_tenant_may_be_called(name: str) -> None:
    validate = body_validator(ADMIN_DOCUMENT, "/admin/v1/tenants")
    assert validate.is_valid({"name": "a-0"})
    assert not validate.is_valid({"name": name})
    assert not validate.is_valid({"name": "a-0", "epoch": 1})


def taken(read: Any) -> bool:
    try:
        read()
    except ApiError:
        return False
    return True


def test_what_is_sent_fits_its_schema_and_less_does_not() -> None:
    now = datetime.now(UTC)
    key = KeyBody("key_1", None, "abcd", ["completions"], "active", now, now + timedelta(days=1))
    tenants = Page([TenantBody("ten_1", "a", "active", now, now)], None)
    for name, sent in (("KeyBody", key), ("Page_TenantBody_", tenants)):
        validate = validator(ADMIN_DOCUMENT, {"$ref": f"#/components/schemas/{name}"})
        body = msgspec.to_builtins(sent)
        assert validate.is_valid(body)
        for field in body:
            assert not validate.is_valid({other: value for other, value in body.items() if other != field}), field


def test_a_field_that_is_sometimes_left_out_is_optional_and_a_secret_is_text() -> None:
    class Made(msgspec.Struct):
        id: str
        kind: str = "made"
        secret: Secret | UnsetType = UNSET

    document = describe([Route("GET", "/made", "public", answer, answers=Made)], "Made")
    schema = document["components"]["schemas"]["Made"]
    assert schema["required"] == ["id", "kind"]
    assert schema["properties"]["secret"] == {"type": "string"}


def test_a_type_that_is_read_and_sent_is_refused() -> None:
    read = Route("POST", "/keys", "public", answer, reads=KeyInput)
    sent = Route("GET", "/keys", "public", answer, answers=KeyInput)
    describe([read], "Read")
    describe([sent], "Sent")
    with pytest.raises(ValueError, match="KeyInput"):
        describe([read, sent], "Both")


async def test_the_document_is_public_and_holds_itself() -> None:
    async def refuse(headers: Any) -> Any:
        raise AssertionError("a public route asks for no key")

    routes = described(TENANT_ROUTES, "/openapi.json", "Saltern")
    router = Router(routes, authenticate_tenant=refuse, authenticate_admin=refuse)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(router), base_url="http://test") as client:
        response = await client.get("/openapi.json")
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
    document = parse_object(response.content)
    assert document["openapi"].startswith("3.1.")
    assert document["paths"].keys() == TENANT_DOCUMENT["paths"].keys() | {"/openapi.json"}
