"""What the machine can do at best: what every figure is a share of."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.gpu.machine import Call, Machine
from benchmarks.gpu.plan import Plan

TRIES = 10


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes and operations per second, each the best of several tries.

    Attributes:
        copy: read and written by a copy within the device's memory.
        to_device, to_host: between pinned host memory and the device.
        matrix: multiplications and additions of a product of bfloat16 matrices.
    """

    copy: float
    to_device: float
    to_host: float
    matrix: float

    def __str__(self) -> str:
        return (
            f"copy {self.copy / 1e9:.0f} GB/s (read and written), to device {self.to_device / 1e9:.1f} GB/s, "
            f"to host {self.to_host / 1e9:.1f} GB/s, matrices {self.matrix / 1e12:.0f} TFLOP/s"
        )


def measure_limits(machine: Machine, plan: Plan) -> Limits:
    def per_second(amount: float, call: Call) -> float:
        machine.time(call)
        return amount / min(machine.time(call).device_us for _ in range(TRIES)) * 1e6

    device = machine.device
    source = torch.ones(plan.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = per_second(2 * plan.copy_bytes, partial(target.copy_, source))
    host = torch.ones(plan.link_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    near = target[: plan.link_bytes]
    to_device = per_second(plan.link_bytes, partial(near.copy_, host, non_blocking=True))
    to_host = per_second(plan.link_bytes, partial(host.copy_, near, non_blocking=True))
    del source, target, near, host
    size = plan.matrix_size
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    product = torch.empty_like(left)
    matrix = per_second(2 * size**3, partial(torch.mm, left, right, out=product))
    return Limits(copy, to_device, to_host, matrix)
