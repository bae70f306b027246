"""Putting the splits of a long decode together, by log-sum-exp."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton_backend.softmax import LN2

# Splits that are loaded at once. Fixed, so that the order of additions depends on a sequence's own splits alone.
SPLIT_TILE = tl.constexpr(16)


@triton.jit(do_not_specialize=["splits", "window"])
def merge_kernel(
    partial_out, partial_lse, splits, query_starts, context_lengths,
    out, out_token_stride, out_head_stride, lse, lse_token_stride, lse_head_stride, window,
    S: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One query head of one sequence with one query token; none of its business if one split was all.

    Args:
        partial_out, partial_lse: what `decode_kernel` wrote, for `splits` splits at most.
        COLUMNS: the power of two that holds a value.
    """
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(query_starts + sequence)
    if tl.load(query_starts + sequence + 1) - start != 1:
        return
    context = tl.load(context_lengths + sequence)
    seen_begin = 0
    if S.windowed:
        seen_begin = tl.maximum(context - window, 0)
    count = tl.cdiv(context, S.split_tokens) - seen_begin // S.split_tokens
    if count <= 1:
        return

    first = (sequence.to(tl.int64) * tl.num_programs(1) + head) * splits
    column = tl.arange(0, COLUMNS)
    peak = float("-inf")
    total = 0.0
    acc = tl.full([COLUMNS], 0, tl.float32)
    for begin in range(0, count, SPLIT_TILE):
        split = begin + tl.arange(0, SPLIT_TILE)
        inside = split < count
        part_lse = tl.load(partial_lse + first + split, mask=inside, other=float("-inf"))
        part = tl.load(
            partial_out + (first + split)[:, None] * S.value_dim + column[None, :],
            mask=inside[:, None] & (column < S.value_dim)[None, :],
            other=0.0,
        )
        new_peak = tl.maximum(peak, tl.max(part_lse, 0))
        weight = tl.exp2(part_lse - new_peak)
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(weight, 0)
        acc = acc * decay + tl.sum(weight[:, None] * part, 0)
        peak = new_peak
    row = start.to(tl.int64)
    pointers = out + row * out_token_stride + head * out_head_stride + column
    tl.store(pointers, (acc / total).to(out.dtype.element_ty), mask=column < S.value_dim)
    if lse is not None:
        tl.store(lse + row * lse_token_stride + head * lse_head_stride, (peak + tl.log2(total)) * LN2)
