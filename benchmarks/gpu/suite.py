"""Programs with a time limit, and the one that matters: the tests of the kernels, on the device."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

ROOT = Path(__file__).resolve().parents[2]
KEPT_CHARACTERS = 8_000

_OUTCOME = re.compile(
    r"^(?:\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|ERROR|SKIPPED)\b|tests/\S+::.* (PASSED|FAILED|ERROR|SKIPPED)\b)",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Suite:
    """How the tests went.

    Attributes:
        returncode: pytest's, or None when the time limit ended it.
        tail: the last of its output, when it did not succeed.
    """

    returncode: int | None
    passed: int
    failed: int
    skipped: int
    seconds: float
    tail: str = ""

    @property
    def succeeded(self) -> bool:
        return self.returncode == 0 and self.passed > 0

    def __str__(self) -> str:
        counts = f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"
        if self.returncode is None:
            return f"{counts}, the rest not within {self.seconds:.0f} s"
        return counts if self.succeeded else f"{counts}; pytest ended with status {self.returncode}"


def run_kernel_tests(device_type: str, seconds: float) -> Suite:
    """`tests/kernels` with the Triton kernels on a device, `SALTERN_TEST_DEVICE`, for at most `seconds`."""
    command = [sys.executable, "-m", "pytest", "tests/kernels", "--confcutdir=tests/kernels", "-o", "addopts="]
    command += ["-m", "not once", "-v", "-rN", "--tb=short", "-p", "no:cacheprovider"]
    command += ["--continue-on-collection-errors"]
    if importlib.util.find_spec("hypothesis") is not None:
        command += ["--hypothesis-profile=ci"]  # an example that compiles a kernel takes as long as it takes
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(min(8, os.cpu_count() or 1))]  # most of the time goes into compiling
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["SALTERN_TEST_DEVICE"] = device_type
    returncode, output = run_limited(command, seconds, environment)
    counts = outcomes(output)
    return Suite(
        returncode,
        passed=counts["PASSED"],
        failed=counts["FAILED"] + counts["ERROR"],
        skipped=counts["SKIPPED"],
        seconds=seconds,
        tail="" if returncode == 0 else output[-KEPT_CHARACTERS:],
    )


def outcomes(output: str) -> Counter[str]:
    """How often each outcome stands in what `pytest -v` wrote so far, with and without workers."""
    return Counter(one or other for one, other in _OUTCOME.findall(output))


def run_limited(
    command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None
) -> tuple[int | None, str]:
    """(exit status or None when `seconds` were over, its output), with all its children ended."""
    with TemporaryFile() as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            returncode: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            returncode = None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return returncode, output.read().decode(errors="replace")
