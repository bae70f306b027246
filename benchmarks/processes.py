"""Processes that are measured: started, waited for, looked at, and gone when the block ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
START_SECONDS = 60.0
END_SECONDS = 20.0
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class ProcessError(Exception):
    """A process did not come up: one line, and where its own words are."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A process that runs."""

    popen: subprocess.Popen[bytes]
    started_at: float
    log: Path

    def cpu_seconds(self) -> float:
        """What all its threads have used so far, in user and in system mode."""
        fields = Path(f"/proc/{self.popen.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND

    def resident_bytes(self) -> int:
        status = Path(f"/proc/{self.popen.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) << 10

    def wait_until(self, holds: Callable[[], bool], what: str) -> float:
        """Seconds from its start until it holds. Raises ProcessError when it ends before, or takes too long."""
        while not holds():
            if self.popen.poll() is not None:
                raise ProcessError(f"it ended before it was {what}: {self.log.read_text()[-500:]}")
            if time.perf_counter() > self.started_at + START_SECONDS:
                raise ProcessError(f"it is not {what} after {START_SECONDS:g} s: {self.log.read_text()[-500:]}")
            time.sleep(0.005)
        return time.perf_counter() - self.started_at


@contextmanager
def running(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Iterator[Measured]:
    """`command` from the repository's root until the block ends; what it says goes to `log`."""
    with log.open("ab") as output:
        started_at = time.perf_counter()
        popen = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, env=dict(environment))
    try:
        yield Measured(popen, started_at, log)
    finally:
        popen.send_signal(signal.SIGTERM)
        try:
            popen.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            popen.kill()
            popen.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
