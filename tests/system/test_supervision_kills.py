"""The store killed at any moment: what ran ends with an error, nothing else is lost, and everything works again."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gateway.prompt.detokenize import Detokenizer
from gateway.prompt.model_files import read_model_files
from gateway.prompt.tokens import Tokenizer
from tests.cachestore.support import expected_answer
from tests.system.insider import Insider
from tests.system.served import EAGER, PATIENCE_SECONDS, Running, eventually, running, until
from tests.system.storm import Storm, check_refusal, storm
from tests.system.support import Tenant, cached_tokens, random_prompt
from tests.system.wire import events, refusal

EARLY_SECONDS = 1.2
# What the promise allows; measured are the client's times.
ENDED_WITHIN_SECONDS = 1.0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, default_model: object) -> Iterator[Running]:
    """A gateway over a store double that is started again at once; every test leaves it ready."""
    limits = [*EAGER, f"gateway.store_link.EARLY_LOSS_SECONDS={EARLY_SECONDS}"]
    with running(tmp_path_factory.mktemp("kills") / "data", "serve", limits=limits) as server:
        server.wait_until_ready()
        yield server


async def kill(served: Running, weather: Storm, pid: int) -> float:
    """Kill this store while requests run, and see them end; answers when.

    Also that from then on requests are refused at once, and may be sent again.
    """
    ran = set(weather.running)
    since = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    served.notes.go_on()
    await weather.until_over(ran, since, ENDED_WITHIN_SECONDS)
    # A stream is cut short by nothing else: from then on the gateway knows. (Before, it may still submit.)
    known = min((asked.ended_at for asked in ran if asked.end == "error event"), default=float("inf"))
    while not await asyncio.to_thread(served.ready):
        assert time.monotonic() - since < PATIENCE_SECONDS, served.log()
    meanwhile = [asked for asked in weather.asked if asked.sent_at > known and asked.end.startswith("refused")]
    assert all(asked.headers["x-should-retry"] == "true" for asked in meanwhile)
    return since


async def until_streaming(weather: Storm, streams: int = 3) -> None:
    """So many clients have text of the present store, and wait for more."""
    await until(lambda: weather.streaming() >= streams)


async def until_all_is_dropped(weather: Storm) -> None:
    """No rotation waits for a store any more."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await weather.directory.pending_fences():
            pass


async def until_standing(served: Running) -> int:
    return await asyncio.to_thread(served.standing_store)


def check_aftermath(served: Running, weather: Storm, stores: int) -> None:
    """Nothing is held, the pool is whole, every name was right, and nothing but the kills ended a store."""
    report = served.wait_until_idle()
    assert report.held_blocks == 0
    assert report.free_blocks + report.cached_blocks == report.total_blocks
    weather.check_answers()
    counts = weather.check_names()
    print(weather.fates(), counts)
    assert min(counts["prompt blocks"], counts["answer blocks"], counts["hits"]) > 0
    ends = [line for line in served.log().splitlines() if "the store ended" in line]
    assert len(ends) >= stores
    assert all("ended with status -9" in line for line in ends)
    for customer in weather.customers:
        prompt = random_prompt(f"after {customer.tenant.name}", 33)
        assert [customer.tenant.cached_tokens(prompt), customer.tenant.cached_tokens(prompt)] == [0, 32]


@pytest.mark.parametrize("point", ["prefill", "decode", "last seal", "fence", "fenced", "loading"])
def test_a_store_killed_at_a_named_point_leaves_no_trace(served: Running, point: str) -> None:
    """Within a step of a prompt or an answer, between Finished and the last Seal, around a drop, before it listens."""
    weather = asyncio.run(_killed_at(served, point))
    check_aftermath(served, weather, stores=1 + (point == "loading"))


async def _killed_at(served: Running, point: str) -> Storm:
    async with storm(served, seed=7) as weather:
        await until_streaming(weather)
        rotating: asyncio.Task[dict[str, Any]] | None = None
        if point == "loading":
            served.notes.stop_at(point)
            since = time.monotonic()
            os.kill(served.store_pid, signal.SIGKILL)
            pid = await until_standing(served)
            # It loads: what is asked now is refused, and what ran has ended.
            await weather.until_over({asked for asked in weather.running if asked.sent_at < since}, since, 2)
            asked = await weather.ask(weather.customers[0], stream=False, max_tokens=1)
            assert (asked.end, asked.headers["x-should-retry"]) == ("refused 503", "true")
        else:
            served.notes.stop_at(point)
            if point in ("fence", "fenced"):
                rotating = asyncio.create_task(weather.rotate(weather.customers[0]))
            pid = await until_standing(served)
        assert pid == served.store_pid
        ran = set(weather.running)
        killed_at = await kill(served, weather, pid)
        if rotating:
            assert (await rotating)["dropped"] is None
        if point in ("prefill", "decode"):
            # At least one was in the step that never ended.
            assert any(asked.end in ("error event", "refused 503") for asked in ran)
        print(f"ready again {time.monotonic() - killed_at:.1f} s after the kill")
        await until_streaming(weather)
        await weather.rotate(weather.customers[1])
        await until_all_is_dropped(weather)
    return weather


@pytest.mark.parametrize("times", [8, pytest.param(20, marks=pytest.mark.once)])
def test_a_store_killed_again_and_again_at_random_leaves_no_trace(served: Running, times: int) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    weather = asyncio.run(_killed_at_random(served, seed, times))
    check_aftermath(served, weather, stores=times)
    fates = weather.fates()
    assert min(fates["stream error event"], fates["plain refused 503"]) >= times
    assert fates["stream answered"] + fates["plain answered"] > 0


async def _killed_at_random(served: Running, seed: int, times: int) -> Storm:
    draw = random.Random(seed)
    async with storm(served, seed) as weather:
        for _ in range(times):
            await until_streaming(weather, 2)
            rotating = [
                asyncio.create_task(weather.rotate(customer))
                for customer in draw.sample(weather.customers, draw.choice([0, 0, 1, 2]))
            ]
            await asyncio.sleep(draw.uniform(0, 0.1))
            await kill(served, weather, served.store_pid)
            await asyncio.gather(*rotating)
        await until_streaming(weather)
        await until_all_is_dropped(weather)
    return weather


def live_long() -> None:
    """An end of the store is no longer early."""
    since = time.monotonic()
    eventually(lambda: time.monotonic() > since + EARLY_SECONDS, "the store is no longer young")


def in_background(pool: ThreadPoolExecutor, tenant: Tenant, **fields: Any) -> Any:
    """A request of a fresh prompt that runs while the test goes on; a future of its response."""
    return pool.submit(tenant.complete, random_prompt(f"{time.monotonic_ns()}", 20), ignore_eos=True, **fields)


def killed_while_it_answers(served: Running, tenant: Tenant) -> str:
    """`x-should-retry` of a request that was decoding when the store was killed; returns when all is ready again."""
    with ThreadPoolExecutor(1) as pool:
        served.notes.stop_at("decode")
        answer = in_background(pool, tenant, max_tokens=20)
        served.standing_store()
        served.kill_store()
        response = answer.result(ENDED_WITHIN_SECONDS)
    error = refusal(response, 503)
    assert (error["type"], error["code"]) == ("service_unavailable_error", "server_is_overloaded")
    check_refusal(response.headers)
    served.wait_until_ready()
    should_retry: str = response.headers["x-should-retry"]
    return should_retry


def test_line_49_a_crashed_store_fails_its_requests_and_serves_again_as_soon_as_its_model_is_loaded(
    served: Running,
) -> None:
    live_long()
    tenant = served.tenant()
    prompt = random_prompt("line 49", 33)
    assert [tenant.cached_tokens(prompt), tenant.cached_tokens(prompt)] == [0, 32]
    with ThreadPoolExecutor(2) as pool:
        answers = [in_background(pool, tenant, max_tokens=1500, stream=stream) for stream in (False, True)]
        eventually(lambda: served.stats().running == 2, "both run")
        served.notes.stop_at("decode")
        killed = served.standing_store()
        served.notes.stop_at("loading")
        os.kill(killed, signal.SIGKILL)
        response, stream = (answer.result(ENDED_WITHIN_SECONDS) for answer in answers)
    refusal(response, 503)
    check_refusal(response.headers)
    assert response.headers["x-should-retry"] == "true"
    *_, last = events(stream.content)
    assert last["error"]["type"] == "service_unavailable_error"
    eventually(lambda: served.notes.standing() != killed, "the next one loads")
    while_it_loads = tenant.complete(prompt)
    refusal(while_it_loads, 503)
    check_refusal(while_it_loads.headers)
    assert while_it_loads.headers["x-should-retry"] == "true"
    served.notes.go_on()
    assert served.wait_until_ready() < 5
    assert [tenant.cached_tokens(prompt), tenant.cached_tokens(prompt)] == [0, 32]


def test_a_request_that_ran_while_two_stores_died_early_in_a_row_is_not_to_be_sent_again(served: Running) -> None:
    tenant = served.tenant()
    live_long()
    # Not early; early once, twice, three times; not early again.
    fates = [killed_while_it_answers(served, tenant) for _ in range(4)]
    live_long()
    fates.append(killed_while_it_answers(served, tenant))
    assert fates == ["true", "true", "false", "false", "true"]
    assert tenant.complete("All is well").status_code == 200


def test_a_store_killed_while_a_stop_string_waits_for_its_end_ends_the_stream_with_an_error(
    served: Running, default_model: Path
) -> None:
    tenant = served.tenant()
    prompt = random_prompt("a stop string", 20)
    detokenizer = Detokenizer(Tokenizer(read_model_files(default_model)))
    # Complete at the third token: the gateway tells the store to end the answer there.
    stop = detokenizer.push(expected_answer(prompt, 3))
    assert stop
    for stream in (False, True):
        fields = {"max_tokens": 20, "ignore_eos": True, "stop": stop, "stream": stream}
        with ThreadPoolExecutor(1) as pool:
            served.notes.stop_at("abort")
            answer = pool.submit(tenant.complete, prompt, **fields)
            served.standing_store()
            served.kill_store()
            response = answer.result(ENDED_WITHIN_SECONDS)
        served.wait_until_ready()
        if stream:
            *_, last = events(response.content)
            assert last["error"]["type"] == "service_unavailable_error"
        else:
            refusal(response, 503)
        whole = tenant.complete(prompt, **fields)
        assert whole.status_code == 200
        assert b"error" not in whole.content


@pytest.mark.parametrize("point", ["fence", "fenced", None])
def test_line_12_a_drop_that_the_store_died_over_comes_before_its_successors_first_request(
    served: Running, point: str | None
) -> None:
    """Killed before the drop, after the drop and before its answer, and before it was asked at all."""
    tenant, other = served.tenant(), served.tenant()
    account = Insider(served).secrets(tenant).account.hex()
    prompt = random_prompt("line 12", 33)
    assert [tenant.cached_tokens(prompt), tenant.cached_tokens(prompt)] == [0, 32]
    killed = served.store_pid
    with ThreadPoolExecutor(3) as pool:

        def first_answer(of: Tenant) -> int:
            """As a client's library does: again and again until it is served."""
            while (response := of.complete(prompt)).status_code == 503:
                check_refusal(response.headers)
            return cached_tokens(response)

        if point:
            served.notes.stop_at(point)
            rotating = pool.submit(tenant.rotate)
            assert served.standing_store() == killed
            served.kill_store()
        else:
            # The next one is held up before it listens.
            served.notes.stop_at("loading")
            os.kill(killed, signal.SIGKILL)
            served.standing_store()
            rotating = pool.submit(tenant.rotate)
        assert rotating.result(PATIENCE_SECONDS) == {"epoch": 2, "dropped": None}
        answers = [pool.submit(first_answer, of) for of in (tenant, other)]
        if not point:
            states = served.admin.get(f"/admin/v1/tenants/{tenant.id}/salts").json()["data"]
            assert [(salt["epoch"], salt["state"]) for salt in states] == [(1, "dropping"), (2, "active")]
            served.notes.go_on()
        assert [answer.result(PATIENCE_SECONDS) for answer in answers] == [0, 0]
    assert tenant.cached_tokens(prompt) == 32

    came = [entry for entry in served.notes.entries() if entry.pid == served.store_pid and entry.kind != "OpenAccount"]
    assert [(entry.kind, entry.account, entry.epoch) for entry in came[:1]] == [("Fence", account, 2)]
    assert {entry.epoch for entry in came if entry.kind == "Submit" and entry.account == account} == {2}
    states = served.admin.get(f"/admin/v1/tenants/{tenant.id}/salts").json()["data"]
    assert [(salt["epoch"], salt["state"]) for salt in states] == [(1, "dropped"), (2, "active")]
