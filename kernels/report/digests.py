"""Which variants have been compiled without a complaint just as they are now: a file in the repository remembers."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
from pathlib import Path

import torch
import triton

from kernels.report.targets import Target
from kernels.report.variants import Variant

REPORT = Path(__file__).parent
FILE = REPORT / "digests.json"

# The names of clean variants with their digests, by target.
Digests = dict[str, dict[str, str]]


def load() -> Digests:
    digests: Digests = json.loads(FILE.read_text()) if FILE.exists() else {}
    return digests


def save(digests: Digests) -> None:
    FILE.write_text(json.dumps(digests, indent=1, sort_keys=True) + "\n")


def digest(variant: Variant, target: Target) -> str:
    """Of everything that a row comes from: kernels, checks, Triton's version, target, and what is launched.

    Empty where there are no tiles for such a launch.
    """
    try:
        launch = variant.launch(target)
    except ValueError:
        return ""
    arguments = [
        (value.dtype, value.stride(), value.untyped_storage().nbytes()) if isinstance(value, torch.Tensor) else value
        for value in launch.arguments.values()
    ]
    options = (launch.kernel.__name__, launch.num_warps, launch.num_stages, variant.matrix_expected)
    known = (_sources(), triton.__version__, target, arguments, options)
    return hashlib.sha256(repr(known).encode()).hexdigest()[:16]


@functools.cache
def _sources() -> str:
    backend = sorted((REPORT.parent / "triton_backend").glob("*.py"))
    kernels = [file for file in backend if "@triton.jit" in file.read_text()]
    return "".join(code(file) for file in [*kernels, REPORT / "compile.py", REPORT / "row.py"])


def code(file: Path) -> str:
    """The code of a Python file, without comments and docstrings."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.unparse(tree)
