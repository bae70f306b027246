"""Writing new keys and values into their slots, quantised on the way where the blocks have 8 bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.contract import check_write
from kernels.triton_backend.launch import Launch
from kernels.triton_backend.target import on

HEADS = 8  # rows of one program at most
LEAST_SCALE = torch.finfo(torch.float32).tiny
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float16: 65504.0}

# Added and taken away again, rounds to the nearest integer, half to even, what is smaller than 2^22.
ROUNDING = tl.constexpr(12582912.0)


@triton.jit
def _rounded(x, FLOAT8: tl.constexpr):
    """float32 rounded to what int8 or float8_e4m3fn holds, half to even: so the conversion is exact on every target."""
    shift = ROUNDING
    if FLOAT8:
        # Three bits after the first one, and never finer than 2^-9.
        power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        shift = tl.maximum(power * 0.125, 0.001953125) * ROUNDING
    return (x + shift) - shift


@triton.jit
def write_kernel(
    new, new_token_stride, new_head_stride, blocks, block_stride, token_stride, head_stride,
    scales, scale_block_stride, scale_token_stride, scale_head_stride, slots, kv_heads, least_scale,
    BLOCK_TOKENS: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr,
    LARGEST: tl.constexpr,
):  # fmt: skip
    """HEADS rows of one token. LARGEST: the largest finite value of 8-bit and float16 blocks, 0 for the others."""
    slot = tl.load(slots + tl.program_id(0))  # int64
    if slot < 0:
        return
    block = slot // BLOCK_TOKENS
    offset = slot % BLOCK_TOKENS
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    mask = (head < kv_heads)[:, None] & (column < DIM)[None, :]
    rows = new + tl.program_id(0).to(tl.int64) * new_token_stride + head * new_head_stride
    row = tl.load(rows[:, None] + column[None, :], mask=mask, other=0.0)
    if scales is not None:
        row = row.to(tl.float32)
        scale = tl.maximum(tl.div_rn(tl.max(tl.abs(row), 1), LARGEST), least_scale)
        # A row with NaN or an infinity in it reads back as NaN: maxima and conversions may pass NaN over.
        finite = tl.min((tl.abs(row) < float("inf")).to(tl.int32), 1) > 0
        tl.store(
            scales + block * scale_block_stride + offset * scale_token_stride + head * scale_head_stride,
            tl.where(finite, scale, float("nan")), mask=head < kv_heads,
        )  # fmt: skip
        row = tl.where(finite[:, None], tl.div_rn(row, tl.broadcast_to(scale[:, None], row.shape)), 0.0)
    if LARGEST > 0:  # a conversion may turn what is too large into NaN or infinity
        row = row.to(tl.float32)
        row = tl.where(row > LARGEST, LARGEST, tl.where(row < -LARGEST, -LARGEST, row))
    if scales is not None:
        row = _rounded(row, blocks.dtype.element_ty != tl.int8)
    targets = blocks + block * block_stride + offset * token_stride + head * head_stride
    tl.store(targets[:, None] + column[None, :], row.to(blocks.dtype.element_ty), mask=mask)


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
    narrow = scales is not None or (blocks.dtype == torch.float16 and new.dtype != torch.float16)
    arguments = {
        "new": new, "new_token_stride": new.stride(0), "new_head_stride": new.stride(1),
        "blocks": blocks, "block_stride": block, "token_stride": token, "head_stride": head,
        "scales": scales, "scale_block_stride": scale_block, "scale_token_stride": scale_token,
        "scale_head_stride": scale_head, "slots": slots, "kv_heads": kv_heads, "least_scale": LEAST_SCALE,
        "BLOCK_TOKENS": blocks.shape[1], "DIM": dim, "COLUMNS": triton.next_power_of_2(dim), "HEADS": heads,
        "LARGEST": LARGEST.get(blocks.dtype, 0.0) if narrow else 0.0,
    }  # fmt: skip
    return Launch(write_kernel, (tokens, triton.cdiv(kv_heads, heads)), arguments, 4, 1)
