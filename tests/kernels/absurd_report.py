"""The report over launches that must not pass, in a process of its own: here Triton's interpreter is not on."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from kernels.report.__main__ import main
from kernels.report.targets import Target
from kernels.report.variants import Attention, Write
from kernels.triton_backend.launch import Launch


@dataclass(frozen=True)
class Absurd(Attention):
    def launch(self, target: Target) -> Launch:
        launch = super().launch(target)
        shape = launch.arguments["S"]._replace(row_tile=128, key_tile=64)
        return replace(launch, arguments={**launch.arguments, "S": shape}, num_warps=4, num_stages=2)


@dataclass(frozen=True)
class Broken(Attention):
    def launch(self, target: Target) -> Launch:
        launch = super().launch(target)
        return replace(launch, arguments={**launch.arguments, "q": None})


VARIANTS = [
    Absurd("prefill", 256, 256, (16, 8), "bf16"),
    Broken("decode", 64, 64, (9, 3), "bf16"),
    Write("bf16", matrix_expected=True),
    Write("int8"),
    Write("fp8"),
]

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], VARIANTS))
