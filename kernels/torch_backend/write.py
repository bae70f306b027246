"""New keys and values into their slots."""

from __future__ import annotations

import torch

from kernels.contract import check_write
from kernels.quantise import convert, quantise


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_blocks: torch.Tensor,
    v_blocks: torch.Tensor,
    slots: torch.Tensor,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> None:
    """Write the keys and values of new tokens into their slots.

    Args:
        k, v: [T, G, D] and [T, G, Dv], float32, bfloat16 or float16.
        k_blocks, v_blocks: [N, B, G, D] and [N, B, G, Dv], rows on 16 bytes: a float dtype, which k and v are
            converted to, saturating in float16; or int8 or float8_e4m3fn, which they are quantised to.
        slots: int64 [T], block * B + offset; -1 skips the token.
        k_scales, v_scales: float32 [N, B, G], any strides, with 8-bit blocks and only with them.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
        IndexError: a slot past the last block.
    """
    check_write(k, v, k_blocks, v_blocks, slots, k_scales, v_scales)
    written = slots >= 0
    if not written.all():
        k, v, slots = k[written], v[written], slots[written]
    block_tokens = k_blocks.shape[1]
    index = (slots // block_tokens, slots % block_tokens)
    for new, blocks, scales in ((k, k_blocks, k_scales), (v, v_blocks, v_scales)):
        if scales is None:
            blocks.index_put_(index, convert(new, blocks.dtype))
        else:
            values, new_scales = quantise(new, blocks.dtype)
            blocks.index_put_(index, values)
            scales.index_put_(index, new_scales)
