"""A server must not stop for seconds because a step has a size that no step had before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("options", [[], ["window"]])
def test_steps_of_any_size_run_the_same_compiled_kernels(options: list[str], tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_without_a_device", *options],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    versions = dict(line.split() for line in result.stdout.splitlines())
    assert versions == dict.fromkeys(("prefill_kernel", "decode_kernel", "merge_kernel", "write_kernel"), "1")
