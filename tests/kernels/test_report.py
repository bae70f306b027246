"""The report on the compiled kernels: the list is whole, the checks bite, and what CI compiles is fit to serve."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernels import tiles
from kernels.report import digests
from kernels.report.row import Row, problems
from kernels.report.table import table
from kernels.report.targets import TARGETS
from kernels.report.variants import MOST_VARIANTS, VARIANTS, Attention

ROOT = Path(__file__).parents[2]
CLEAN = Row(
    "prefill 128", "sm_90", "prefill", True, 232_448, 0, rows=64, keys=64, num_warps=4, num_stages=2, registers=128,
    shared_memory_bytes=81_920, matrix_instructions={"HGMMA": 24}, wide_loads=40,
)  # fmt: skip


def report(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: Triton's interpreter is on in this one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def absurd() -> subprocess.CompletedProcess[str]:
    return report("tests.kernels.absurd_report", "--arch", "sm_80", "--json")


@pytest.fixture(scope="module")
def absurd_rows(absurd: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    return {row["variant"]: row for row in json.loads(absurd.stdout)}


def test_the_list_is_no_longer_than_was_agreed_and_names_are_unique() -> None:
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS) <= MOST_VARIANTS == 60


def test_the_list_has_every_kernel_on_every_cache() -> None:
    pairs = {(variant.kernel, variant.cache) for variant in VARIANTS}
    for kernel in ("prefill", "decode", "write"):
        assert pairs >= {(kernel, cache) for cache in ("bf16", "fp16", "int8", "fp8")}
    assert pairs >= {("prefill", "fp32"), ("decode", "fp32"), ("merge", "bf16")}


# Rows for a head dim above 256 are for the latent kernel.
@pytest.mark.parametrize("row", [row for row in tiles.TABLE if row.most_key_dim <= 256], ids=str)
def test_every_row_of_the_tile_table_is_compiled(row: tiles.Row) -> None:
    compiled = [v.table_row(target) for v in VARIANTS if isinstance(v, Attention) for target in TARGETS.values()]
    assert row in compiled, "no variant has these tiles: add one, or delete the row"


def test_a_clean_row_has_no_problem() -> None:
    assert problems(CLEAN) == []


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"spills": 3}, r"spills \(3\) at 128 registers"),
        ({"matrix_instructions": {}}, "no matrix instruction"),
        ({"shared_memory_limit_bytes": 81_919}, "81920 bytes of shared memory, 81919 are all that sm_90 has"),
        ({"table_shared_memory_bytes": 81_919}, "where the table of tiles says that it takes at most 81919"),
        ({"tensor_memory_columns": 1}, "1 columns of tensor memory, 0 are all"),
        ({"error": "PTXASError: no"}, "no machine code: PTXASError: no"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_each_fault_is_a_problem_and_stands_below_the_table(fault: dict[str, Any], said: str) -> None:
    row = replace(CLEAN, **fault)
    (problem,) = problems(row)
    assert said.replace("\\", "") in problem
    assert f"FAILS prefill 128: {problem}" in table([row])


def test_what_needs_no_matrix_instruction_or_does_not_exist_is_no_problem() -> None:
    assert problems(replace(CLEAN, matrix_expected=False, matrix_instructions={})) == []
    row = replace(CLEAN, not_available="sm_80 has no float8_e4m3fn: use int8", registers=0, matrix_instructions={})
    assert problems(row) == []
    assert "use int8" in table([row])


def test_launches_that_must_not_pass_make_the_report_fail(
    absurd: subprocess.CompletedProcess[str], absurd_rows: dict[str, dict[str, Any]]
) -> None:
    assert absurd.returncode == 1, absurd.stderr
    found = {name.partition(" ")[0]: row["problems"] for name, row in absurd_rows.items() if row["problems"]}
    assert "spills" in found["prefill"][0]
    assert "no machine code" in found["decode"][0]
    assert "no matrix instruction" in found["write"][0]


def test_rows_say_what_was_compiled(absurd_rows: dict[str, dict[str, Any]]) -> None:
    fields = dict(absurd_rows["prefill 256 16/8 bf16/bf16"])
    assert len(fields.pop("problems")) == 2
    row = replace(Row(**fields), table_shared_memory_bytes=0)
    assert (row.target, row.rows, row.keys, row.num_warps, row.num_stages) == ("sm_80", 128, 64, 4, 2)
    assert row.registers > 0
    assert row.shared_memory_bytes > 0
    assert row.matrix_instructions["HMMA"] > 0
    assert row.wide_loads > 0
    assert problems(replace(row, spills=0)) == []
    assert problems(replace(row, spills=0, shared_memory_limit_bytes=row.shared_memory_bytes - 1)) != []
    assert absurd_rows["write 128 8 bf16/int8"]["problems"] == []
    assert absurd_rows["write 128 8 bf16/fp8"]["not_available"] == "sm_80 has no float8_e4m3fn: use int8"


def test_no_target_of_that_name_is_an_error() -> None:
    done = report("kernels.report", "--arch", "sm_90,sm_91")
    assert done.returncode == 2
    assert "no target of that name: sm_91; there are sm_80, sm_90, sm_100, gfx942" in done.stderr


def test_comments_and_docstrings_are_no_change_and_code_is(tmp_path: Path) -> None:
    def code(text: str) -> str:
        (tmp_path / "kernel.py").write_text(text)
        return digests.code(tmp_path / "kernel.py")

    plain = code("def kernel(x):\n    return x + 1\n")
    assert code('"""Doc."""\n\n\ndef kernel(x):\n    """Doc."""\n    return x + 1  # why\n') == plain
    assert code("def kernel(x):\n    return x + 2\n") != plain


def test_what_changed_is_fit_to_serve_on_sm_80_and_sm_90() -> None:
    done = report("kernels.report", "--arch", "sm_80,sm_90", "--changed", "--json")
    rows = json.loads(done.stdout)
    assert done.returncode == 0, [row for row in rows if row["problems"]]
    assert {(row["kernel"], row["target"]) for row in rows} == {
        (kernel, target) for kernel in ("prefill", "decode", "merge", "write") for target in ("sm_80", "sm_90")
    }
    if "--write-digest" in done.stderr:
        warnings.warn(f"kernels/report/digests.json is behind: {done.stderr.strip()}", stacklevel=1)
