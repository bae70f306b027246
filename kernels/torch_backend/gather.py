"""Keys and values out of their blocks, in the dtype that attention computes in."""

from __future__ import annotations

import torch

from kernels.quantise import convert


def gather_context(
    blocks: torch.Tensor, scales: torch.Tensor | None, table: torch.Tensor, begin: int, end: int, dtype: torch.dtype
) -> torch.Tensor:
    """[G, end - begin, D]: the tokens `begin .. end - 1` of one sequence.

    Cut to the context rather than masked: a free slot may hold NaN, and 0 · NaN is NaN.
    """
    block_tokens = blocks.shape[1]
    skipped = begin // block_tokens
    held = gather(blocks, scales, table[skipped : -(-end // block_tokens)], dtype)
    return held[:, begin - skipped * block_tokens : end - skipped * block_tokens]


def gather(
    blocks: torch.Tensor, scales: torch.Tensor | None, entries: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """[G, entries * B, D]: all tokens of the given blocks. Head by head, since a block holds its heads one by one."""
    _, block_tokens, kv_heads, dim = blocks.shape
    gathered = blocks.new_empty(kv_heads, len(entries), block_tokens, dim)
    for head, tokens in zip(blocks.unbind(2), gathered.unbind(), strict=True):
        torch.index_select(head, 0, entries, out=tokens)
    if scales is not None:
        gathered = gathered.float().mul_(scales.index_select(0, entries).permute(2, 0, 1)[..., None])
    return convert(gathered, dtype).flatten(1, 2)
