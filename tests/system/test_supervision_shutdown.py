"""How a server ends: told to, told twice, killed; whatever its store does at that moment."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.system.served import EAGER, Running, children, command_line, eventually, is_running, running, store_alone
from tests.system.support import random_prompt, serve_environment
from tests.system.wire import DONE, events, refusal

DRAIN_SECONDS = 1.5
# Of the double: an answer of 100 tokens takes half of the drain.
STEP_SECONDS = "0.007"


@contextlib.contextmanager
def draining(folder: Path, *store: str, limits: tuple[str, ...] = ()) -> Iterator[Running]:
    arguments = ["--drain-seconds", str(DRAIN_SECONDS)]
    options = ["--step-seconds", STEP_SECONDS, *store]
    with running(folder / "data", "serve", *arguments, limits=limits, store=options) as server:
        yield server


def end_within(server: Running, seconds: float, since: float) -> int:
    """Its exit status; what it leaves behind is nothing."""
    stores = children(server.process.pid)
    status = server.process.wait(max(0.1, since + seconds - time.monotonic()))
    assert not any(is_running(pid) for pid in stores)
    assert not server.socket.exists()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/livez", trust_env=False)
    return status


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.once)])
def test_a_signal_to_the_process_group_ends_everything_in_three_phases(tmp_path: Path, number: signal.Signals) -> None:
    with draining(tmp_path) as server, ThreadPoolExecutor(4) as pool:
        server.wait_until_ready()
        tenant = server.tenant()
        prompt = random_prompt("a drain", 20)
        long = {"max_tokens": 400, "ignore_eos": True}
        answers = {
            "short stream": pool.submit(tenant.complete, prompt, stream=True, ignore_eos=True, max_tokens=60),
            "long stream": pool.submit(tenant.complete, prompt, stream=True, **long),
            "short": pool.submit(tenant.complete, prompt, ignore_eos=True, max_tokens=60),
            "long": pool.submit(tenant.complete, prompt, **long),
        }
        eventually(lambda: server.stats().running == 4, "all run")
        assert server.ready()

        since = time.monotonic()
        os.killpg(server.process.pid, number)
        eventually(lambda: not server.ready(), "not ready", 0.5)
        assert "draining" in server.http.get("/readyz").text
        refused = tenant.complete("New work")
        refusal(refused, 503)
        assert (refused.headers["retry-after"], refused.headers["x-should-retry"]) == ("1", "true")
        assert server.http.get("/livez").status_code == 200
        assert server.stats().running > 0

        # What ends before the deadline ends normally.
        *_, last = events(answers["short stream"].result(DRAIN_SECONDS).content)
        assert last == DONE
        assert answers["short"].result(DRAIN_SECONDS).json()["usage"]["completion_tokens"] == 60
        assert time.monotonic() - since < DRAIN_SECONDS
        assert not answers["long stream"].done()
        # The rest is told so at the deadline.
        *said, last = events(answers["long stream"].result(DRAIN_SECONDS + 1).content)
        assert time.monotonic() - since >= DRAIN_SECONDS
        assert len(said) > 60
        assert last["error"]["type"] == "service_unavailable_error"
        refusal(answers["long"].result(1), 503)
        assert end_within(server, DRAIN_SECONDS + 1, since) == 0
        assert "Traceback" not in server.log()


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with draining(tmp_path) as server, ThreadPoolExecutor(1) as pool:
        server.wait_until_ready()
        tenant = server.tenant()
        answer = pool.submit(tenant.complete, random_prompt("cut", 20), max_tokens=400, ignore_eos=True)
        eventually(lambda: server.stats().running == 1, "it runs")
        os.killpg(server.process.pid, signal.SIGINT)
        eventually(lambda: not server.ready(), "not ready", 0.5)
        assert server.process.poll() is None
        since = time.monotonic()
        os.killpg(server.process.pid, signal.SIGINT)
        assert end_within(server, 0.5, since) == 130
        with pytest.raises(httpx.TransportError):
            answer.result(1)


@pytest.mark.parametrize(
    "moment",
    [
        "loading",
        "stuck in a step",
        *(pytest.param(moment, marks=pytest.mark.once) for moment in ("idle", "between two starts", "frozen")),
    ],
)
def test_a_signal_ends_everything_whatever_the_store_does(tmp_path: Path, moment: str) -> None:
    pauses = ("gateway.supervisor.FIRST_BACKOFF_SECONDS=600", "gateway.supervisor.LAST_BACKOFF_SECONDS=600")
    with draining(tmp_path, limits=pauses if moment == "between two starts" else EAGER) as server:
        server.wait_until_ready()
        tenant = server.tenant()
        with ThreadPoolExecutor(1) as pool:
            if moment == "loading":
                server.notes.stop_at("loading")
                os.kill(server.store_pid, signal.SIGKILL)
                server.standing_store()
            elif moment == "between two starts":
                os.kill(server.store_pid, signal.SIGKILL)
                eventually(lambda: "next start in 600.0 s" in server.log(), "it waits for the next start")
            elif moment == "frozen":
                os.kill(server.store_pid, signal.SIGSTOP)
            elif moment == "stuck in a step":
                server.notes.stop_at("decode")
                answer = pool.submit(tenant.complete, "Stuck", max_tokens=20, ignore_eos=True)
                server.standing_store()
            since = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            # Only what runs is waited for.
            seconds = DRAIN_SECONDS + 1 if moment == "stuck in a step" else 1
            assert end_within(server, seconds, since) == 0
            if moment == "stuck in a step":
                refusal(answer.result(1), 503)


def refused(data_dir: Path, *arguments: str, limits: tuple[str, ...] = ()) -> str:
    """The one line with which `saltern serve` ends with status 2."""
    command = command_line(data_dir, "serve", "--port", "0", "--admin-port", "0", *arguments, limits=limits)
    done = subprocess.run(command, capture_output=True, text=True, env=serve_environment(), timeout=30, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("saltern: ")]
    return said


def test_a_store_that_refuses_its_first_start_ends_serve_with_its_status_and_its_line(tmp_path: Path) -> None:
    model = tmp_path / "no-such-model"
    said = refused(tmp_path / "data", "--model", str(model))
    assert said == f"saltern: {model} does not exist: name a model folder in Hugging Face format, or a hub id"


def test_serve_does_not_take_anothers_store_for_its_own(tmp_path: Path, default_model: Path) -> None:
    socket = tmp_path / "data" / "run" / "store.sock"
    with store_alone(tmp_path / "data") as other:
        said = refused(tmp_path / "data", limits=("gateway.process.LAST_STORE_SECONDS=0.5",))
        assert said == f"saltern: another store serves at {socket}: stop it, or choose another --socket"
        # It was left alone, with its socket.
        assert other.poll() is None
        assert socket.exists()


@pytest.mark.once
def test_a_store_that_is_killed_while_it_loads_at_first_ends_serve_too(tmp_path: Path) -> None:
    with running(tmp_path / "data", "serve", stop_at="loading") as server:
        os.kill(server.standing_store(), signal.SIGKILL)
        assert end_within(server, 2, time.monotonic()) == 1
