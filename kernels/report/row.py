"""What came out of one compilation, and what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Row:
    """One variant on one target.

    Attributes:
        kernel: prefill, decode, merge or write.
        matrix_expected: whether a product that matrix units can do is in there.
        shared_memory_limit_bytes, tensor_memory_limit_columns: all that a program can have on the target.
        not_available: why this is not compiled for this target, and what to take instead; empty where it is.
        error: why there is no machine code; empty where there is.
        rows, keys: of a tile; 0 where there are none.
        table_shared_memory_bytes: what `kernels.tiles` says that such tiles take at most; 0 where there are none.
        registers: per thread.
        spills: NVIDIA: loads and stores of local memory in the machine code. AMD: vector registers that went to memory.
        scalar_spills: AMD: scalar registers that went to lanes of vector registers, which is no memory.
        matrix_instructions: how often each kind stands in the machine code.
        wide_loads: loads of 128 bits a thread from global memory, alike.
    """

    variant: str
    target: str
    kernel: str
    matrix_expected: bool
    shared_memory_limit_bytes: int
    tensor_memory_limit_columns: int
    not_available: str = ""
    error: str = ""
    rows: int = 0
    keys: int = 0
    num_warps: int = 0
    num_stages: int = 0
    registers: int = 0
    spills: int = 0
    scalar_spills: int = 0
    shared_memory_bytes: int = 0
    table_shared_memory_bytes: int = 0
    tensor_memory_columns: int = 0
    matrix_instructions: dict[str, int] = field(default_factory=dict)
    wide_loads: int = 0


def problems(row: Row) -> list[str]:
    """Why this must not be served; empty where nothing is wrong or nothing was to be compiled."""
    if row.not_available:
        return []
    if row.error:
        return [f"no machine code: {row.error}"]
    found = []
    if row.spills:
        found.append(f"spills ({row.spills}) at {row.registers} registers a thread: take a smaller tile or more warps")
    if row.matrix_expected and not row.matrix_instructions:
        found.append("no matrix instruction, where the products need them")
    if row.shared_memory_bytes > row.shared_memory_limit_bytes:
        found.append(
            f"{row.shared_memory_bytes} bytes of shared memory, {row.shared_memory_limit_bytes} are all that "
            f"{row.target} has: take a smaller tile or fewer stages"
        )
    if row.shared_memory_bytes > row.table_shared_memory_bytes > 0:
        found.append(
            f"{row.shared_memory_bytes} bytes of shared memory, where the table of tiles says that it takes at most "
            f"{row.table_shared_memory_bytes}: correct the table"
        )
    if row.tensor_memory_columns > row.tensor_memory_limit_columns:
        found.append(
            f"{row.tensor_memory_columns} columns of tensor memory, {row.tensor_memory_limit_columns} are all that "
            f"{row.target} has: take a smaller tile"
        )
    return found
