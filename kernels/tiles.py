"""Which tiles attention works with: a table made offline, looked up by shape, never tuned at run time.

Split length, key tile and with them the order of additions depend on what a row here says and on nothing else: not on
the batch, its lengths or the load.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Attention's shape as far as tiles depend on it.

    Attributes:
        group: query heads that share a KV head.
        query_bytes, cache_bytes: of an element.
    """

    key_dim: int
    value_dim: int
    group: int
    query_bytes: int
    cache_bytes: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows and keys of a tile, and how a program works through them."""

    row_tile: int
    key_tile: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Choice:
    prefill: Tiles
    decode: Tiles
    split_tokens: int


def choose(shape: HeadShape, target: str, shared_memory_bytes: int) -> Choice:
    rows = max(16, 1 << (min(shape.group, 64) - 1).bit_length())
    return Choice(Tiles(64, 64, 4, 2), Tiles(rows, 64, 4, 2), 512)

def shortest_split_tokens() -> int:
    return 512
