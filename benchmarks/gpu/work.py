"""The least work of a step, from its shapes alone: bytes that must move, operations that must be done."""

from __future__ import annotations

from dataclasses import dataclass

QUERY_BYTES = 2  # bfloat16
SCALE_BYTES = 4  # float32


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention's geometry; keys and values are equally wide."""

    query_heads: int
    kv_heads: int
    dim: int


def decode_bytes(heads: Heads, *, sequences: int, context_tokens: int, cache_bytes: int) -> int:
    """Keys and values of the context once for each sequence and KV head, their scales if 8-bit, q and out.

    Args:
        cache_bytes: of an element of the cache.
    """
    row_bytes = heads.dim * cache_bytes + (SCALE_BYTES if cache_bytes == 1 else 0)
    cache = sequences * context_tokens * heads.kv_heads * 2 * row_bytes
    return cache + 2 * sequences * heads.query_heads * heads.dim * QUERY_BYTES


def visible_keys(*, new_tokens: int, context_tokens: int) -> int:
    """Keys that the last `new_tokens` of a context see under a causal mask, summed over these tokens."""
    cached = context_tokens - new_tokens
    return new_tokens * cached + new_tokens * (new_tokens + 1) // 2


def prefill_operations(heads: Heads, *, new_tokens: int, context_tokens: int) -> int:
    """Multiplications and additions of q·k and weights·v over the keys that are visible; softmax is not counted."""
    keys = visible_keys(new_tokens=new_tokens, context_tokens=context_tokens)
    return 4 * heads.query_heads * heads.dim * keys
