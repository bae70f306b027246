"""Every field that says how to generate: what it makes of the request to the store, and of the answer.

The model says what a test wants, so that a field's part in the gateway is seen by itself; what the store makes of these
fields is shown on the real model.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cachestore.protocol import Sampling
from tests.cachestore.serving import submissions
from tests.system.scripted import CHAT, END, START, TEXT, byte_ids, desk, tokens_of, until
from tests.system.wire import error_form, events, finish_reasons, refusal, text_of

pytestmark = pytest.mark.anyio

VOCABULARY_TOKENS = 49152
both = pytest.mark.parametrize("path", [CHAT, TEXT])


# --- what the store is asked


SAMPLING_FIELDS: dict[str, Any] = {
    "temperature": 0.5,
    "top_k": 7,
    "top_p": 0.75,
    "min_p": 0.25,
    "presence_penalty": -1.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.25,
    "min_tokens": 3,
}


@both
async def test_every_sampling_field_reaches_the_store_as_it_was_sent(tmp_path: Path, path: str) -> None:
    async with desk(tmp_path) as customer:
        submitted = submissions(customer.inside.engine)
        bias, logprobs = {"5": -100, "49151": 1.5}, {"logprobs": True, "top_logprobs": 4}
        fields = SAMPLING_FIELDS | (logprobs if path == CHAT else {"logprobs": 4})
        await customer.ask(path, **fields, seed=9, logit_bias=bias, stop_token_ids=[9, END, 9])
        expected = Sampling(
            **SAMPLING_FIELDS, seed=9, logit_bias=[(5, -100.0), (49151, 1.5)], stop_token_ids=[END, 9], logprobs=4
        )
        assert submitted[-1].sampling == expected
        # Nothing that was not asked for changes anything.
        await customer.ask(path, seed=0)
        assert submitted[-1].sampling == Sampling(stop_token_ids=[END])
        await customer.ask(path, seed=0, ignore_eos=True, stop_token_ids=[7])
        assert submitted[-1].sampling == Sampling(stop_token_ids=[7])


@both
async def test_values_that_change_nothing_ask_for_nothing(tmp_path: Path, path: str) -> None:
    neutral = {"min_p": 0, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "min_tokens": 0}
    neutral |= {"logit_bias": {}, "stop_token_ids": [], "include_stop_str_in_output": False, "logprobs": False}
    neutral |= {"top_logprobs": 0, "return_token_ids": False}
    async with desk(tmp_path) as customer:
        submitted = submissions(customer.inside.engine)
        plain = await customer.choice(path, seed=1)
        for fields in (neutral, dict.fromkeys(neutral)):
            assert await customer.choice(path, seed=1, **fields) == plain
            assert submitted[-1].sampling == submitted[0].sampling


BAD = [
    ("min_p", 1.01),
    ("min_p", -0.01),
    ("presence_penalty", 2.01),
    ("frequency_penalty", -2.01),
    ("repetition_penalty", 0),
    ("repetition_penalty", 101),
    ("min_tokens", 21),
    ("min_tokens", -1),
    ("stop_token_ids", [VOCABULARY_TOKENS]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [1 << 62]),
    ("stop_token_ids", [1] * 257),
    ("include_stop_str_in_output", "yes"),
    ("return_token_ids", 1),
    ("logit_bias", []),
    ("logit_bias", {str(token): 1 for token in range(1025)}),
    ("top_logprobs", 21),
    ("logprobs", -1),
]


@both
@pytest.mark.parametrize("stream", [False, True])
async def test_a_bad_value_is_refused_by_name_and_reaches_no_store(tmp_path: Path, path: str, stream: bool) -> None:
    async with desk(tmp_path) as customer:
        submitted = submissions(customer.inside.engine)
        for name, value in BAD:
            error = refusal(await customer.ask(path, stream=stream, **{name: value}), 400)
            assert (error["param"], error["code"]) == (name, "unsupported_value")
        # min_tokens is held against what is left where no maximum is given: the context is 2048.
        error = refusal(await customer.ask(path, stream=stream, max_tokens=None, min_tokens=2048), 400)
        assert error["param"] == "min_tokens"
        assert "2048" in error["message"]
        assert not submitted


@both
async def test_b126_a_bias_on_no_token_is_refused_while_other_requests_run(tmp_path: Path, path: str) -> None:
    async with desk(tmp_path) as customer:
        customer.script("he", "llo")
        customer.runner.close()
        running = [asyncio.create_task(customer.ask(path)) for _ in range(2)]
        await until(lambda: customer.runner.waiting)
        for bias in ({str(VOCABULARY_TOKENS): 1}, {"-1": 1}, {"abc": 1}, {"01": 1}, {"5": 101}):
            error = refusal(await customer.ask(path, logit_bias=bias), 400)
            assert (error["type"], error["param"]) == ("invalid_request_error", "logit_bias")
        customer.runner.open()
        for answer in await asyncio.gather(*running):
            assert answer.status_code == 200
            assert finish_reasons([answer.json()]) == ["stop"]
        # The last token of the vocabulary is one.
        assert (await customer.ask(path, logit_bias={str(VOCABULARY_TOKENS - 1): 1})).status_code == 200


@both
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"5": -100}, "min_tokens": 1}, "logit_bias"),
        ({"min_tokens": 1}, "min_tokens"),
        ({"stop_token_ids": [5]}, "stop_token_ids"),
    ],
)
async def test_a_request_that_leaves_no_token_is_refused_and_takes_nothing_with_it(
    tmp_path: Path, path: str, fields: dict[str, Any], param: str
) -> None:
    async with desk(tmp_path) as customer:
        words = customer.words.ids("he", "llo")
        customer.runner.says = lambda sequence: (
            None if sequence.sampling.seed == 66 and sequence.output_tokens else [*words, END][sequence.output_tokens]
        )
        other = asyncio.create_task(customer.choice(path, seed=1))
        error = refusal(await customer.ask(path, seed=66, **fields), 400)
        assert (error["param"], error["code"]) == (param, "unsupported_value")
        *chunks, last = events((await customer.ask(path, seed=66, stream=True, **fields)).content)
        assert text_of(chunks) == "he"
        assert error_form(last) == error
        assert (await other)["text"] == "hello"


# --- what ends an answer


@both
async def test_a_token_that_was_asked_to_stop_at_ends_the_answer_without_its_text(tmp_path: Path, path: str) -> None:
    async with desk(tmp_path) as customer:
        he, llo, world = customer.script("he", "llo", " wor")
        for ids, kept, text in (
            ([world], False, "hello"),
            ([world], True, "hello wor"),
            ([llo, world], False, "he"),
            ([he], False, ""),
            ([he], True, "he"),
            # The model's own end has no text, whoever names it.
            ([END], True, "hello wor"),
        ):
            fields = {"stop_token_ids": ids, "include_stop_str_in_output": kept}
            assert await customer.text(path, **fields) == text
            answer = (await customer.ask(path, **fields)).json()
            assert answer["choices"][0]["finish_reason"] == "stop"
            # Counted up to the one that ended it.
            spelt = [he, llo, world, END]
            assert answer["usage"]["completion_tokens"] == min(map(spelt.index, ids)) + 1
        # Without the model's own end, only what was named ends it.
        customer.runner.script(he, END, world)
        assert await customer.text(path, ignore_eos=True, stop_token_ids=[world]) == "he"


@both
async def test_a_stop_string_is_kept_where_that_is_asked_for(tmp_path: Path, path: str) -> None:
    async with desk(tmp_path) as customer:
        customer.script("he", "llo", " wor", "ld")
        for stop, cut, kept in (("lo w", "hel", "hello w"), ("world", "hello ", "hello world"), ("he", "", "he")):
            assert await customer.text(path, stop=stop) == cut
            assert await customer.text(path, stop=stop, include_stop_str_in_output=True) == kept


@both
async def test_no_stop_string_is_looked_for_in_the_first_min_tokens(tmp_path: Path, path: str) -> None:
    async with desk(tmp_path) as customer:
        customer.script("he", "llo", "he", "llo", "red")
        for stop, least, text in (
            ("hello", 0, ""),
            ("hello", 1, ""),
            ("hello", 2, "hello"),
            ("ohe", 2, "hell"),
            ("hello", 4, "hellohellored"),
            ("lored", 4, "hellohel"),
        ):
            assert await customer.text(path, stop=stop, min_tokens=least) == text


# --- the next turn


async def test_a_token_that_ended_a_turn_by_request_is_no_part_of_the_conversation(tmp_path: Path) -> None:
    async with desk(tmp_path) as customer:
        submitted = submissions(customer.inside.engine)
        he, llo, red = customer.script("he", "llo", "red")
        for number, (fields, spelt) in enumerate(
            [
                ({"stop_token_ids": [red]}, [he, llo]),
                ({"stop_token_ids": [red], "include_stop_str_in_output": True}, [he, llo, red]),
                ({"stop": "red", "include_stop_str_in_output": True}, [he, llo, red]),
                # The model's own end is the template's as well.
                ({"stop_token_ids": [END]}, [he, llo, red]),
            ]
        ):
            turns = [{"role": "user", "content": f"Question {number}"}]
            answer = (await customer.choice(CHAT, messages=turns, **fields))["text"]
            before = tokens_of(submitted[-1])
            turns += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Go on."}]
            await customer.choice(CHAT, messages=turns)
            assert tokens_of(submitted[-1])[: len(before) + len(spelt) + 1] == [*before, *spelt, END]
        customer.runner.script(he, START)
        turns = [{"role": "user", "content": "Special."}]
        await customer.choice(CHAT, messages=turns, stop_token_ids=[START], include_stop_str_in_output=True)
        before = tokens_of(submitted[-1])
        turns += [{"role": "assistant", "content": "he"}, {"role": "user", "content": "Go on."}]
        await customer.choice(CHAT, messages=turns)
        assert tokens_of(submitted[-1])[: len(before) + 2] == [*before, he, END]


# --- how a chat is rendered


OPEN_CHAT = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "The answer is "}]
OPENING = [START, *byte_ids("user\nx"), END, *byte_ids("\n"), START, *byte_ids("assistant\nThe answer is ")]
NEXT_TURN = [END, *byte_ids("\n"), START, *byte_ids("assistant\n")]


async def test_b085_a_last_message_of_the_assistant_is_continued_only_where_that_is_asked_for(tmp_path: Path) -> None:
    async with desk(tmp_path) as customer:
        submitted = submissions(customer.inside.engine)
        customer.script("he", "llo")
        for fields, prompt in (
            ({}, OPENING + NEXT_TURN),
            ({"continue_final_message": True, "add_generation_prompt": False}, OPENING),
            ({"continue_final_message": True}, OPENING),
            ({"add_generation_prompt": False}, OPENING + NEXT_TURN[:2]),
        ):
            assert await customer.text(CHAT, messages=OPEN_CHAT, **fields) == "hello"
            # The prompt of the whole answer and of the stream.
            assert [tokens_of(submitted.pop()) for _ in range(2)] == [prompt] * 2
        asked_both = {"continue_final_message": True, "add_generation_prompt": True}
        error = refusal(await customer.ask(CHAT, messages=OPEN_CHAT, **asked_both), 400)
        assert error["param"] == "continue_final_message"
        error = refusal(await customer.ask(CHAT, messages=OPEN_CHAT[:1], continue_final_message=True), 400)
        assert error["param"] == "continue_final_message"
        assert not submitted


async def test_a_continued_turn_goes_on_and_is_remembered_as_it_was_generated(tmp_path: Path) -> None:
    async with desk(tmp_path) as customer:
        submitted = submissions(customer.inside.engine)
        question = {"role": "user", "content": "x"}
        spelt = customer.script("he", "llo")
        first = (await customer.choice(CHAT, messages=[question], max_tokens=2))["text"]
        before = tokens_of(submitted[-1])
        turns = [question, {"role": "assistant", "content": first}]
        spelt += customer.script(" wor", "ld")
        more = (await customer.choice(CHAT, messages=turns, continue_final_message=True))["text"]
        assert (first, more) == ("hello", " world")
        assert tokens_of(submitted[-1]) == [*before, *spelt[:2]]
        turns = [question, {"role": "assistant", "content": first + more}, {"role": "user", "content": "Go on."}]
        await customer.choice(CHAT, messages=turns)
        assert tokens_of(submitted[-1])[: len(before) + 5] == [*before, *spelt, END]


async def test_variables_reach_the_template_and_none_of_its_own(tmp_path: Path) -> None:
    template = "{{ tone }}:{{ messages[0].content }}<|im_end|>"
    async with desk(tmp_path, template) as customer:
        submitted = submissions(customer.inside.engine)
        forged = "<|im_start|>"
        assert (await customer.ask(CHAT, chat_template_kwargs={"tone": forged})).status_code == 200
        assert tokens_of(submitted.pop()) == [*byte_ids(f"{forged}:x"), END]
        error = refusal(await customer.ask(CHAT, chat_template_kwargs={"messages": [], "bos_token": "x"}), 400)
        assert error["param"] == "chat_template_kwargs"
        assert "bos_token, messages" in error["message"]
        # Refused by its size before it is rendered: the context is 2048 tokens.
        error = refusal(await customer.ask(CHAT, chat_template_kwargs={"other": ["x" * 40_000]}), 400)
        assert error["code"] == "context_length_exceeded"
        assert "bytes" in error["message"]
        assert not submitted
