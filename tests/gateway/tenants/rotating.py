"""Rotations of the key-encryption key in processes that die: a helper of tests, and the program that it runs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from sqlalchemy import event
from sqlalchemy.orm import Session

from gateway.tenants.database import Database
from gateway.tenants.kek_rotation import rotate


class Rotations:
    """Starts one rotation after the other, each in a new process with everything imported already."""

    def __init__(self, url: str, kek_file: Path) -> None:
        command = [sys.executable, "-m", __name__, url, str(kek_file)]
        self._program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._program.communicate()

    def run(self, die_at: int) -> str | None:
        """Rotate; where it was killed, or None if it came to its end before the moment of that number."""
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        self._program.stdin.write(f"{die_at}\n")
        self._program.stdin.flush()
        moment, status = self._program.stdout.readline().rsplit(maxsplit=1)
        if os.WIFSIGNALED(int(status)):
            assert os.WTERMSIG(int(status)) == signal.SIGKILL
            return moment
        assert int(status) == 0
        return None


def _main(url: str, kek_file: Path) -> None:
    for line in sys.stdin:
        reading, writing = os.pipe()
        if not (child := os.fork()):
            try:
                _die_at(int(line), writing)
                asyncio.run(_rotate(url, kek_file))
                os._exit(0)
            finally:
                os._exit(1)
        os.close(writing)
        _, status = os.waitpid(child, 0)
        with open(reading) as told:
            print(told.read() or "end", status, flush=True)


def _die_at(number: int, pipe: int) -> None:
    """Have this process killed: before a file gets its name, after it, or after a row was committed.

    Args:
        number: of the moment, from 1; 0 for never.
        pipe: where its name goes.
    """
    moments = 0

    def moment(name: str) -> None:
        nonlocal moments
        moments += 1
        if moments == number:
            os.write(pipe, name.encode())
            os.kill(os.getpid(), signal.SIGKILL)

    replace = os.replace

    def replaced(*names: Any) -> None:
        moment("before the file")
        replace(*names)
        moment("after the file")

    os.replace = replaced
    written = False

    def mark(*_: object) -> None:
        nonlocal written
        written = True

    def committed(session: Session) -> None:
        nonlocal written
        if written:
            moment("after a row")
        written = False

    event.listen(Session, "do_orm_execute", lambda state: mark() if state.is_update else None)
    event.listen(Session, "after_commit", committed)


async def _rotate(url: str, kek_file: Path) -> None:
    database = await Database.open(url)
    await rotate(database, kek_file)
    await database.close()


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]))
