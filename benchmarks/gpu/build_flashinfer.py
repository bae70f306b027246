"""Let FlashInfer build what it will be asked for; run by `peers.py` in a process that can be ended."""

from __future__ import annotations

import torch

from benchmarks.gpu.peers import FlashInfer
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.step import Step


def main() -> None:
    plan = Plan()
    step = Step(plan.heads, 1, 1, plan.block_tokens, plan.block_tokens, torch.bfloat16, torch.device("cuda"))
    FlashInfer()(step, step.contiguous())()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
