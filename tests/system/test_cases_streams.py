"""Streams as they are on the wire: form of the events, order at the end, and the same answer as without a stream."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.system.support import Server, Tenant, random_prompt
from tests.system.wire import finish_reasons, post, streamed, text_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def say(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def chat(content: str, **fields: Any) -> dict[str, Any]:
    return {"messages": say(content), "temperature": 0, "stream": True} | fields


def text(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "temperature": 0, "stream": True} | fields


def test_b112_every_stream_says_once_why_it_ended(tenant: Tenant) -> None:
    asked = {"stop": (CHAT, chat("What is 2+2?")), "length": (CHAT, chat("What is 2+2?", max_tokens=3))}
    for reason, (path, body) in asked.items():
        chunks = streamed(post(tenant, path, body))
        *before, last = finish_reasons(chunks)
        assert before
        assert set(before) == {None}
        assert last == reason
        assert {choice["index"] for chunk in chunks for choice in chunk["choices"]} == {0}
    *before, last = finish_reasons(streamed(post(tenant, TEXT, text("1 2 3 4", max_tokens=3))))
    assert (set(before), last) == ({None}, "length")


# With line breaks, quotes and characters of several tokens; cut short, cut within a character, cut by a stop string.
BODIES = [
    (CHAT, chat("Name three colours.", max_tokens=3)),
    (CHAT, chat("Name three colours.", max_tokens=3, stream_options={"include_usage": True})),
    (CHAT, chat("Name three colours.", max_tokens=2, stop="1")),
    (CHAT, chat("Say hi.", max_tokens=1)),
    (CHAT, chat("x" * 300, max_tokens=2)),
    (TEXT, text("def add(a, b):", max_tokens=4)),
    (TEXT, text("def add(a, b):", max_tokens=4, stop=["\n"])),
    (TEXT, text("emoji 😀 😃", max_tokens=2)),
    (TEXT, text("Hangul: 안녕", max_tokens=4)),
    (TEXT, text("data: x\n\ndata: [DONE]\n\n", max_tokens=4)),
    (TEXT, text("event: a\r\nid: 1\r\nretry: 5\r\n\r\n", max_tokens=4)),
    (TEXT, text("\u2028\u2029\x85\x00", max_tokens=4)),
    (TEXT, text("1 2 3", max_tokens=4, stream_options={"include_usage": True})),
    (TEXT, text("1 2 3", max_tokens=4, unknown_field=1)),
    (TEXT, text("1 2 3", max_tokens=4, temperature=2, seed=1)),
    (TEXT, text("1 2 3", max_tokens=4, temperature=2, seed=2)),
]
REFUSED = [
    (CHAT, chat("Hi.", max_tokens=0), 400),
    (CHAT, chat("Hi.", model="gpt-4"), 404),
    (TEXT, text("", max_tokens=1), 400),
    (TEXT, text("Hi.", echo=True), 400),
]


def test_b120_every_event_is_one_line_of_data(tenant: Tenant) -> None:
    streams = [post(tenant, path, body) for path, body in BODIES]
    texts = []
    for stream in streams:
        assert stream.headers["transfer-encoding"] == "chunked"
        # `streamed` looks at every line of every event.
        chunks = streamed(stream)
        texts.append(text_of(chunks))
    assert any("\n" in each for each in texts)
    assert any("\ufffd" in each for each in texts)
    errors = [post(tenant, path, body) for path, body, _ in REFUSED]
    assert [error.status for error in errors] == [status for _, _, status in REFUSED]
    assert all(error.error()["type"] == "invalid_request_error" for error in errors)
    assert len(streams) + len(errors) == 20


PROMPTS: list[tuple[str, dict[str, Any]]] = [(CHAT, {"messages": say("Count to three.")}), (TEXT, {"prompt": "1 2 3"})]


def said(answer: Any) -> str:
    """The text of a whole answer of either route."""
    choice = answer["choices"][0]
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


def counts(usage: Any) -> tuple[int, int, int]:
    return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]


@pytest.mark.parametrize(("path", "prompt"), PROMPTS)
def test_a_stream_ends_with_its_reason_its_usage_and_done(tenant: Tenant, path: str, prompt: dict[str, Any]) -> None:
    body = prompt | {"temperature": 0, "max_tokens": 4}
    answer = json.loads(post(tenant, path, body).body)
    *chunks, usage = streamed(post(tenant, path, body | USAGE))
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 4
    assert counts(usage["usage"]) == counts(answer["usage"])
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    assert (finish_reasons(chunks[-1:]), text_of(chunks[-1:])) == (["length"], "")
    assert text_of(chunks) == said(answer)
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in [*chunks, usage]}) == 1
    # Nothing of usage where it was not asked for.
    plain = streamed(post(tenant, path, body | {"stream": True, "max_tokens": 1}))
    assert all("usage" not in chunk for chunk in plain)


def test_the_first_chunk_of_a_chat_says_who_speaks(tenant: Tenant) -> None:
    chunks = streamed(post(tenant, CHAT, chat("Hi.", max_tokens=2)))
    roles = [choice["delta"].get("role") for chunk in chunks for choice in chunk["choices"]]
    assert roles == ["assistant", *[None] * (len(chunks) - 1)]


def test_text_is_sent_as_it_becomes_certain(server: Server, tenant: Tenant) -> None:
    chunks = streamed(post(tenant, TEXT, text("1 2 3 4 5", max_tokens=6)))
    pieces = [text_of([chunk]) for chunk in chunks]
    assert "".join(pieces) == " 6 7 8"
    # Not one piece at the end: six tokens came, and only what was ready together was sent together.
    assert len([piece for piece in pieces if piece]) >= 3


def test_a_stop_string_over_the_border_of_chunks_is_cut_exactly(tenant: Tenant) -> None:
    # The tokens are " ", "6", " ", "7", …: each of these stop strings begins in one and ends in another.
    for stop, left in {" 7 8": " 6", "6 7": " ", "7 8 9": " 6 "}.items():
        body = {"temperature": 0, "max_tokens": 12, "stop": ["never", stop]}
        answer = tenant.complete("1 2 3 4 5", **body).json()
        chunks = streamed(tenant.complete("1 2 3 4 5", **body, **USAGE))
        assert said(answer) == text_of(chunks) == left
        assert answer["choices"][0]["finish_reason"] == finish_reasons(chunks)[-1] == "stop"
        # Counted to the token that completed it, not to where the store was when it heard of it.
        last = stop.strip()[-1]
        tokens = 2 * (int(last) - 5)
        assert answer["usage"]["completion_tokens"] == chunks[-1]["usage"]["completion_tokens"] == tokens
    # What only began to be a stop string is text.
    assert said(tenant.complete("1 2 3 4 5", max_tokens=4, stop=["6 7 9"]).json()) == " 6 7"


def test_a_seed_repeats_and_another_differs(tenant: Tenant) -> None:
    body = {"temperature": 1.5, "max_tokens": 8, "ignore_eos": True}
    first, again = (said(tenant.complete("Salt is", **body, seed=7).json()) for _ in range(2))
    stream = text_of(streamed(tenant.complete("Salt is", **body, seed=7, stream=True)))
    assert first == again == stream
    assert said(tenant.complete("Salt is", **body, seed=8).json()) != first
    # Without a seed each answer has its own.
    assert len({said(tenant.complete("Salt is", **body).json()) for _ in range(3)}) > 1


def test_usage_says_what_was_found_and_what_was_kept(tenant: Tenant) -> None:
    prompt = random_prompt("usage", 60)

    def details(response: Any) -> tuple[int, int]:
        usage = response["usage"]
        assert usage["prompt_tokens"] == 60
        found = usage["prompt_tokens_details"]
        return found["cached_tokens"], found["cache_write_tokens"]

    assert details(tenant.complete(prompt).json()) == (0, 48)
    assert details(tenant.complete(prompt).json()) == (48, 0)
    assert details(streamed(tenant.complete(prompt, **USAGE))[-1]) == (48, 0)
    # Only the blocks that are new are computed and kept.
    assert details(tenant.complete([*prompt[:32], *random_prompt("other end", 28)]).json()) == (32, 16)
