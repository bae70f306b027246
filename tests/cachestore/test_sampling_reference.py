"""Sampling as others define it: transformers' processors, OpenAI's penalties in plain Python."""

from __future__ import annotations

import math
from collections import Counter
from itertools import accumulate

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cachestore.philox import philox_uniform
from cachestore.protocol import Sampling
from tests.cachestore.sampling_requests import Request, requests, sample_together

# More than are sorted first.
VOCABULARY_TOKENS = 5_000


def openai_penalties(logits: torch.Tensor, request: Request) -> torch.Tensor:
    """mu[j] -> mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence"""
    counts = Counter(request.tokens[request.prompt_tokens :])
    sampling = request.sampling
    penalised = [
        logit - counts[token] * sampling.frequency_penalty - float(counts[token] > 0) * sampling.presence_penalty
        for token, logit in enumerate(logits.tolist())
    ]
    return torch.tensor(penalised, dtype=logits.dtype)


def reference_scores(logits: torch.Tensor, request: Request) -> torch.Tensor:
    """Scores before temperature, float64 [vocabulary]."""
    sampling = request.sampling
    context = torch.tensor([request.tokens])
    scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(context, logits.double()[None])
    scores = openai_penalties(scores[0], request)
    for token, bias in sampling.logit_bias:
        scores[token] += bias
    if sampling.stop_token_ids:
        shortest = MinNewTokensLengthLogitsProcessor(
            request.prompt_tokens, sampling.min_tokens, sampling.stop_token_ids
        )
        scores = shortest(context, scores[None])[0]
    return scores


def reference_probabilities(logits: torch.Tensor, request: Request) -> torch.Tensor:
    """float64 [vocabulary]; for a temperature above 0."""
    sampling = request.sampling
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    return warpers(torch.tensor([request.tokens]), reference_scores(logits, request)[None])[0].softmax(-1)


def reference_token(logits: torch.Tensor, request: Request) -> int:
    sampling = request.sampling
    if sampling.temperature == 0:
        return int(reference_scores(logits, request).argmax())
    probabilities = reference_probabilities(logits, request)
    # Where a set is kept its members are in order of likelihood, else in order of their ids.
    order = torch.arange(len(probabilities))
    if sampling.top_k or sampling.top_p < 1:
        order = probabilities.argsort(descending=True, stable=True)
    seed = torch.tensor([[sampling.seed & 0xFFFFFFFF, sampling.seed >> 32]])
    index = torch.tensor([len(request.tokens) - request.prompt_tokens])
    uniform = float(philox_uniform(seed, index))
    reached = accumulate(probabilities[order].tolist())
    return next(token for token, sum_ in zip(order.tolist(), reached, strict=True) if sum_ > uniform)


@given(request=requests(VOCABULARY_TOKENS), scale=st.sampled_from([0.5, 2.0, 6.0]), seed=st.integers(0, 50))
@example(request=Request([1], 1, Sampling(temperature=2.0, top_p=0.9)), scale=0.5, seed=1)
def test_tokens_are_those_of_the_processors_of_transformers(request: Request, scale: float, seed: int) -> None:
    """Probabilities of equal order and value, and the same random number, give the same token."""
    # A normal distribution without equal values, of which only one of two processors would keep both.
    ranks = torch.linspace(0.9999, -0.9999, VOCABULARY_TOKENS, dtype=torch.float64)
    logits = (ranks.erfinv() * 2**0.5 * scale).float()
    logits[10:] = logits[10:][torch.randperm(VOCABULARY_TOKENS - 10, generator=torch.Generator().manual_seed(seed))]
    (sampled,) = sample_together(logits[None], [request])
    assert sampled.token == reference_token(logits, request)


# --- distributions

LOGITS = torch.tensor([1.5, -0.5, 0.0, 0.7, -2.0, 1.0, 1.2, 0.3])
DRAWS = 4000
# 99.9 % of the chi-square distribution by degrees of freedom. Seeds are fixed: a pass stays a pass.
CHI_SQUARE = {2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32}


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ({"presence_penalty": 1.2}, 8),
        ({"frequency_penalty": 0.6}, 8),
        ({"frequency_penalty": -0.6}, 8),
        ({"repetition_penalty": 1.7}, 8),
        ({"logit_bias": [(4, 3.0), (0, -100.0)]}, 7),
        ({"stop_token_ids": [0, 5], "min_tokens": 5}, 6),
        ({"stop_token_ids": [0, 5], "min_tokens": 4}, 8),
        ({"min_p": 0.3}, 5),
        ({"min_p": 0.2, "top_k": 5, "top_p": 0.8}, 4),
        (
            {
                "temperature": 1.3,
                "presence_penalty": 0.4,
                "frequency_penalty": 0.3,
                "repetition_penalty": 1.2,
                "logit_bias": [(7, 1.0)],
                "stop_token_ids": [0],
                "min_tokens": 9,
                "min_p": 0.1,
                "top_k": 6,
                "top_p": 0.9,
            },
            5,
        ),
    ],
)
def test_tokens_are_drawn_as_often_as_the_computed_probabilities(asked: dict[str, object], kept: int) -> None:
    tokens, prompt_tokens = [0, 1, 2, 2, 6, 3, 3, 6], 4
    rows = [
        Request(tokens, prompt_tokens, Sampling(**{"seed": seed} | asked))  # type: ignore[arg-type]
        for seed in range(DRAWS)
    ]
    drawn = Counter(sampled.token for sampled in sample_together(LOGITS.expand(DRAWS, -1), rows))
    probabilities = reference_probabilities(LOGITS, rows[0]).tolist()
    expected = {token: DRAWS * probability for token, probability in enumerate(probabilities) if probability > 1e-9}
    assert len(expected) == kept
    assert set(drawn) == set(expected)
    chi_square = math.fsum((drawn[token] - count) ** 2 / count for token, count in expected.items())
    assert chi_square < CHI_SQUARE[kept - 1]
