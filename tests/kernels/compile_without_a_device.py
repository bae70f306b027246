"""Run by `test_compiled_once.py`, without Triton's interpreter: compiles what steps of many sizes would launch.

Triton's own launcher decides what it compiles anew; only the driver is a stand-in, and nothing is launched.
"""

from __future__ import annotations

import sys

import torch
from triton.runtime import driver

from kernels.report.compile import NoDevice
from kernels.report.targets import TARGETS
from kernels.tiles import HeadShape, choose
from kernels.triton_backend.attention import attention_workspace, plan_attention
from kernels.triton_backend.write import plan_write


def main() -> None:
    """Print each kernel's name and how many versions of it were compiled."""
    target = TARGETS["sm_90"]
    driver.set_active(NoDevice(target))
    k_blocks, v_blocks = (torch.empty(9, 2, 16, 64, dtype=torch.bfloat16).transpose(1, 2) for _ in "kv")
    choice = choose(HeadShape(64, 64, 3, 2, 2), target.name, target.shared_memory_bytes)
    kernels = set()
    for tokens, sequences, entries, most_query, most_context in (
        (1, 1, 1, 1, 1), (1, 1, 40, 1, 600), (16, 16, 16, 1, 256), (17, 3, 33, 15, 513), (2048, 1, 128, 2048, 2048),
        (100, 100, 8192, 1, 131_072), (64, 32, 1000, 33, 9999),
    ):  # fmt: skip
        q = torch.empty(tokens, 6, 64, dtype=torch.bfloat16)
        workspace = attention_workspace(
            tokens=tokens, sequences=sequences, query_heads=6, value_dim=64, max_context_tokens=most_context
        )
        launches = plan_attention(
            q, k_blocks, v_blocks, torch.empty(sequences, entries, dtype=torch.int32),
            torch.empty(sequences + 1, dtype=torch.int32), torch.empty(sequences, dtype=torch.int32),
            choice=choice, scale=0.125, causal=True, window=most_context if "window" in sys.argv else None,
            soft_cap=None, sinks=None, k_scales=None, v_scales=None, max_query_tokens=most_query,
            max_context_tokens=most_context, out=torch.empty_like(q), lse=None,
            workspace=torch.empty(workspace, dtype=torch.uint8),
        )  # fmt: skip
        launches.append(plan_write(q[:, :2], k_blocks, torch.empty(tokens, dtype=torch.int64), None))
        for launch in launches:
            kernels.add(launch.kernel)
            launch.kernel.warmup(
                **launch.arguments, grid=launch.grid, num_warps=launch.num_warps, num_stages=launch.num_stages
            )
    for kernel in kernels:
        print(kernel.fn.__name__, len(kernel.device_caches[target.name][0]))


if __name__ == "__main__":
    main()
