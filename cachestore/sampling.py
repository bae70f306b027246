"""From logits to tokens: greedy, temperature, top-k, top-p, for all rows of a step together.

Random numbers are counter-based: Philox4x32-10 (Salmon et al., 2011) keyed by the request's seed and counted by the
index of the output token. Nothing is carried between steps, so a token does not depend on slots, batches or
preemption. A row's choice does not depend on which other rows are sampled with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cachestore.protocol import Sampling

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The sampling parameters of R rows as tensors.

    Attributes:
        temperature, top_p: float64 [R]; top_k: int64 [R], 0 is off.
        seeds: the 64-bit seeds as pairs of 32-bit words, int64 [R, 2].
        output_index: int64 [R], how many tokens the request has generated before.
        drawn: int64, the rows that are not greedy; filtered: which of those have a top-k or top-p (bool).
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    seeds: torch.Tensor
    output_index: torch.Tensor
    drawn: torch.Tensor
    filtered: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[Sampling], output_index: Sequence[int], device: torch.device) -> SamplingRows:
        drawn = [row for row, sampling in enumerate(rows) if sampling.temperature > 0]
        filtered = [rows[row].top_k > 0 or rows[row].top_p < 1 for row in drawn]
        return cls(
            temperature=torch.tensor([s.temperature for s in rows], dtype=torch.float64, device=device),
            top_k=torch.tensor([s.top_k for s in rows], dtype=torch.int64, device=device),
            top_p=torch.tensor([s.top_p for s in rows], dtype=torch.float64, device=device),
            seeds=torch.tensor(
                [(s.seed & _WORD, s.seed >> 32) for s in rows], dtype=torch.int64, device=device
            ).reshape(-1, 2),
            output_index=torch.tensor(list(output_index), dtype=torch.int64, device=device),
            drawn=torch.tensor(drawn, dtype=torch.int64, device=device),
            filtered=torch.tensor(filtered, dtype=torch.bool, device=device),
        )


def sample(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """One token per row.

    Args:
        logits: [R, vocabulary], any float dtype.

    Returns:
        int64 [R].
    """
    tokens = logits.argmax(dim=-1)
    if len(rows.drawn):
        drawn = rows.drawn
        uniform = philox_uniform(rows.seeds[drawn], rows.output_index[drawn])
        scores = logits[drawn].double()
        # The best score becomes 0 before the division: a tiny temperature must not make infinities.
        scores = (scores - scores.amax(dim=-1, keepdim=True)) / rows.temperature[drawn, None]
        tokens[drawn] = _draw(scores.softmax(dim=-1), uniform)
        if len(kept := rows.filtered.nonzero().flatten()):
            chosen = drawn[kept]
            tokens[chosen] = _draw_filtered(scores[kept], rows.top_k[chosen], rows.top_p[chosen], uniform[kept])
    return tokens


def _draw(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The inverse of each row's distribution function at `uniform`; never a token of probability 0."""
    cumulative = probabilities.cumsum(dim=-1)
    # A draw at the very end of the last step of the function would fall off it by rounding.
    last = (probabilities > 0).cumsum(dim=-1).argmax(dim=-1)
    threshold = uniform[:, None] * cumulative[:, -1:]
    return torch.minimum(torch.searchsorted(cumulative, threshold, right=True).flatten(), last)


def _draw_filtered(
    scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """Keep the `top_k` best, then of those the fewest whose probability reaches `top_p`, and draw among them."""
    scores, order = scores.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(scores.shape[-1], device=scores.device)
    limit = torch.where(top_k > 0, top_k, scores.shape[-1])[:, None]
    probabilities = scores.masked_fill(ranks >= limit, -torch.inf).softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    kept = probabilities.masked_fill(before >= top_p[:, None], 0.0)
    return order.gather(-1, _draw(kept, uniform)[:, None]).flatten()


def philox_uniform(seeds: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """A number in [0, 1) for each (seed, counter), with 53 random bits.

    Args:
        seeds: int64 [R, 2], low and high 32-bit word.
        counters: int64 [R], non-negative.

    Returns:
        float64 [R].
    """
    high, low, *_ = philox(seeds, counters)
    return ((high >> 5) * (1 << 26) + (low >> 6)).double() / (1 << 53)


def philox(seeds: torch.Tensor, counters: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Philox4x32-10 of key (seed low, seed high) and counter (low, high, 0, 0): four 32-bit words, each int64 [R]."""
    zero = torch.zeros_like(counters)
    x0, x1, x2, x3 = counters & _WORD, counters >> 32, zero, zero
    k0, k1 = seeds[:, 0], seeds[:, 1]
    for _ in range(_ROUNDS):
        # int64 products wrap modulo 2^64, which leaves both 32-bit halves as they should be.
        p0, p1 = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0, x1, x2, x3 = (
            ((p1 >> 32) & _WORD) ^ x1 ^ k0,
            p1 & _WORD,
            ((p0 >> 32) & _WORD) ^ x3 ^ k1,
            p0 & _WORD,
        )
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return x0, x1, x2, x3
