"""What the fields of sampling do to the answers of the real model."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.system.support import Server, Tenant, random_prompt
from tests.system.test_openai_client import client_of
from tests.system.wire import streamed, text_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
END = 2
both = pytest.mark.parametrize("path", [CHAT, TEXT])


def ask(tenant: Tenant, path: str, said: str, **fields: Any) -> dict[str, Any]:
    """The answer to a greedy request, with the text of its choice."""
    response = (tenant.chat if path == CHAT else tenant.complete)(said, **fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    (choice,) = answer["choices"]
    return answer | choice | {"text": choice["text"] if path == TEXT else choice["message"]["content"]}


def ids(tenant: Tenant, path: str, said: str, **fields: Any) -> list[int]:
    found: list[int] = ask(tenant, path, said, return_token_ids=True, ignore_eos=True, **fields)["token_ids"]
    return found


@both
def test_a_bias_forces_a_token_or_bans_it(tenant: Tenant, path: str) -> None:
    said = "1 2 3 4 5"
    plain = ids(tenant, path, said, max_tokens=3)
    forced = next(token for token in range(1000, 2000) if token not in plain)
    assert ids(tenant, path, said, max_tokens=3, logit_bias={str(forced): 100}) == [forced] * 3
    banned = ids(tenant, path, said, max_tokens=3, logit_bias={str(plain[0]): -100})
    assert plain[0] not in banned
    # What is streamed is biased as well, and no other request is.
    response = (tenant.chat if path == CHAT else tenant.complete)(
        said, max_tokens=3, logit_bias={str(forced): 100}, stream=True
    )
    assert text_of(streamed(response)) == ask(tenant, path, said, max_tokens=3, logit_bias={str(forced): 100})["text"]
    assert ids(tenant, path, said, max_tokens=3) == plain


def test_penalties_make_repetition_rarer_or_more_frequent(tenant: Tenant) -> None:
    def different_tokens(said: str, **fields: float) -> int:
        return len(set(ids(tenant, TEXT, said, max_tokens=12, **fields)))

    repeats, tells = "a b a b a b a b a b a b a b", "Once upon a time, in a town by the sea,"
    plain, story = different_tokens(repeats), different_tokens(tells)
    assert plain == 2
    for rarer, more_frequent in (
        ({"presence_penalty": 2}, {"presence_penalty": -2}),
        ({"frequency_penalty": 2}, {"frequency_penalty": -2}),
        ({"repetition_penalty": 2}, {"repetition_penalty": 0.5}),
    ):
        assert different_tokens(repeats, **rarer) > plain
        assert different_tokens(tells, **more_frequent) < story
    # The prompt counts for one of them only.
    first = ids(tenant, TEXT, repeats, max_tokens=1)
    assert ids(tenant, TEXT, repeats, max_tokens=1, presence_penalty=2, frequency_penalty=2) == first
    assert ids(tenant, TEXT, repeats, max_tokens=1, repetition_penalty=2) != first


def test_min_p_keeps_only_what_is_likely_enough(tenant: Tenant) -> None:
    greedy = ids(tenant, TEXT, "Once upon a time", max_tokens=8)
    hot = {"temperature": 2, "max_tokens": 8}
    assert [ids(tenant, TEXT, "Once upon a time", **hot, seed=seed, min_p=1) for seed in range(2)] == [greedy] * 2
    assert ids(tenant, TEXT, "Once upon a time", **hot, seed=0) != greedy


@both
def test_no_end_comes_before_min_tokens(tenant: Tenant, path: str) -> None:
    ending = {"logit_bias": {str(END): 100}, "max_tokens": 8}
    for least, sampled in ((None, 1), (0, 1), (3, 4)):
        answer = ask(tenant, path, "1 2 3 4 5", **ending, min_tokens=least)
        assert (answer["usage"]["completion_tokens"], answer["finish_reason"]) == (sampled, "stop")
    plain = ids(tenant, path, "1 2 3 4 5", max_tokens=4)
    # Nor one that the request names.
    named = ask(tenant, path, "1 2 3 4 5", stop_token_ids=[plain[0]], max_tokens=4, ignore_eos=True, min_tokens=2)
    assert named["usage"]["completion_tokens"] > 2
    stopped = ask(tenant, path, "1 2 3 4 5", stop_token_ids=[plain[1]], max_tokens=4, ignore_eos=True)
    first = ask(tenant, path, "1 2 3 4 5", max_tokens=1, ignore_eos=True)
    assert (stopped["finish_reason"], stopped["text"]) == ("stop", first["text"])


def test_the_greedy_token_is_the_likeliest_and_all_logarithms_are_finite(tenant: Tenant) -> None:
    answer = ask(tenant, CHAT, "Count to ten.", max_tokens=8, logprobs=True, top_logprobs=20, return_token_ids=True)
    content = answer["logprobs"]["content"]
    assert len(content) == len(answer["token_ids"]) == 8
    assert "".join(entry["token"] for entry in content) == answer["text"]
    for entry in content:
        top = [each["logprob"] for each in entry["top_logprobs"]]
        assert (entry["token"], entry["logprob"]) == (entry["top_logprobs"][0]["token"], top[0])
        assert len(top) == 20
        assert top == sorted(top, reverse=True)
        assert all(math.isfinite(value) and value <= 0 for value in top)
        assert 0 < sum(map(math.exp, top)) <= 1.000001
    # They are the model's, whatever made it take another token.
    biased = {"logprobs": True, "top_logprobs": 1, "logit_bias": {"5": 100}}
    (forced,) = ask(tenant, CHAT, "Count to ten.", max_tokens=1, **biased)["logprobs"]["content"]
    (likeliest,) = forced["top_logprobs"]
    assert likeliest["token"] == content[0]["token"]
    assert likeliest["logprob"] == pytest.approx(content[0]["logprob"], abs=0.01)
    assert forced["token"] != likeliest["token"]
    assert forced["logprob"] < likeliest["logprob"]


def test_the_openai_client_reads_log_probabilities(server: Server, tenant: Tenant) -> None:
    with client_of(server, tenant.key) as client:
        chat: Any = {"model": server.model, "messages": [{"role": "user", "content": "Say hi."}], "temperature": 0}
        chat |= {"max_completion_tokens": 5, "logprobs": True, "top_logprobs": 3, "extra_body": {"ignore_eos": True}}
        whole = client.chat.completions.create(**chat).choices[0].logprobs
        assert whole is not None
        assert whole.content is not None
        assert [len(entry.top_logprobs) for entry in whole.content] == [3] * 5
        entries = [
            entry
            for chunk in client.chat.completions.create(**chat, stream=True)
            for choice in chunk.choices
            if choice.logprobs
            for entry in choice.logprobs.content or []
        ]
        assert [entry.token for entry in entries] == [entry.token for entry in whole.content]
        assert [entry.logprob for entry in entries] == pytest.approx([e.logprob for e in whole.content], abs=0.01)

        text: Any = {"model": server.model, "prompt": "1 2 3 4 5", "temperature": 0, "max_tokens": 4, "logprobs": 2}
        choice = client.completions.create(**text).choices[0]
        assert choice.logprobs is not None
        assert "".join(choice.logprobs.tokens or []) == choice.text
        assert choice.logprobs.text_offset == [0, 1, 2, 3]
        for token, logprob, top in zip(
            choice.logprobs.tokens or [],
            choice.logprobs.token_logprobs or [],
            choice.logprobs.top_logprobs or [],
            strict=True,
        ):
            assert len(top) == 2
            assert max(top, key=lambda each: top[each]) == token
            assert top[token] == logprob

        biased = client.completions.create(
            **text | {"logit_bias": {"33": 100}, "presence_penalty": 0.5, "frequency_penalty": 0.5}
        )
        assert biased.choices[0].text == "1111"


def test_b139_and_b140_a_seed_decides_alone_and_every_time(tenant: Tenant, other: Tenant) -> None:
    drawn = {"temperature": 0.9, "max_tokens": 10, "ignore_eos": True, "return_token_ids": True}
    prompt, elsewhere = random_prompt("b139", 20), random_prompt("b139 beside", 20)

    def answer(**beside: Any) -> list[int]:
        with ThreadPoolExecutor(1) as pool:
            companion = pool.submit(other.complete, elsewhere, **drawn, **beside) if beside else None
            found: list[int] = tenant.complete(prompt, **drawn, seed=1234).json()["choices"][0]["token_ids"]
            assert companion is None or companion.result().status_code == 200
        return found

    first = answer()
    assert [answer(), answer(seed=None), answer(seed=9)] == [first] * 3
    assert tenant.complete(prompt, **drawn, seed=1235).json()["choices"][0]["token_ids"] != first


def test_b085_the_model_goes_on_with_an_open_message(tenant: Tenant, server: Server) -> None:
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "1, 2, 3, 4,"}]
    body = {"model": server.model, "messages": messages, "max_tokens": 2, "temperature": 0}
    response = server.http.post(CHAT, json=body | {"continue_final_message": True}, headers=tenant.headers)
    assert response.json()["choices"][0]["message"]["content"].startswith(" ")
    again = server.http.post(CHAT, json=body, headers=tenant.headers)
    assert again.json()["usage"]["prompt_tokens"] > response.json()["usage"]["prompt_tokens"]
