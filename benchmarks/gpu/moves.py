"""Whole blocks between the device and pinned host memory, as a share of what the link can do."""

from __future__ import annotations

import random
from functools import partial

import torch

from benchmarks.gpu.limits import Limits
from benchmarks.gpu.machine import Machine, in_turns
from benchmarks.gpu.plan import Deadline, Plan
from benchmarks.gpu.report import OURS, Figure, Report
from kernels.copy import copy_blocks

MOVES_AIM = 0.90


def block_order(blocks: int, run_blocks: int, seed: int) -> list[int]:
    """All block numbers below `blocks`, a multiple of `run_blocks`, in random order but for runs of neighbours."""
    starts = list(range(0, blocks, run_blocks))
    random.Random(seed).shuffle(starts)
    return [start + offset for start in starts for offset in range(run_blocks)]


def measure_moves(machine: Machine, plan: Plan, limits: Limits, report: Report, seconds: float) -> None:
    deadline = Deadline(seconds)
    shape = (plan.moved_blocks, plan.block_bytes)
    on_device = torch.empty(shape, dtype=torch.uint8, device=machine.device)
    on_host = torch.empty(shape, dtype=torch.uint8, pin_memory=machine.device.type == "cuda")
    ways = (("to device", on_host, on_device, limits.to_device), ("to host", on_device, on_host, limits.to_host))
    for run_blocks, order in ((1, "random order"), (plan.run_blocks, f"runs of {plan.run_blocks}")):
        source_index, target_index = (block_order(plan.moved_blocks, run_blocks, seed) for seed in (1, 2))
        for way, source, target, limit in ways:
            name = f"{plan.moved_blocks} blocks of {plan.block_bytes >> 10} KiB {way}, {order}"
            if deadline.passed():
                report.add([Figure("moves", name, OURS, missing=deadline.reason)])
                continue
            drawn = torch.randint(0, 256, shape, dtype=torch.uint8, device=machine.device)
            source.copy_(drawn)
            target.zero_()
            move = partial(copy_blocks, source, target, source_index, target_index)
            move()
            if not torch.equal(target.to(machine.device)[target_index], drawn[source_index]):
                report.add([Figure("moves", name, OURS, wrong="blocks differ from what they were copied from")])
                continue
            samples = in_turns(machine, {OURS: move}, plan.repetitions)
            least_us = plan.moved_blocks * plan.block_bytes / limit * 1e6
            report.add([Figure.of("moves", name, OURS, samples[OURS], least_us=least_us, aim=MOVES_AIM)])
