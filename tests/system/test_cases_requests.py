"""What requests may hold, and how those that may not are refused: with the field, and at no cost to anybody."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.system.support import Server, Tenant, cached_tokens, random_prompt
from tests.system.wire import another_stream, finish_reasons, refusal, streamed, text_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}


def ask(tenant: Tenant, path: str, **fields: Any) -> Any:
    """A POST of just these fields and the model's name."""
    body = {"model": tenant.server.model} | fields
    return tenant.server.http.post(path, json=body, headers=tenant.headers)


def say(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def test_b004_log_probabilities_of_a_prompt_are_refused_by_name_and_harm_nobody(server: Server, tenant: Tenant) -> None:
    prompt = random_prompt("b004", 70)
    with another_stream(server.tenant()):
        for _ in range(2):
            error = refusal(ask(tenant, TEXT, prompt=prompt, echo=True, logprobs=1, max_tokens=1), 400)
            assert (error["type"], error["param"]) == ("invalid_request_error", "echo")
    # Nothing of it was kept; without those fields it is answered, and kept.
    assert tenant.cached_tokens(prompt) == 0
    assert tenant.cached_tokens(prompt) == 64


def test_b123_a_prompt_to_be_scored_only_is_refused_by_name_and_harms_nobody(server: Server, tenant: Tenant) -> None:
    prompt = random_prompt("b123", 12)
    with another_stream(server.tenant()):
        error = refusal(ask(tenant, TEXT, prompt=prompt, echo=True, max_tokens=0, logprobs=1), 400)
        assert (error["type"], error["param"]) == ("invalid_request_error", "echo")
    assert tenant.complete(prompt).status_code == 200


def test_b125_an_empty_prompt_is_refused_and_harms_nobody(server: Server, tenant: Tenant) -> None:
    with another_stream(server.tenant()):
        for prompt in ("", [""], []):
            assert refusal(ask(tenant, TEXT, prompt=prompt, max_tokens=1), 400)["param"] == "prompt"
        assert refusal(ask(tenant, CHAT, messages=[], max_tokens=1), 400)["param"] == "messages"
    assert tenant.complete("x").status_code == 200


def test_b008_an_image_is_refused_by_its_place_and_nothing_is_cached(server: Server, tenant: Tenant) -> None:
    text = {"type": "text", "text": "What is in this picture? Name all that you see, from left to right."}
    before = server.wait_until_idle()
    for url in ("https://example.com/a.png", "https://example.com/b.png"):
        error = refusal(ask(tenant, CHAT, messages=say([text, {"type": "image_url", "image_url": {"url": url}}])), 400)
        assert (error["type"], error["param"]) == ("invalid_request_error", "messages[0].content[1]")
    assert server.stats() == before
    # The text alone is cached.
    answers = [ask(tenant, CHAT, messages=say([text]), max_tokens=1) for _ in range(2)]
    assert [cached_tokens(answer) for answer in answers] == [0, 32]


def test_b099_a_byte_order_mark_before_the_body_is_dropped_and_one_in_a_message_is_kept(tenant: Tenant) -> None:
    def send(content: str, before: bytes = b"") -> Any:
        body = json.dumps({"model": tenant.server.model, "messages": say(content), "max_tokens": 1, "top_k": 1})
        response = tenant.server.http.post(CHAT, content=before + body.encode(), headers=tenant.headers | JSON)
        assert response.status_code == 200, response.text
        return response.json()

    plain, marked, inside = send("Hi."), send("Hi.", b"\xef\xbb\xbf"), send("\ufeffHi.")
    assert marked["choices"] == plain["choices"]
    assert marked["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    # Kept: it is characters of the prompt.
    assert inside["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]


def test_b100_only_utf_8_is_read_and_nothing_else_is_charged(server: Server, tenant: Tenant) -> None:
    content = json.dumps({"model": server.model, "messages": say("café"), "max_tokens": 1}, ensure_ascii=False)
    before = server.wait_until_idle()
    for encoding in ("utf-16-le", "utf-32", "latin-1"):
        response = server.http.post(CHAT, content=content.encode(encoding), headers=tenant.headers | JSON)
        assert refusal(response, 400)["type"] == "invalid_request_error"
    assert server.stats() == before
    response = server.http.post(CHAT, content=content.encode("utf-8"), headers=tenant.headers | JSON)
    assert response.status_code == 200
    assert server.stats().computed_tokens > before.computed_tokens


NULLS = dict.fromkeys(
    (
        "max_completion_tokens",
        "temperature",
        "top_p",
        "n",
        "stop",
        "stream",
        "stream_options",
        "seed",
        "logit_bias",
        "logprobs",
        "user",
    )
)


def test_b121_fields_that_are_null_are_as_good_as_left_out(tenant: Tenant) -> None:
    # top_k 1 makes the default temperature repeatable, and the tenth number is followed by the end of the turn.
    limits = {"top_k": 1, "max_tokens": 4}
    for path, prompt in ((CHAT, {"messages": say("Hi.")}), (TEXT, {"prompt": "1 2 3 4 5"})):
        without = ask(tenant, path, **prompt, **limits)
        nulls = ask(tenant, path, **prompt, **limits, **NULLS)
        assert (nulls.status_code, nulls.json()["choices"]) == (200, without.json()["choices"])
        assert "x-saltern-ignored-fields" not in nulls.headers
    # Without a limit an answer ends by itself.
    question = say("What is 2+2?")
    without = ask(tenant, CHAT, messages=question, top_k=1)
    nulls = ask(tenant, CHAT, messages=question, top_k=1, max_tokens=None, **NULLS)
    assert (nulls.status_code, nulls.json()["choices"]) == (200, without.json()["choices"])
    assert nulls.json()["choices"][0]["finish_reason"] == "stop"


def test_b122_limits_that_are_no_positive_integers_are_refused_by_name(tenant: Tenant) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        for path, prompt in ((CHAT, {"messages": say("Hi.")}), (TEXT, {"prompt": "Hi."})):
            for value in (0, -1, 1.5, "8", True):
                error = refusal(ask(tenant, path, **prompt, **{name: value}), 400)
                assert (error["type"], error["param"]) == ("invalid_request_error", name)
            answer = ask(tenant, path, **prompt, **{name: 1})
            assert answer.json()["usage"]["completion_tokens"] == 1


def test_b128_unknown_fields_are_ignored_and_reach_neither_prompt_nor_cache(tenant: Tenant) -> None:
    content = "A grain of salt is a cube of sodium and chlorine, over and over. Say so in one word."
    extended = [{"role": "user", "content": content, "weight": 0.5, "made_by": "someone"}]
    fields = {"enable_magic": True, "metadata": {"a": "b"}, "temperature": 0, "max_tokens": 1}
    plain = ask(tenant, CHAT, messages=say(content), temperature=0, max_tokens=1)
    extra = ask(tenant, CHAT, messages=extended, **fields)
    assert extra.status_code == 200
    assert extra.json()["choices"] == plain.json()["choices"]
    assert extra.headers["x-saltern-ignored-fields"] == "enable_magic"
    assert "x-saltern-ignored-fields" not in plain.headers
    prompt_tokens = plain.json()["usage"]["prompt_tokens"]
    assert extra.json()["usage"]["prompt_tokens"] == prompt_tokens
    assert (cached_tokens(plain), cached_tokens(extra)) == (0, (prompt_tokens - 1) // 16 * 16)


def test_the_names_of_ignored_fields_are_ten_short_and_harmless(tenant: Tenant) -> None:
    names = ["évil\r\nx-forged: 1", "n" * 100, *(f"unknown_{number}" for number in range(12))]
    answer = ask(tenant, TEXT, prompt="x", max_tokens=1, **dict.fromkeys(names, 1))
    said = answer.headers["x-saltern-ignored-fields"].split(", ")
    assert said == ["?vil??x-forged??1", "n" * 64, *names[2:10]]
    assert "x-forged" not in answer.headers
    stream = ask(tenant, TEXT, prompt="x", max_tokens=1, stream=True, unknown=1)
    assert stream.headers["x-saltern-ignored-fields"] == "unknown"


def test_b117_what_is_known_before_the_first_token_is_no_stream(server: Server, tenant: Tenant) -> None:
    too_long = [
        ask(tenant, CHAT, messages=say(" a" * 9000), stream=True),
        ask(tenant, TEXT, prompt=[1] * 8193, stream=True),
    ]
    for refused in too_long:
        assert refusal(refused, 400)["code"] == "context_length_exceeded"
    for path, prompt in ((CHAT, {"messages": say("Hi.")}), (TEXT, {"prompt": "Hi."})):
        unknown = server.http.post(path, json={"model": "x", **prompt, "stream": True}, headers=tenant.headers)
        assert refusal(unknown, 404)["code"] == "model_not_found"
        # What is right is a stream.
        chunks = streamed(ask(tenant, path, **prompt, stream=True, max_tokens=1, ignore_eos=True))
        assert finish_reasons(chunks)[-1] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_b134_a_prompt_beyond_the_context_is_refused_with_both_numbers(
    server: Server, tenant: Tenant, stream: bool
) -> None:
    before = server.wait_until_idle()
    refusals = [
        ask(tenant, TEXT, prompt=[1] * 8193, stream=stream),
        ask(tenant, TEXT, prompt=" a" * 8193, stream=stream),
    ]
    for error in [refusal(response, 400) for response in refusals]:
        assert error["code"] == "context_length_exceeded"
        assert "8193" in error["message"]
        assert "8192" in error["message"]
    # What fits by itself, but not with what was asked for.
    error = refusal(ask(tenant, TEXT, prompt=[1] * 8000, max_tokens=193, stream=stream), 400)
    assert error["code"] == "context_length_exceeded"
    assert all(number in error["message"] for number in ("8000", "193", "8193", "8192"))
    assert server.stats() == before
    assert tenant.complete([1] * 8, max_tokens=1, stream=stream).status_code == 200
    assert server.wait_until_idle().computed_tokens == before.computed_tokens + 8


def test_b129_every_refusal_has_the_form_that_clients_read(server: Server, tenant: Tenant) -> None:
    wrong_key = {"authorization": "Bearer sk-saltern-000000000000-" + "0" * 49}
    unknown_model = {"model": "gpt-4", "messages": say("Hi.")}
    answers = {
        "type": (ask(tenant, CHAT, messages="Hi."), 400),
        "model": (server.http.post(CHAT, json=unknown_model, headers=tenant.headers), 404),
        "key": (server.http.post(CHAT, json=unknown_model, headers=wrong_key), 401),
        "path": (server.http.post("/v1/nothing", json={}, headers=tenant.headers), 404),
        "method": (server.http.put(CHAT, json={}, headers=tenant.headers), 405),
        "admin key": (server.http.get("/v1/models", headers=dict(server.admin.headers)), 401),
        "admin path": (server.admin.get("/admin/v1/nothing"), 404),
        "admin method": (server.admin.put("/admin/v1/tenants"), 405),
        "admin type": (server.admin.post("/admin/v1/tenants", json={"name": 1}), 400),
    }
    errors = {what: refusal(response, status) for what, (response, status) in answers.items()}
    assert {error["type"] for error in errors.values()} == {"invalid_request_error"}
    codes = {what: error["code"] for what, error in errors.items()}
    assert codes == {
        "type": "unsupported_value",
        "model": "model_not_found",
        "key": "invalid_api_key",
        "path": "not_found",
        "method": None,
        "admin key": "invalid_api_key",
        "admin path": "not_found",
        "admin method": None,
        "admin type": "unsupported_value",
    }
    params = {what: error["param"] for what, error in errors.items() if error["param"]}
    assert params == {"type": "messages", "model": "model", "admin type": "name"}
    assert answers["method"][0].headers["allow"] == "POST"
    # HEAD has a status and no body; a right request is right.
    assert server.http.head("/v1/models", headers=tenant.headers).status_code == 200
    assert server.http.get("/v1/models", headers=tenant.headers).json()["data"][0]["id"] == server.model


def test_a_field_that_would_change_the_answer_and_is_not_served_is_refused_by_name(tenant: Tenant) -> None:
    fields = {
        "echo": True,
        "prompt_logprobs": 3,
        "bad_words": ["x"],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "required",
        "response_format": {"type": "json_object"},
        "store": True,
        "prediction": {"type": "content", "content": "x"},
        "chat_template": "{{ messages }}",
        "priority": 1,
        "request_id": "mine",
        "kv_transfer_params": {"a": 1},
    }
    for name, value in fields.items():
        error = refusal(ask(tenant, CHAT, messages=say("Hi."), max_tokens=1, **{name: value}), 400)
        assert error["param"] == name
    neutral = {"n": 1, "logprobs": False, "tools": [], "store": False, "frequency_penalty": 0, "logit_bias": {}}
    assert ask(tenant, CHAT, messages=say("Hi."), max_tokens=1, **neutral).status_code == 200


def test_b079_control_tokens_at_the_start_of_a_prompt_are_the_callers(tenant: Tenant) -> None:
    # The default model's tokenizer writes no BOS, so a prompt that begins with its text has one, and others none.
    begun, plain, ids = (
        tenant.complete(prompt).json()["usage"]["prompt_tokens"]
        for prompt in ("<|im_start|>Hello there", "Hello there", [1, 19556, 665])
    )
    assert (begun, plain, ids) == (3, 2, 3)


def test_b095_an_answer_that_ends_within_a_character_has_one_replacement_and_a_reason(tenant: Tenant) -> None:
    cut = 0
    for tokens in (1, 2, 3):
        answer = tenant.complete("emoji 😀 😃", max_tokens=tokens, ignore_eos=True).json()["choices"][0]
        chunks = streamed(tenant.complete("emoji 😀 😃", max_tokens=tokens, ignore_eos=True, stream=True))
        assert answer["finish_reason"] == "length"
        assert text_of(chunks) == answer["text"]
        assert "\ufffd" not in answer["text"][:-1]
        cut += answer["text"].endswith("\ufffd")
    assert cut
