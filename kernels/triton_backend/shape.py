"""What the attention kernels know when they are compiled."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton


class Shape(NamedTuple):
    """Compile-time constants of a kernel, one value instead of twenty.

    A head dim is the largest power of two in it plus a remainder, rounded up to one and masked: `tl.dot` takes
    powers of two, from 16. So keys are `key_main + key_rest` wide, and values alike; no rest is 0.

    Attributes:
        row_tile: rows of a query tile, query tokens times the query heads that share a KV head.
        key_tile: keys that are folded in at once, whatever the size of a block.
        split_tokens: keys of one program of a decode, a multiple of `key_tile`.
        group: query heads that share a KV head.
        head_tile: of these in one tile; a KV head has `head_tiles` tiles of them.
        unit: elements of the cache in 16 bytes.
        score_dot, value_dot: `tl.dtype` of the operands of q·k and of weights·v.
        scaled: 8-bit blocks with scales.
    """

    row_tile: int
    key_tile: int
    split_tokens: int
    block_tokens: int
    group: int
    head_tile: int
    head_tiles: int
    key_dim: int
    key_main: int
    key_rest: int
    value_dim: int
    value_main: int
    value_rest: int
    unit: int
    score_dot: Any
    value_dot: Any
    causal: bool
    windowed: bool
    capped: bool
    sunk: bool
    scaled: bool


def parts(dim: int) -> tuple[int, int]:
    """(main, rest): the two powers of two, at least 16 each, that cover a head dim; no rest is 0."""
    main = max(16, 1 << (dim.bit_length() - 1))
    rest = max(0, dim - main)
    return main, max(16, triton.next_power_of_2(rest)) if rest else 0
