"""Attention over block tables in Triton: one family of kernels for prefill, chunked prefill, decode and mixtures.

    query_starts ─► which sequence is this program's tile?          block_tables[s] ─► blocks ─► keys and values
                    (binary search; leave early if none)
    rows of a tile: query tokens × the query heads that share a KV head      columns: keys, tile by tile

Sequences with one query token are the decode kernel's, all others the prefill kernel's, in two launches of one call
whatever the mixture; and what a program does depends on its own sequence alone. So a row never depends on its company.
Long contexts are split across programs of the decode kernel (`splits.py` puts them together), which is FlashDecoding.
Paged blocks are those of PagedAttention, arXiv:2309.06180.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton_backend.softmax import LN2, LOG2E, attend, load_queries, store_rows

# What differs from step to step: a kernel compiled for its value would be compiled again and again while serving.
VARYING = ["table_stride", "window", "tokens", "sequences"]


@triton.jit
def _cache_of(
    sequence, kv_head, block_tables, table_stride,
    k_blocks, k_block_stride, k_token_stride, k_head_stride,
    v_blocks, v_block_stride, v_token_stride, v_head_stride,
    k_scales, k_scale_block_stride, k_scale_token_stride, k_scale_head_stride,
    v_scales, v_scale_block_stride, v_scale_token_stride, v_scale_head_stride,
    S: tl.constexpr,
):  # fmt: skip
    """The `cache` of `softmax.py` of one sequence and KV head."""
    head = kv_head.to(tl.int64)
    if S.scaled:
        scales = (
            k_scales + head * k_scale_head_stride, k_scale_block_stride, k_scale_token_stride,
            v_scales + head * v_scale_head_stride, v_scale_block_stride, v_scale_token_stride,
        )  # fmt: skip
    else:
        scales = (k_blocks, 0, 0, v_blocks, 0, 0)  # never read; Triton 3.6 takes no None here
    return (
        block_tables + sequence.to(tl.int64) * table_stride,
        k_blocks + head * k_head_stride * S.unit, k_block_stride, k_token_stride,
        v_blocks + head * v_head_stride * S.unit, v_block_stride, v_token_stride,
        scales,
    )  # fmt: skip


@triton.jit
def _initial(sinks, head, valid, S: tl.constexpr):
    """Peak and total of the rows' softmax before their first key: a sink is one more logit, without a value."""
    if S.sunk:
        peak = tl.load(sinks + head, mask=valid, other=0.0) * LOG2E
        total = tl.full([S.row_tile], 1.0, tl.float32)
    else:
        peak = tl.full([S.row_tile], float("-inf"), tl.float32)
        total = tl.full([S.row_tile], 0, tl.float32)
    return peak, total


@triton.jit
def _finish(out, out_offsets, lse, lse_offsets, valid, sees, peak, total, acc, acc_rest, S: tl.constexpr):
    """Write out and lse of rows; one that sees no key gives 0 and -inf."""
    sees = sees & valid
    divisor = tl.where(sees, total, 1.0)
    rest = acc_rest
    if S.value_rest > 0:
        rest = acc_rest / divisor[:, None]
    store_rows(out, out_offsets, valid, acc / divisor[:, None], rest, S)
    if lse is not None:
        tl.store(
            lse + lse_offsets, tl.where(sees, (peak + tl.log2(divisor)) * LN2, float("-inf")), mask=valid
        )


@triton.jit
def _blank(out, out_offsets, lse, lse_offsets, valid, S: tl.constexpr):
    """Write rows of padding."""
    zeros = tl.full([S.row_tile, S.value_main], 0, tl.float32)
    rest = zeros
    if S.value_rest > 0:
        rest = tl.full([S.row_tile, S.value_rest], 0, tl.float32)
    store_rows(out, out_offsets, valid, zeros, rest, S)
    if lse is not None:
        tl.store(lse + lse_offsets, tl.full([S.row_tile], float("-inf"), tl.float32), mask=valid)


@triton.jit(do_not_specialize=VARYING)
def prefill_kernel(
    q, q_token_stride, q_head_stride,
    k_blocks, k_block_stride, k_token_stride, k_head_stride,
    v_blocks, v_block_stride, v_token_stride, v_head_stride,
    k_scales, k_scale_block_stride, k_scale_token_stride, k_scale_head_stride,
    v_scales, v_scale_block_stride, v_scale_token_stride, v_scale_head_stride,
    block_tables, table_stride, query_starts, context_lengths, sinks,
    out, out_token_stride, out_head_stride, lse, lse_token_stride, lse_head_stride,
    score_scale, soft_cap, window, tokens, sequences,
    S: tl.constexpr,
):  # fmt: skip
    """One query tile of one KV head, of a sequence that has another number of query tokens than one.

    Sequence s has its tiles at `query_starts[s] // tile_tokens + s` and after, room enough for each to round up; the
    rows after the last sequence are one more, of padding. Tiles late in a prompt see most keys and go first.
    """
    tile_tokens: tl.constexpr = S.row_tile // S.head_tile
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    low = 0
    high = sequences
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_starts + middle) // tile_tokens + middle <= tile:
            low = middle
        else:
            high = middle - 1
    sequence = low
    start = tl.load(query_starts + sequence)
    if sequence == sequences:
        count = tokens - start
    else:
        count = tl.load(query_starts + sequence + 1) - start
    first = (tile - start // tile_tokens - sequence) * tile_tokens
    if first >= count:
        return

    kv_head = tl.program_id(1) // S.head_tiles
    row = tl.arange(0, S.row_tile)
    token = first + row // S.head_tile
    member = tl.program_id(1) % S.head_tiles * S.head_tile + row % S.head_tile
    valid = (row < tile_tokens * S.head_tile) & (token < count) & (member < S.group)
    head = kv_head * S.group + member
    global_row = (start + token).to(tl.int64)
    out_offsets = global_row * out_token_stride + head * out_head_stride
    lse_offsets = global_row * lse_token_stride + head * lse_head_stride
    if sequence == sequences:
        _blank(out, out_offsets, lse, lse_offsets, valid, S)
        return
    if count == 1:
        return

    context = tl.load(context_lengths + sequence)
    queries = load_queries(q, global_row * q_token_stride + head * q_head_stride, valid, S)
    position = context - count + token
    first_position = context - count + first
    last_position = context - count + tl.minimum(first + tile_tokens, count) - 1
    begin = 0
    whole_begin = 0
    first_seen = 0
    oldest = tl.full([S.row_tile], 0, tl.int32)
    if S.windowed:
        oldest = position - window + 1
        first_seen = tl.maximum(first_position - window + 1, 0)
        begin = first_seen // S.key_tile * S.key_tile
        whole_begin = tl.cdiv(tl.maximum(last_position - window + 1, 0), S.key_tile) * S.key_tile
    if S.causal:
        newest = position
        end = tl.maximum(last_position + 1, 0)
        whole_end = tl.maximum(first_position + 1, 0) // S.key_tile * S.key_tile
    else:
        newest = tl.full([S.row_tile], 0, tl.int32) + (context - 1)
        end = context
        whole_end = context // S.key_tile * S.key_tile
    whole_end = tl.maximum(whole_begin, whole_end)

    cache = _cache_of(
        sequence, kv_head, block_tables, table_stride,
        k_blocks, k_block_stride, k_token_stride, k_head_stride,
        v_blocks, v_block_stride, v_token_stride, v_head_stride,
        k_scales, k_scale_block_stride, k_scale_token_stride, k_scale_head_stride,
        v_scales, v_scale_block_stride, v_scale_token_stride, v_scale_head_stride, S,
    )  # fmt: skip
    peak, total = _initial(sinks, head, valid, S)
    peak, total, acc, acc_rest = attend(
        queries, peak, total, (begin, whole_begin, whole_end, end), (oldest, newest, first_seen, context),
        cache, score_scale, soft_cap, S,
    )  # fmt: skip
    _finish(out, out_offsets, lse, lse_offsets, valid, newest >= 0, peak, total, acc, acc_rest, S)


@triton.jit(do_not_specialize=[*VARYING, "splits"])
def decode_kernel(
    q, q_token_stride, q_head_stride,
    k_blocks, k_block_stride, k_token_stride, k_head_stride,
    v_blocks, v_block_stride, v_token_stride, v_head_stride,
    k_scales, k_scale_block_stride, k_scale_token_stride, k_scale_head_stride,
    v_scales, v_scale_block_stride, v_scale_token_stride, v_scale_head_stride,
    block_tables, table_stride, query_starts, context_lengths, sinks,
    out, out_token_stride, out_head_stride, lse, lse_token_stride, lse_head_stride,
    score_scale, soft_cap, window, tokens, sequences,
    partial_out, partial_lse, splits,
    S: tl.constexpr,
):  # fmt: skip
    """One split of the context of a sequence with one query token, for the query heads of one KV head.

    Splits begin at multiples of split_tokens, those before a window left out. One that is all of its context writes
    out and lse; of several, each writes `partial_out` [sequences, query heads, splits, value dim], normalised, and
    `partial_lse` [sequences, query heads, splits] in base 2, float32. Where no prefill kernel runs, `tokens` is the
    number of rows of q and those past the last sequence are blanked here, else 0.
    """
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1) // S.head_tiles
    row = tl.arange(0, S.row_tile)
    member = tl.program_id(1) % S.head_tiles * S.head_tile + row
    valid = (row < S.head_tile) & (member < S.group)
    head = kv_head * S.group + member
    if tl.program_id(2) == 0:
        padding_row = sequence.to(tl.int64)
        if (padding_row < tokens) & (padding_row >= tl.load(query_starts + sequences)):
            _blank(
                out, padding_row * out_token_stride + head * out_head_stride,
                lse, padding_row * lse_token_stride + head * lse_head_stride, valid, S,
            )  # fmt: skip
    if sequence >= sequences:
        return
    start = tl.load(query_starts + sequence)
    if tl.load(query_starts + sequence + 1) - start != 1:
        return

    context = tl.load(context_lengths + sequence)
    seen_begin = 0
    if S.windowed:
        seen_begin = tl.maximum(context - window, 0)
    first_split = seen_begin // S.split_tokens
    begin = (first_split + tl.program_id(2)) * S.split_tokens
    if (begin >= context) & (tl.program_id(2) > 0):
        return
    end = tl.minimum(begin + S.split_tokens, context)
    whole_end = end // S.key_tile * S.key_tile
    whole_begin = begin
    if S.windowed:
        begin = tl.maximum(begin, seen_begin // S.key_tile * S.key_tile)
        whole_begin = tl.maximum(whole_begin, tl.cdiv(seen_begin, S.key_tile) * S.key_tile)
    whole_end = tl.maximum(whole_begin, whole_end)

    queries = load_queries(q, start.to(tl.int64) * q_token_stride + head * q_head_stride, valid, S)
    cache = _cache_of(
        sequence, kv_head, block_tables, table_stride,
        k_blocks, k_block_stride, k_token_stride, k_head_stride,
        v_blocks, v_block_stride, v_token_stride, v_head_stride,
        k_scales, k_scale_block_stride, k_scale_token_stride, k_scale_head_stride,
        v_scales, v_scale_block_stride, v_scale_token_stride, v_scale_head_stride, S,
    )  # fmt: skip
    newest = tl.full([S.row_tile], 0, tl.int32) + (context - 1)
    oldest = tl.full([S.row_tile], 0, tl.int32) + seen_begin
    peak, total = _initial(sinks, head, valid, S)
    if S.sunk:
        # The sink is counted once.
        peak = tl.where(tl.program_id(2) == 0, peak, float("-inf"))
        total = tl.where(tl.program_id(2) == 0, total, 0.0)
    peak, total, acc, acc_rest = attend(
        queries, peak, total, (begin, whole_begin, whole_end, end), (oldest, newest, seen_begin, context),
        cache, score_scale, soft_cap, S,
    )  # fmt: skip
    if tl.cdiv(context, S.split_tokens) - first_split <= 1:
        out_offsets = start.to(tl.int64) * out_token_stride + head * out_head_stride
        lse_offsets = start.to(tl.int64) * lse_token_stride + head * lse_head_stride
        _finish(out, out_offsets, lse, lse_offsets, valid, newest >= 0, peak, total, acc, acc_rest, S)
    else:
        part = (sequence.to(tl.int64) * (tl.num_programs(1) // S.head_tiles * S.group) + head) * splits
        part += tl.program_id(2)
        rest = acc_rest
        if S.value_rest > 0:
            rest = acc_rest / total[:, None]
        store_rows(partial_out, part * S.value_dim, valid, acc / total[:, None], rest, S)
        tl.store(partial_lse + part, peak + tl.log2(total), mask=valid)
