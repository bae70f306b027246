"""The architectures that the kernels are compiled for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """An architecture as `kernels.tiles.choose` and as Triton know it.

    Attributes:
        arch: Triton's word for it, of the kind that its backend takes.
        shared_memory_bytes: what one program can have at most.
        tensor_memory_columns: of 128 lanes × 32 bit, what one program can have at most; 0 where there is none.
        float8: whether it converts float8_e4m3fn.
    """

    name: str
    backend: str
    arch: int | str
    warp_threads: int
    shared_memory_bytes: int
    tensor_memory_columns: int
    float8: bool


# NVIDIA: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", maximum amount of shared
# memory per thread block; PTX ISA, "Tensor Memory". AMD: CDNA 3 Instruction Set Architecture, local data share.
TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", "cuda", 80, 32, 166_912, 0, False),
        Target("sm_90", "cuda", 90, 32, 232_448, 0, True),
        Target("sm_100", "cuda", 100, 32, 232_448, 512, True),
        Target("gfx942", "hip", "gfx942", 64, 65_536, 0, True),
    )
}
