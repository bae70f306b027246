"""`saltern` over the store double: a gateway's process as it is, whose store computes nothing.

    python -m tests.system.served '{"limits": ["gateway.supervisor.SILENCE_SECONDS=3"], "store": […]}' serve …

`limits` are constants of the gateway's process; `store` are further options of the double.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from gateway import cli, process
from tests.system.store_double import Notes, set_constants
from tests.system.support import Server, serve_environment

# Nothing here takes long; what never comes ends here.
PATIENCE_SECONDS = 30
DOUBLE = (sys.executable, "-m", "tests.system.store_double")
# Restarts follow each other at once.
EAGER = (
    "gateway.supervisor.FIRST_BACKOFF_SECONDS=0.02",
    "gateway.supervisor.LAST_BACKOFF_SECONDS=0.1",
    "gateway.store_link.LAST_RETRY_SECONDS=0.05",
)


def eventually(holds: Callable[[], bool], what: str, seconds: float = PATIENCE_SECONDS) -> float:
    """Ask until it holds; answers how many seconds that took."""
    started = time.monotonic()
    while not holds():
        assert time.monotonic() - started < seconds, f"not within {seconds} s: {what}"
        time.sleep(0.005)
    return time.monotonic() - started


async def until(holds: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    """`eventually`, beside other tasks of this loop."""
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110  # it happens in other processes
            await asyncio.sleep(0.002)


def children(pid: int) -> list[int]:
    """Processes that this one started and that are there."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, (task / "children").read_text().split())
    return found


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Running(Server):
    """A gateway's process, with or without a store of its own."""

    @property
    def notes(self) -> Notes:
        return Notes(self.socket.parent)

    @property
    def store_pid(self) -> int:
        """The store it started, which must be there."""
        (pid,) = children(self.process.pid)
        return pid

    def ready(self) -> bool:
        try:
            return self.http.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def wait_until_ready(self) -> float:
        return eventually(self.ready, f"ready\n{self.log()}")

    def kill_store(self) -> int:
        """With SIGKILL; answers its process id, and forgets that it stood still."""
        pid = self.store_pid
        os.kill(pid, signal.SIGKILL)
        self.notes.go_on()
        return pid

    def standing_store(self) -> int:
        """The process id of the store, once it stands still where it was told to."""
        eventually(lambda: self.notes.standing() is not None, "the store stands still")
        pid = self.notes.standing()
        assert pid is not None
        return pid


def command_line(
    data_dir: Path, command: str, *arguments: str, limits: Sequence[str] = (), store: Sequence[str] = ()
) -> list[str]:
    """`saltern serve` over a store double, or `saltern gateway`."""
    chosen = json.dumps({"limits": limits, "store": store})
    return [sys.executable, "-m", "tests.system.served", chosen, command, "--data-dir", str(data_dir), *arguments]


@contextmanager
def running(
    data_dir: Path,
    command: str,
    *arguments: str,
    ports: tuple[int, int] | None = None,
    stop_at: str | None = None,
    **chosen: Sequence[str],
) -> Iterator[Running]:
    """`saltern serve` over a store double, or `saltern gateway`, until the block ends; its processes are gone then.

    It answers `/livez` when the block begins; whether it is ready is the block's business. It leads a process group, as
    a shell starts it.

    Args:
        ports: of tenants and administrators; free ones when not given.
        stop_at: a point where its first store stands still.
        chosen: `limits` and `store` of the module's docstring.
    """
    ports = ports or (free_port(), free_port())
    arguments = ("--port", str(ports[0]), "--admin-port", str(ports[1]), *arguments)
    errors = data_dir.parent / f"{data_dir.name}.stderr"
    run = data_dir / "run"
    run.mkdir(mode=0o700, parents=True, exist_ok=True)
    if stop_at:
        Notes(run).stop_at(stop_at)
    with errors.open("a") as stderr:
        process = subprocess.Popen(
            command_line(data_dir, command, *arguments, **chosen),
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            text=True,
            env=serve_environment(),
            start_new_session=True,
        )
    urls = [f"http://127.0.0.1:{port}" for port in ports]

    def listens() -> bool:
        assert process.poll() is None, errors.read_text()
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{urls[1]}/livez", trust_env=False).status_code == 200
        return False

    try:
        eventually(listens, "listens")
        yield Running(process, data_dir, *urls, [])
    finally:
        stores = children(process.pid)
        process.kill()
        process.wait()
        for pid in stores:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def store_alone(data_dir: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A store double that nobody supervises, at the socket of that directory, until the block ends."""
    run = data_dir / "run"
    run.mkdir(mode=0o700, parents=True, exist_ok=True)
    command = [*DOUBLE, "--socket", str(run / "store.sock"), *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env=serve_environment())
    try:
        assert process.stderr is not None
        eventually(lambda: _is_served(run / "store.sock"), "the store listens")
        yield process
    finally:
        process.kill()
        process.wait()


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def main() -> None:
    chosen = json.loads(sys.argv.pop(1))
    set_constants(chosen["limits"])
    process.store_command = lambda arguments: [*DOUBLE, *arguments, *chosen["store"]]
    cli.main()


if __name__ == "__main__":
    main()
