"""The parts in their order, each with its time limit and a line at its end. A part that fails doesn't stop the next."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict

import torch
import triton

from benchmarks.gpu.attention import decode_cases, measure_cases, prefill_cases, told
from benchmarks.gpu.limits import measure_limits
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.moves import measure_moves
from benchmarks.gpu.peers import Peer
from benchmarks.gpu.plan import DECODE_SECONDS, MOVES_SECONDS, PREFILL_SECONDS, SUITE_SECONDS, TILES_SECONDS, Plan
from benchmarks.gpu.report import Report
from benchmarks.gpu.suite import run_kernel_tests
from benchmarks.gpu.tiles import sweep


def note_machine(report: Report, device: torch.device) -> None:
    properties = torch.cuda.get_device_properties(device)
    facts = {
        "device": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "triton": triton.__version__,
    }
    report.note("machine", facts, f"{properties.name}, torch {torch.__version__}, Triton {triton.__version__}")


def check_kernels(report: Report) -> None:
    with _part(report, "tests"):
        suite = run_kernel_tests("cuda", SUITE_SECONDS)
        report.note("tests", asdict(suite), f"tests/kernels: {suite}")
        if not suite.succeeded:
            report.fail(f"tests/kernels: {suite}")


def measure(machine: Machine, plan: Plan, peers: Mapping[str, Peer], report: Report) -> None:
    with _part(report, "all that is measured"):
        limits = measure_limits(machine, plan)
        report.note("limits", asdict(limits), f"limits: {limits}")
        with _part(report, "decode"):
            measure_cases(machine, plan, decode_cases(plan, limits), peers, report, DECODE_SECONDS)
        with _part(report, "prefill"):
            measure_cases(machine, plan, prefill_cases(plan, limits), peers, report, PREFILL_SECONDS)
        with _part(report, "moves"):
            measure_moves(machine, plan, limits, report, MOVES_SECONDS)


def try_tiles(machine: Machine, plan: Plan, report: Report) -> None:
    with _part(report, "tiles"):
        limits = measure_limits(machine, plan)
        report.note("limits", asdict(limits), f"limits: {limits}")
        sweep(machine, plan, limits, report, TILES_SECONDS)


@contextmanager
def _part(report: Report, name: str) -> Iterator[None]:
    begun = time.monotonic()
    try:
        yield
    except Exception as failure:
        report.fail(f"{name}: {told(failure)}")
    seconds = time.monotonic() - begun
    report.note(f"seconds of {name}", seconds, f"{name} ended after {seconds:.0f} s")
