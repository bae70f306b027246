"""How close the Triton kernels come to what a GPU can do, and that they are right there.

    python -m benchmarks.gpu [--json FILE] [--tiles]

Runs `tests/kernels` on the device, measures what the device can do at best, then decode, prefill and block moves as
shares of that, beside PyTorch's attention, flex_attention and FlashInfer where it is installed; in under five minutes.
With --tiles it tries tiles instead, for the tile table.

Exit status: 0; 1 when a test failed or did not end, or a result was wrong (the rest is measured all the same);
2 without a CUDA device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures, written anew as each is made")
    parser.add_argument("--tiles", action="store_true", help="try tiles for decode and prefill, and nothing else")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("There is no CUDA device here, and nothing was measured.", file=sys.stderr)
        return 2

    # These need Triton, which there may not be where there is no device.
    from benchmarks.gpu import machine, run
    from benchmarks.gpu.peers import FlexAttention, Peer, built_flashinfer, sdpa
    from benchmarks.gpu.plan import Plan
    from benchmarks.gpu.report import Report, tables
    from benchmarks.gpu.tiles import best_table
    from kernels.triton_backend.target import INTERPRETED

    if INTERPRETED:
        print("TRITON_INTERPRET is set: unset it to measure the device.", file=sys.stderr)
        return 2
    report = Report(options.json, partial(print, flush=True))
    device = torch.device("cuda", torch.cuda.current_device())
    run.note_machine(report, device)
    if options.tiles:
        run.try_tiles(machine.cuda(device), Plan(), report)
        print(best_table(report.figures))
        return report.status
    run.check_kernels(report)
    peers: dict[str, Peer] = {"sdpa": sdpa, "flex_attention": FlexAttention(), "flashinfer": built_flashinfer()}
    run.measure(machine.cuda(device), Plan(), peers, report)
    print(tables(report.figures))
    return report.status


if __name__ == "__main__":
    sys.exit(main())
