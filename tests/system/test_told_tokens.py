"""What an answer tells of its tokens: log probabilities and ids, whole and streamed alike."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.cachestore.serving import submissions
from tests.system.scripted import CHAT, END, START, TEXT, WORDS, Desk, byte_ids, desk, tokens_of
from tests.system.wire import streamed, text_of

pytestmark = pytest.mark.anyio

both = pytest.mark.parametrize("path", [CHAT, TEXT])



def told(path: str, choice: dict[str, Any]) -> list[tuple[str, float, list[tuple[str, float]]]]:
    """The entries of a choice or a chunk, in one form: token, its logarithm, the likeliest."""
    logprobs = choice["logprobs"]
    if logprobs is None:
        return []
    if path == CHAT:
        assert logprobs["refusal"] is None
        entries = []
        for entry in logprobs["content"]:
            for each in (entry, *entry["top_logprobs"]):
                assert bytes(each["bytes"]).decode("utf-8", "replace") == each["token"]
            entries.append(
                (entry["token"], entry["logprob"], [(e["token"], e["logprob"]) for e in entry["top_logprobs"]])
            )
        return entries
    assert len(logprobs["text_offset"]) == len(logprobs["tokens"])
    top = [list(likeliest.items()) for likeliest in logprobs["top_logprobs"]]
    return list(zip(logprobs["tokens"], logprobs["token_logprobs"], top, strict=True))


def asked(path: str, top: int = 2) -> dict[str, Any]:
    telling = {"logprobs": True, "top_logprobs": top} if path == CHAT else {"logprobs": top}
    return {**telling, "return_token_ids": True}


async def both_ways(customer: Desk, path: str, **fields: Any) -> tuple[str, list[int], list[Any]]:
    """Text, token ids and entries of an answer, which a stream must tell alike, each with its own text."""
    whole = await customer.choice(path, **asked(path), **fields)
    chunks = streamed(await customer.ask(path, **asked(path), **fields, stream=True))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    ids = [token for choice in choices for token in choice["token_ids"]]
    entries = [entry for choice in choices for entry in told(path, choice)]
    assert (text_of(chunks), ids, entries) == (whole["text"], whole["token_ids"], told(path, whole))
    assert len(ids) == len(entries)
    for choice in choices:
        # A chunk without tokens has no entries at all, and one with text never lags behind it.
        assert len(choice["token_ids"]) == len(told(path, choice))
        assert (choice["logprobs"] is None) == (not choice["token_ids"])
    if path == TEXT:
        offsets = [offset for choice in choices if choice["logprobs"] for offset in choice["logprobs"]["text_offset"]]
        assert offsets == whole["logprobs"]["text_offset"]
    return whole["text"], ids, entries


@both
async def test_each_token_is_told_with_the_likeliest_at_its_place(tmp_path: Path, path: str) -> None:
    async with desk(tmp_path) as customer:
        tokens = customer.script("he", b"\xe4\xbd", b"\xa0!", "ld", "red")
        text, ids, entries = await both_ways(customer, path)
        assert (text, ids) == ("he\u4f60!ldred", tokens)
        assert [entry[0] for entry in entries] == ["he", "\ufffd", "\ufffd!", "ld", "red"]
        for _, logprob, likeliest in entries:
            assert logprob == -0.5
            assert [value for _, value in likeliest] == [-0.5, -1.5]
        # What is likelier comes first; a token is its own likeliest here, and special ones read as they are spelt.
        assert entries[0][2] == [("he", -0.5), ("llo", -1.5)]
        # None at all of the likeliest, and no log probabilities.
        whole = await customer.choice(path, **asked(path, 0))
        assert [entry[2] for entry in told(path, whole)] == (
            [[]] * 5 if path == CHAT else [[(entry[0], -0.5)] for entry in entries]
        )
        assert (await customer.choice(path))["logprobs"] is None


async def test_a_special_token_reads_as_it_is_spelt_and_adds_no_text(tmp_path: Path) -> None:
    async with desk(tmp_path) as customer:
        he, llo = customer.words.ids("he", "llo")
        customer.runner.script(he, START, llo, START)
        for path in (CHAT, TEXT):
            text, ids, entries = await both_ways(customer, path, max_tokens=4)
            assert (text, ids) == ("hello", [he, START, llo, START])
            assert [entry[0] for entry in entries] == ["he", "<|im_start|>", "llo", "<|im_start|>"]
        content = (await customer.choice(CHAT, **asked(CHAT), max_tokens=2))["logprobs"]["content"]
        assert bytes(content[1]["bytes"]) == b"<|im_start|>"
        offsets = (await customer.choice(TEXT, **asked(TEXT), max_tokens=4))["logprobs"]["text_offset"]
        assert offsets == [0, 2, 2, 5]


@both
@pytest.mark.parametrize(
    ("stop", "fields", "text", "count"),
    [
        # Within the last token: it counts, as some of its text is returned.
        ("orld", {}, "hello w", 3),
        ("STOP", {}, "hello world ", 5),
        # At its start: it does not.
        (" wor", {}, "hello", 2),
        ("hello", {}, "", 0),
        (" wor", {"include_stop_str_in_output": True}, "hello wor", 3),
        ("orl", {"include_stop_str_in_output": True}, "hello worl", 4),
        (None, {}, "hello world STOP", 5),
        (None, {"max_tokens": 3}, "hello wor", 3),
    ],
)
async def test_b108_entries_and_ids_are_those_of_the_returned_text(
    tmp_path: Path, path: str, stop: str | None, fields: dict[str, Any], text: str, count: int
) -> None:
    async with desk(tmp_path) as customer:
        tokens = customer.script("he", "llo", " wor", "ld", " STOP")
        told_text, ids, entries = await both_ways(customer, path, stop=stop, **fields)
        assert (told_text, ids, len(entries)) == (text, tokens[:count], count)


async def test_b108_whatever_is_generated_both_modes_tell_the_same(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    async with desk(tmp_path) as customer:
        vocabulary = [*customer.words.ids(*WORDS), *byte_ids("ab"), START]
        for round_ in range(12):
            customer.runner.script(*draw.choices(vocabulary, k=draw.randrange(1, 15)))
            fields = {
                "stop": draw.sample(["lo", "STOP", "hered", "\ufffd", "!", "ab"], k=2),
                "stop_token_ids": draw.sample(vocabulary, k=draw.randrange(2)),
                "include_stop_str_in_output": draw.random() < 0.5,
                "min_tokens": draw.randrange(4),
                "max_tokens": draw.randrange(4, 16),
            }
            alike = [await both_ways(customer, path, **fields) for path in (CHAT, TEXT)]
            assert alike[0][:2] == alike[1][:2], (round_, fields)


@both
@pytest.mark.parametrize("stream", [False, True])
async def test_the_ids_of_the_prompt_are_told_where_they_are_asked_for(
    tmp_path: Path, path: str, stream: bool
) -> None:
    async with desk(tmp_path) as customer:
        submitted = submissions(customer.inside.engine)
        customer.script("he")
        prompts = {"prompt": ["x", "yy"]} if path == TEXT else {}
        answer = await customer.ask(path, n=2, stream=stream, return_token_ids=True, **prompts)
        sent = {tuple(tokens_of(submit)) for submit in submitted}
        chunks = streamed(answer) if stream else [answer.json()]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert {choice["index"] for choice in choices} == set(range(4 if path == TEXT else 2))
        if path == CHAT:
            named = [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk]
            # Once for a whole answer, with the first chunk of each choice in a stream.
            assert named == [list(*sent)] * (2 if stream else 1)
            assert "prompt_token_ids" in chunks[0]
        else:
            named = [(c["index"], c["prompt_token_ids"]) for c in choices if "prompt_token_ids" in c]
            x, y = byte_ids("x"), byte_ids("yy")
            assert sorted(named) == [(0, x), (1, x), (2, y), (3, y)]
        assert all("token_ids" in choice for choice in choices)
        # Nobody else is told.
        plain = await customer.ask(path, stream=stream)
        assert b"token_ids" not in plain.content


@both
async def test_every_choice_has_entries_of_its_own(tmp_path: Path, path: str) -> None:
    async with desk(tmp_path) as customer:
        ids = customer.words.ids("he", "llo", "red")
        customer.runner.says = lambda sequence: [ids[sequence.sampling.seed % 3], END][sequence.output_tokens]
        answer = (await customer.ask(path, n=3, seed=0, **asked(path))).json()
        for choice in answer["choices"]:
            assert choice["token_ids"] == [ids[choice["index"]]]
            ((token, _, _),) = told(path, choice)
            assert token == (choice["text"] if path == TEXT else choice["message"]["content"])
