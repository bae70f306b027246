"""Which implementation of the kernels serves a device; nothing else names one."""

from __future__ import annotations

from types import ModuleType

import torch

from kernels import torch_backend


def backend(device: torch.device | str) -> ModuleType:
    """The module whose functions run on `device`.

    Raises:
        RuntimeError: `device` is a string that names no device.
    """
    torch.device(device)
    return torch_backend  # until there are Triton kernels, PyTorch serves every device
