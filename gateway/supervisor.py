"""Starts `saltern store`, watches it, and starts it again when it ends.

The store inherits the read end of a pipe whose write end only we hold: when this process is gone, however it went,
the store sees the end of the pipe and goes too. It runs in a session of its own, so that Ctrl-C reaches the gateway
alone, which lets running answers end before it tells the store to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

log = logging.getLogger("saltern.gateway")

FIRST_BACKOFF_SECONDS = 0.5
LAST_BACKOFF_SECONDS = 8.0
# A store that lived this long did not fail because of how it was started.
SETTLED_SECONDS = 10.0
# Within the second that an end may take after running answers had theirs.
STOP_SECONDS = 0.7
# A store that was heard of and then says nothing for this long is stuck.
SILENCE_SECONDS = 30.0


class StoreEnded(Exception):
    """The first store of this start ended by itself. Attributes: `code`, its exit status."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the store ended with status {code}")
        self.code = code


class Supervisor:
    """Runs one store as a child process.

    Args:
        command: what to run; `--life-descriptor N` is added.
        heard_at: monotonic seconds, when a store was last heard of.
    """

    def __init__(self, command: Sequence[str], heard_at: Callable[[], float]) -> None:
        self._command = command
        self._life_read, self._life_write = os.pipe()
        self._process: asyncio.subprocess.Process | None = None
        self._heard_at = heard_at
        self._started = 0.0
        self._ready = False
        self._stopping = False

    def settled(self) -> None:
        """The first store serves: from now on an end is a crash, and it is started again."""
        self._ready = True

    async def run(self) -> None:
        """Start the store, and start it again when it ends.

        Raises:
            StoreEnded: it ended before it ever served.
        """
        backoff_seconds = FIRST_BACKOFF_SECONDS
        while True:
            self._started = time.monotonic()
            process = await self._start()
            watching = asyncio.create_task(self._kill_when_silent())
            try:
                code = await process.wait()
            finally:
                watching.cancel()
            if self._stopping:
                return
            if not self._ready:
                raise StoreEnded(code)
            lived = time.monotonic() - self._started
            backoff_seconds = FIRST_BACKOFF_SECONDS if lived > SETTLED_SECONDS else backoff_seconds
            log.error("the store ended with status %d after %.0f s; next start in %.1f s", code, lived, backoff_seconds)
            await asyncio.sleep(backoff_seconds)
            backoff_seconds = min(2 * backoff_seconds, LAST_BACKOFF_SECONDS)

    async def _kill_when_silent(self) -> None:
        """One that never was heard of still loads its model; one that wakes before is left alone."""
        while True:
            await asyncio.sleep(1)
            heard_at = self._heard_at()
            if heard_at > self._started and (silent := time.monotonic() - heard_at) > SILENCE_SECONDS:
                log.error("the store was silent for %.0f s: it is killed and started again", silent)
                self.kill()

    async def _start(self) -> asyncio.subprocess.Process:
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            "--life-descriptor",
            str(self._life_read),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=(self._life_read,),
            start_new_session=True,
        )
        return self._process

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL. Leaves no process."""
        self._stopping = True
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    await process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        os.close(self._life_write)
        os.close(self._life_read)


    def kill(self) -> None:
        """End the store at once."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()


def store_command(arguments: Sequence[str]) -> list[str]:
    """`saltern store` as it was installed, so that `ps` shows it by that name."""
    script = Path(sys.executable).with_name("saltern")
    saltern = [str(script)] if script.exists() else [sys.executable, "-m", "gateway.cli"]
    return [*saltern, "store", *arguments]
