"""One typed place for what the operator can set, wherever it was set."""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

# A socket's path has to fit into 108 bytes of the kernel's address, its end included.
MAX_SOCKET_PATH_BYTES = 100

# Variables that are read, but are options of no command of their own.
CLIENT_VARIABLES = ("SALTERN_ADMIN_URL", "SALTERN_ADMIN_KEY")

# What stands where a secret is not shown.
HIDDEN = "***"

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB)?", re.IGNORECASE)
_UNIT_BYTES = {"b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


class SettingsError(Exception):
    """One line: what is wrong with a setting, and the remedy."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """The files of a listener's certificate, with its chain, and of its private key.

    Attributes:
        option: what both options begin with, `--tls` or `--admin-tls`.
    """

    option: str
    cert: Path
    key: Path

    @classmethod
    def of(cls, option: str, cert: Path | None, key: Path | None) -> KeyPair | None:
        """None without both. Raises SettingsError for one of them."""
        if cert is None and key is None:
            return None
        if cert is None or key is None:
            given, lacking = ("key", "cert") if cert is None else ("cert", "key")
            raise SettingsError(f"{option}-{given} is without {option}-{lacking}: give both for TLS, or neither")
        return cls(option, cert.expanduser().absolute(), key.expanduser().absolute())


@dataclass(frozen=True, slots=True)
class Settings:
    """Of `saltern serve` and `saltern gateway`; paths are absolute.

    Attributes:
        tls, admin_tls: of the listeners; None for plain HTTP.
        model: of the store; None is the default model. The gateway on its own takes the store's word.
    """

    data_dir: Path
    database_url: str
    kek_file: Path
    socket: Path
    model: str | None
    model_name: str | None
    host: str
    port: int
    admin_port: int
    tls: KeyPair | None
    admin_tls: KeyPair | None
    drain_seconds: float
    tenant_metrics: int

    @property
    def model_dir(self) -> Path | None:
        """The model's folder, where a folder was named."""
        return Path(self.model).expanduser().absolute() if self.model else None


def prepare_data_dir(data_dir: Path) -> None:
    """Make the data directory, for us alone, and see that it can be written; with it a folder for its socket.

    Raises:
        SettingsError: it can't, or the socket's folder is somebody else's.
    """
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=data_dir):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise SettingsError(
            f"the data directory {data_dir} can't be written ({reason}): make it writable, or choose another --data-dir"
        ) from None
    folder = socket_path(data_dir, None).parent
    if folder.parent != data_dir:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o700:
            raise SettingsError(f"{folder} must be a folder of ours with mode 0700: remove it, or choose a --socket")


def socket_path(data_dir: Path, chosen: Path | None) -> Path:
    """Where the store's socket is: as chosen, in the data directory, or in a short folder where that is too long.

    Raises:
        SettingsError: the chosen path is too long.
    """
    path = (chosen or data_dir / "run" / "store.sock").expanduser().absolute()
    size_bytes = len(os.fsencode(path))
    if size_bytes <= MAX_SOCKET_PATH_BYTES:
        return path
    if chosen is not None:
        raise SettingsError(
            f"--socket has {size_bytes} bytes and a socket's path at most {MAX_SOCKET_PATH_BYTES}: choose a shorter one"
        )
    # Made from the data directory, so that every process of it finds the same.
    name = hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"saltern-{os.geteuid()}-{name}" / "store.sock"


def size_bytes(text: str) -> int:
    """Bytes of `512MiB`, `1.5GiB` or `1000000`. Raises SettingsError for anything else."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise SettingsError(f"{text!r} is no size: write a number with B, KiB, MiB, GiB or TiB, such as 1GiB")
    return int(float(match[1]) * _UNIT_BYTES[(match[2] or "B").lower()])


def check_environment(environment: Mapping[str, str], known: Iterable[str]) -> None:
    """A misspelt setting must not be ignored.

    Raises:
        SettingsError: a `SALTERN_` variable that no option reads, with the closest one that exists.
    """
    names = {*known, *CLIENT_VARIABLES}
    for name in sorted(environment):
        if name.startswith("SALTERN_") and name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            remedy = f"did you mean {close[0]}?" if close else "`saltern serve --help` lists those that exist"
            raise SettingsError(f"{name} is no setting: {remedy}")
