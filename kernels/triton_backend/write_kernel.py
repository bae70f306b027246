"""One kernel that writes rows into their slots, quantised on the way where the blocks have 8 bits."""

from __future__ import annotations

import triton
import triton.language as tl

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
        # A row with NaN or an infinity in it reads back as NaN: maxima and conversions may pass NaN over.
        finite = tl.min((tl.abs(row) < float("inf")).to(tl.int32), 1) > 0
        row = tl.where(finite[:, None], row, 0.0)
        scale = tl.maximum(tl.div_rn(tl.max(tl.abs(row), 1), LARGEST), least_scale)
        tl.store(
            scales + block * scale_block_stride + offset * scale_token_stride + head * scale_head_stride,
            tl.where(finite, scale, float("nan")), mask=head < kv_heads,
        )  # fmt: skip
        row = tl.div_rn(row, tl.broadcast_to(scale[:, None], row.shape))
    if LARGEST > 0:  # a conversion may turn what is too large into NaN or infinity
        row = row.to(tl.float32)
        row = tl.where(row > LARGEST, LARGEST, tl.where(row < -LARGEST, -LARGEST, row))
    if scales is not None:
        row = _rounded(row, blocks.dtype.element_ty != tl.int8)
    targets = blocks + block * block_stride + offset * token_stride + head * head_stride
    tl.store(targets[:, None] + column[None, :], row.to(blocks.dtype.element_ty), mask=mask)
