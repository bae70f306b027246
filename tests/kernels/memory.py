"""Memory that says when it is touched."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import torch
from torch import Tensor

from tests.kernels.device import DEVICE

_PAGE = mmap.PAGESIZE
_NO_RESERVE = 0x4000  # MAP_NORESERVE, which Python 3.11 has no name for


def untouched(elements: int, dtype: torch.dtype) -> Tensor:
    """Memory that costs nothing until it is touched, more of it than there is."""
    if DEVICE.type != "cpu":
        return torch.empty(elements, dtype=dtype, device=DEVICE)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    return torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize, flags), dtype=dtype)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def walled(tensor: Tensor) -> Tensor:
    """A copy with the same strides whose last element is the last before a page that nobody may touch.

    Rows of blocks begin on 16 bytes, so where they end elsewhere the wall is up to 15 bytes further.
    """
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() == 0:
        extent = 0
    unit = 16 if tensor.ndim == 4 else tensor.element_size()
    size = -(-extent * tensor.element_size() // unit) * unit
    pages = -(-size // _PAGE) + 1
    mapping = mmap.mmap(-1, pages * _PAGE)
    wall = ctypes.addressof(ctypes.c_char.from_buffer(mapping)) + (pages - 1) * _PAGE
    if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(wall), _PAGE, 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    flat = torch.frombuffer(mapping, dtype=torch.uint8)
    held = flat[(pages - 1) * _PAGE - size : (pages - 1) * _PAGE].fill_(0xFF).view(tensor.dtype)
    return held.as_strided(tensor.shape, tensor.stride(), held.storage_offset()).copy_(tensor)
