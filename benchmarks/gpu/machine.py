"""How calls are timed and captured. On a device by its own clock; what measures takes any `Machine`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]

# Read before each call: it pushes everything else out of the L2 (tens of MiB), and keeps the device busy for about
# half a millisecond, in which the host gets the launches of a call done. Reading leaves nothing behind that would
# have to be written back while the call runs.
FLUSH_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Sample:
    """Microseconds of one call: on the device, and of the host until the call came back."""

    device_us: float
    host_us: float


@dataclass(frozen=True, slots=True)
class Machine:
    """A device, how to time one call on it, and how to capture one as a graph (what comes back replays it).

    `capture` raises RuntimeError when the call waits for the device or allocates.
    """

    device: torch.device
    time: Callable[[Call], Sample]
    capture: Callable[[Call], Call]


def in_turns(machine: Machine, calls: Mapping[str, Call], repetitions: int) -> dict[str, list[Sample]]:
    """A B A B …, so that what else the machine does meets all of them; the first round is not counted."""
    samples: dict[str, list[Sample]] = {name: [] for name in calls}
    for counts in (False, *[True] * repetitions):
        for name, call in calls.items():
            sample = machine.time(call)
            if counts:
                samples[name].append(sample)
    return samples


def cuda(device: torch.device) -> Machine:
    flush = torch.ones(FLUSH_BYTES // 4, dtype=torch.float32, device=device)

    def time_call(call: Call) -> Sample:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        flush.sum()
        begin.record()
        begun_ns = time.perf_counter_ns()
        call()
        host_ns = time.perf_counter_ns() - begun_ns
        end.record()
        end.synchronize()
        return Sample(begin.elapsed_time(end) * 1e3, host_ns / 1e3)

    def capture(call: Call) -> Call:
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            before = _allocations(device)
            call()
            allocations = _allocations(device) - before
        if allocations:
            raise RuntimeError(f"the captured call allocated {allocations} times")

        def replay(held: Call = call) -> None:  # what the call holds, the graph reads and writes
            graph.replay()

        return replay

    return Machine(device, time_call, capture)


def _allocations(device: torch.device) -> int:
    """How often tensors' memory was asked for since the process began."""
    return int(torch.cuda.memory_stats(device)["allocation.all.allocated"])
