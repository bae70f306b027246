"""Sampling seen from the engine: seeds, company, preemption, and requests that leave no token to sample."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cachestore import sampling as sampling_module
from cachestore.protocol import ProtocolError, Sampling
from tests.cachestore.sampling_requests import LogitsRunner, Request, requests, sample_together
from tests.cachestore.support import Answer, Harness

VOCABULARY_TOKENS = 64
# Flat enough that every draw could go another way.
LOGITS = torch.linspace(1.0, -1.0, VOCABULARY_TOKENS)[torch.randperm(64, generator=torch.Generator().manual_seed(1))]
SEEDED = Sampling(temperature=0.9, seed=1234)


def fixed_store(logits: torch.Tensor = LOGITS, **options: Any) -> Harness:
    return Harness(LogitsRunner(lambda _: logits), vocabulary_tokens=len(logits), **options)


# --- company

MOST_ROWS, WIDE_TOKENS = 5, 701


def _wide_logits() -> torch.Tensor:
    """Rows as they can be: with ties, excluded tokens, nothing at all, and what is no number."""
    logits = torch.randn(6, WIDE_TOKENS, generator=torch.Generator().manual_seed(2))
    logits[1] = (logits[1] * 4).round() / 2
    logits[2, ::2] = -math.inf
    logits[3] = -math.inf
    logits[4, 5] = math.nan
    logits[5] *= 12
    return logits


WIDE_LOGITS = _wide_logits()


@given(
    rows=st.lists(
        st.tuples(requests(WIDE_TOKENS), st.integers(0, len(WIDE_LOGITS) - 1)), min_size=1, max_size=MOST_ROWS
    )
)
def test_a_row_is_sampled_alike_alone_and_in_any_company(rows: list[tuple[Request, int]]) -> None:
    """Tokens and log probabilities, to the last bit."""
    logits = torch.stack([WIDE_LOGITS[kind] for _, kind in rows])
    together = sample_together(logits, [request for request, _ in rows])
    assert together == [sample_together(WIDE_LOGITS[kind : kind + 1], [request])[0] for request, kind in rows]


@given(rows=st.lists(requests(WIDE_TOKENS), min_size=1, max_size=MOST_ROWS))
def test_sampling_leaves_the_logits_as_they_are(rows: list[Request]) -> None:
    # Of all kinds but the one that isn't equal to itself.
    logits = WIDE_LOGITS[[3, 0, 1, 2, 5][: len(rows)]]
    before = logits.clone()
    sample_together(logits, rows)
    assert torch.equal(logits, before)


def test_b138_a_greedy_row_with_excluded_tokens_beside_a_drawn_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cumulative = _watch_cumulative(monkeypatch)
    masked = LOGITS.clone()
    masked[LOGITS.argsort(descending=True)[:10]] = -math.inf
    greedy, drawn = Request([1], 1, Sampling(temperature=0, logprobs=3)), Request([1], 1, Sampling(temperature=0.8))
    for order in ([greedy, drawn], [drawn, greedy]):
        logits = torch.stack([masked if request is greedy else LOGITS for request in order])
        samples = dict(zip(map(id, order), sample_together(logits, order), strict=True))
        assert samples[id(greedy)].token == masked.argmax()
        assert samples[id(drawn)] == sample_together(LOGITS[None], [drawn])[0]
        logprobs = samples[id(greedy)].logprobs
        assert logprobs
        assert all(math.isfinite(value) for value in (logprobs.logprob, *(value for _, value in logprobs.top)))
    assert all(part.isfinite().all() for part in cumulative)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("nothing", [-math.inf, math.nan, math.inf])
def test_a_row_without_a_token_leaves_every_probability_finite(
    monkeypatch: pytest.MonkeyPatch, nothing: float, temperature: float
) -> None:
    cumulative = _watch_cumulative(monkeypatch)
    logits = LOGITS.clone().repeat(2, 1)
    logits[0, :] = nothing
    for filtered in ({}, {"top_p": 0.5, "min_p": 0.1}):
        sampling = Sampling(temperature=temperature, logprobs=2, **filtered)  # type: ignore[arg-type]
        none, beside = sample_together(logits, [Request([1], 1, sampling), Request([1], 1, SEEDED)])
        assert (none.token, none.logprobs) == (None, None)
        assert [beside] == sample_together(LOGITS[None], [Request([1], 1, SEEDED)])
    assert cumulative
    assert all(part.isfinite().all() for part in cumulative)


def test_one_logit_that_is_no_number_leaves_no_token_even_where_it_would_be_excluded() -> None:
    for place in (0, 7, 63):
        logits = LOGITS.clone()
        logits[place] = math.nan
        for sampling in (Sampling(temperature=0), SEEDED, Sampling(stop_token_ids=[place], min_tokens=3)):
            assert sample_together(logits[None], [Request([1], 1, sampling)])[0].token is None


def _watch_cumulative(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    draw = sampling_module._draw

    def watched(cumulative: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        seen.append(cumulative)
        return draw(cumulative, uniform)

    monkeypatch.setattr(sampling_module, "_draw", watched)
    return seen


# --- seeds


@pytest.mark.parametrize("companion", [None, "unseeded", "seed 9"])
def test_b139_a_seed_gives_the_same_tokens_in_any_company(companion: str | None) -> None:
    expected = fixed_store().complete([1, 2, 3], max_tokens=20, sampling=SEEDED).tokens
    assert len(set(expected)) > 5
    for run in range(3):
        store = fixed_store()
        if companion:
            # Who asks for no seed is given 64 random bits.
            seed = 9 if companion == "seed 9" else 0x9E3779B97F4A7C15 * (run + 1) % (1 << 64)
            store.submit([4, 5], max_tokens=30, sampling=Sampling(temperature=0.9, seed=seed))
        seeded = store.submit([1, 2, 3], max_tokens=20, sampling=SEEDED)
        store.run(seeded)
        assert seeded.tokens == expected


def test_b140_a_seeded_request_is_answered_alike_every_time() -> None:
    store = fixed_store()
    answers = [store.complete([1, 2, 3], max_tokens=20, sampling=SEEDED).tokens for _ in range(3)]
    assert answers[0] == answers[1] == answers[2]
    assert len(set(answers[0])) > 5
    other = store.complete([1, 2, 3], max_tokens=20, sampling=Sampling(temperature=0.9, seed=1235))
    assert other.tokens != answers[0]


PENALISED = {
    "temperature": 0.9,
    "top_p": 0.9,
    "presence_penalty": 0.7,
    "frequency_penalty": 0.9,
    "repetition_penalty": 1.4,
    "logit_bias": [(3, 2.0), (5, -4.0)],
    "stop_token_ids": [3],
    "min_tokens": 30,
    "logprobs": 2,
}


def test_a_preemption_changes_no_token_and_no_logprob() -> None:
    """What penalties count is of the whole answer, before and after."""

    def answers(blocks: int) -> tuple[list[Answer], int]:
        store = fixed_store(blocks=blocks, block_tokens=4)
        pending = [
            store.submit([seed, 7, 7], max_tokens=30, sampling=Sampling(seed=seed, **PENALISED))  # type: ignore[arg-type]
            for seed in range(4)
        ]
        store.run(*pending)
        return pending, store.engine.scheduler.preemptions

    (roomy, none), (tight, preemptions) = answers(64), answers(12)
    assert none == 0
    assert preemptions > 3
    assert [answer.tokens for answer in tight] == [answer.tokens for answer in roomy]
    assert [answer.logprobs for answer in tight] == [answer.logprobs for answer in roomy]
    assert all(len(answer.tokens) == len(answer.logprobs) == 30 for answer in tight)


# --- penalties and stops over a whole answer


def test_a_penalty_counts_what_the_answer_has_so_far() -> None:
    logits = torch.tensor([5.0, 4.5, 4.0, 0.0])

    def answer(**asked: Any) -> list[int]:
        return fixed_store(logits).complete([2], max_tokens=6, sampling=Sampling(temperature=0, **asked)).tokens

    assert answer() == [0, 0, 0, 0, 0, 0]
    # 5, 4.5 and 4 lose 2 once each, and then the first is the best again.
    assert answer(presence_penalty=2.0) == [0, 1, 2, 0, 0, 0]
    # 5 4.5 4, 4 4.5 4, 4 3.5 4, 3 3.5 4, 3 3.5 3, 3 2.5 3
    assert answer(frequency_penalty=1.0) == [0, 1, 0, 2, 1, 0]
    # The prompt's 2 counts from the start: 5 4.5 2, 2.5 4.5 2, 2.5 2.25 2 and no more.
    assert answer(repetition_penalty=2.0) == [0, 1, 0, 0, 0, 0]


def test_no_stop_token_comes_before_min_tokens_and_it_ends_the_answer_after() -> None:
    logits = torch.tensor([5.0, 9.0, 8.0, 0.0])
    for temperature in (0.0, 0.01):
        sampling = Sampling(temperature=temperature, stop_token_ids=[1, 2], min_tokens=3)
        answer = fixed_store(logits).complete([2], max_tokens=9, sampling=sampling)
        assert (answer.tokens, answer.reason) == ([0, 0, 0, 1], "stop")


# --- what can't be sampled


def test_b126_a_token_outside_the_vocabulary_is_refused_and_nobody_notices() -> None:
    store = fixed_store()
    running = [store.submit([word, 2, 3], max_tokens=8, sampling=SEEDED) for word in (1, 2)]
    store.step(2)
    for asked in (
        {"logit_bias": [(VOCABULARY_TOKENS, 1.0)]},
        {"logit_bias": [(0, 1.0), ((1 << 32) - 1, 1.0)]},
        {"stop_token_ids": [0, VOCABULARY_TOKENS]},
        {"logit_bias": [(12, 1.0), (3, 1.0), (12, -1.0)]},
    ):
        with pytest.raises(ProtocolError, match=r"outside the vocabulary|biased twice") as raised:
            store.submit([1, 2, 3], sampling=Sampling(**asked))  # type: ignore[arg-type]
        assert not any(character.isdigit() for character in str(raised.value))
    store.answers = {(answer.connection, answer.request): answer for answer in running}
    store.run(*running)
    assert [answer.reason for answer in running] == ["length", "length"]
    assert {tuple(answer.tokens) for answer in running} == {
        tuple(fixed_store().complete([1, 2, 3], max_tokens=8, sampling=SEEDED).tokens)
    }
    last = Sampling(temperature=0, logit_bias=[(VOCABULARY_TOKENS - 1, 100.0)], stop_token_ids=[VOCABULARY_TOKENS - 1])
    assert store.complete([1], sampling=last).tokens == [VOCABULARY_TOKENS - 1]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_b141_a_request_that_leaves_no_token_ends_alone(temperature: float) -> None:
    store = fixed_store(LOGITS[:8])
    everything = Sampling(temperature=temperature, stop_token_ids=list(range(8)), min_tokens=2, logprobs=1)
    first = store.submit([1, 2, 3], max_tokens=8, sampling=SEEDED)
    store.step()
    masked = store.submit([1, 2, 3, 4, 5], max_tokens=8, sampling=everything)
    store.step()
    assert masked.finished
    assert (masked.finished.reason, masked.finished.error, masked.tokens) == ("error", "no_token", [])
    assert masked.finished.counts.output_tokens == 0
    assert not first.over
    store.seal(masked)
    store.run(first)
    alone = fixed_store(LOGITS[:8]).complete([1, 2, 3], max_tokens=8, sampling=SEEDED)
    assert (first.reason, first.tokens) == ("length", alone.tokens)


def test_a_request_whose_logits_turn_to_nan_keeps_what_it_has_and_ends() -> None:
    def logits_of(sequence: Any) -> torch.Tensor:
        return LOGITS if sequence.output_tokens < 3 or sequence.tokens[0] == 1 else torch.full_like(LOGITS, math.nan)

    store = Harness(LogitsRunner(logits_of), vocabulary_tokens=VOCABULARY_TOKENS)
    sound, broken = (store.submit([word, 2], max_tokens=8, sampling=SEEDED) for word in (1, 2))
    store.run(sound, broken)
    assert (broken.reason, len(broken.tokens)) == ("error", 3)
    assert (sound.reason, len(sound.tokens)) == ("length", 8)
    assert broken.tokens == sound.tokens[:3]
