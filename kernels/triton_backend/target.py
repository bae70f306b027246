"""The device that kernels are compiled for."""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager

import torch
from triton import knobs

# Whether `triton.jit` has made functions for Triton's interpreter: decided once, when they are decorated.
INTERPRETED: bool = knobs.runtime.interpret


@functools.cache
def target(device: torch.device) -> tuple[str, int]:
    """Name of a device's architecture as the tile table has it, and bytes of shared memory a program can have there."""
    if device.type != "cuda":
        return "sm_90", 232_448  # what the interpreter stands in for
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return properties.gcnArchName.partition(":")[0], properties.shared_memory_per_block
    return f"sm_{properties.major}{properties.minor}", properties.shared_memory_per_block_optin


def on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, whatever device its arguments are on."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
