"""What tenants may have of the cache: set as long as it can be honoured, told to the store, read and flushed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.tenants import cache_limits
from gateway.tenants.cache_limits import CacheLimits, Pool
from tests.gateway.admin.served import TENANTS, Served, served
from tests.gateway.admin.test_routes import grant, refused

pytestmark = pytest.mark.anyio

#: Of 160 tokens.
POOL = Pool(blocks=10, block_tokens=16)


async def quotas_of(admin: Served, name: str) -> str:
    """The path of a new tenant's limits."""
    return f"{TENANTS}/{(await admin.tenant(name))['id']}/quotas"


async def see_pool(admin: Served, pool: Pool = POOL) -> None:
    await cache_limits.remember_pool(admin.door.directory.database, pool)


async def test_reservations_that_the_pool_has_no_room_for_are_409_with_the_numbers(tmp_path: Path) -> None:
    async with served(tmp_path) as admin:
        first, second = await quotas_of(admin, "first"), await quotas_of(admin, "second")
        await see_pool(admin)
        # 97 tokens take seven blocks of ten.
        assert (await admin.client.put(first, json={"device_reserved_tokens": 97})).status_code == 200
        before = (await admin.client.get(second)).json()
        for send in (admin.client.put, admin.client.patch):
            error = refused(await send(second, json={"device_reserved_tokens": 49, "tokens_per_day": 5}), 409)
            assert error["param"] == "device_reserved_tokens"
            for number in ("64 tokens", "blocks of 16", "the 160", "leave 48"):
                assert number in (error["message"] or "")
        assert (await admin.client.get(second)).json() == before
        assert (await admin.client.put(second, json={"device_reserved_tokens": 48})).status_code == 200
        # Others' are not its own: it may have all that they leave.
        assert (await admin.client.patch(first, json={"device_reserved_tokens": 112})).status_code == 200
        refused(await admin.client.patch(first, json={"device_reserved_tokens": 113}), 409)


async def test_a_reservation_above_the_maximum_is_409_with_both_numbers(tmp_path: Path) -> None:
    async with served(tmp_path) as admin:
        quotas = await quotas_of(admin, "demo")
        body = {"device_reserved_tokens": 40, "device_max_tokens": 39}
        message = refused(await admin.client.put(quotas, json=body), 409)["message"] or ""
        assert "40" in message
        assert "39" in message
        await admin.client.put(quotas, json={"device_reserved_tokens": 40, "device_max_tokens": 40})
        refused(await admin.client.patch(quotas, json={"device_max_tokens": 39}), 409)
        # A strict tenant has what it reserved, neither more nor less.
        assert (await admin.client.patch(quotas, json={"strict": True})).status_code == 200
        for body in ({"device_max_tokens": 41}, {"device_max_tokens": None}, {"device_reserved_tokens": 39}):
            error = refused(await admin.client.patch(quotas, json=body), 400)
            assert error["param"] == "strict"


async def test_a_pool_that_shrank_refuses_only_what_asks_for_more(tmp_path: Path) -> None:
    async with served(tmp_path) as admin:
        quotas, other = await quotas_of(admin, "demo"), await quotas_of(admin, "other")
        # No store was ever seen: nobody knows what there is.
        await admin.client.put(quotas, json={"device_reserved_tokens": 200})
        await admin.client.put(other, json={"device_reserved_tokens": 160})
        await see_pool(admin)
        for body in ({"tokens_per_day": 5}, {"device_reserved_tokens": 190}, {"weight": 2}):
            assert (await admin.client.patch(quotas, json=body)).status_code == 200
        error = refused(await admin.client.patch(quotas, json={"device_reserved_tokens": 191}), 409)
        assert "leave 0" in (error["message"] or "")
        await see_pool(admin, Pool(blocks=100, block_tokens=16))
        assert (await admin.client.patch(quotas, json={"device_reserved_tokens": 191})).status_code == 200


async def test_two_who_reserve_at_once_can_not_both_have_the_last_of_the_pool(tmp_path: Path) -> None:
    async with served(tmp_path) as admin:
        quotas = [await quotas_of(admin, f"tenant-{number}") for number in range(8)]
        await see_pool(admin)
        answers = await asyncio.gather(
            *(admin.client.patch(path, json={"device_reserved_tokens": 48}) for path in quotas)
        )
        assert sorted(answer.status_code for answer in answers) == [200] * 3 + [409] * 5


async def test_every_change_of_cache_limits_and_no_other_is_told_to_the_store_with_the_next_revision(
    tmp_path: Path,
) -> None:
    async with served(tmp_path) as admin:
        tenant = await admin.tenant("demo")
        quotas = f"{TENANTS}/{tenant['id']}/quotas"
        row = await admin.door.registry.tenant(tenant["id"])
        assert row is not None
        key = (await admin.client.post(f"{TENANTS}/{tenant['id']}/keys", json={})).json()
        for body in ({"device_reserved_tokens": 20}, {"tokens_per_day": 5}, {"device_max_tokens": 50, "weight": 3}):
            await admin.client.patch(quotas, json=body)
        await admin.client.put(f"{TENANTS}/{tenant['id']}/keys/{key['id']}/quotas", json={"tokens_per_day": 5})
        await admin.client.patch(quotas, json={"weight": 0})
        await admin.client.put(quotas, json={})
        assert admin.link.limits == [
            CacheLimits(row.account, 1, 1, 20, None, 1.0, False),
            CacheLimits(row.account, 1, 2, 20, 50, 3.0, False),
            CacheLimits(row.account, 1, 3, 0, None, 1.0, False),
        ]
        # Whoever connects next says the last of it, that there are none, too.
        assert await cache_limits.read_limits(admin.door.directory.database) == admin.link.limits[-1:]


async def test_the_mark_changes_with_every_change_of_what_stores_are_told(tmp_path: Path) -> None:
    async with served(tmp_path) as admin:
        database = admin.door.directory.database
        tenant, other = await quotas_of(admin, "demo"), await quotas_of(admin, "other")
        seen = [await cache_limits.mark(database)]
        for path, body in ((tenant, {"weight": 2}), (other, {"weight": 2}), (tenant, {"weight": 1})):
            await admin.client.patch(path, json=body)
            seen.append(await cache_limits.mark(database))
        assert len(set(seen)) == 4
        await admin.client.patch(tenant, json={"tokens_per_day": 5})
        assert await cache_limits.mark(database) == seen[-1]


async def test_what_a_tenant_has_is_told_and_flushed(tmp_path: Path) -> None:
    async with served(tmp_path) as admin:
        tenant = await admin.tenant("demo")
        row = await admin.door.registry.tenant(tenant["id"])
        assert row is not None
        cache = f"{TENANTS}/{tenant['id']}/cache"
        assert (await admin.client.get(cache)).json() == {
            "device": {"blocks": 3, "tokens": 48, "bytes": 4096, "reserved_tokens": 32, "max_tokens": None},
            "hit_tokens": 100,
            "miss_tokens": 20,
        }
        flushed = await admin.client.delete(cache)
        assert (flushed.status_code, flushed.json()) == (200, {"blocks": 3, "bytes": 4096})
        assert admin.link.asked == [(row.account, None)] * 2
        admin.link.answer = None
        for method in ("GET", "DELETE"):
            refused(await admin.client.request(method, cache), 503)
            refused(await admin.client.request(method, f"{TENANTS}/ten_0/cache"), 404)


@pytest.mark.parametrize(("scope", "allowed"), [("cache:read", "GET"), ("cache:write", "DELETE"), ("quotas:write", "")])
async def test_each_of_it_has_a_scope_of_its_own(scope: str, allowed: str, tmp_path: Path) -> None:
    async with served(tmp_path) as admin:
        cache = f"{TENANTS}/{(await admin.tenant('demo'))['id']}/cache"
        await grant(admin, {scope})
        for method in ("GET", "DELETE"):
            answer: httpx.Response = await admin.client.request(method, cache)
            wanted: dict[bool, Any] = {True: 200, False: 403}
            assert answer.status_code == wanted[method == allowed]
