"""When a key was last used: known within ten seconds, and never earlier than it was known before. On both databases."""

from __future__ import annotations

import asyncio
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from gateway.http.errors import Unauthorized
from gateway.tenants import last_used
from gateway.tenants.database import DatabaseUnavailable
from tests.gateway.tenants.opened import Opened, bearer, opened
from tests.system.in_process import in_process

pytestmark = pytest.mark.anyio


async def used(door: Opened, tenant_id: str, key_id: str) -> datetime | None:
    row = await door.registry.key(tenant_id, key_id)
    assert row is not None
    return row.last_used_at


async def test_a_use_is_written_later_and_a_refusal_never(tmp_path: Path, database_url: str) -> None:
    async with opened(tmp_path, database_url) as door:
        tenant = await door.tenant("demo")
        (used_key, text), (other_key, _) = await door.key(tenant), await door.key(tenant)
        with pytest.raises(Unauthorized):
            await door.directory.authenticate(bearer(text[:-1] + b"."))
        before = door.clock()
        await door.directory.authenticate(bearer(text))
        after = door.clock()
        assert await used(door, tenant.id, used_key.id) is None
        await door.directory.last_used.write()
        at = await used(door, tenant.id, used_key.id)
        assert at is not None
        assert before < at < after
        assert await used(door, tenant.id, other_key.id) is None


async def test_it_never_goes_back(tmp_path: Path, database_url: str) -> None:
    async with opened(tmp_path, database_url) as door, opened(tmp_path, database_url) as behind:
        tenant = await door.tenant("demo")
        key, text = await door.key(tenant)
        door.clock.advance(seconds=60)
        for each in (door, behind):
            await each.directory.authenticate(bearer(text))
            await each.directory.last_used.write()
        assert (at := await used(door, tenant.id, key.id)) is not None
        assert at > behind.clock()


async def test_a_gateway_that_ends_leaves_it_to_the_next(tmp_path: Path, default_model: Path) -> None:
    async with in_process(tmp_path, default_model) as inside:
        customer = await inside.customer("demo")
        assert (await inside.complete(customer, [1, 2, 3])).status_code == 200
    async with in_process(tmp_path, default_model) as inside:
        (key,) = (await inside.admin.get(f"/admin/v1/tenants/{customer.id}/keys")).json()["data"]
        assert key["created_at"] < key["last_used_at"]


async def test_many_keys_are_written_and_a_deleted_one_is_no_trouble(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(last_used, "MOST_PER_TRANSACTION", 2)
    async with opened(tmp_path, database_url) as door:
        keys = []
        for name in ("one", "two"):
            tenant = await door.tenant(name)
            keys += [(tenant, *await door.key(tenant)) for _ in range(3)]
        for _, _, text in keys:
            await door.directory.authenticate(bearer(text))
        gone, kept = keys[0], keys[1:]
        await door.registry.delete_key(gone[0].id, gone[1].id)
        await door.directory.last_used.write()
        assert None not in [await used(door, tenant.id, key.id) for tenant, key, _ in kept]


async def test_what_a_locked_database_does_not_take_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as door:
        tenant = await door.tenant("demo")
        key, text = await door.key(tenant)
        await door.directory.authenticate(bearer(text))

        async def locked(work: Any) -> None:
            raise DatabaseUnavailable

        with monkeypatch.context() as patched:
            patched.setattr(door.directory.database, "transact", locked)
            await door.directory.last_used.write()
        assert await used(door, tenant.id, key.id) is None
        monkeypatch.setattr(last_used, "WRITE_SECONDS", 0.001)
        writing = asyncio.create_task(door.directory.last_used.run())
        for _ in range(10_000):
            if await used(door, tenant.id, key.id) is not None:
                break
            await asyncio.sleep(0.001)
        else:
            raise AssertionError("never written")
        writing.cancel()
