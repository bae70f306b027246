"""Decode and prefill: a step is checked against float64, and only who was right is timed, all in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.limits import Limits
from benchmarks.gpu.machine import Call, Machine, in_turns
from benchmarks.gpu.peers import NotMeasured, Peer, rows
from benchmarks.gpu.plan import Deadline, Plan
from benchmarks.gpu.report import OURS, Figure, Report
from benchmarks.gpu.step import Step, error
from benchmarks.gpu.work import decode_bytes, prefill_operations
from kernels import triton_backend
from kernels.tiles import Choice, HeadShape, choose
from kernels.triton_backend.target import target

DECODE_AIM, AIM_SEQUENCES, AIM_CONTEXT_TOKENS = 0.90, 32, 8192
PREFILL_AIM, AIM_PROMPT_TOKENS = 0.65, 8192
CACHED_TENTHS = 9


@dataclass(frozen=True, slots=True)
class Case:
    """One step by everybody. `least_us` is what its work takes at the machine's limit."""

    part: str
    name: str
    sequences: int
    new_tokens: int
    context_tokens: int
    cache: str
    least_us: float
    aim: float | None


def decode_cases(plan: Plan, limits: Limits) -> Iterator[Case]:
    for context_tokens in plan.contexts:
        for sequences in plan.batches:
            for cache in plan.caches:
                amount = decode_bytes(
                    plan.heads, sequences=sequences, context_tokens=context_tokens,
                    cache_bytes=getattr(torch, cache).itemsize,
                )  # fmt: skip
                aimed = sequences >= AIM_SEQUENCES and context_tokens >= AIM_CONTEXT_TOKENS
                name = f"batch {sequences}, context {context_tokens}, {cache}"
                yield Case(
                    "decode", name, sequences, 1, context_tokens, cache, amount / limits.copy * 1e6,
                    DECODE_AIM if aimed else None,
                )  # fmt: skip


def prefill_cases(plan: Plan, limits: Limits) -> Iterator[Case]:
    """Each prompt whole, and with 90 % of it cached."""
    for prompt_tokens in plan.prompts:
        for cached_tokens in (0, prompt_tokens * CACHED_TENTHS // 10):
            new_tokens = prompt_tokens - cached_tokens
            amount = prefill_operations(plan.heads, new_tokens=new_tokens, context_tokens=prompt_tokens)
            aimed = not cached_tokens and prompt_tokens >= AIM_PROMPT_TOKENS
            yield Case(
                "prefill", f"prompt {prompt_tokens}, cached {cached_tokens}", 1, new_tokens, prompt_tokens, "bfloat16",
                amount / limits.matrix * 1e6, PREFILL_AIM if aimed else None,
            )  # fmt: skip


def tiles_of(step: Step) -> Choice:
    heads = step.heads
    group = heads.query_heads // heads.kv_heads
    shape = HeadShape(heads.dim, heads.dim, group, step.q.element_size(), step.cache.itemsize)
    return choose(shape, *target(step.device))


def ours(step: Step) -> Call:
    """`paged_attention` with all it needs given, as in a graph."""
    k_blocks, v_blocks = step.keys_and_values
    k_scales, v_scales = step.both_scales
    workspace_bytes = triton_backend.attention_workspace(
        tokens=len(step.q), sequences=step.sequences, query_heads=step.heads.query_heads, value_dim=step.heads.dim,
        max_context_tokens=step.context_tokens,
    )  # fmt: skip
    workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=step.device)
    out = torch.empty_like(step.q)
    return lambda: triton_backend.paged_attention(
        step.q, k_blocks, v_blocks, step.tables, step.query_starts, step.context_lengths,
        scale=step.scale, k_scales=k_scales, v_scales=v_scales, max_query_tokens=step.new_tokens,
        max_context_tokens=step.context_tokens, out=out, workspace=workspace,
    )  # fmt: skip


def measure_cases(
    machine: Machine, plan: Plan, cases: Iterator[Case], peers: Mapping[str, Peer], report: Report, seconds: float
) -> None:
    deadline = Deadline(seconds)
    for case in cases:
        if deadline.passed():
            report.add([Figure(case.part, case.name, OURS, missing=deadline.reason)])
            continue
        try:
            figures = measure(machine, plan, case, peers)
        except torch.OutOfMemoryError:
            figures = [Figure(case.part, case.name, OURS, missing="it does not fit into the device's memory")]
        except Exception as failure:
            figures = [Figure(case.part, case.name, OURS, wrong=told(failure))]
        report.add(figures)


def measure(machine: Machine, plan: Plan, case: Case, peers: Mapping[str, Peer]) -> list[Figure]:
    """Raises torch.OutOfMemoryError, and whatever writing the cache or timing raises."""
    step = Step(
        plan.heads, case.sequences, case.new_tokens, case.context_tokens, plan.block_tokens,
        getattr(torch, case.cache), machine.device,
    )  # fmt: skip
    part, name = case.part, case.name
    if (wrong := step.fill()) is not None:
        return [Figure(part, name, OURS, wrong=wrong)]
    expected, dense = step.expected(), step.contiguous()
    calls: dict[str, Call] = {}
    others: dict[str, Figure] = {}

    def admit(contender: str, make: Callable[[], Call]) -> None:
        """Time it later if it's right; a peer that fails is let go, we are not."""
        try:
            call = make()
            wrong = error(rows(call()), expected)
        except Exception as failure:
            mine = contender.startswith(OURS)
            if mine and isinstance(failure, torch.OutOfMemoryError):
                raise
            reason = str(failure) if isinstance(failure, NotMeasured) else told(failure)
            others[contender] = (
                Figure(part, name, contender, wrong=reason) if mine else Figure(part, name, contender, missing=reason)
            )
            return
        if wrong is None:
            calls[contender] = call
        else:
            others[contender] = Figure(part, name, contender, wrong=wrong)

    admit(OURS, lambda: ours(step))
    if OURS in calls and case.new_tokens == 1:
        admit(f"{OURS}, graph", lambda: _replayed(machine, ours(step)))
    for contender, peer in peers.items():
        admit(contender, partial(peer, step, dense))
    tiles = asdict(tiles_of(step))
    for contender, samples in in_turns(machine, calls, plan.repetitions).items():
        mine = contender == OURS
        others[contender] = Figure.of(
            part, name, contender, samples, least_us=case.least_us, aim=case.aim if mine else None,
            tiles=tiles if mine else None,
        )  # fmt: skip
    order = [OURS, f"{OURS}, graph", *peers]
    return sorted(others.values(), key=lambda figure: order.index(figure.contender))


def _replayed(machine: Machine, call: Call) -> Call:
    """A replay of `call` that gives back what it wrote, and nothing that was there before."""
    out: Tensor = call()
    replay = machine.capture(call)
    out.fill_(torch.nan)

    def again() -> Any:
        replay()
        return out

    return again


def told(failure: Exception) -> str:
    """A failure in a line."""
    lines = str(failure).strip().splitlines() or [""]
    return f"{type(failure).__name__}: {lines[0]}"
