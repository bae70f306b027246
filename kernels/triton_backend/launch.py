"""One kernel launch as a value: what the backend runs is what `kernels.report` compiles ahead of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Launch:
    """A Triton kernel, its grid and all it is called with.

    Attributes:
        kernel: a `triton.jit` function.
        grid: programs in up to three dimensions.
        arguments: by name, in the order of the kernel's parameters; compile-time constants included.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int
    num_stages: int

    def run(self) -> None:
        """Put it on the current stream of the current device."""
        if min(self.grid):
            self.kernel[self.grid](**self.arguments, num_warps=self.num_warps, num_stages=self.num_stages)
