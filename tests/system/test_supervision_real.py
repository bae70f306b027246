"""Kills and stops of a server whose store holds a real model."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gateway.supervisor import Supervisor, store_command
from tests.system.served import children, eventually, is_running
from tests.system.support import SALTERN, START_SECONDS, Server, Tenant, random_prompt, serve_environment, serving
from tests.system.wire import events, refusal

LOADED = "model loaded and bound"


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("real") / "data", "--cache-memory", "64MiB") as server:
        yield server


def ready(server: Server) -> bool:
    return server.http.get("/readyz").status_code == 200


@pytest.mark.once
def test_line_49_a_crashed_store_fails_its_requests_and_serves_again_within_five_seconds_of_its_load(
    real: Server,
) -> None:
    tenants = [real.tenant(), real.tenant()]
    prompt = random_prompt("line 49", 33)
    assert [tenants[0].cached_tokens(prompt), tenants[0].cached_tokens(prompt)] == [0, 32]
    counting = tenants[0].complete("1 2 3 4 5", max_tokens=6).json()["choices"]
    (store,) = children(real.process.pid)
    long = {"max_tokens": 1000, "ignore_eos": True}
    with ThreadPoolExecutor(6) as pool:
        streams = [pool.submit(tenant.complete, "Count: 1 2 3", stream=True, **long) for tenant in tenants * 2]
        plain = [pool.submit(tenant.complete, "Count: 1 2 3", **long) for tenant in tenants]
        before = real.stats().steps
        eventually(lambda: (report := real.stats()).running == 6 and report.steps > before + 8, "all decode")
        killed_at = time.monotonic()
        os.kill(store, signal.SIGKILL)
        for answer in streams:
            *said, last = events(answer.result(killed_at + 1 - time.monotonic()).content)
            assert said
            assert last["error"]["type"] == "service_unavailable_error"
        for answer in plain:
            response = answer.result(killed_at + 1 - time.monotonic())
            refusal(response, 503)
            assert response.headers["x-should-retry"] == "true"

    # Until the model is loaded: refused at once, and to be sent again.
    def loaded() -> bool:
        response = tenants[1].complete(prompt)
        if response.status_code != 200:
            refusal(response, 503)
            assert (response.headers["retry-after"], response.headers["x-should-retry"]) == ("1", "true")
        return real.log().count(LOADED) == 2

    eventually(loaded, "the model is loaded", START_SECONDS)
    serving_seconds = eventually(lambda: ready(real), "ready")
    print(f"serving {serving_seconds:.1f} s after the model was loaded")
    assert serving_seconds < 5
    assert is_running(children(real.process.pid)[0])

    # Nothing is left of the old one: cold, right, found again under the tenant's own names, whole.
    assert [tenants[0].cached_tokens(prompt), tenants[0].cached_tokens(prompt)] == [0, 32]
    assert tenants[0].complete("1 2 3 4 5", max_tokens=6).json()["choices"] == counting
    report = real.wait_until_idle()
    assert report.free_blocks + report.cached_blocks == report.total_blocks


@pytest.mark.once
def test_b194_the_store_goes_with_a_killed_gateway_and_a_new_start_succeeds(real: Server) -> None:
    eventually(lambda: ready(real), "ready", START_SECONDS)
    tenant = real.tenant()
    (store,) = children(real.process.pid)
    with ThreadPoolExecutor(1) as pool:
        cut = pool.submit(tenant.complete, "Count: 1 2 3", max_tokens=1000, ignore_eos=True)
        eventually(lambda: real.stats().running == 1, "it runs")
        os.kill(real.process.pid, signal.SIGKILL)
        killed_at = time.monotonic()
        real.process.wait()
        print(f"gone after {eventually(lambda: not is_running(store), 'gone', 10):.2f} s")
        assert not real.socket.exists()
        with serving(real.data_dir, "--cache-memory", "64MiB") as second:
            assert Tenant(second, tenant.id, tenant.name, tenant.key).complete("Again").status_code == 200
        print(f"started again {time.monotonic() - killed_at:.1f} s after the kill")
        assert cut.exception(1)


@pytest.mark.anyio
async def test_b195_a_supervisor_that_is_stopped_at_any_moment_of_the_load_leaves_no_store(
    tmp_path: Path, default_model: Path
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    socket = tmp_path / "run" / "store.sock"
    command = store_command(["--socket", str(socket), "--threads", "1", "--cache-memory", "64MiB"])
    before = children(os.getpid())
    for _ in range(5):
        supervisor = Supervisor(command, socket, lambda: 0.0)
        running = asyncio.create_task(supervisor.run())
        await asyncio.sleep(draw.uniform(0, 2.5))
        assert not running.done()
        since = time.monotonic()
        supervisor.stop()
        await running
        print(f"ended after {time.monotonic() - since:.2f} s")
        assert time.monotonic() - since < 1
        assert children(os.getpid()) == before
        assert not socket.exists()


@pytest.mark.once
def test_b195_a_stop_at_any_moment_of_the_load_ends_both_processes(tmp_path: Path, default_model: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    drain_seconds = 0.5
    command = [SALTERN, "serve", "--data-dir", str(tmp_path / "data"), "--port", "0", "--admin-port", "0"]
    command += ["--threads", "1", "--drain-seconds", str(drain_seconds)]
    for _ in range(5):
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=serve_environment()
        )
        try:
            eventually(lambda: bool(children(process.pid)), "the store is started")  # noqa: B023
            (store,) = children(process.pid)
            time.sleep(draw.uniform(0, 4))
            since = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert process.wait(drain_seconds + 1) == 0
            print(f"ended after {time.monotonic() - since:.2f} s")
            assert not is_running(store)
            assert not (tmp_path / "data" / "run" / "store.sock").exists()
        finally:
            process.kill()
            process.wait()
