"""All of `benchmarks.gpu` that measures, on a CPU in Triton's interpreter with tiny shapes: run by `test_gpu.py`.

    TRITON_INTERPRET=1 python -m tests.benchmarks.gpu_on_cpu FOLDER

Leaves in FOLDER a report of each run; see `main`.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu import run, tiles
from benchmarks.gpu.attention import decode_cases, measure_cases
from benchmarks.gpu.limits import Limits
from benchmarks.gpu.machine import Call, Machine, Sample
from benchmarks.gpu.peers import FlashInfer, FlexAttention, Peer, sdpa
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.report import Report, tables
from benchmarks.gpu.step import Step
from benchmarks.gpu.work import Heads
from kernels import triton_backend

PLAN = Plan(
    heads=Heads(4, 2, 16), batches=(2,), contexts=(37,), prompts=(40,), block_bytes=1 << 10, moved_blocks=16,
    run_blocks=4, copy_bytes=1 << 20, link_bytes=1 << 20, matrix_size=32, repetitions=1, sweep_batches=(2,),
    sweep_context=70,
)  # fmt: skip
ONE_DECODE = replace(PLAN, caches=("bfloat16",))
LIMITS = Limits(copy=1e9, to_device=1e9, to_host=1e9, matrix=1e9)


class PagedDecode:
    """FlashInfer's decode by its documentation: blocks in HND, tables as compressed rows."""

    def __init__(self, workspace: Tensor, kv_layout: str, *, use_tensor_cores: bool) -> None:
        assert kv_layout == "HND"
        assert workspace.dtype == torch.uint8

    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim: int, page_size: int, *, q_data_type: torch.dtype, kv_data_type: torch.dtype, sm_scale: float,
    ) -> None:  # fmt: skip
        assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
        self.pages = [indices[first:end] for first, end in pairwise(indptr)]
        self.last, self.scale = last_page_len, sm_scale
        self.shape = (num_kv_heads, page_size, head_dim)

    def run(self, q: Tensor, cache: Tensor) -> Tensor:
        assert cache.shape[1:] == (2, *self.shape)
        outs = []
        for row, pages, last in zip(q, self.pages, self.last, strict=True):
            used = (len(pages) - 1) * self.shape[1] + int(last)
            k, v = cache[pages.long()].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :used]
            outs.append(scaled_dot_product_attention(row[:, None], k, v, scale=self.scale, enable_gqa=True)[:, 0])
        return torch.stack(outs)


def on_cpu() -> Machine:
    def timed(call: Call) -> Sample:
        begun = time.perf_counter()
        call()
        return Sample((time.perf_counter() - begun) * 1e6, 1.0)

    return Machine(torch.device("cpu"), timed, lambda call: call)


def broken(step: Step, dense: Tensor) -> Call:
    raise RuntimeError("no kernel image\nand more lines")


def uncompiled(function: Any, *, dynamic: bool) -> Any:
    assert not dynamic
    return function


def decode(plan: Plan, report: Report, seconds: float = 600) -> None:
    measure_cases(on_cpu(), plan, decode_cases(plan, LIMITS), {"sdpa": sdpa}, report, seconds)
    report.note("status", report.status, "")


def main(folder: Path) -> None:
    sys.modules["flashinfer"] = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=PagedDecode)  # type: ignore[assignment]
    torch.manual_seed(0)
    torch.set_num_threads(1)

    report = Report(folder / "right.json", print)
    peers: dict[str, Peer] = {
        "sdpa": sdpa,
        "flex_attention": FlexAttention(uncompiled),
        "flashinfer": FlashInfer(),
        "broken": broken,
    }
    run.measure(on_cpu(), PLAN, peers, report)
    report.note("table", tables(report.figures), "")
    report.note("status", report.status, "")

    decode(replace(ONE_DECODE, batches=(1,), contexts=(520,)), Report(folder / "splits.json", print))
    decode(PLAN, Report(folder / "late.json", print), seconds=0)

    report = Report(folder / "tiles.json", print)
    tiles.KEY_TILES, tiles.STAGES, tiles.DECODE_WARPS, tiles.PREFILL_WARPS = (64,), (2,), (8,), (8,)
    tiles.ROW_TILES, tiles.SPLIT_TOKENS = (32,), (64,)
    run.try_tiles(on_cpu(), replace(PLAN, caches=("int8",), prompts=(20,)), report)
    report.note("table", tiles.best_table(report.figures), "")
    report.note("status", report.status, "")

    honest, calls = triton_backend.paged_attention, []

    def corrupt(*args: Any, **options: Any) -> Tensor:
        calls.append(None)
        return honest(*args, **options).add_(1)

    triton_backend.paged_attention = corrupt
    report = Report(folder / "corrupt.json", print)
    decode(ONE_DECODE, report)
    report.note("calls", len(calls), "")
    triton_backend.paged_attention = honest

    triton_backend.write_kv = lambda *args: None
    decode(ONE_DECODE, Report(folder / "unwritten.json", print))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
