"""Log probabilities: of the model's own logits, whatever the request does to them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cachestore.protocol import Sampling, TokenLogprobs
from cachestore.sampling import LEAST_LOGPROB, sample
from cachestore.sampling_rows import SamplingRows
from tests.cachestore.support import make_sequence

CPU = torch.device("cpu")


def told(logits: torch.Tensor, *rows: Sampling) -> list[TokenLogprobs | None]:
    sequences = [make_sequence([1, 2, 2], sampling) for sampling in rows]
    return [sampled.logprobs for sampled in sample(logits, SamplingRows.of(sequences, CPU)).collect()]


def one(logits: list[float], **asked: Any) -> TokenLogprobs:
    (logprobs,) = told(torch.tensor([logits]), Sampling(**{"temperature": 0, "logprobs": 0} | asked))
    assert logprobs
    return logprobs


def test_logprobs_are_the_logarithms_of_the_models_probabilities() -> None:
    logits = [0.0, 2.0, -1.0, 1.0]
    total = sum(math.exp(logit) for logit in logits)
    logprobs = one(logits, logprobs=3)
    assert logprobs.logprob == pytest.approx(2.0 - math.log(total), abs=1e-12)
    assert [token for token, _ in logprobs.top] == [1, 3, 0]
    assert [value for _, value in logprobs.top] == pytest.approx(
        [logit - math.log(total) for logit in (2.0, 1.0, 0.0)], abs=1e-12
    )


@pytest.mark.parametrize(
    "change",
    [
        {"logit_bias": [(1, -100.0)]},
        {"repetition_penalty": 5.0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"stop_token_ids": [1], "min_tokens": 9},
        {"temperature": 0.1, "top_k": 1, "top_p": 0.1, "min_p": 0.9},
    ],
)
def test_nothing_that_a_request_asks_for_changes_the_logprobs(change: dict[str, Any]) -> None:
    logits = [0.0, 2.0, 1.5, 1.0]
    plain, changed = one(logits, logprobs=4), one(logits, logprobs=4, **change)
    assert changed.top == plain.top
    assert changed.logprob in [value for _, value in plain.top]


def test_the_sampled_token_is_told_of_though_it_is_not_among_the_likeliest() -> None:
    forced = one([0.0, 2.0, 1.0, -5.0], logprobs=2, logit_bias=[(3, 100.0)])
    assert [token for token, _ in forced.top] == [1, 2]
    assert forced.logprob == pytest.approx(one([0.0, 2.0, 1.0, -5.0], logprobs=4).top[3][1])


@pytest.mark.parametrize("asked", [0, 1, 4, 5, 20])
def test_as_many_of_the_likeliest_are_told_as_asked_or_as_there_are(asked: int) -> None:
    logprobs = one([0.0, -math.inf, 3.0, -math.inf, 1.0], logprobs=asked)
    assert [token for token, _ in logprobs.top] == [2, 4, 0, 1, 3][:asked]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_equally_likely_tokens_the_lower_id_comes_first(dtype: torch.dtype) -> None:
    logits = torch.tensor([[-0.0, 5.0, 0.0, 7.0, 5.0, -1.0, 5.0, -1.0] * 200], dtype=dtype)
    order = sorted(range(1600), key=lambda token: (-logits[0, token].item(), token))
    for count in (1, 3, 20):
        (logprobs,) = told(logits, Sampling(temperature=0, logprobs=count))
        assert logprobs
        assert [token for token, _ in logprobs.top] == order[:count]


def test_likeliest_tokens_are_those_of_a_plain_sort_for_every_kind_of_number() -> None:
    numbers = [0.0, -0.0, 1e-45, -1e-45, 1.0, -1.0, 3e38, -3e38, 1.0000001, -1.0000001, -math.inf, 1e-38]
    for shift in range(len(numbers)):
        logits = torch.tensor([numbers[shift:] + numbers[:shift]])
        (logprobs,) = told(logits, Sampling(temperature=0, logprobs=12))
        assert logprobs
        order = sorted(range(12), key=lambda token: (-logits[0, token].item(), token))
        assert [token for token, _ in logprobs.top] == order


def test_what_is_impossible_has_the_least_logprob_and_no_infinity() -> None:
    logprobs = one([0.0, -math.inf, -1e30], logprobs=3)
    assert logprobs.top == [(0, 0.0), (2, LEAST_LOGPROB), (1, LEAST_LOGPROB)]
    # Forced though the model excludes it: as a bias can't lift -inf, only a penalised rest gets there.
    assert one([0.0, -2e4], logprobs=0, stop_token_ids=[0], min_tokens=9).logprob == LEAST_LOGPROB


def test_only_the_rows_that_ask_are_told_and_each_as_much_as_it_asks() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    rows = [Sampling(temperature=0, logprobs=count) for count in (None, 5, 0, 2)]
    none, five, zero, two = told(logits, *rows)
    assert none is None
    assert five
    assert zero
    assert two
    assert [len(logprobs.top) for logprobs in (five, zero, two)] == [5, 0, 2]
    for row, logprobs in ((1, five), (2, zero), (3, two)):
        assert [logprobs] == told(logits[row : row + 1], rows[row])
