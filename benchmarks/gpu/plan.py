"""What is measured, and within how many seconds: under five minutes together, the sweep of tiles apart."""

from __future__ import annotations

import time
from dataclasses import dataclass

from benchmarks.gpu.work import Heads

SUITE_SECONDS = 100.0
DECODE_SECONDS = 75.0
PREFILL_SECONDS = 35.0
MOVES_SECONDS = 15.0
TILES_SECONDS = 540.0
FLEX_SECONDS = 25.0
FLASHINFER_BUILD_SECONDS = 45.0

LLAMA_3_8B = Heads(query_heads=32, kv_heads=8, dim=128)


@dataclass(frozen=True, slots=True)
class Plan:
    """Shapes and sizes; what has an aim comes first, in case that time runs out.

    The heads are those of Llama 3 8B, and `block_bytes` are 16 tokens of all its 32 layers in bfloat16.

    Attributes:
        copy_bytes, link_bytes: of one copy that measures a limit.
        matrix_size: rows and columns of the square matrices whose product measures the matrix rate.
        moved_blocks: how many blocks one call of `copy_blocks` moves, `run_blocks` of them side by side, or none.
    """

    heads: Heads = LLAMA_3_8B
    block_tokens: int = 16
    caches: tuple[str, ...] = ("bfloat16", "int8", "float8_e4m3fn")
    batches: tuple[int, ...] = (64, 16, 1)
    contexts: tuple[int, ...] = (8192, 32768, 1024)
    prompts: tuple[int, ...] = (8192, 2048)
    block_bytes: int = 2 << 20
    moved_blocks: int = 512
    run_blocks: int = 8
    copy_bytes: int = 4 << 30
    link_bytes: int = 1 << 30
    matrix_size: int = 8192
    repetitions: int = 20
    sweep_batches: tuple[int, ...] = (64, 16, 1)
    sweep_context: int = 8192


class Deadline:
    """When a part must come to its end."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ends = time.monotonic() + seconds

    @property
    def reason(self) -> str:
        return f"the {self._seconds:.0f} s of this part are spent"

    def left_seconds(self) -> float:
        return max(0.0, self._ends - time.monotonic())

    def passed(self) -> bool:
        return not self.left_seconds()
