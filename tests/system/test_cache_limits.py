"""What tenants may have of the cache, from the admin API to the store: when it is told, and what requests then meet."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cachestore.engine import Engine
from cachestore.protocol import Message, OpenAccount, Submit
from gateway import store_link
from gateway.app import open_gateway
from gateway.telemetry.providers import Exporters
from gateway.telemetry.telemetry import Telemetry
from gateway.tenants.limits import LimitRegistry
from policies.eviction import NO_LIMITS, AccountLimits, Shares
from tests.cachestore.serving import stepping
from tests.system.in_process import BLOCK_BYTES, Customer, InProcess, _client, in_process, until
from tests.system.metered import TENANTS, limit, metered
from tests.system.scripted import TEXT, ScriptedRunner, idle
from tests.system.support import random_prompt
from tests.system.wire import refusal

pytestmark = pytest.mark.anyio

POOL_BLOCKS = 64


@pytest.fixture
def came(monkeypatch: pytest.MonkeyPatch) -> list[Message]:
    """Accounts that were opened and requests that were submitted, in the order in which stores took them."""
    messages: list[Message] = []
    open_account, submit = Engine.open_account, Engine.submit

    def opening(engine: Engine, message: OpenAccount) -> None:
        messages.append(message)
        open_account(engine, message)

    def submitting(engine: Engine, connection: int, message: Submit) -> None:
        messages.append(message)
        submit(engine, connection, message)

    monkeypatch.setattr(Engine, "open_account", opening)
    monkeypatch.setattr(Engine, "submit", submitting)
    return messages


def limits_of(inside: InProcess, customer: Customer) -> AccountLimits:
    """Those that the store keeps to."""
    return inside.engine.pool.shares.account(customer.account).limits


async def cache(inside: InProcess, customer: Customer, method: str = "GET") -> dict[str, Any]:
    answer = await inside.admin.request(method, f"{TENANTS}/{customer.id}/cache")
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def test_limits_are_told_on_connect_before_the_first_request(
    tmp_path: Path, default_model: Path, came: list[Message]
) -> None:
    async with in_process(tmp_path, default_model, POOL_BLOCKS) as inside:
        limited, unset, free = [await inside.customer(name) for name in ("limited", "unset", "free")]
        await limit(inside, limited.id, device_reserved_tokens=33, device_max_tokens=100, weight=2.5)
        await limit(inside, unset.id, device_reserved_tokens=16)
        await limit(inside, unset.id)
        await limit(inside, free.id, tokens_per_day=1_000_000)
        await inside.rotate(limited)
    came.clear()
    # Another store, which knows nothing of all this.
    async with in_process(tmp_path, default_model, POOL_BLOCKS) as inside:
        for customer in (limited, free):
            assert await inside.cached_tokens(customer, random_prompt("connect", 20)) == 0
        first = next(index for index, message in enumerate(came) if isinstance(message, Submit))
        opened = {message.account: message for message in came[:first] if isinstance(message, OpenAccount)}
        # The epoch of now, whole blocks; and that there are no limits any more where a store may have heard of some.
        assert opened == {
            limited.account: OpenAccount(
                account=limited.account, epoch=2, revision=1, reserved_blocks=3, max_blocks=7, weight=2.5
            ),
            unset.account: OpenAccount(account=unset.account, epoch=1, revision=2),
        }
        assert limits_of(inside, limited) == AccountLimits(3, 7, 2.5)
        assert limits_of(inside, free) == NO_LIMITS
        await inside.check()


async def test_a_change_is_in_force_when_it_is_answered_and_outlives_a_rotation(
    tmp_path: Path, default_model: Path
) -> None:
    async with in_process(tmp_path, default_model, POOL_BLOCKS) as inside:
        customer = await inside.customer("a")
        prompt = random_prompt("change", 70)
        for body, limits in (
            ({"device_reserved_tokens": 64, "device_max_tokens": 128}, AccountLimits(4, 8)),
            ({"device_reserved_tokens": 128, "strict": True}, AccountLimits(8, 8, 1.0, True)),
            ({"strict": False, "weight": 3}, AccountLimits(8, 8, 3.0)),
        ):
            answer = await inside.admin.patch(f"{TENANTS}/{customer.id}/quotas", json=body)
            assert answer.status_code == 200
            assert limits_of(inside, customer) == limits
        await inside.rotate(customer)
        assert [await inside.cached_tokens(customer, prompt) for _ in range(2)] == [0, 64]
        await inside.check()
        assert limits_of(inside, customer) == AccountLimits(8, 8, 3.0)
        await limit(inside, customer.id)
        assert limits_of(inside, customer) == NO_LIMITS


async def test_what_a_tenant_has_is_counted_and_flushed_and_nothing_of_others(
    tmp_path: Path, default_model: Path
) -> None:
    async with in_process(tmp_path, default_model, POOL_BLOCKS) as inside:
        customer, other = await inside.customer("a"), await inside.customer("b")
        await limit(inside, customer.id, device_reserved_tokens=33, device_max_tokens=100)
        prompt = random_prompt("flush", 40)
        for each in (customer, other):
            assert [await inside.cached_tokens(each, prompt) for _ in range(2)] == [0, 32]
        await inside.check()
        assert await cache(inside, customer) == {
            "device": {
                "blocks": 2,
                "tokens": 32,
                "bytes": 2 * BLOCK_BYTES,
                "reserved_tokens": 48,
                "max_tokens": 112,
            },
            "hit_tokens": 32,
            "miss_tokens": 48,
        }
        assert await cache(inside, customer, "DELETE") == {"blocks": 2, "bytes": 2 * BLOCK_BYTES}
        assert (await cache(inside, customer))["device"]["blocks"] == 0
        assert (await cache(inside, other))["device"]["blocks"] == 2
        assert [await inside.cached_tokens(each, prompt) for each in (customer, other)] == [0, 32]
        await inside.check()


async def test_limits_that_were_changed_and_not_sent_are_found_in_the_database(
    tmp_path: Path, default_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_link, "LIMITS_SECONDS", 0.01)
    async with in_process(tmp_path, default_model, POOL_BLOCKS) as inside:
        customer = await inside.customer("a")
        # As a gateway that ends between the commit and what follows it.
        registry = LimitRegistry(inside.gateway.directory.database)

        def changed(**values: Any) -> Callable[[Any], Any]:
            return lambda before: {**before, **values}

        await registry.change(customer.id, None, changed(device_reserved_tokens=64))
        await until(lambda: limits_of(inside, customer) == AccountLimits(4))
        await registry.change(customer.id, None, changed(device_reserved_tokens=0))
        await until(lambda: limits_of(inside, customer) == NO_LIMITS)


async def test_in_a_store_that_is_too_small_each_has_the_same_part_of_its_reservation(
    tmp_path: Path, default_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_link, "LIMITS_SECONDS", 0.01)
    async with in_process(tmp_path, default_model, POOL_BLOCKS) as inside:
        large, strict, small = [await inside.customer(name) for name in ("large", "strict", "small")]
        await limit(inside, large.id, device_reserved_tokens=32 * 16)
        await limit(inside, strict.id, device_reserved_tokens=20 * 16, device_max_tokens=20 * 16, strict=True)
        await limit(inside, small.id, device_reserved_tokens=12 * 16, device_max_tokens=50 * 16)
        assert "partly_in_force" not in (await inside.http.get("/readyz?verbose")).text
    caplog.clear()
    # Another one, with half of it.
    async with in_process(tmp_path, default_model, POOL_BLOCKS // 2) as inside:
        everybody = (large, strict, small)
        parts = [AccountLimits(16), AccountLimits(10, 10, 1.0, True), AccountLimits(6, 50)]
        await until(lambda: [limits_of(inside, each) for each in everybody] == parts)
        # All of that is in force.
        shares = inside.engine.pool.shares
        assert [shares.account(each.account).reserved for each in everybody] == [16, 10, 6]
        await until(lambda: (report := inside.gateway.link.report) and report.reserved_blocks == 32)
        metrics = (await inside.admin.get("/metrics")).text
        assert reserved_blocks(metrics) == {"in_force": 32, "missing": 32}
        (line,) = [record.message for record in caplog.records if "reserved" in record.message]
        assert "64 blocks" in line
        assert "32" in line
        told = await inside.http.get("/readyz?verbose")
        assert told.status_code == 200
        # That it is so is no secret, and how much it is concerns nobody who has a tenant's key, or none.
        assert told.text.splitlines()[-1] == "reservations partly_in_force"

        # A change says what is in force of it now, and once they fit all have what was promised.
        await limit(inside, strict.id, device_reserved_tokens=4 * 16, device_max_tokens=4 * 16, strict=True)
        assert limits_of(inside, strict) == AccountLimits(2, 2, 1.0, True)
        await until(lambda: limits_of(inside, large) == AccountLimits(21))
        await limit(inside, large.id, device_reserved_tokens=16 * 16)
        assert limits_of(inside, large) == AccountLimits(16)
        await until(lambda: limits_of(inside, strict) == AccountLimits(4, 4, 1.0, True))
        await until(lambda: limits_of(inside, small) == AccountLimits(12, 50))
        await until(lambda: not inside.gateway.link.missing_blocks)
        assert "partly_in_force" not in (await inside.http.get("/readyz?verbose")).text
        assert [await inside.cached_tokens(small, random_prompt("small", 180)) for _ in range(2)] == [0, 176]
        await inside.check()


async def test_a_reservation_that_is_not_free_yet_is_missing(tmp_path: Path) -> None:
    async with metered(tmp_path, blocks=16) as m:
        link, other = m.inside.gateway.link, await m.inside.customer("b")
        client = link.connection().client
        m.runner.close()
        running = await m.begin(100, 100)
        await stepping(m.runner, limit(m.inside, other.id, device_reserved_tokens=16 * 16))
        await stepping(m.runner, client.stats())
        # The running request needs 13 of 16 to its end.
        assert link.missing_blocks == 13
        assert "partly_in_force" in (await m.inside.http.get("/readyz?verbose")).text
        m.runner.open()
        assert (await running).status_code == 200
        await idle(m.inside)
        await client.stats()
        assert link.missing_blocks == 0
        assert "partly_in_force" not in (await m.inside.http.get("/readyz?verbose")).text


def reserved_blocks(metrics: str) -> dict[str, float]:
    """By state, from a scrape."""
    found = re.findall(
        r"^saltern_cache_reserved_blocks\{.*saltern_cache_reservation_state=\"(\w+)\".*\} (\S+)$", metrics, re.MULTILINE
    )
    return {state: float(blocks) for state, blocks in found}


async def test_without_a_store_the_last_pool_decides_and_the_cache_is_503(tmp_path: Path, default_model: Path) -> None:
    async with in_process(tmp_path, default_model, POOL_BLOCKS) as inside:
        customer, authorization = await inside.customer("a"), inside.admin.headers["authorization"]
    async with (
        open_gateway(
            database_url=f"sqlite+aiosqlite:///{tmp_path / 'saltern.db'}",
            kek_file=tmp_path / "kek",
            socket_path=tmp_path / "run" / "store.sock",
            telemetry=Telemetry(Exporters()),
        ) as gateway,
        _client(gateway.admin_app) as admin,
    ):
        admin.headers["authorization"] = authorization
        quotas = f"{TENANTS}/{customer.id}/quotas"
        pool_tokens = POOL_BLOCKS * 16
        answer = await admin.put(quotas, json={"device_reserved_tokens": pool_tokens + 1})
        assert answer.status_code == 409
        assert f"{pool_tokens} " in answer.json()["error"]["message"]
        assert (await admin.put(quotas, json={"device_reserved_tokens": pool_tokens})).status_code == 200
        for method in ("GET", "DELETE"):
            refusal(await admin.request(method, f"{TENANTS}/{customer.id}/cache"), 503)


async def test_a_request_is_bounded_by_its_tenants_part_of_the_cache(tmp_path: Path) -> None:
    async with metered(tmp_path) as m:
        await m.limit(device_max_tokens=32)
        answer = await m.ask(10, None)
        assert answer.json()["usage"]["completion_tokens"] == 22
        for prompt_tokens, max_tokens in ((32, None), (10, 23)):
            error = refusal(await m.ask(prompt_tokens, max_tokens), 400)
            assert error["code"] == "context_length_exceeded"
            assert "the context is 32" in error["message"]


async def test_an_answer_without_a_maximum_fits_beside_what_others_have_reserved(tmp_path: Path) -> None:
    async with metered(tmp_path, blocks=16) as m:
        other = await m.inside.customer("b")

        async def answered(prompt_tokens: int) -> int:
            answer = await m.ask(prompt_tokens, None)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["finish_reason"] == "length"
            return int(answer.json()["usage"]["completion_tokens"])

        assert await answered(40) == 16 * 16 + 1 - 40
        await limit(m.inside, other.id, device_reserved_tokens=12 * 16)
        assert await answered(40) == 4 * 16 + 1 - 40
        # What was asked for is decided by the store, and so is a prompt that does not fit.
        for prompt_tokens, max_tokens in ((40, 26), (65, None)):
            assert "of 64 tokens" in refusal(await m.ask(prompt_tokens, max_tokens), 400)["message"]
        assert (await m.ask(40, 25)).status_code == 200
        # Its own reservation counts, and its own limit.
        await m.limit(device_reserved_tokens=2 * 16)
        assert await answered(40) == 4 * 16 + 1 - 40
        await limit(m.inside, other.id, device_reserved_tokens=14 * 16)
        assert await answered(20) == 2 * 16 + 1 - 20
        await m.limit(device_reserved_tokens=2 * 16, device_max_tokens=2 * 16, strict=True)
        assert await answered(20) == 2 * 16 - 20
        await limit(m.inside, other.id)
        assert await answered(20) == 2 * 16 - 20


def has_reserved(shares: Shares, blocks: int) -> bool:
    return shares.reserved == blocks


async def test_where_reservations_do_not_fit_an_answer_without_a_maximum_has_its_part(tmp_path: Path) -> None:
    async with metered(tmp_path, blocks=32) as m:
        other = await m.inside.customer("b")
        await m.limit(device_reserved_tokens=16 * 16, device_max_tokens=16 * 16, strict=True)
        await limit(m.inside, other.id, device_reserved_tokens=16 * 16)
        headers = m.customer.headers
    # Eight blocks for each are one less than there are: nobody's, and so anybody's but a strict tenant's.
    for strict, tokens in ((True, 8 * 16), (False, 9 * 16)):
        async with in_process(tmp_path, tmp_path / "model", 17, runner=ScriptedRunner()) as inside:
            shares = inside.engine.pool.shares
            if not strict:
                await limit(inside, m.customer.id, device_reserved_tokens=16 * 16)
            await until(partial(has_reserved, shares, 16))
            # Reports are up to a second old.
            await inside.gateway.link.connection().client.stats()
            body = {"model": inside.model, "prompt": "x" * 40, "ignore_eos": True}
            answer = await inside.http.post(TEXT, json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == tokens + 1 - 40
            await idle(inside)
