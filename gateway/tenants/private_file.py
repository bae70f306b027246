"""Files that nobody else may read: written whole beside their place, then named at once."""

from __future__ import annotations

import os
from pathlib import Path


def write_beside(path: Path, content: bytes) -> Path:
    """A file next to `path`, mode 0600 and on the disk when this returns; the caller gives it its name.

    Raises:
        OSError: it can't be made or written.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)
    return temporary
