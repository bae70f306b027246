"""House rules that no type checker sees: no objects loaded from bytes, own kernels, a gateway without torch."""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.version import Version
from transformers.utils import is_kernels_available

from cachestore.own_kernels import require_own_kernels
from cachestore.start_error import StartError

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("gateway", "cachestore", "kernels", "policies")
SHIPPED = (*PACKAGES, "migrations", "benchmarks")

# They build objects, or run code, from bytes.
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "yaml", "ruamel"}
BUILTINS = {"eval", "exec"}
IMPORTERS = {"__import__", "import_module"}
# It makes bytes and loads none: what the names of blocks are measured against.
ALLOWED = {("benchmarks/keys.py", "pickle.dumps")}


def unsafe_loading(source: str) -> Iterator[str]:
    """Where a source loads objects from bytes, as `line: what`."""
    tree = ast.parse(source)
    aliases = {"torch": "torch"} | {
        name.asname: name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for name in node.names
        if name.asname
    }
    for node in ast.walk(tree):
        for what in _unsafe(node, aliases):
            yield f"{getattr(node, 'lineno', 0)}: {what}"


def _unsafe(node: ast.AST, aliases: dict[str, str]) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (name.name for name in names if name.name.split(".")[0] in MODULES)
        case ast.ImportFrom(module=str(module), names=names, level=0):
            if module.split(".")[0] in MODULES:
                yield from (f"{module}.{name.name}" for name in names)
            yield from (f"{module}.{name.name}" for name in names if _is_torch_load(module, name.name))
            yield from (name.name for name in names if module == "builtins" and name.name in BUILTINS)
        case ast.Attribute(value=ast.Name(id=owner), attr=attribute):
            module = aliases.get(owner, owner)
            if _is_torch_load(module, attribute) or (module == "builtins" and attribute in BUILTINS):
                yield f"{module}.{attribute}"
        case ast.Attribute(value=ast.Attribute(value=ast.Name(id="torch"), attr="serialization"), attr="load"):
            yield "torch.serialization.load"
        case ast.Name(id=name) if name in BUILTINS:
            yield name
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[ast.Constant(value=str(module)), *_]):
            if name in IMPORTERS and module.split(".")[0] in MODULES:
                yield module
        case ast.keyword(arg="allow_pickle", value=value):
            if not (isinstance(value, ast.Constant) and value.value is False):
                yield "allow_pickle"


def _is_torch_load(module: str, name: str) -> bool:
    return (module, name) in {("torch", "load"), ("torch.serialization", "load")}


def unsafe_files(root: Path) -> list[str]:
    """All findings in the shipped tree under `root`, as `file:line: what`."""
    return [
        f"{file.relative_to(root)}:{finding}"
        for folder in SHIPPED
        for file in sorted((root / folder).rglob("*.py"))
        for finding in unsafe_loading(file.read_text(encoding="utf-8"))
        if (str(file.relative_to(root)), finding.split(": ")[1]) not in ALLOWED
    ]


PLANTED = [
    "import pickle",
    "import os, marshal as m",
    "from pickle import loads",
    "from yaml.loader import Loader",
    "def load(path):\n    import shelve\n    return shelve.open(path)",
    "eval('1 + 1')",
    "run = exec",
    "import builtins\nbuiltins.eval('1')",
    "from builtins import exec as run",
    "import torch\ntorch.load('weights.bin', weights_only=True)",
    "import torch as t\nt.load('weights.bin')",
    "from torch import load",
    "import torch\ntorch.serialization.load('weights.bin')",
    "import numpy as np\nnp.load('a.npy', allow_pickle=True)",
    "import numpy as np\nnp.load('a.npy', allow_pickle=trusted)",
    "import importlib\nimportlib.import_module('yaml')",
    "__import__('pickle')",
]

HARMLESS = [
    "model.eval()",
    "import json\njson.load(open('a.json'))",
    "import numpy as np\nnp.load('a.npy', allow_pickle=False)",
    "from safetensors.torch import load_file",
    "async def run(session): await session.exec(statement)",
    "'pickle, eval and torch.load have no place here'",
    "import importlib\nimportlib.import_module('gateway.app')",
]


def test_line_34_the_shipped_tree_loads_no_objects_from_bytes(tmp_path: Path) -> None:
    assert unsafe_files(ROOT) == []

    # The same look at a tree with one planted file finds it.
    planted = tmp_path / "gateway" / "tenants" / "planted.py"
    planted.parent.mkdir(parents=True)
    planted.write_text("import json\nimport pickle\n")
    assert unsafe_files(tmp_path) == ["gateway/tenants/planted.py:2: pickle"]


def test_making_bytes_is_allowed_in_one_file_and_loading_them_in_none(tmp_path: Path) -> None:
    for name in ("keys", "serving"):
        file = tmp_path / "benchmarks" / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text("from pickle import dumps, loads\n")
    found = ["benchmarks/keys.py:1: pickle.loads"]
    found += ["benchmarks/serving.py:1: pickle.dumps", "benchmarks/serving.py:1: pickle.loads"]
    assert unsafe_files(tmp_path) == found


@pytest.mark.parametrize("source", PLANTED)
def test_the_lint_finds_each_way_in(source: str) -> None:
    assert list(unsafe_loading(source))


@pytest.mark.parametrize("source", HARMLESS)
def test_the_lint_lets_the_rest_pass(source: str) -> None:
    assert list(unsafe_loading(source)) == []


def test_init_files_are_empty_but_for_those_of_the_kernels_backends() -> None:
    """A backend is one module to its callers, whatever it is made of."""
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("__init__.py")]
    assert {file.parent.name for file in files} >= set(PACKAGES)
    backends = {ROOT / "kernels" / name / "__init__.py" for name in ("torch_backend", "triton_backend")}
    assert {file for file in files if file.read_bytes()} <= backends


def test_transformers_does_not_take_our_kernels_for_its_own() -> None:
    assert not is_kernels_available()
    # It does look at our version: were that in its range, it would.
    assert is_kernels_available("0.0.1", "99")

    version = Version(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])
    assert Version(importlib.metadata.version("saltern")) == version
    assert not Version("0.18.2") <= version < Version("0.19")


def test_a_start_beside_anothers_kernels_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_own_kernels()
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("__version__ = '0.18.2'\n")
    monkeypatch.delitem(sys.modules, "kernels", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(StartError, match=r"is not Saltern's \(found: .*: run `pip uninstall kernels`") as raised:
        require_own_kernels()
    assert str(tmp_path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_every_log_is_salterns_own() -> None:
    """So that `--log-level` reaches it, and nothing else; one of a library is silenced, as it quotes clients."""
    names = [
        ast.unparse(node.args[0])
        for package in SHIPPED
        for file in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("getLogger")
    ]
    assert len(names) > 10
    others = [name for name in names if not name.startswith(("'saltern'", "'saltern."))]
    assert others == ["'opentelemetry.trace'"]


def test_the_gateway_is_imported_without_torch() -> None:
    script = (
        "import importlib, pkgutil, sys\n"
        "import gateway\n"
        "names = [module.name for module in pkgutil.walk_packages(gateway.__path__, 'gateway.')]\n"
        "for name in names:\n"
        "    importlib.import_module(name)\n"
        "print(len(names), 'torch' in sys.modules)\n"
        "import torch\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (count, before), (after,) = (line.split() for line in done.stdout.splitlines())
    assert int(count) > 5
    assert (before, after) == ("False", "True")
