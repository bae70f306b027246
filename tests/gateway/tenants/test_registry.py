"""Tenants made, rotated and deleted, and what is left of their secrets."""

import asyncio
from pathlib import Path

import pytest
from sqlalchemy import select, text

from gateway.http.errors import Unauthorized
from gateway.tenants import engines
from gateway.tenants.database import DatabaseUnavailable
from gateway.tenants.fences import PendingFence
from gateway.tenants.keyring import SaltUnavailable
from gateway.tenants.registry import NameTaken
from gateway.tenants.tables import Tenant, WrappedSecret
from tests.gateway.tenants.opened import SCOPES, Opened, bearer, opened

pytestmark = pytest.mark.anyio


async def wrapped(door: Opened, tenant_id: str) -> list[bytes]:
    async with door.directory.database.read() as session:
        rows = await session.scalars(select(WrappedSecret.wrapped).where(WrappedSecret.tenant_id == tenant_id))
        return list(rows)


async def count(door: Opened, table: str) -> int:
    async with door.directory.database.read() as session:
        return int(await session.scalar(text(f"SELECT count(*) FROM {table}")))


async def test_a_name_is_taken_once(tmp_path: Path, database_url: str) -> None:
    async with opened(tmp_path, database_url) as door:
        await door.tenant("a")
        with pytest.raises(NameTaken):
            await door.tenant("a")
        await door.tenant("b")
        assert [tenant.name for tenant in await door.registry.tenants(10)] == ["a", "b"]
        assert await count(door, "wrapped_secrets") == 2 + 2 * 2


async def test_rotation_starts_an_epoch_with_fresh_secrets_and_destroys_the_old(tmp_path: Path) -> None:
    async with opened(tmp_path) as door:
        tenant, other = await door.tenant("a"), await door.tenant("b")
        before = await door.directory.salt(tenant.id, 1), await door.directory.offload_key(tenant.id, 1)
        others = await wrapped(door, other.id)
        old = await wrapped(door, tenant.id)
        assert all(blob in door.files() for blob in old)
        fence = await door.registry.rotate(tenant.id)
        assert fence is not None
        assert (fence.account, fence.epoch) == (tenant.account, 2)
        after = await door.directory.salt(tenant.id, 2), await door.directory.offload_key(tenant.id, 2)
        assert len({secret.reveal() for secret in (*before, *after)}) == 4
        with pytest.raises(SaltUnavailable):
            await door.directory.salt(tenant.id, 1)
        files = door.files()
        assert not any(blob in files for blob in old)
        assert all(blob in files for blob in await wrapped(door, tenant.id))
        assert await wrapped(door, other.id) == others


async def test_rotating_nothing_changes_nothing(tmp_path: Path, database_url: str) -> None:
    async with opened(tmp_path, database_url) as door:
        await door.tenant("a")
        assert await door.registry.rotate("ten_unknown") is None
        assert await door.registry.delete_tenant("ten_unknown") is None
        assert await door.directory.pending_fences() == []


async def test_line_12_a_rotation_leaves_its_fence_pending_until_a_store_confirms(
    tmp_path: Path, database_url: str
) -> None:
    async with opened(tmp_path, database_url) as door:
        tenant = await door.tenant("a")
        fence = await door.registry.rotate(tenant.id)
        assert fence is not None
    async with opened(tmp_path, database_url) as door:
        assert await door.directory.pending_fences() == [fence]
        assert await states(door, tenant.id) == ["dropping", "active"]
        await door.directory.fence_done(fence)
        assert await door.directory.pending_fences() == []
        assert await states(door, tenant.id) == ["dropped", "active"]


async def test_a_later_fence_replaces_an_earlier_one(tmp_path: Path, database_url: str) -> None:
    async with opened(tmp_path, database_url) as door:
        tenant = await door.tenant("a")
        first, second = await door.registry.rotate(tenant.id), await door.registry.rotate(tenant.id)
        assert first is not None
        assert second is not None
        assert await door.directory.pending_fences() == [second]
        await door.directory.fence_done(first)
        assert await door.directory.pending_fences() == [second]
        assert await states(door, tenant.id) == ["dropped", "dropping", "active"]
        await door.directory.fence_done(second)
        assert await states(door, tenant.id) == ["dropped", "dropped", "active"]
        deletion = await door.registry.delete_tenant(tenant.id)
        assert deletion == PendingFence(deletion.id if deletion else "", tenant.account, None)
        assert await door.directory.pending_fences() == [deletion]


async def test_rotations_at_once_each_get_an_epoch_of_their_own(tmp_path: Path, database_url: str) -> None:
    async with opened(tmp_path, database_url) as door, opened(tmp_path, database_url) as other_gateway:
        tenant = await door.tenant("a")
        gateways = (door, other_gateway) * 4
        fences = await asyncio.gather(*(gateway.registry.rotate(tenant.id) for gateway in gateways))
        assert sorted(fence.epoch or 0 for fence in fences if fence) == list(range(2, 10))
        await door.directory.salt(tenant.id, 9)
        assert len(await wrapped(door, tenant.id)) == 2


async def test_a_deleted_key_is_unreadable_in_the_file(tmp_path: Path) -> None:
    async with opened(tmp_path) as door:
        tenant = await door.tenant("a")
        row, _ = await door.key(tenant)
        assert row.digest in door.files()
        assert not await door.registry.delete_key("ten_other", row.id)
        assert row.digest in door.files()
        assert await door.registry.delete_key(tenant.id, row.id)
        assert row.digest not in door.files()
        assert not await door.registry.delete_key(tenant.id, row.id)


async def test_line_15_a_tenant_recreated_with_the_same_name_starts_anew(tmp_path: Path, database_url: str) -> None:
    async with opened(tmp_path, database_url) as door:
        first = await door.tenant("a")
        old = await door.directory.salt(first.id, 1), await door.directory.offload_key(first.id, 1)
        _, key = await door.key(first)
        await door.registry.delete_tenant(first.id)
        again = await door.tenant("a")
        assert (again.id, again.account) != (first.id, first.account)
        new = await door.directory.salt(again.id, 1), await door.directory.offload_key(again.id, 1)
        assert len({secret.reveal() for secret in (*old, *new)}) == 4
        with pytest.raises(Unauthorized):
            await door.directory.authenticate(bearer(key))
        assert [fence.account for fence in await door.directory.pending_fences()] == [first.account]


async def test_another_gateway_forgets_a_destroyed_salt_within_five_minutes(tmp_path: Path, database_url: str) -> None:
    async with opened(tmp_path, database_url) as door, opened(tmp_path, database_url) as other_gateway:
        tenant = await door.tenant("a")
        await other_gateway.directory.salt(tenant.id, 1)
        await door.registry.delete_tenant(tenant.id)
        other_gateway.clock.advance(minutes=5)
        with pytest.raises(SaltUnavailable):
            await other_gateway.directory.salt(tenant.id, 1)


async def states(door: Opened, tenant_id: str) -> list[str]:
    history = await door.registry.salts(tenant_id, 10)
    assert history is not None
    return [salt.state for salt in history]


async def test_whoever_changes_a_tenant_waits_for_its_row(
    tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reservation that holds it has read what the change would end."""
    async with opened(tmp_path, postgres_url) as gateway:
        tenant = await gateway.tenant("a")
        row, _ = await gateway.key(tenant)
        monkeypatch.setattr(engines, "BUSY_TIMEOUT_MS", 10)
        async with opened(tmp_path, postgres_url) as door:
            changes = (
                lambda: door.registry.create_key(tenant.id, None, SCOPES, None),
                lambda: door.registry.rotate(tenant.id),
                lambda: confirm(door),
                lambda: door.registry.delete_key(tenant.id, row.id),
                lambda: door.registry.delete_tenant(tenant.id),
            )
            for change in changes:
                async with gateway.directory.database.write() as session:
                    await session.get(Tenant, tenant.id, with_for_update={"key_share": True})  # type: ignore[arg-type]
                    with pytest.raises(DatabaseUnavailable):
                        await change()
                assert await change()


async def confirm(door: Opened) -> bool:
    """The oldest pending fence."""
    fence, *_ = await door.directory.pending_fences()
    await door.directory.fence_done(fence)
    return fence not in await door.directory.pending_fences()
