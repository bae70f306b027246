"""A store that says nothing, or makes no steps: seen, waited for, and ended when it is too long."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.system.served import EAGER, Running, eventually, free_port, is_running, running
from tests.system.support import Tenant, random_prompt
from tests.system.wire import refusal

# Seconds where the real ones are 1, 5, 10 and 30: asked for, lost, stuck, ended.
SILENT_SECONDS, STUCK_SECONDS, ENDED_SECONDS = 1.0, 1.0, 2.5
SHORT = (
    *EAGER,
    "cachestore.client.PING_INTERVAL_SECONDS=0.1",
    f"cachestore.client.SILENCE_LIMIT_SECONDS={SILENT_SECONDS}",
    f"gateway.store_link.STEP_AGE_LIMIT_MS={int(1000 * STUCK_SECONDS)}",
    "gateway.supervisor.LOOK_SECONDS=0.1",
    f"gateway.supervisor.SILENCE_SECONDS={ENDED_SECONDS}",
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("frozen") / "data", "serve", limits=SHORT) as server:
        yield server


def step_age_ms(served: Running) -> int:
    """What `/readyz` says of the last step."""
    found = re.search(r"step_age_ms (\d+)", served.http.get("/readyz?verbose").text)
    assert found
    return int(found[1])


def test_b208_a_frozen_store_is_not_ready_and_recovers_when_it_wakes(served: Running) -> None:
    served.wait_until_ready()
    tenant = served.tenant()
    store = served.store_pid
    assert step_age_ms(served) == 0
    with ThreadPoolExecutor(1) as pool:
        os.kill(store, signal.SIGSTOP)
        answer = pool.submit(tenant.complete, random_prompt("waits", 20), max_tokens=20, ignore_eos=True)
        try:
            noticed_seconds = eventually(lambda: not served.ready(), "not ready")
            assert noticed_seconds < SILENT_SECONDS + 2
            # The one that waited may be sent again, elsewhere.
            response = answer.result(1)
            refusal(response, 503)
            assert response.headers["x-should-retry"] == "true"
            refusal(tenant.complete("Meanwhile"), 503)
            before = step_age_ms(served)
            assert before > 0
            eventually(lambda: step_age_ms(served) > before, "the age grows")
            assert is_running(store)
        finally:
            os.kill(store, signal.SIGCONT)
    eventually(served.ready, "ready again")
    assert served.store_pid == store
    assert step_age_ms(served) == 0
    assert tenant.complete("Awake").status_code == 200
    assert served.wait_until_idle().held_blocks == 0


def test_b208_an_engine_that_makes_no_steps_is_not_ready_and_loses_nothing(served: Running) -> None:
    served.wait_until_ready()
    tenant = served.tenant()
    store = served.store_pid
    prompt = random_prompt("stuck", 20)
    expected = tenant.complete(prompt, max_tokens=20, ignore_eos=True).json()["choices"]
    with ThreadPoolExecutor(1) as pool:
        served.notes.stop_at("decode")
        answer = pool.submit(tenant.complete, prompt, max_tokens=20, ignore_eos=True)
        served.standing_store()
        assert served.ready()
        # The process speaks all the time: it is not ended, however long the step takes.
        eventually(lambda: not served.ready(), "not ready")
        assert "the store has work and makes no steps" in served.http.get("/readyz").text
        assert step_age_ms(served) >= 1000 * STUCK_SECONDS
        eventually(lambda: step_age_ms(served) > 1000 * (ENDED_SECONDS + 0.5), "longer than silence may last")
        assert not answer.done()
        served.notes.go_on()
        assert answer.result(1).json()["choices"] == expected
    eventually(served.ready, "ready again")
    assert served.store_pid == store


def test_b208_a_store_that_does_not_wake_is_ended_and_started_again(served: Running) -> None:
    served.wait_until_ready()
    tenant = served.tenant()
    store = served.store_pid
    since = time.monotonic()
    os.kill(store, signal.SIGSTOP)
    eventually(lambda: not is_running(store), "ended")
    assert time.monotonic() - since >= ENDED_SECONDS - 0.5
    eventually(served.ready, "ready again")
    assert served.store_pid != store
    assert tenant.complete("Again").status_code == 200
    assert "it is killed and started again" in served.log()


def test_b194_a_new_start_waits_for_the_store_of_a_killed_gateway_to_go(served: Running) -> None:
    """Frozen, it can't hear that its gateway is gone: the new one is neither connected to it nor beside it."""
    served.wait_until_ready()
    tenant = served.tenant()
    store = served.store_pid
    os.kill(store, signal.SIGSTOP)
    try:
        os.kill(served.process.pid, signal.SIGKILL)
        served.process.wait()
        came = len(served.notes.entries())
        ports = free_port(), free_port()
        with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
            starting = pool.submit(stack.enter_context, running(served.data_dir, "serve", ports=ports, limits=SHORT))
            eventually(lambda: _accepts(ports[1]), "the new one has its ports")
            with pytest.raises(httpx.ReadTimeout):
                httpx.get(f"http://127.0.0.1:{ports[0]}/livez", timeout=0.3, trust_env=False)
            os.kill(store, signal.SIGCONT)
            gone_seconds = eventually(lambda: not is_running(store), "the old store is gone", 10)
            print(f"gone {gone_seconds:.2f} s after it woke")
            again = starting.result()
            again.wait_until_ready()
            assert Tenant(again, tenant.id, tenant.name, tenant.key).complete("Again").status_code == 200
            assert {entry.pid for entry in again.notes.entries()[came:]} == {again.store_pid}
    finally:
        if is_running(store):
            os.kill(store, signal.SIGKILL)


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.once
def test_b208_with_the_limits_as_they_are(tmp_path: Path, default_model: Path) -> None:
    with running(tmp_path / "data", "serve") as served:
        served.wait_until_ready()
        store = served.store_pid
        since = time.monotonic()
        os.kill(store, signal.SIGSTOP)
        not_ready = eventually(lambda: not served.ready(), "not ready", 12)
        os.kill(store, signal.SIGCONT)
        awake = eventually(served.ready, "ready again", 12)
        os.kill(store, signal.SIGSTOP)
        since = time.monotonic()
        eventually(lambda: not is_running(store), "ended", 40)
        ended = time.monotonic() - since
        eventually(served.ready, "ready again", 30)
        print(f"not ready after {not_ready:.1f} s, ready {awake:.1f} s after it woke, ended after {ended:.1f} s")
        assert not_ready < 10
        assert 29 < ended < 35
        assert served.store_pid != store
