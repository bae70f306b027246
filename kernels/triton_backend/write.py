"""Writing new keys and values into their slots: from tensors to launches."""

from __future__ import annotations

import torch
import triton

from kernels.contract import check_write
from kernels.quantise import LARGEST
from kernels.triton_backend.launch import Launch
from kernels.triton_backend.target import on
from kernels.triton_backend.write_kernel import write_kernel

HEADS = 8  # rows of one program at most


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_blocks: torch.Tensor,
    v_blocks: torch.Tensor,
    slots: torch.Tensor,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> None:
    """Write new keys and values into their slots; `kernels.torch_backend.write_kv` says how.

    Raises:
        ValueError: shapes or dtypes that do not fit together. Slots are not looked at: one past the last block
            writes where it should not.
    """
    check_write(k, v, k_blocks, v_blocks, slots, k_scales, v_scales)
    with on(k.device):
        for new, blocks, scales in ((k, k_blocks, k_scales), (v, v_blocks, v_scales)):
            plan_write(new, blocks, slots, scales).run()


def plan_write(
    new: torch.Tensor, blocks: torch.Tensor, slots: torch.Tensor, scales: torch.Tensor | None
) -> Launch:
    """The launch that writes new rows [T, G, D] into blocks [N, B, G, D]."""
    tokens, kv_heads, dim = new.shape
    block, token, head, _ = blocks.stride()
    scale_block, scale_token, scale_head = scales.stride() if scales is not None else (0, 0, 0)
    heads = min(triton.next_power_of_2(kv_heads), HEADS)
    # What saturates: 8-bit blocks, and float16 that is given more than it holds.
    largest = LARGEST.get(blocks.dtype, 0.0)
    if blocks.dtype == torch.float16 != new.dtype:
        largest = torch.finfo(torch.float16).max
    arguments = {
        "new": new, "new_token_stride": new.stride(0), "new_head_stride": new.stride(1),
        "blocks": blocks, "block_stride": block, "token_stride": token, "head_stride": head,
        "scales": scales, "scale_block_stride": scale_block, "scale_token_stride": scale_token,
        "scale_head_stride": scale_head, "slots": slots, "kv_heads": kv_heads,
        "least_scale": torch.finfo(torch.float32).tiny,
        "BLOCK_TOKENS": blocks.shape[1], "DIM": dim, "COLUMNS": triton.next_power_of_2(dim), "HEADS": heads,
        "LARGEST": largest,
    }  # fmt: skip
    return Launch(write_kernel, (tokens, triton.cdiv(kv_heads, heads)), arguments, 4, 1)
