from __future__ import annotations

from typing import Any

import msgspec
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from gateway.http import answers, sse
from gateway.http.errors import ApiError
from gateway.http.fields import CHANGES_NOTHING, NO_EFFECT, built_fields, ignored_fields_header
from gateway.http.shapes import ChatRequest, CompletionRequest, Generation, read_generation_request
from gateway.prompt.template import OWN_VARIABLES, Rendering

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "x"}
DEFAULTS = Generation(
    n=1,
    max_tokens=None,
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    repetition_penalty=1.0,
    logit_bias=(),
    seed=None,
    stop=(),
    stop_token_ids=(),
    include_stop=False,
    min_tokens=0,
    ignore_eos=False,
    logprobs=None,
    token_ids=False,
    stream=False,
    include_usage=False,
    scope=b"",
    ttl_seconds=0,
)


def chat(**fields: Any) -> ChatRequest:
    return read_generation_request(CHAT | fields, ChatRequest)[0]


def completion(**fields: Any) -> CompletionRequest:
    return read_generation_request(COMPLETION | fields, CompletionRequest)[0]


def refused(ask: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        ask(**fields)
    assert (caught.value.status, caught.value.type) == (400, "invalid_request_error")
    return caught.value


both = pytest.mark.parametrize("ask", [chat, completion])


@both
def test_both_routes_ask_for_the_same_kind_of_generation(ask: Any) -> None:
    request = ask(
        max_tokens=7,
        n=3,
        temperature=0,
        top_p=0.5,
        top_k=3,
        min_p=0.25,
        presence_penalty=-1,
        frequency_penalty=2,
        repetition_penalty=1.5,
        logit_bias={"0": 1, "49151": -100},
        seed=-1,
        stop=["a", "b"],
        stop_token_ids=[5, 0],
        include_stop_str_in_output=True,
        min_tokens=2,
        ignore_eos=True,
        return_token_ids=True,
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
        cache_salt="sälz",
        prompt_cache_options={"ttl": "30m", "mode": "implicit"},
    )
    assert request.generation() == Generation(
        max_tokens=7,
        n=3,
        temperature=0.0,
        top_p=0.5,
        top_k=3,
        min_p=0.25,
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        repetition_penalty=1.5,
        logit_bias=((0, 1.0), (49151, -100.0)),
        seed=2**64 - 1,
        stop=("a", "b"),
        stop_token_ids=(5, 0),
        include_stop=True,
        min_tokens=2,
        ignore_eos=True,
        logprobs=None,
        token_ids=True,
        stream=True,
        include_usage=True,
        scope="sälz".encode(),
        ttl_seconds=1800,
    )
    assert ask(stop="x").generation().stop == ("x",)
    assert ask(max_completion_tokens=5, max_tokens=9).generation().max_tokens == 5


@both
def test_b121_null_is_absent(ask: Any) -> None:
    names = ["max_tokens", "temperature", "top_p", "n", "stop", "stream", "stream_options", "seed", "logit_bias"]
    names += ["logprobs", "user", "max_completion_tokens", "top_k", "ignore_eos", "cache_salt", "tools", "echo"]
    names += ["min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "stop_token_ids", "min_tokens"]
    names += ["include_stop_str_in_output", "top_logprobs", "return_token_ids", "prompt_cache_options"]
    assert ask(**dict.fromkeys(names)).generation() == ask().generation() == DEFAULTS


@both
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True, 2**31])
def test_b122_a_token_limit_is_a_positive_integer(ask: Any, name: str, value: Any) -> None:
    assert refused(ask, **{name: value}).param == name
    assert ask(**{name: 1}).generation().max_tokens == 1


@both
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "1"),
        ("temperature", 10**400),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("seed", 2**63),
        ("seed", 0.5),
        ("stop", ["a", "b", "c", "d", "e"]),
        ("stop", ""),
        ("stop", 5),
        ("stream", 1),
        ("ignore_eos", "yes"),
        ("stream_options", True),
        ("model", None),
        ("model", 5),
        ("prompt_cache_key", "x" * 257),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("presence_penalty", -2.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", "0"),
        ("repetition_penalty", 0),
        ("repetition_penalty", 100.1),
        ("logit_bias", [1]),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"abc": 1}),
        ("logit_bias", {"01": 1}),
        ("logit_bias", {"": 1}),
        ("logit_bias", {"1\n": 1}),
        ("logit_bias", {"１": 1}),
        ("logit_bias", {"1": 100.5}),
        ("logit_bias", {"1": -101}),
        ("logit_bias", {"1": "1"}),
        ("logit_bias", {"1": True}),
        ("logit_bias", {"1": None}),
        ("logit_bias", {str(token): 0 for token in range(1025)}),
        ("stop_token_ids", 5),
        ("stop_token_ids", [1] * 257),
        ("include_stop_str_in_output", 1),
        ("min_tokens", -1),
        ("min_tokens", 0.5),
        ("min_tokens", 2**31),
        ("return_token_ids", "yes"),
        ("prompt_cache_options", "30m"),
        ("prompt_cache_options", [{"ttl": "30m"}]),
        ("prompt_cache_options", {"mode": "explicit"}),
        ("prompt_cache_options", {"mode": "Implicit"}),
        ("prompt_cache_options", {"mode": ["implicit"]}),
        ("prompt_cache_options", {"ttl": "30m", "breakpoints": []}),
        ("prompt_cache_retention", "48h"),
        ("prompt_cache_retention", 24),
    ],
)
def test_values_out_of_range_are_refused_by_name(ask: Any, name: str, value: Any) -> None:
    assert refused(ask, **{name: value}).param == name


def test_b125_an_empty_prompt_is_refused() -> None:
    for prompt in ("", [""], [], None):
        assert refused(completion, prompt=prompt).param == "prompt"
    for messages in ([], None):
        assert refused(chat, messages=messages).param == "messages"
    assert completion(prompt=" ").prompt == " "


def test_a_prompt_has_one_of_four_forms() -> None:
    assert completion(prompt="a").prompts() == ["a"]
    assert completion(prompt=["a", "b"]).prompts() == ["a", "b"]
    assert completion(prompt=[0, 5]).prompts() == [[0, 5]]
    assert completion(prompt=[[1, 2], [3]]).prompts() == [[1, 2], [3]]
    for prompt, param in (
        ([0, -1], "prompt[1]"),
        ([True], "prompt[0]"),
        ([[1], [-1]], "prompt[1][0]"),
        (5, "prompt"),
        ([0, "a"], "prompt"),
        ([[1], 2], "prompt"),
        (["a", [1]], "prompt"),
        ([""], "prompt"),
        (["a", ""], "prompt"),
        ([[1], []], "prompt"),
        ([[]], "prompt"),
    ):
        assert refused(completion, prompt=prompt).param == param


@both
def test_b128_unknown_fields_are_ignored_and_reach_nothing(ask: Any) -> None:
    plain = ask()
    request = ask(some_extra={"a": 1}, metadata={"a": "b"}, user="u", service_tier="auto")
    assert request == plain
    assert request.generation() == DEFAULTS


def test_b128_unknown_keys_in_a_message_are_ignored_and_reach_no_prompt() -> None:
    message = {"role": "user", "content": "x", "refusal": None, "weird": "canary"}
    assert chat(messages=[message]).conversation() == [{"role": "user", "content": "x"}]


def test_unknown_fields_are_named_and_others_are_not() -> None:
    body = CHAT | {"zz": 1, "user": "u", "n": 1, "temperature": None, "aa": None}
    assert read_generation_request(body, ChatRequest)[1] == ("zz", "aa")
    assert read_generation_request(CHAT | {"prompt": "x"}, ChatRequest)[1] == ("prompt",)


def test_the_header_of_ignored_fields_holds_nothing_harmful() -> None:
    assert ignored_fields_header(()) == {}
    names = ["a\r\nset-cookie: x", "é", "x" * 100, *(f"f{i}" for i in range(20))]
    value = ignored_fields_header(names)["x-saltern-ignored-fields"]
    assert value.startswith(f"a??set-cookie??x, ?, {'x' * 64}, f0")
    assert value.isascii()
    assert len(value.split(", ")) == 10


@both
@pytest.mark.parametrize("name", sorted(CHANGES_NOTHING))
def test_a_field_that_is_not_served_is_refused_unless_it_changes_nothing(ask: Any, name: str) -> None:
    if name in built_fields(ChatRequest):
        ask = completion
    for value in (None, *CHANGES_NOTHING[name]):
        assert ask(**{name: value}).generation() == DEFAULTS
    error = refused(ask, **{name: {"something": "else"}})
    assert (error.param, error.code) == (name, "unsupported_value")


@both
@pytest.mark.parametrize(
    ("name", "value"),
    [("n", 129), ("n", True), ("n", 0), ("echo", True), ("echo", 0), ("tools", [1]), ("prompt_logprobs", 0)],
)
def test_what_is_not_built_is_refused(ask: Any, name: str, value: Any) -> None:
    assert refused(ask, **{name: value}).param == name


def test_each_route_asks_for_log_probabilities_in_its_own_way() -> None:
    for fields, told in (({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"logprobs": None}, None)):
        assert chat(**fields).generation().logprobs == told
        assert chat(**fields, top_logprobs=0).generation().logprobs == told
    assert chat(logprobs=True, top_logprobs=20).generation().logprobs == 20
    for value in (0, 1, "true"):
        assert refused(chat, logprobs=value).param == "logprobs"
    for value in (-1, 21, 0.5, True):
        assert refused(chat, logprobs=True, top_logprobs=value).param == "top_logprobs"
    for logprobs in (None, False):
        assert refused(chat, logprobs=logprobs, top_logprobs=1).param == "top_logprobs"

    for value, told in ((None, None), (False, None), (0, 0), (5, 5), (20, 20)):
        assert completion(logprobs=value).generation().logprobs == told
    for value in (True, -1, 21, 0.5, "1"):
        assert refused(completion, logprobs=value).param == "logprobs"
    assert refused(completion, logprobs=1, top_logprobs=1).param == "top_logprobs"


def test_a_last_message_is_continued_or_a_new_one_begun() -> None:
    open_chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    for fields, rendering in (
        ({}, Rendering(opens_turn=True, continues=False)),
        (dict.fromkeys(("add_generation_prompt", "continue_final_message", "chat_template_kwargs")), Rendering()),
        ({"add_generation_prompt": False}, Rendering(opens_turn=False, continues=False)),
        ({"continue_final_message": True}, Rendering(opens_turn=False, continues=True)),
        ({"continue_final_message": True, "add_generation_prompt": False}, Rendering(False, True)),
        ({"continue_final_message": False, "chat_template_kwargs": {"a": [1]}}, Rendering(variables={"a": [1]})),
    ):
        assert chat(messages=open_chat, **fields).rendering() == rendering
    both_at_once = {"continue_final_message": True, "add_generation_prompt": True}
    assert refused(chat, messages=open_chat, **both_at_once).param == "continue_final_message"
    assert refused(chat, messages=open_chat[:1], continue_final_message=True).param == "continue_final_message"
    for name in ("continue_final_message", "add_generation_prompt"):
        assert refused(chat, messages=open_chat, **{name: 1}).param == name
        assert refused(completion, **{name: name == "continue_final_message"}).param == name


@pytest.mark.parametrize("name", sorted(OWN_VARIABLES))
def test_no_request_sets_what_the_renderer_sets(name: str) -> None:
    for value in ("x", None):
        error = refused(chat, chat_template_kwargs={"enable_thinking": False, name: value})
        assert error.param == "chat_template_kwargs"
        assert name in error.message
        assert "enable_thinking" not in error.message
    assert refused(chat, chat_template_kwargs=[name]).param == "chat_template_kwargs"


def test_b004_and_b123_echo_is_refused_whatever_else_is_asked() -> None:
    assert refused(completion, echo=True, logprobs=1, max_tokens=1).param == "echo"
    assert refused(completion, echo=True, max_tokens=0, logprobs=1).param == "echo"
    assert completion(echo=False, max_tokens=1).prompt == "x"


def test_b008_a_picture_is_refused_with_its_place() -> None:
    text = {"type": "text", "text": "what is this?"}
    for url in ("https://example.com/a.png", "data:image/png;base64,AA=="):
        content = [text, {"type": "image_url", "image_url": {"url": url}}]
        error = refused(chat, messages=[{"role": "user", "content": content}])
        assert error.param == "messages[0].content[1]"
    assert chat(messages=[{"role": "user", "content": [text]}]).conversation()[0]["content"] == "what is this?"


def test_text_parts_are_joined_with_nothing_between_them() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts, "name": "ann"}]
    assert chat(messages=messages).conversation() == [{"role": "user", "content": "a b", "name": "ann"}]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x"}, "messages[1].role"),
        ({"role": "user\n", "content": "x"}, "messages[1].role"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "assistant", "content": None}, "messages[1].content"),
        ({"role": "assistant", "content": "x", "tool_calls": [{"id": "c"}]}, "messages[1].tool_calls"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0]"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ("x", "messages[1]"),
    ],
)
def test_a_message_that_cannot_be_read_is_named(message: Any, param: str) -> None:
    good = {"role": "assistant", "content": "x", "tool_calls": None, "function_call": None, "audio": None}
    assert len(chat(messages=[good]).messages) == 1
    assert refused(chat, messages=[good, message]).param == param


@both
def test_b166_a_blank_scope_is_refused(ask: Any) -> None:
    for salt in ("", " ", "\t\n", 5, ["a"]):
        assert refused(ask, cache_salt=salt).param == "cache_salt"
    assert ask(cache_salt=" a ").generation().scope == b" a "


@both
def test_b167_a_scope_is_bounded_and_kept_as_it_is(ask: Any) -> None:
    for salt in ("x" * 10_000, "x" * 257, "é" * 129):
        assert refused(ask, cache_salt=salt).param == "cache_salt"
    for salt in ("x" * 256, "é" * 128, "b/c", "@", "\0", "../"):
        assert ask(cache_salt=salt).generation().scope == salt.encode()


@both
def test_a_lifetime_is_a_whole_number_of_seconds_minutes_or_hours_up_to_a_day(ask: Any) -> None:
    for ttl, seconds in (("1s", 1), ("86400s", 86400), ("30m", 1800), ("1440m", 86400), ("24h", 86400), (None, 0)):
        assert ask(prompt_cache_options={"ttl": ttl}).generation().ttl_seconds == seconds
    for options in (None, {}, {"mode": None}, {"mode": "implicit"}):
        assert ask(prompt_cache_options=options).generation() == DEFAULTS
    outside = ("0s", "86401s", "1441m", "25h", "9" * 5000 + "s")
    wrong = ("1d", "90", "-1s", "+1s", "1.5h", " 1s", "1s ", "1s\n", "1 s", "01s", "1S", "s", "", "١s", "９s")
    for ttl in (*outside, *wrong, 1800, True, {}, ["1s"]):
        error = refused(ask, prompt_cache_options={"ttl": ttl})
        assert error.param == "prompt_cache_options"
        assert "1s to 24h" in error.message


@both
def test_what_is_refused_of_cache_options_is_not_repeated(ask: Any) -> None:
    for options in ({"canary": 1}, {"ttl": "canary"}, {"mode": "canary"}, {"ttl": {"canary": 1}}):
        error = refused(ask, prompt_cache_options=options)
        assert error.param == "prompt_cache_options"
        assert "canary" not in error.message


def test_no_known_field_is_in_two_groups() -> None:
    chat_fields, text_fields = map(built_fields, (ChatRequest, CompletionRequest))
    # What one route serves and the other doesn't is refused there, not ignored.
    assert chat_fields ^ text_fields <= {"messages", "prompt"} | set(CHANGES_NOTHING)
    assert not chat_fields & text_fields & set(CHANGES_NOTHING)
    assert not (chat_fields | text_fields) & NO_EFFECT
    assert not NO_EFFECT & set(CHANGES_NOTHING)


USAGE = answers.Usage.of(prompt_tokens=20, cached_tokens=16, cache_write_tokens=0, completion_tokens=3)


def test_answers_are_what_the_openai_client_reads() -> None:
    whole = answers.ChatCompletion("c", 1, "m", [answers.ChatChoice(answers.AssistantMessage("hi"), "stop")], USAGE)
    read = ChatCompletion.model_validate_json(msgspec.json.encode(whole))
    assert read.choices[0].message.content == "hi"
    assert read.usage is not None
    assert (read.usage.total_tokens, read.usage.prompt_tokens_details.cached_tokens) == (23, 16)  # type: ignore[union-attr]
    text = answers.TextCompletion("c", 1, "m", [answers.TextChoice("hi", "length")], USAGE)
    assert Completion.model_validate_json(msgspec.json.encode(text)).choices[0].finish_reason == "length"
    model = answers.ModelList([answers.Model("m", 1)])
    assert Model.model_validate(msgspec.to_builtins(model)["data"][0]).id == "m"
    first = answers.ChatChunk("c", 1, "m", [answers.ChatChunkChoice(answers.Delta(role="assistant", content=""))])
    assert ChatCompletionChunk.model_validate_json(msgspec.json.encode(first)).choices[0].delta.role == "assistant"


def test_a_chunk_says_nothing_of_what_it_does_not_have() -> None:
    chunk = answers.ChatChunk("c", 1, "m", [answers.ChatChunkChoice(answers.Delta(content="x"))])
    assert msgspec.to_builtins(chunk)["choices"] == [
        {"delta": {"content": "x"}, "finish_reason": None, "index": 0, "logprobs": None}
    ]
    assert "usage" not in msgspec.to_builtins(chunk)
    asked = answers.ChatChunk("c", 1, "m", [], usage=None)
    assert msgspec.to_builtins(asked)["usage"] is None


def test_b120_an_event_is_one_data_line_whatever_the_text() -> None:
    text = "a\nb\r\nc\rd\u2028e\u0085f\0"
    events = [
        sse.event(answers.TextCompletion("c", 1, "m", [answers.TextChoice(text)])),
        sse.event(answers.ChatChunk("c", 1, text, [answers.ChatChunkChoice(answers.Delta(content=text))])),
        sse.error_event(ApiError(503, text, "service_unavailable_error", "server_is_overloaded")),
        sse.DONE,
    ]
    for event in events:
        assert event.startswith(b"data: ")
        assert event.endswith(b"\n\n")
        assert event.count(b"\n") == 2
        assert b"\r" not in event
    assert msgspec.json.decode(events[0][6:])["choices"][0]["text"] == text
    assert msgspec.json.decode(events[2][6:])["error"]["code"] == "server_is_overloaded"
    assert sse.KEEPALIVE.startswith(b":")
