"""Starts `saltern store`, watches it, and starts it again when it ends.

The store inherits the read end of a pipe whose write end only we hold: when this process is gone, however it went,
the store sees the end of the pipe and goes too. It runs in a session of its own, so that Ctrl-C reaches the gateway
alone, which lets running answers end before it tells the store to stop.

One task does it all in turn, so that an end that is asked for meets a store that is about to start, runs, or waits for
its next start, and never something in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence
from pathlib import Path

log = logging.getLogger("saltern.gateway")

FIRST_BACKOFF_SECONDS = 0.5
LAST_BACKOFF_SECONDS = 8.0
# A store that lived this long did not fail because of how it was started.
SETTLED_SECONDS = 10.0
# Within the second that an end may take after running answers had theirs.
STOP_SECONDS = 0.5
# A store that was heard of and then says nothing for this long is stuck.
SILENCE_SECONDS = 30.0
LOOK_SECONDS = 1.0


class StoreEnded(Exception):
    """The first store of this start ended by itself. Attributes: `code`, its exit status."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the store ended with status {code}")
        self.code = code


class Supervisor:
    """Runs one store as a child process.

    Args:
        command: what to run; `--life-descriptor N` is added.
        socket: where it listens; one that is killed leaves it behind.
        heard_at: monotonic seconds, when a store was last heard of.
    """

    def __init__(self, command: Sequence[str], socket: Path, heard_at: Callable[[], float]) -> None:
        self._command = command
        self._socket = socket
        self._heard_at = heard_at
        self._life_read, self._life_write = os.pipe()
        self._process: Process | None = None
        self._ready = False
        self._stopping = asyncio.Event()

    def settled(self) -> None:
        """The first store serves: from now on an end is a crash, and it is started again."""
        self._ready = True

    def stop(self) -> None:
        """Make `run` end the store and return."""
        self._stopping.set()

    def kill(self) -> None:
        """End the store at once."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._socket.unlink(missing_ok=True)

    async def run(self) -> None:
        """Start the store, and start it again when it ends, until `stop`. Leaves no process and no socket.

        Raises:
            StoreEnded: it ended before it ever served.
            OSError: it can't be started at all.
        """
        try:
            await self._run()
            self._socket.unlink(missing_ok=True)
        finally:
            self.kill()
            os.close(self._life_write)
            os.close(self._life_read)

    async def _run(self) -> None:
        backoff_seconds = FIRST_BACKOFF_SECONDS
        while not self._stopping.is_set():
            started_at = time.monotonic()
            try:
                self._process = await self._start()
            except OSError as error:
                if not self._ready:
                    raise
                end = f"can't be started ({error.strerror})"
            else:
                code = await self._attend(self._process, started_at)
                if self._stopping.is_set():
                    return
                if not self._ready:
                    raise StoreEnded(code)
                end = f"ended with status {code} after {time.monotonic() - started_at:.0f} s"
            if time.monotonic() - started_at > SETTLED_SECONDS:
                backoff_seconds = FIRST_BACKOFF_SECONDS
            log.error("the store %s; next start in %.1f s", end, backoff_seconds)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff_seconds):
                    await self._stopping.wait()
            backoff_seconds = min(2 * backoff_seconds, LAST_BACKOFF_SECONDS)

    async def _start(self) -> Process:
        return await asyncio.create_subprocess_exec(
            *self._command,
            "--life-descriptor",
            str(self._life_read),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=(self._life_read,),
            start_new_session=True,
        )

    async def _attend(self, process: Process, started_at: float) -> int:
        """Wait for its end, its silence or ours; answers its exit status.

        One that never was heard of still loads its model. Silence is counted in looks, not by the clock: after we
        ourselves stood still, it has until the next ones to be heard.
        """
        ended, stopping = asyncio.create_task(process.wait()), asyncio.create_task(self._stopping.wait())
        silent_seconds, heard_at = 0.0, self._heard_at()
        try:
            while not ended.done() and not stopping.done():
                await asyncio.wait((ended, stopping), timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                before, heard_at = heard_at, self._heard_at()
                silent_seconds = silent_seconds + LOOK_SECONDS if before == heard_at > started_at else 0.0
                if silent_seconds > SILENCE_SECONDS and not ended.done():
                    log.error("the store was silent for %.0f s: it is killed and started again", silent_seconds)
                    self.kill()
            if not ended.done():
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
                await asyncio.wait((ended,), timeout=STOP_SECONDS)
                self.kill()
            return await ended
        finally:
            ended.cancel()
            stopping.cancel()


def store_command(arguments: Sequence[str]) -> list[str]:
    """`saltern store` as it was installed, so that `ps` shows it by that name."""
    script = Path(sys.executable).with_name("saltern")
    saltern = [str(script)] if script.exists() else [sys.executable, "-m", "gateway.cli"]
    return [*saltern, "store", *arguments]
