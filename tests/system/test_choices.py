"""Several prompts and several choices in one request: what the store is asked, and what the client is told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cachestore.protocol import Finished, Started, Submit, Tokens
from gateway.prompt.tokens import Prompt, Tokenizer
from tests.cachestore.serving import Arrivals, submissions
from tests.system.in_process import Customer, InProcess, in_process, until
from tests.system.scripted import (
    CHAT,
    TEXT,
    ScriptedRunner,
    Words,
    byte_ids,
    events_of,
    idle,
    tokens_of,
)
from tests.system.wire import DONE, error_form, events, finish_reasons, refusal, streamed

pytestmark = pytest.mark.anyio

STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


@asynccontextmanager
async def letters(folder: Path, **limited: int) -> AsyncIterator[tuple[InProcess, ScriptedRunner, Customer]]:
    """A model that answers with letters which its seed decides: same seed, same text."""
    runner = ScriptedRunner()
    runner.says = lambda sequence: byte_ids("abcdefgh")[(sequence.sampling.seed + sequence.output_tokens) % 8]
    async with in_process(folder, Words.write(folder / "model").directory, runner=runner, **limited) as inside:
        yield inside, runner, await inside.customer("a")
        await idle(inside)


async def ask(inside: InProcess, customer: Customer, path: str = TEXT, **fields: Any) -> Any:
    body = {"model": inside.model, "max_tokens": 3} | fields
    return await inside.http.post(path, json=body, headers=customer.headers)


def texts(answer: Any) -> list[str]:
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]


def joined(chunks: list[Any]) -> dict[int, str]:
    """The text of each index of a stream."""
    found: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        found[choice["index"]] = found.get(choice["index"], "") + text
    return found


def seeds(submitted: list[Submit]) -> list[int]:
    return [submit.sampling.seed for submit in submitted]


async def test_the_first_choice_computes_the_prompt_and_the_others_adopt_its_blocks(tmp_path: Path) -> None:
    # The prompt takes two steps, and the second has room for others.
    async with letters(tmp_path, step_tokens=64, max_running=64) as (inside, runner, customer):
        runner.close()
        said, submitted = events_of(inside), Arrivals(inside.store).of(Submit)
        asked = asyncio.create_task(ask(inside, customer, prompt=byte_ids("x" * 104), n=4, seed=0))
        # All of them were asked for when the first has no token yet.
        await until(lambda: len(submitted) == 4 and runner.waiting)
        assert seeds(submitted) == [0, 1, 2, 3]
        assert not any(isinstance(event, Tokens) for event in said)
        runner.open()
        usage = (await asked).json()["usage"]
        started = [event.cached_tokens for event in said if isinstance(event, Started)]
        assert started == [0, 96, 96, 96]
        # The prompt once, of the others the 8 tokens behind the last whole block; all sampled tokens but the last.
        assert inside.engine.computed_tokens == 104 + 3 * 8 + 4 * 2
        assert usage["prompt_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 96}
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (104, 12, 116)
        again = (await ask(inside, customer, prompt=byte_ids("x" * 104), n=4)).json()["usage"]
        assert again["prompt_tokens_details"] == {"cached_tokens": 96, "cache_write_tokens": 0}


async def test_waiting_for_the_first_choice_is_no_waiting_for_room(tmp_path: Path) -> None:
    async with letters(tmp_path, max_running=16, step_tokens=16) as (inside, runner, customer):
        runner.close()
        submitted = Arrivals(inside.store).of(Submit)
        asked = asyncio.create_task(ask(inside, customer, prompt=byte_ids("x" * 40), n=4))
        await until(lambda: len(submitted) == 4 and runner.waiting)
        # Longer than any tenant's requests may wait.
        inside.engine._clock_ns = lambda: time.monotonic_ns() + 3_600_000_000_000
        runner.open()
        assert len(texts(await asked)) == 4


async def test_usage_of_several_prompts_counts_each_once(tmp_path: Path) -> None:
    prompts = [byte_ids("x" * 40), byte_ids("y" * 20), byte_ids("z")]
    async with letters(tmp_path) as (inside, _, customer):
        whole = (await ask(inside, customer, prompt=prompts, n=2, stop="never")).json()["usage"]
        assert (whole["prompt_tokens"], whole["completion_tokens"], whole["total_tokens"]) == (61, 18, 79)
        assert whole["prompt_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 48}
        *_, last = streamed(await ask(inside, customer, prompt=prompts, n=2, **STREAM))
        assert last["choices"] == []
        assert last["usage"] == whole | {"prompt_tokens_details": {"cached_tokens": 48, "cache_write_tokens": 0}}


async def test_each_choice_counts_up_to_the_token_that_completed_its_stop_string(tmp_path: Path) -> None:
    async with letters(tmp_path) as (inside, _, customer):
        # Of seed 0: abcdefgh, of seed 1: bcdefgha, of seed 2: cdefghab.
        answer = await ask(inside, customer, prompt="x", n=3, seed=0, max_tokens=6, stop=["de", "h"])
        assert texts(answer) == ["abc", "bc", "c"]
        assert [choice["finish_reason"] for choice in answer.json()["choices"]] == ["stop"] * 3
        assert answer.json()["usage"]["completion_tokens"] == 5 + 4 + 3


@pytest.mark.parametrize(("seed", "first"), [(7, 7), (0, 0), (-1, (1 << 64) - 1), (-2, (1 << 64) - 2)])
async def test_choice_i_samples_with_seed_plus_i(tmp_path: Path, seed: int, first: int) -> None:
    async with letters(tmp_path) as (inside, _, customer):
        submitted = submissions(inside.engine)
        answer = await ask(inside, customer, prompt=["x", "y"], n=3, seed=seed)
        expected = [(first + choice) % (1 << 64) for choice in range(3)]
        by_prompt = {word: sorted(seeds([s for s in submitted if tokens_of(s) == byte_ids(word)])) for word in "xy"}
        assert by_prompt == dict.fromkeys("xy", sorted(expected))
        # And each index has the text of its own seed.
        alone = [texts(await ask(inside, customer, prompt="x", seed=each))[0] for each in (seed, seed + 1, seed + 2)]
        assert texts(answer) == alone * 2


async def test_without_a_seed_each_request_draws_one(tmp_path: Path) -> None:
    async with letters(tmp_path) as (inside, _, customer):
        submitted = submissions(inside.engine)
        for _ in range(2):
            await ask(inside, customer, prompt="x", n=2)
        first, second = seeds(submitted[:2]), seeds(submitted[2:])
        for low, high in (sorted(first), sorted(second)):
            assert high - low == 1
        assert not set(first) & set(second)


@pytest.mark.parametrize(("path", "prompt"), [(TEXT, {"prompt": ["x", "y"]}), (CHAT, None)])
async def test_a_stream_says_the_same_by_index(tmp_path: Path, path: str, prompt: Any) -> None:
    fields = prompt or {"messages": [{"role": "user", "content": "x"}]}
    async with letters(tmp_path) as (inside, _, customer):
        whole = await ask(inside, customer, path, n=3, seed=5, **fields)
        *chunks, usage = streamed(await ask(inside, customer, path, n=3, seed=5, **fields, **STREAM))
        said = texts(whole)
        assert len(set(said)) == 3
        assert joined(chunks) == dict(enumerate(said))
        assert finish_reasons(chunks).count("length") == len(said)
        assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in [*chunks, usage]}) == 1
        counted = ("prompt_tokens", "completion_tokens", "total_tokens")
        assert [usage["usage"][name] for name in counted] == [whole.json()["usage"][name] for name in counted]


async def test_one_request_is_at_most_128_submissions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with letters(tmp_path) as (inside, _, customer):
        submitted, tokenised = submissions(inside.engine), []
        completion = Tokenizer.completion

        def noted(self: Tokenizer, text: str) -> Prompt:
            tokenised.append(text)
            return completion(self, text)

        monkeypatch.setattr(Tokenizer, "completion", noted)
        for fields in ({"prompt": ["x"] * 43, "n": 3}, {"prompt": ["x"] * 129}, {"prompt": "x", "n": 129}):
            error = refusal(await ask(inside, customer, **fields), 400)
            assert error["param"] == "n"
            assert "128" in error["message"]
        messages = [{"role": "user", "content": "x"}]
        assert refusal(await ask(inside, customer, CHAT, messages=messages, n=129), 400)["param"] == "n"
        assert not submitted
        assert not tokenised
        for fields in ({"prompt": ["x"] * 64, "n": 2}, {"prompt": "x", "n": 128}):
            answer = await ask(inside, customer, **fields, seed=0)
            assert len(texts(answer)) == 128
        assert (len(submitted), len(tokenised)) == (256, 64 + 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_one_prompt_that_is_refused_refuses_the_request_before_anything_is_sent(
    tmp_path: Path, stream: bool
) -> None:
    async with letters(tmp_path) as (inside, _, customer):
        fields = {"prompt": ["x", "y" * 2047], "n": 2, "max_tokens": 3, "stream": stream}
        error = refusal(await ask(inside, customer, **fields), 400)
        assert error["code"] == "context_length_exceeded"
        assert "2047" in error["message"]
        await idle(inside)
        # The positive control: one token less of each is served.
        assert (await ask(inside, customer, **(fields | {"prompt": ["x", "y" * 2045]}))).status_code == 200


@pytest.mark.parametrize("choices", [1, 2, 3])
async def test_one_choice_that_fails_fails_the_request_and_ends_the_others(tmp_path: Path, choices: int) -> None:
    """The step in which a second choice computes its prompt fails with all that run in it."""
    async with letters(tmp_path) as (inside, runner, customer):
        launch, steps = runner.launch, 0

        def failing(rows: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps == 3:
                runner.fault = RuntimeError("planted")
            if steps > 3:
                # Whoever did not run in that step is told to stop before it comes to its own end.
                time.sleep(0.002)
            return launch(rows)

        runner.launch = failing  # type: ignore[method-assign]
        said = events_of(inside)
        error = refusal(await ask(inside, customer, prompt="x", n=choices, max_tokens=1900), 500)
        assert error["type"] == "server_error"
        assert "planted" not in error["message"]
        await idle(inside)
        assert all(event.reason in ("error", "aborted") for event in said if isinstance(event, Finished))
        steps = 0
        answer = await ask(inside, customer, prompt="x", n=choices, max_tokens=60, **STREAM)
        *chunks, last = events(answer.content)
        assert last != DONE
        assert error_form(last)["type"] == "server_error"
        assert joined(chunks)[0]
        assert set(finish_reasons(chunks)) == {None}
        await idle(inside)
        # The engine goes on.
        assert len(texts(await ask(inside, customer, prompt="x", n=choices))) == choices


async def test_the_four_forms_of_a_prompt(tmp_path: Path) -> None:
    async with letters(tmp_path) as (inside, _, customer):
        submitted = submissions(inside.engine)
        one, two = byte_ids("one"), byte_ids("second")
        for prompt, expected in (
            ("one", [one]),
            (["one", "second"], [one, two]),
            (one, [one]),
            ([one, two], [one, two]),
        ):
            answer = await ask(inside, customer, prompt=prompt)
            assert len(texts(answer)) == len(expected)
            assert answer.json()["usage"]["prompt_tokens"] == sum(map(len, expected))
            assert sorted(map(tokens_of, submitted)) == sorted(expected)
            submitted.clear()


async def test_echo_and_suffix_are_refused_by_name(tmp_path: Path) -> None:
    async with letters(tmp_path) as (inside, _, customer):
        submitted = submissions(inside.engine)
        for field, value in (("echo", True), ("suffix", "x")):
            error = refusal(await ask(inside, customer, prompt="x", **{field: value}), 400)
            assert error["param"] == field
        assert not submitted
        # What changes nothing is no reason to refuse.
        assert texts(await ask(inside, customer, prompt="x", echo=False, suffix=None))


async def test_one_model_is_found_by_its_name_and_no_other(tmp_path: Path) -> None:
    async with letters(tmp_path) as (inside, _, customer):
        (listed,) = (await inside.http.get("/v1/models", headers=customer.headers)).json()["data"]
        found = await inside.http.get(f"/v1/models/{inside.model}", headers=customer.headers)
        assert found.status_code == 200
        assert found.json() == listed
        assert listed == {"id": inside.model, "created": listed["created"], "owned_by": "saltern", "object": "model"}
        for other in ("gpt-4", "gpt/4", inside.model.upper(), f"{inside.model}/x", "%2e%2e"):
            missing = await inside.http.get(f"/v1/models/{other}", headers=customer.headers)
            error = refusal(missing, 404)
            assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert (await inside.http.get(f"/v1/models/{inside.model}")).status_code == 401
