"""8-bit keys and values: one scale for each token and kv head, and conversions that never make a number NaN."""

from __future__ import annotations

import torch

# The largest value of each 8-bit dtype that blocks can have.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def quantise(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of 8 bits, each with the scale that its own largest value needs.

    A row of zeros reads back as zeros; a row that holds a NaN or an infinity reads back as NaN altogether, since
    its scale is that NaN or infinity.

    Args:
        x: [..., D], any float dtype.
        dtype: int8 (rounded half to even) or float8_e4m3fn.

    Returns:
        [..., D] in `dtype` and float32 [...]; x is about their product.
    """
    x = x.float()
    scales = (x.abs().amax(-1) / LARGEST[dtype]).clamp_min(torch.finfo(torch.float32).tiny)
    values = x / scales[..., None]
    if dtype == torch.float8_e4m3fn:
        return to_float8(values), scales
    # What an integer made of NaN is differs between devices.
    return values.nan_to_num(0).round().clamp(-127, 127).to(torch.int8), scales


def to_float8(x: torch.Tensor) -> torch.Tensor:
    """Convert to float8_e4m3fn, saturating: what is above 448, infinity included, becomes 448; NaN stays NaN."""
    # Not every device saturates by itself: beyond 464 some give NaN.
    return x.float().clamp(-448, 448).to(torch.float8_e4m3fn)


def convert(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert to another float dtype; what is above the largest value of float16 becomes that, NaN stays NaN."""
    if dtype == torch.float16 and x.dtype != torch.float16:
        largest = torch.finfo(torch.float16).max
        x = x.float().clamp(-largest, largest)  # bfloat16 would round the bound up
    return x.to(dtype)
