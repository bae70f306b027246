"""From a variant to machine code, and what stands in it. Needs no GPU: the arguments are tensors without memory."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from kernels.report.row import Row
from kernels.report.targets import Target
from kernels.report.variants import Attention, Variant

MATRIX = {
    "cuda": re.compile(r"(?<![.\w])([A-Z]+MMA)\b"),  # HFMA2.MMA is none
    "hip": re.compile(r"\b(v_mfma_\w+)"),
}
WIDE_LOAD = {
    "cuda": re.compile(r"\bLDG(?:STS)?\.\S*\b128\b"),
    "hip": re.compile(r"\b(?:global|buffer|flat)_load_(?:lds_)?dwordx4\b"),
}
LOCAL_MEMORY = re.compile(r"\b(?:LDL|STL)\b")


@dataclass(frozen=True, slots=True)
class NoDevice:
    """In the place of Triton's driver: enough of a device for its launcher to specialise and compile a launch."""

    target: Target

    def get_current_target(self) -> Any:
        return GPUTarget(self.target.backend, self.target.arch, self.target.warp_threads)

    def get_current_device(self) -> str:
        return self.target.name

    def get_current_stream(self, device: str) -> int:
        return 0


def unexamined(variant: Variant, target: Target) -> Row:
    return Row(
        variant.name, target.name, variant.kernel, variant.matrix_expected,
        target.shared_memory_bytes, target.tensor_memory_columns,
    )  # fmt: skip


def examine(variant: Variant, target: Target) -> Row:
    """Plan and compile `variant` for `target`, or say why not.

    It is Triton's launcher that specialises the arguments (alignment, widths, ones), so this is what a device gets.
    """
    row = unexamined(variant, target)
    if variant.cache == "fp8" and not target.float8:
        return replace(row, not_available=f"{target.name} has no float8_e4m3fn: use int8")
    driver.set_active(NoDevice(target))
    try:
        launch = variant.launch(target)
        row = replace(row, num_warps=launch.num_warps, num_stages=launch.num_stages)
        if isinstance(variant, Attention) and variant.kernel != "merge":
            shape = launch.arguments["S"]
            row = replace(
                row, rows=shape.row_tile, keys=shape.key_tile,
                table_shared_memory_bytes=variant.table_row(target).shared_memory_bytes,
            )  # fmt: skip
        binary = launch.kernel.warmup(
            **launch.arguments, grid=launch.grid, num_warps=launch.num_warps, num_stages=launch.num_stages
        )
    except Exception as error:  # whatever it is, this variant is not to be had
        return replace(row, error=_innermost(error))
    row = replace(
        row,
        shared_memory_bytes=binary.metadata.shared,
        tensor_memory_columns=getattr(binary.metadata, "tmem_size", 0) if target.tensor_memory_columns else 0,
    )
    return _cuda(row, binary) if target.backend == "cuda" else _hip(row, binary)


def _cuda(row: Row, binary: Any) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(binary.asm["cubin"])
        usage = _output(knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin))
        code = _output(knobs.nvidia.nvdisasm.path, "--print-code", str(cubin))
    return replace(
        _counted(row, "cuda", code),
        registers=_number(rf"Function {binary.metadata.name}:\s+REG:(\d+)", usage),
        spills=len(LOCAL_MEMORY.findall(code)),
    )


def _hip(row: Row, binary: Any) -> Row:
    code = binary.asm["amdgcn"]
    return replace(
        _counted(row, "hip", code),
        registers=_number(r"\.vgpr_count:\s+(\d+)", code),
        spills=_number(r"\.vgpr_spill_count:\s+(\d+)", code),
        scalar_spills=_number(r"\.sgpr_spill_count:\s+(\d+)", code),
    )


def _counted(row: Row, backend: str, code: str) -> Row:
    return replace(
        row,
        matrix_instructions=dict(Counter(MATRIX[backend].findall(code))),
        wide_loads=len(WIDE_LOAD[backend].findall(code)),
    )


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"the compiler's output has no {pattern!r} in it: {text[:200]!r}")
    return int(match[1])


def _innermost(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^\t")]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"
