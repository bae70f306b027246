"""The supervisor alone, over commands that stand for a store: when it starts one again, and what it leaves behind."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import uvloop

from cachestore.client import StoreLost
from cachestore.protocol import Ping
from gateway import supervisor as module
from gateway.supervisor import StoreEnded, Supervisor
from tests.cachestore.serving import complete, connected, serving, submit
from tests.system.served import PATIENCE_SECONDS, children, until

pytestmark = pytest.mark.anyio

FOREVER = "exec sleep 600"


def supervise(folder: Path, script: str, heard_at: Callable[[], float] = lambda: 0.0) -> Supervisor:
    """Of a shell script; `--life-descriptor N` is its last two arguments."""
    return Supervisor(["sh", "-c", script, "store"], folder / "store.sock", heard_at)


class Heard:
    """When the store was last heard of, and how often the supervisor has looked."""

    def __init__(self) -> None:
        self.at = 0.0
        self.looks = 0

    def __call__(self) -> float:
        self.looks += 1
        return self.at


@asynccontextmanager
async def supervised(supervisor: Supervisor) -> AsyncIterator[asyncio.Task[None]]:
    """It runs until the block ends, and leaves no process."""
    before = children(os.getpid())
    task = asyncio.create_task(supervisor.run())
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            yield task
            supervisor.stop()
            await task
    finally:
        task.cancel()
        await asyncio.wait((task,))
    assert children(os.getpid()) == before


def delays(caplog: pytest.LogCaptureFixture) -> list[float]:
    """What was said of each pause, in seconds."""
    return [record.args[1] for record in caplog.records if "next start" in record.msg]


async def test_the_pause_before_the_next_start_grows_and_is_bounded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (module.FIRST_BACKOFF_SECONDS, module.LAST_BACKOFF_SECONDS) == (0.5, 8)
    monkeypatch.setattr(module, "FIRST_BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr(module, "LAST_BACKOFF_SECONDS", 0.05)
    supervisor = supervise(tmp_path, f"date +%s%N >> {tmp_path}/starts; exit 3")
    supervisor.settled()
    async with supervised(supervisor):
        await until(lambda: len(delays(caplog)) == 6)
    assert delays(caplog) == [0.01, 0.02, 0.04, 0.05, 0.05, 0.05]
    starts_ns = [int(line) for line in (tmp_path / "starts").read_text().split()]
    # What is said is what is waited.
    waited = [(after - before) / 1e9 for before, after in pairwise(starts_ns)]
    assert all(seconds >= said for seconds, said in zip(waited, delays(caplog), strict=False))
    assert all("ended with status 3" in message for message in caplog.messages)


async def test_a_store_that_lived_long_is_started_again_as_after_the_first_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr(module, "SETTLED_SECONDS", 0.2)
    # Every third one lives.
    script = f"echo >> {tmp_path}/starts; [ $(($(wc -l < {tmp_path}/starts) % 3)) = 0 ] && sleep 0.3; exit 1"
    supervisor = supervise(tmp_path, script)
    supervisor.settled()
    async with supervised(supervisor):
        await until(lambda: len(delays(caplog)) == 6)
    assert delays(caplog) == [0.01, 0.02, 0.01, 0.02, 0.04, 0.01]


async def test_a_first_store_that_ends_by_itself_is_not_started_again(tmp_path: Path) -> None:
    supervisor = supervise(tmp_path, f"echo >> {tmp_path}/starts; exit 2")
    with pytest.raises(StoreEnded) as ended:
        await supervisor.run()
    assert ended.value.code == 2
    assert (tmp_path / "starts").read_text() == "\n"


async def test_a_command_that_does_not_exist_is_an_error_at_first_and_tried_again_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_BACKOFF_SECONDS", 0.01)
    command = tmp_path / "saltern"
    with pytest.raises(FileNotFoundError):
        await Supervisor([str(command)], tmp_path / "store.sock", lambda: 0.0).run()
    later = Supervisor([str(command)], tmp_path / "store.sock", lambda: 0.0)
    later.settled()
    async with supervised(later):
        await until(lambda: len(delays(caplog)) == 2)
        command.write_text(f"#!/bin/sh\necho > {tmp_path}/started\n{FOREVER}\n")
        command.chmod(0o700)
        await until((tmp_path / "started").exists)
    assert all("can't be started (No such file or directory)" in message for message in caplog.messages)


@pytest.mark.parametrize("moment", ["before it starts", "as it starts", "while it runs", "between two starts"])
async def test_a_stop_at_any_moment_ends_the_store_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    monkeypatch.setattr(module, "FIRST_BACKOFF_SECONDS", 600)
    socket = tmp_path / "store.sock"
    script = "exit 1" if moment == "between two starts" else FOREVER
    supervisor = supervise(tmp_path, f"echo > {socket}; echo > {tmp_path}/started; {script}")
    supervisor.settled()
    if moment == "before it starts":
        supervisor.stop()
    async with supervised(supervisor) as task:
        if moment == "as it starts":
            await asyncio.sleep(0)
        elif moment == "while it runs":
            await until((tmp_path / "started").exists)
        elif moment == "between two starts":
            await until(lambda: len(delays(caplog)) == 1)
            # One that was killed leaves its socket.
            assert socket.exists()
        asked_at = time.monotonic()
        supervisor.stop()
        await task
        assert time.monotonic() - asked_at < 0.4
    assert not socket.exists()
    if moment == "before it starts":
        assert not (tmp_path / "started").exists()


async def test_a_store_that_does_not_hear_sigterm_is_killed_within_the_second(tmp_path: Path) -> None:
    supervisor = supervise(tmp_path, f"trap '' TERM; echo > {tmp_path}/started; while :; do sleep 600; done")
    async with supervised(supervisor) as task:
        await until((tmp_path / "started").exists)
        asked_at = time.monotonic()
        supervisor.stop()
        await task
        assert module.STOP_SECONDS <= time.monotonic() - asked_at < 0.9


async def test_a_silent_store_is_killed_and_one_that_was_never_heard_of_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert module.SILENCE_SECONDS == 30
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(module, "SILENCE_SECONDS", 0.2)
    monkeypatch.setattr(module, "FIRST_BACKOFF_SECONDS", 0.01)
    heard = Heard()
    supervisor = supervise(tmp_path, FOREVER, heard)
    supervisor.settled()
    with caplog.at_level(logging.ERROR):
        async with supervised(supervisor):
            # It loads its model, for longer than the limit.
            await until(lambda: heard.looks > 50)
            assert not caplog.messages
            # It speaks, for longer than the limit.
            for _ in range(30):
                heard.at, before = time.monotonic(), heard.looks
                await until(lambda before=before: heard.looks > before)
            assert not caplog.messages
            silent_since = time.monotonic()
            await until(lambda: len(caplog.messages) == 2)
            assert time.monotonic() - silent_since >= module.SILENCE_SECONDS
            before = heard.looks
            # The next one has not been heard of yet.
            await until(lambda: heard.looks > before + 50)
    assert "was silent for 0 s: it is killed and started again" in caplog.messages[0]
    assert "ended with status -9" in caplog.messages[1]
    assert len(caplog.messages) == 2


async def test_a_supervisor_that_stood_still_itself_takes_nobodys_silence_from_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(module, "SILENCE_SECONDS", 0.1)
    heard = Heard()
    supervisor = supervise(tmp_path, FOREVER, heard)
    supervisor.settled()
    async with supervised(supervisor):
        await until(lambda: heard.looks > 1)
        heard.at = time.monotonic()
        await until(lambda: heard.looks > 3)
        # Nothing of this process runs meanwhile, as when it is stopped: nothing could be heard.
        time.sleep(3 * module.SILENCE_SECONDS)  # noqa: ASYNC251
        before = heard.looks
        await until(lambda: heard.looks > before + 1)
        heard.at = time.monotonic()
        await until(lambda: heard.looks > before + 4)
    assert not caplog.messages


def test_a_connection_that_goes_is_lost_to_whoever_sends_at_that_moment(tmp_path: Path) -> None:
    """Between the end of the transport and its being heard of; the gateway's loop closes it under its writers."""

    async def send_while_it_goes() -> None:
        async with serving(tmp_path) as server, connected(server) as client:
            assert await complete(client, [1] * 9)
            client._writer.transport.abort()
            for _ in range(5):
                with pytest.raises(StoreLost):
                    submit(client, [1] * 9)
                client.send_if_open(Ping())
                await asyncio.sleep(0)
            await client.closed.wait()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(send_while_it_goes())
