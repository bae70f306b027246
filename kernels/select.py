"""Which implementation of the kernels serves a device; nothing else names one."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import torch


def backend(device: torch.device | str) -> ModuleType:
    """The module whose functions run on `device`: Triton on CUDA and HIP devices, PyTorch on others.

    Where Triton's interpreter is on (`TRITON_INTERPRET=1`, set before Triton is imported), it serves every device.

    Raises:
        RuntimeError: `device` is a string that names no device.
    """
    if torch.device(device).type == "cuda" or _interpreting():
        from kernels import triton_backend

        return triton_backend
    from kernels import torch_backend

    return torch_backend


def _interpreting() -> bool:
    if importlib.util.find_spec("triton") is None:  # it is made for Linux alone
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)
