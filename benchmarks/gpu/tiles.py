"""The sweep that the tile table is made from: candidates for one head shape, each checked, then timed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from statistics import geometric_mean

import torch

from benchmarks.figures import table
from benchmarks.gpu.attention import Case, decode_cases, prefill_cases, tiles_of, told
from benchmarks.gpu.limits import Limits
from benchmarks.gpu.machine import Call, Machine, in_turns
from benchmarks.gpu.plan import Deadline, Plan
from benchmarks.gpu.report import OURS, Figure, Report
from benchmarks.gpu.step import Step, error
from kernels.tiles import Choice, Tiles
from kernels.triton_backend.attention import plan_attention, split_workspace

KEY_TILES, STAGES = (64, 128, 32), (2, 3, 4)
DECODE_WARPS, PREFILL_WARPS = (4, 8, 2), (4, 8)
ROW_TILES = (128, 64)
SPLIT_TOKENS = (512, 1024, 2048, 4096)


def decode_tiles(choice: Choice) -> Iterator[Choice]:
    """The table's own first."""
    yield choice
    for key_tile, num_warps, num_stages in product(KEY_TILES, DECODE_WARPS, STAGES):
        tiles = Tiles(choice.decode.row_tile, key_tile, num_warps, num_stages)
        if tiles != choice.decode:
            yield replace(choice, decode=tiles)


def decode_splits(choice: Choice) -> Iterator[Choice]:
    for split_tokens in SPLIT_TOKENS:
        if split_tokens != choice.split_tokens:
            yield replace(choice, split_tokens=split_tokens)


def prefill_tiles(choice: Choice) -> Iterator[Choice]:
    """The table's own first."""
    yield choice
    for row_tile, key_tile, num_warps, num_stages in product(ROW_TILES, KEY_TILES, PREFILL_WARPS, STAGES):
        tiles = Tiles(row_tile, key_tile, num_warps, num_stages)
        if tiles != choice.prefill:
            yield replace(choice, prefill=tiles)


@dataclass(frozen=True, slots=True)
class Trial:
    """A case ready to be tried with any tiles."""

    case: Case
    step: Step
    expected: torch.Tensor

    @classmethod
    def of(cls, machine: Machine, plan: Plan, case: Case) -> Trial:
        """Raises RuntimeError when the cache can't be filled."""
        step = Step(
            plan.heads, case.sequences, case.new_tokens, case.context_tokens, plan.block_tokens,
            getattr(torch, case.cache), machine.device,
        )  # fmt: skip
        if (wrong := step.fill()) is not None:
            raise RuntimeError(wrong)
        return cls(case, step, step.expected())

    def call(self, choice: Choice) -> Call:
        """What gives back the result of `paged_attention` with these tiles."""
        step = self.step
        k_scales, v_scales = step.both_scales
        workspace_bytes = split_workspace(
            step.sequences, step.heads.query_heads, step.heads.dim, step.context_tokens, choice.split_tokens
        )
        out = torch.empty_like(step.q)
        launches = plan_attention(
            step.q, *step.keys_and_values, step.tables, step.query_starts, step.context_lengths,
            choice=choice, scale=step.scale, causal=True, window=None, soft_cap=None, sinks=None,
            k_scales=k_scales, v_scales=v_scales, max_query_tokens=step.new_tokens,
            max_context_tokens=step.context_tokens, out=out, lse=None,
            workspace=torch.empty(workspace_bytes, dtype=torch.uint8, device=step.device),
        )  # fmt: skip

        def run() -> torch.Tensor:
            for launch in launches:
                launch.run()
            return out

        return run


def sweep(machine: Machine, plan: Plan, limits: Limits, report: Report, seconds: float) -> None:
    """Decode of each cache, then prefill of whole prompts, each for a like share of the time that is left."""
    deadline = Deadline(seconds)
    narrow = replace(plan, batches=plan.sweep_batches, contexts=(plan.sweep_context,))
    decodes = list(decode_cases(narrow, limits))
    groups = [[case for case in decodes if case.cache == cache] for cache in plan.caches]
    groups.append([case for case in prefill_cases(plan, limits) if case.new_tokens == case.context_tokens])
    for done, cases in enumerate(groups):
        share = Deadline(deadline.left_seconds() / (len(groups) - done))
        title = f"tiles, {cases[0].part} {cases[0].cache}"
        try:
            best = _best(machine, plan, title, cases, report, share)
        except Exception as failure:
            report.add([Figure(title, "all", OURS, wrong=told(failure))])
            continue
        told_best = short(best) if best is not None else "none was right in every case"
        report.note(f"best {title}", best and asdict(best), f"{title}: best over all cases: {told_best}")


def _best(
    machine: Machine, plan: Plan, title: str, cases: Sequence[Case], report: Report, deadline: Deadline
) -> Choice | None:
    """The tiles with the greatest geometric mean of shares over all cases."""
    trials = [Trial.of(machine, plan, case) for case in cases]
    own = tiles_of(trials[0].step)
    means: dict[Choice, float] = {}

    def consider(candidates: Iterator[Choice]) -> None:
        for choice in candidates:
            if deadline.passed():
                return
            figures = [_try(machine, plan, title, trial, choice) for trial in trials]
            report.add(figures)
            shares = [figure.share for figure in figures if figure.share is not None]
            if len(shares) == len(trials):
                means[choice] = geometric_mean(shares)

    if cases[0].part == "prefill":
        consider(prefill_tiles(own))
    else:
        consider(decode_tiles(own))
        if means:
            consider(decode_splits(max(means, key=means.__getitem__)))
    return max(means, key=means.__getitem__, default=None)


def _try(machine: Machine, plan: Plan, title: str, trial: Trial, choice: Choice) -> Figure:
    name, tiles = trial.case.name, asdict(choice)
    try:
        call = trial.call(choice)
        wrong = error(call(), trial.expected)
    except Exception as failure:  # most likely more shared memory or registers than there are
        return Figure(title, name, short(choice), tiles=tiles, missing=told(failure))
    if wrong is not None:
        return Figure(title, name, short(choice), tiles=tiles, wrong=wrong)
    samples = in_turns(machine, {OURS: call}, plan.repetitions)[OURS]
    return Figure.of(
        title, name, short(choice), samples, least_us=trial.case.least_us, aim=trial.case.aim, tiles=tiles
    )  # fmt: skip


def short(choice: Choice) -> str:
    """Rows × keys, warps and stages of prefill and of decode, and the split."""
    prefill, decode = (
        f"{tiles.row_tile}x{tiles.key_tile} {tiles.num_warps}w {tiles.num_stages}s"
        for tiles in (choice.prefill, choice.decode)
    )
    return f"prefill {prefill}, decode {decode}, split {choice.split_tokens}"


def best_table(figures: Sequence[Figure]) -> str:
    """The fastest tiles of each case, beside those of the table."""
    rows = [["tiles", "best, us", "of the limit", "table's own, us", "best are"]]
    for case in dict.fromkeys((figure.part, figure.case) for figure in figures):
        here = [figure for figure in figures if (figure.part, figure.case) == case]
        timed = [(figure.device_us.median, figure) for figure in here if figure.device_us is not None]
        if timed:
            device_us, best = min(timed, key=lambda pair: pair[0])
            own = f"{here[0].device_us.median:.1f}" if here[0].device_us is not None else "-"
            rows.append([f"{case[0]}: {case[1]}", f"{device_us:.1f}", f"{best.share:.0%}", own, best.contender])
    return table(rows)
