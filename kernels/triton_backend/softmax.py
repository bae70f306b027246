"""The heart of attention: an online softmax of a tile of query rows over a stretch of one sequence's keys.

Milakov and Gimelshein, arXiv:1805.02867; tiled as in FlashAttention-2, arXiv:2307.08691. Scores are kept in base 2.
A `cache` is the tuple

    (block table of the sequence,
     keys of the KV head, block stride, token stride, values of the KV head, block stride, token stride,
     (scales of its keys, block stride, token stride, scales of its values, block stride, token stride))

with the strides of keys and values in 16 bytes, so that the compiler knows how rows are aligned.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_tile(pointers, rows, columns, MASK_ROWS: tl.constexpr, MASK_COLUMNS: tl.constexpr):
    """A tile, zero where a mask that broadcasts to it says no; a mask that is not asked for costs nothing."""
    if MASK_ROWS and MASK_COLUMNS:
        tile = tl.load(pointers, mask=rows & columns, other=0.0)
    elif MASK_ROWS:
        tile = tl.load(pointers, mask=rows, other=0.0)
    elif MASK_COLUMNS:
        tile = tl.load(pointers, mask=columns, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def load_queries(q, offsets, valid, S: tl.constexpr):
    """Query rows at `offsets` [row_tile] in two parts; the first one twice where there is no rest."""
    column = tl.arange(0, S.key_main)
    mask = valid[:, None] & (column < S.key_dim)[None, :]
    main = tl.load(q + offsets[:, None] + column[None, :], mask=mask, other=0.0).to(S.score_dot)
    rest = main
    if S.key_rest > 0:
        column = S.key_main + tl.arange(0, S.key_rest)
        mask = valid[:, None] & (column < S.key_dim)[None, :]
        rest = tl.load(q + offsets[:, None] + column[None, :], mask=mask, other=0.0).to(S.score_dot)
    return main, rest


@triton.jit
def store_rows(out, offsets, valid, main, rest, S: tl.constexpr):
    """Write rows at `offsets` [row_tile] from their two parts."""
    column = tl.arange(0, S.value_main)
    mask = valid[:, None] & (column < S.value_dim)[None, :]
    tl.store(out + offsets[:, None] + column[None, :], main.to(out.dtype.element_ty), mask=mask)
    if S.value_rest > 0:
        column = S.value_main + tl.arange(0, S.value_rest)
        mask = valid[:, None] & (column < S.value_dim)[None, :]
        tl.store(out + offsets[:, None] + column[None, :], rest.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _fold(start, queries, state, seen, cache, score_scale, soft_cap, S: tl.constexpr, MASKED: tl.constexpr):
    """Fold the keys `start .. start + key_tile - 1` into the state of each row."""
    q, q_rest = queries
    peak, total, acc, acc_rest = state
    oldest, newest, first, context = seen
    table, k_blocks, k_block, k_token, v_blocks, v_block, v_token, scales = cache
    k_scales, k_scale_block, k_scale_token, v_scales, v_scale_block, v_scale_token = scales

    key = start + tl.arange(0, S.key_tile)
    inside = key < context
    if S.windowed:
        inside = inside & (key >= first)
    if MASKED:  # entries of the table past the context or before every row's window are never read
        block = tl.load(table + key // S.block_tokens, mask=inside, other=0)
    else:
        block = tl.load(table + key // S.block_tokens)
    block = block.to(tl.int64)  # a pool may hold more than 2^31 elements
    slot = key % S.block_tokens

    row = k_blocks + (block * k_block + slot * k_token) * S.unit
    column = tl.arange(0, S.key_main)
    k = load_tile(
        row[None, :] + column[:, None], inside[None, :], (column < S.key_dim)[:, None],
        MASKED, S.key_main > S.key_dim,
    )  # fmt: skip
    score = tl.dot(q, k.to(S.score_dot), input_precision="ieee")
    if S.key_rest > 0:
        column = S.key_main + tl.arange(0, S.key_rest)
        k = load_tile(
            row[None, :] + column[:, None], inside[None, :], (column < S.key_dim)[:, None],
            MASKED, S.key_main + S.key_rest > S.key_dim,
        )  # fmt: skip
        score = tl.dot(q_rest, k.to(S.score_dot), score, input_precision="ieee")

    if S.scaled:
        scale = load_tile(k_scales + block * k_scale_block + slot * k_scale_token, inside, inside, MASKED, False)
        score *= (scale * score_scale)[None, :]
    else:
        score *= score_scale
    if S.capped:
        # cap · tanh(score / cap), by a power of a negative number, which can't overflow.
        shrunk = tl.exp2(tl.abs(score) * (-2.0 * LOG2E / soft_cap))
        capped = soft_cap * (1.0 - shrunk) / (1.0 + shrunk)
        score = tl.where(score < 0, -capped, capped)
    if MASKED:
        visible = key[None, :] <= newest[:, None]
        if S.windowed:
            visible = visible & (key[None, :] >= oldest[:, None])
        score = tl.where(visible, score, float("-inf"))

    new_peak = tl.maximum(peak, tl.max(score, 1))
    base = new_peak
    if MASKED:  # a row that has seen no key yet: -inf minus -inf is NaN
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weight = tl.exp2(score - base[:, None])
    decay = tl.exp2(peak - base)
    total = total * decay + tl.sum(weight, 1)
    if S.scaled:
        scale = load_tile(v_scales + block * v_scale_block + slot * v_scale_token, inside, inside, MASKED, False)
        weight *= scale[None, :]
    weight = weight.to(S.value_dot)

    # The weight of a key that no row sees is 0, but its slot may hold NaN, and 0 · NaN is NaN: hence the mask.
    row = v_blocks + (block * v_block + slot * v_token) * S.unit
    column = tl.arange(0, S.value_main)
    v = load_tile(
        row[:, None] + column[None, :], inside[:, None], (column < S.value_dim)[None, :],
        MASKED, S.value_main > S.value_dim,
    )  # fmt: skip
    acc = tl.dot(weight, v.to(S.value_dot), acc * decay[:, None], input_precision="ieee")
    if S.value_rest > 0:
        column = S.value_main + tl.arange(0, S.value_rest)
        v = load_tile(
            row[:, None] + column[None, :], inside[:, None], (column < S.value_dim)[None, :],
            MASKED, S.value_main + S.value_rest > S.value_dim,
        )  # fmt: skip
        acc_rest = tl.dot(weight, v.to(S.value_dot), acc_rest * decay[:, None], input_precision="ieee")
    return new_peak, total, acc, acc_rest


@triton.jit
def attend(queries, peak, total, stretch, seen, cache, score_scale, soft_cap, S: tl.constexpr):
    """Attention of a tile of rows over the keys of one sequence from `begin` to `end`, tile by tile in this order.

    Args:
        queries: the two parts of q, zero where there is no row.
        peak, total: float32 [row_tile], the softmax state to begin with: -inf and 0, or a sink's logit and 1.
        stretch: int32 (begin, whole_begin, whole_end, end). All but `end` are multiples of key_tile. Every row sees
            every key from `whole_begin` to `whole_end`, and there nothing is masked.
        seen: int32 (oldest [row_tile], newest [row_tile], first, context): the first and the last key that a row
            sees, and the first that any does.
        score_scale: times log2 e; so is `soft_cap`.

    Returns:
        peak, total, and the two parts of the unnormalised output [row_tile, value_main] and [row_tile, value_rest].
    """
    begin, whole_begin, whole_end, end = stretch
    acc = tl.full([S.row_tile, S.value_main], 0, tl.float32)
    acc_rest = total
    if S.value_rest > 0:
        acc_rest = tl.full([S.row_tile, S.value_rest], 0, tl.float32)
    if S.windowed:
        for start in range(begin, whole_begin, S.key_tile):
            peak, total, acc, acc_rest = _fold(
                start, queries, (peak, total, acc, acc_rest), seen, cache, score_scale, soft_cap, S, True
            )
    for start in range(whole_begin, whole_end, S.key_tile):
        peak, total, acc, acc_rest = _fold(
            start, queries, (peak, total, acc, acc_rest), seen, cache, score_scale, soft_cap, S, False
        )
    for start in range(whole_end, end, S.key_tile):
        peak, total, acc, acc_rest = _fold(
            start, queries, (peak, total, acc, acc_rest), seen, cache, score_scale, soft_cap, S, True
        )
    return peak, total, acc, acc_rest
