"""Attention of new tokens over block tables."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.contract import check_attention, check_lengths
from kernels.torch_backend.gather import gather, gather_context

# Rows of a query tile: its tokens times the query heads that share a kv head. Of 128 .. 768, what is fastest
# or within 3 % of it at 9 query heads on 3, chunks of 256 tokens and contexts of 256 .. 8,192 on CPU.
TILE_ROWS = 192
# Masks for more keys are not kept: at this many one is 3 MB in fp32.
LONG_MASK_TOKENS = 4096


def paged_attention(
    q: torch.Tensor,
    k_blocks: torch.Tensor,
    v_blocks: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lengths: torch.Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    max_query_tokens: int,
    max_context_tokens: int,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of new tokens over contexts that lie in blocks: prefill, chunked prefill, decode, mixtures.

    Query j of sequence s sits at position `context_lengths[s] - (query_starts[s+1] - query_starts[s]) + j`
    and sees the keys at `max(0, position - window + 1) .. position`, or all of the context when not causal.
    New tokens are read back from the blocks, so `write_kv` comes first. Nothing past the context is read,
    neither table entries nor slots. Rows past `query_starts[S]` are padding and written as zeros.

    Args:
        q: [T, H, D], float32, bfloat16 or float16.
        k_blocks, v_blocks: [N, B, G, D] and [N, B, G, Dv], rows on 16 bytes: one of q's dtypes, int8 or float8_e4m3fn.
        block_tables: int32 [S, M], the blocks of each context in order.
        query_starts: int32 [S + 1], from 0, where each sequence's rows begin.
        context_lengths: int32 [S], tokens in cache, the new ones included.
        scale: factor of q·k.
        soft_cap: a score s becomes `soft_cap * tanh(s / soft_cap)`, before the mask; from 0.001 to 1,000.
        sinks: float32 [H], per head one more logit without a value, neither scaled nor capped; part of lse.
        k_scales, v_scales: float32 [N, B, G], any strides, with 8-bit blocks and only with them.
        max_query_tokens, max_context_tokens: bounds on what the sequences hold.
        out: [T, H, Dv] in q's dtype, written and returned when given.
        lse: float32 [T, H], written when given: natural logarithm of the sum of exponentials. A row that
            sees no key gives out 0 and lse -inf, sinks or not.
        workspace: unused here.

    Returns:
        [T, H, Dv] in q's dtype; softmax in float32.

    Raises:
        ValueError: shapes, dtypes, lengths or options that do not fit together.
        IndexError: a table entry inside a context that names no block.
    """
    tokens, query_heads, key_dim = q.shape
    kv_heads, value_dim = v_blocks.shape[2:]
    if out is None:
        out = q.new_empty(tokens, query_heads, value_dim)
    check_attention(
        q, k_blocks, v_blocks, block_tables, query_starts, context_lengths,
        causal=causal, window=window, soft_cap=soft_cap, sinks=sinks, k_scales=k_scales, v_scales=v_scales,
        out=out, lse=lse,
    )  # fmt: skip
    starts, contexts = query_starts.tolist(), context_lengths.tolist()
    check_lengths(
        starts, contexts, tokens=tokens, max_query_tokens=max_query_tokens,
        max_context_tokens=min(max_context_tokens, block_tables.shape[1] * k_blocks.shape[1]),
    )  # fmt: skip

    group = query_heads // kv_heads
    tile_tokens = max(1, TILE_ROWS // group)
    # PyTorch's fused attention has no caps, sinks or lse; it takes half the time where it applies.
    fused = soft_cap is None and sinks is None and lse is None and key_dim == value_dim
    if fused:
        for decodes in _decodes(tuple(starts), tuple(contexts), window, k_blocks.shape[1], q.dtype, q.device):
            _decode(out, q, k_blocks, v_blocks, k_scales, v_scales, block_tables, decodes, scale)
    for sequence, context in enumerate(contexts):
        first, stop = starts[sequence], starts[sequence + 1]
        if fused and stop - first == 1 and context:
            continue
        # Index of a row minus its position; positions below zero see nothing.
        shift = stop - context
        seeing = max(first, shift) if causal else (first if context else stop)
        _blank(out, lse, first, seeing)
        if seeing == stop:
            continue
        oldest = 0 if window is None else max(0, seeing - shift - window + 1)
        keys = gather_context(k_blocks, k_scales, block_tables[sequence], oldest, context, q.dtype)
        values = gather_context(v_blocks, v_scales, block_tables[sequence], oldest, context, q.dtype)
        for row in range(seeing, stop, tile_tokens):
            end = min(row + tile_tokens, stop)
            begin = 0 if window is None else max(oldest, row - shift - window + 1)
            until = end - shift if causal else context
            seen = slice(begin - oldest, until - oldest)
            mask = None
            if causal and end - row > 1:
                reach = 1 << (until - begin - 1).bit_length()
                make = _causal_mask if reach > LONG_MASK_TOKENS else _kept_causal_mask
                mask = make(end - row, group, reach, window, q.dtype, q.device)[:, reach - (until - begin) :]
            # Heads of a group side by side as rows [G, group * tokens, D]. Copied even where a view would do:
            # matrix products may round otherwise when their operands are aligned otherwise.
            rows = q[row:end].unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3)
            rows = rows.clone(memory_format=torch.contiguous_format).flatten(1, 2)
            if fused:
                result = F.scaled_dot_product_attention(
                    rows[None], keys[None, :, seen], values[None, :, seen], attn_mask=mask, scale=scale
                )[0]
            else:
                sink = None if sinks is None else sinks.view(kv_heads, group).repeat_interleave(end - row, 1)
                result, result_lse = _attend(rows, keys[:, seen], values[:, seen], mask, scale, soft_cap, sink)
                if lse is not None:
                    by_head = result_lse.view(query_heads, end - row)
                    lse[row:end].copy_(by_head.transpose(0, 1))
            by_head = result.reshape(query_heads, end - row, value_dim)
            out[row:end].copy_(by_head.transpose(0, 1))
    _blank(out, lse, starts[-1], tokens)
    return out


def attention_workspace(
    *, tokens: int, sequences: int, query_heads: int, value_dim: int, max_context_tokens: int
) -> int:
    """Bytes of workspace that `paged_attention` wants for such a step: none, PyTorch allocates as it goes."""
    return 0


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Sequences with one query token whose keys are padded to the same length, and are computed together.

    That length depends on nothing but the number of a sequence's keys, so that none depends on the others.

    Attributes:
        sequences, rows: int64 [S], which they are and their rows of q.
        entries: int64 [S, E], which of their table entries are gathered; past the end of a context, its last again.
        ends: how many of the gathered tokens belong to the context.
        mask: [S, 1, 1, E * B], 0 or -inf.
    """

    sequences: torch.Tensor
    rows: torch.Tensor
    entries: torch.Tensor
    ends: list[int]
    mask: torch.Tensor


# Every layer of a step asks for the same.
@functools.lru_cache(maxsize=4)
def _decodes(
    starts: tuple[int, ...],
    contexts: tuple[int, ...],
    window: int | None,
    block_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[_Decodes]:
    alike: dict[int, list[tuple[int, int, int, int]]] = {}
    for sequence, context in enumerate(contexts):
        if context and starts[sequence + 1] - starts[sequence] == 1:
            oldest = 0 if window is None else max(0, context - window)
            skipped = oldest // block_tokens
            held = context - skipped * block_tokens
            # An eighth too much or 64 tokens, and less than the 512 keys that PyTorch's attention takes at once.
            step = math.lcm(max(64, min(256, (1 << held.bit_length()) >> 4)), block_tokens)
            alike.setdefault(-(-held // step) * step, []).append((sequence, oldest, skipped, held))
    decodes = []
    for padded_tokens, members in alike.items():
        sequences, oldest, skipped, held = torch.tensor(members, device=device).T
        entries = torch.arange(padded_tokens // block_tokens, device=device)
        entries = entries.minimum((held[:, None] - 1) // block_tokens) + skipped[:, None]
        token = torch.arange(padded_tokens, device=device)
        hidden = (token < (oldest - skipped * block_tokens)[:, None]) | (token >= held[:, None])
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
        rows = torch.tensor([starts[sequence] for sequence, *_ in members], device=device)
        ends = held.tolist()
        decodes.append(_Decodes(sequences, rows, entries, ends, mask[:, None, None]))
    return decodes


def _decode(
    out: torch.Tensor,
    q: torch.Tensor,
    k_blocks: torch.Tensor,
    v_blocks: torch.Tensor,
    k_scales: torch.Tensor | None,
    v_scales: torch.Tensor | None,
    block_tables: torch.Tensor,
    decodes: _Decodes,
    scale: float,
) -> None:
    """Attention of the given rows, written into the same rows of `out`."""
    kv_heads, dim = k_blocks.shape[2:]
    count = len(decodes.ends)
    table = block_tables.index_select(0, decodes.sequences).gather(1, decodes.entries).flatten()
    keys = gather(k_blocks, k_scales, table, q.dtype).view(kv_heads, count, -1, dim)
    values = gather(v_blocks, v_scales, table, q.dtype).view(kv_heads, count, -1, dim)
    for sequence, end in enumerate(decodes.ends):
        # A free slot may hold NaN, and 0 · NaN is NaN.
        keys[:, sequence, end:].zero_()
        values[:, sequence, end:].zero_()
    rows = q.index_select(0, decodes.rows).view(count, kv_heads, -1)
    # A kv head's rows begin on 64 bytes: matrix products may round otherwise when operands are aligned otherwise.
    if over := rows.shape[2] * rows.element_size() % 64:
        rows = F.pad(rows, (0, (64 - over) // rows.element_size()))[..., : rows.shape[2]]
    rows, keys, values = rows.view(count, kv_heads, -1, dim), keys.transpose(0, 1), values.transpose(0, 1)
    result = F.scaled_dot_product_attention(rows, keys, values, attn_mask=decodes.mask, scale=scale)
    out.index_copy_(0, decodes.rows, result.flatten(1, 2))


def _causal_mask(
    tokens: int, group: int, reach: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """[group * tokens, reach], 0 or -inf: what the last `tokens` of `reach` tokens see, for each head of a group.

    The mask for fewer keys is its right end.
    """
    position = torch.arange(reach - tokens, reach, device=device)[:, None]
    key = torch.arange(reach, device=device)
    hidden = key > position if window is None else (key > position) | (key <= position - window)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
    return mask.repeat(group, 1)


# Every layer of a step asks for the same, and most steps do.
_kept_causal_mask = functools.lru_cache(maxsize=8)(_causal_mask)


def _attend(
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    soft_cap: float | None,
    sink: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [G, rows, Dv] and lse [G, rows] of rows [G, rows, D] over keys [G, n, D], each seeing at least one."""
    scores = (rows.float() * scale) @ keys.float().transpose(1, 2)
    if soft_cap is not None:
        scores = (scores / soft_cap).tanh_() * soft_cap
    if mask is not None:
        scores += mask
    peak = scores.amax(-1)
    if sink is not None:
        peak = torch.maximum(peak, sink)
    weights = (scores - peak[..., None]).exp_()
    total = weights.sum(-1)
    if sink is not None:
        total += (sink - peak).exp()
    return weights @ values.float() / total[..., None], peak + total.log()


def _blank(out: torch.Tensor, lse: torch.Tensor | None, row: int, end: int) -> None:
    if row < end:
        out[row:end] = 0
        if lse is not None:
            lse[row:end] = -torch.inf
