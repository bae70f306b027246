"""Counter-based random numbers: Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011)."""

from __future__ import annotations

import torch

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


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
