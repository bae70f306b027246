"""`/metrics`: counts that agree with the requests, gauges that fall again, series that nobody outside can multiply."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.telemetry import names
from gateway.telemetry.providers import Exporters
from gateway.telemetry.telemetry import Telemetry
from tests.system.in_process import PATIENCE_SECONDS, InProcess, in_process
from tests.system.metered import limit
from tests.system.scene import scene
from tests.system.scripted import CHAT, TEXT, ScriptedRunner, idle, until

pytestmark = pytest.mark.anyio

Labels = frozenset[tuple[str, str]]


async def scraped(inside: InProcess) -> dict[str, dict[Labels, float]]:
    """Of each sample its values by labels."""
    answer = await inside.admin.get("/metrics", headers={"authorization": ""})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    found: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return found


def labelled(values: dict[Labels, float], label: str) -> dict[str, float]:
    """Sums by one label."""
    sums: dict[str, float] = {}
    for labels, value in values.items():
        word = dict(labels)[label]
        sums[word] = sums.get(word, 0) + value
    return sums


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, str]]:
    """The request lines of the log, their fields by name."""
    messages = [record.getMessage() for record in caplog.records if record.name == "saltern.request"]
    return [dict(pair.split("=", 1) for pair in message.split(" ")) for message in messages]


async def test_b178_random_paths_make_two_series(tmp_path: Path, default_model: Path) -> None:
    async with in_process(tmp_path, default_model) as inside:
        headers = (await inside.customer("a")).headers
        before = (await scraped(inside))["http_server_request_duration_seconds_count"]
        for number in range(1000):
            await inside.http.get(f"/v1/models/random-{number}", headers=headers)
            await inside.http.get(f"/random-{number}", headers=headers)
        after = (await scraped(inside))["http_server_request_duration_seconds_count"]
    new = [dict(labels) for labels in after.keys() - before.keys() if ("http_route", "/metrics") not in labels]
    assert sorted(labels["http_route"] for labels in new) == ["/v1/models/{model:path}", names.UNMATCHED]
    assert [labels["http_response_status_code"] for labels in new] == ["404", "404"]


async def test_b178_neither_methods_nor_headers_make_series(tmp_path: Path, default_model: Path) -> None:
    async with in_process(tmp_path, default_model) as inside:
        for number in range(20):
            headers = {"host": f"h{number}", "user-agent": f"{number}"}
            await inside.http.request(f"METHOD{number}", "/x", headers=headers)
        routes = (await scraped(inside))["http_server_request_duration_seconds_count"]
    methods = labelled(routes, "http_request_method")
    assert methods[names.OTHER_METHOD] == 20
    assert methods.keys() <= {"GET", "POST", names.OTHER_METHOD}


async def test_b179_tenants_make_no_series_unless_that_is_asked_for(tmp_path: Path, default_model: Path) -> None:
    async with in_process(tmp_path, default_model) as inside:
        await inside.complete(await inside.customer("first"), [1, 2, 3])
        before = await with_gauges(inside)
        for number in range(50):
            await inside.complete(await inside.customer(f"t{number}"), [1, 2, 3])
        after = await scraped(inside)
        assert {name: values.keys() for name, values in after.items() if not name.startswith("http_")} == {
            name: values.keys() for name, values in before.items() if not name.startswith("http_")
        }
        assert "tnt_" not in repr(after)
    telemetry = Telemetry(Exporters(), tenant_labels=5)
    (tmp_path / "named").mkdir()
    async with in_process(tmp_path / "named", default_model, telemetry=telemetry) as inside:
        customer = await inside.customer("first")
        await inside.complete(customer, [1, 2, 3])
        found = await scraped(inside)
    assert labelled(found["saltern_tenant_requests_total"], "saltern_tenant_id") == {customer.id: 1}
    assert labelled(found["saltern_tenant_tokens_total"], "gen_ai_token_type") == {"input": 3, "output": 1}


async def test_b180_gauges_fall_when_everything_is_aborted(tmp_path: Path) -> None:
    async with scene(tmp_path, max_running=8) as s:
        clients = [await s.ask(CHAT, True) for _ in range(50)]
        await s.submitted(50)
        pacing = asyncio.create_task(pace(s.runner))

        async def states() -> dict[str, float]:
            return labelled((await scraped(s.inside)).get("saltern_store_requests", {}), "saltern_store_state")

        await until_told(states, {"running": 8, "waiting": 42})
        for client in clients:
            client.leave()
        await until_told(states, {"running": 0, "waiting": 0})
        pacing.cancel()
        s.runner.open()
        blocks = labelled((await scraped(s.inside))["saltern_cache_blocks"], "saltern_cache_state")
        assert blocks["held"] == 0
        assert sum(blocks.values()) == s.inside.engine.pool.total


async def pace(runner: ScriptedRunner) -> None:
    """Steps as slow as those of a model."""
    while True:
        if runner.waiting:
            runner.let()
        await asyncio.sleep(0.02)


async def until_told(ask: Callable[[], Awaitable[object]], value: object) -> None:
    """Wait for the store's next reports, one a second."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await ask() != value:  # noqa: ASYNC110  # the store reports by its own clock
            await asyncio.sleep(0.05)


async def with_gauges(inside: InProcess) -> dict[str, dict[Labels, float]]:
    """A scrape after the store's first report."""

    async def reported() -> bool:
        return "saltern_cache_blocks" in await scraped(inside)

    await until_told(reported, True)
    return await scraped(inside)


async def test_b181_aborted_requests_are_in_every_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "saltern.request")
    async with scene(tmp_path, max_running=8) as s:
        for _ in range(5):
            client, sequence = await s.begin(TEXT, True)
            while sequence.output_tokens < 3:
                await s.step()
            await s.leave(client, sequence)
        s.runner.open()
        for _ in range(5):
            await (await s.ask(TEXT, True, max_tokens=4)).answer()
        await until(lambda: len([line for line in lines(caplog) if "output_tokens" in line]) == 10)
        found = await scraped(s.inside)
        told = [line for line in lines(caplog) if "output_tokens" in line]
    assert labelled(found["saltern_requests_total"], "saltern_outcome") == {"aborted": 5, "finished": 5}
    sums = labelled(found["gen_ai_client_token_usage_sum"], "gen_ai_token_type")
    assert sums["input"] == sum(int(line["input_tokens"]) for line in told) > 0
    assert sums["output"] == sum(int(line["output_tokens"]) for line in told) >= 5 * 3 + 5 * 4
    for name in ("gen_ai_server_request_duration_seconds_count", "gen_ai_client_token_usage_count"):
        assert sum(found[name].values()) in (10, 20)
    durations = labelled(found["gen_ai_server_request_duration_seconds_count"], "error_type")
    assert durations == {"": 5, "client_disconnected": 5}


async def test_b206_what_is_public_tells_counts_only(tmp_path: Path, default_model: Path) -> None:
    """Every GET of both listeners that needs no path of its own, with no key, a tenant's and an administrator's."""
    canary = "canary-5f21"
    async with in_process(tmp_path, default_model) as inside:
        customer = await inside.customer("a")
        body = {"model": inside.model, "messages": [{"role": "user", "content": canary}], "max_tokens": 20}
        answer = (await inside.http.post(CHAT, json=body, headers=customer.headers)).json()
        text = answer["choices"][0]["message"]["content"]
        keys = {"none": "", "tenant": f"Bearer {customer.key}", "admin": inside.admin.headers["authorization"]}
        told: dict[tuple[str, str], httpx.Response] = {}
        for client, app in ((inside.http, inside.gateway.tenant_app), (inside.admin, inside.gateway.admin_app)):
            for route in app.routes:
                if route.method == "GET" and "{" not in route.path:
                    for who, key in keys.items():
                        path = f"{route.path}?verbose" if route.auth == "public" else route.path
                        answer = await client.get(path, headers={"authorization": key})
                        told[route.path, who] = answer
                        allowed = route.auth == "public" or who == route.auth.split(":")[0]
                        assert answer.status_code == (200 if allowed else 401), (route.path, who)
        public = [path for path, who in told if who == "none" and told[path, who].status_code == 200]
        assert sorted(set(public)) == ["/admin/openapi.json", "/livez", "/metrics", "/openapi.json", "/readyz"]
        everything = "".join(answer.text for answer in told.values())
    assert canary not in everything
    assert text.strip()
    assert text not in everything
    assert customer.id not in "".join(told[path, "none"].text for path in public)
    # Numbers and words of closed sets.
    for line in told["/metrics", "none"].text.splitlines():
        assert line.startswith("#") or re.fullmatch(r"\w+(\{.*\})? [-+0-9.eE]+", line), line


async def test_counters_of_the_store_are_published(tmp_path: Path, default_model: Path) -> None:
    async with in_process(tmp_path, default_model, 16) as inside:
        customer = await inside.customer("a")
        for start in range(0, 6000, 200):
            await inside.complete(customer, [*range(start, start + 100)])
        await idle(inside)
        engine = inside.engine
        await evicted(inside)
        found = await scraped(inside)
        assert engine.pool.evictions > 100
        assert sum(found["saltern_store_steps_total"].values()) == engine.steps == 30
        assert sum(found["saltern_store_step_time_seconds_total"].values()) == pytest.approx(engine.step_ns / 1e9)
        assert labelled(found["saltern_cache_tokens_total"], "saltern_cache_outcome") == {"hit": 0, "miss": 3000}


async def test_blocks_that_gave_way_are_counted_by_cause(tmp_path: Path, default_model: Path) -> None:
    async with in_process(tmp_path, default_model, 16) as inside:
        customer = await inside.customer("a")
        for start in range(0, 800, 200):
            await inside.complete(customer, [*range(start, start + 100)])
        await idle(inside)
        needed = inside.engine.pool.evictions
        await limit(inside, customer.id, device_max_tokens=5 * 16)
        told = await evicted(inside)
        # All but five of the fifteen or sixteen that there were.
        limited = inside.engine.pool.evictions - needed
        assert told == {"capacity": needed, "limit": limited}
        assert needed
        assert limited


async def evicted(inside: InProcess) -> dict[str, float]:
    """By cause, once all that gave way were told."""

    async def told() -> float:
        return sum((await scraped(inside))["saltern_cache_evictions_total"].values())

    await until_told(told, inside.engine.pool.evictions)
    return labelled((await scraped(inside))["saltern_cache_evictions_total"], "saltern_cache_cause")


async def test_without_a_store_there_are_no_gauges_and_counters_stay(tmp_path: Path, default_model: Path) -> None:
    async with in_process(tmp_path, default_model) as inside:
        await inside.complete(await inside.customer("a"), [1, 2, 3])
        await idle(inside)

        async def steps() -> float:
            return sum((await scraped(inside)).get("saltern_store_steps_total", {}).values())

        await until_told(steps, 1)
        inside.gateway.link.connection().client.close()
        found = await scraped(inside)
        assert "saltern_store_requests" not in found
        assert "saltern_cache_blocks" not in found
        assert await steps() == 1
        await inside.gateway.link.connected.wait()
        # It is the same store, whose counts go on.
        assert await steps() == 1


async def test_a_scrape_bears_declared_names_only(tmp_path: Path, default_model: Path) -> None:
    telemetry = Telemetry(Exporters(), tenant_labels=5)
    async with in_process(tmp_path, default_model, telemetry=telemetry) as inside:
        headers = (await inside.customer("a")).headers
        body = {"model": inside.model, "prompt": [1, 2, 3], "max_tokens": 3, "ignore_eos": True}
        assert (await inside.http.post(TEXT, json=body, headers=headers)).status_code == 200
        inside.gateway.directory.keyring.unwrap_failures["salt"] += 1
        inside.gateway.quotas.refusals["tenant", "tokens_per_day"] += 1
        found = await with_gauges(inside)
    declared = {metric.name.replace(".", "_"): metric for metric in names.METRICS}
    seen = set()
    for sample, values in found.items():
        if sample == "target_info":
            continue
        (metric,) = [metric for name, metric in declared.items() if _is_of(sample, name, metric)]
        seen.add(metric.name)
        allowed = {attribute.name.replace(".", "_") for attribute in metric.attributes} | {"le"}
        assert {label for labels in values for label, _ in labels} <= allowed, sample
    assert seen == {metric.name for metric in names.METRICS}


def _is_of(sample: str, name: str, metric: names.Metric) -> bool:
    unit = "_seconds" if metric.unit == "s" else ""
    endings = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_count", "_sum"]}[metric.kind]
    return sample in [name + unit + ending for ending in endings]
