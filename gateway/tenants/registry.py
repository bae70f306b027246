"""What administrators change and list: tenants, their keys and their salts.

Every change is one transaction. Rotating and deleting also leave a pending fence in it: the stores' part, done
when a store confirms it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from sqlalchemy import Select, delete, select, tuple_
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.secret import Secret
from gateway.tenants.database import Database
from gateway.tenants.fences import PendingFence
from gateway.tenants.keyring import Keyring
from gateway.tenants.minting import new_key, new_secret, random_id
from gateway.tenants.tables import ApiKey, Epoch, Fence, Tenant, unused_state, utc_now
from gateway.tenants.vault import Place

ACCOUNT_BYTES = 16
_ID_DIGITS = 16

# Of a tenant's row, by whoever changes the tenant, before anything else. Reservations lock the same row: once a change
# is answered, no request that read what was before is still on its way.
_LOCK: Any = {"key_share": True}

# Where a page begins: after the row made at this time with this id.
Position = tuple[datetime, str]

SaltState = Literal["active", "dropping", "dropped"]


class NameTaken(Exception):
    """Another tenant has this name."""


@dataclass(frozen=True, slots=True)
class SaltHistory:
    epoch: int
    created_at: datetime
    state: SaltState


class Registry:
    """Methods answer None (or False) for a tenant or key that does not exist."""

    def __init__(self, database: Database, keyring: Keyring, clock: Callable[[], datetime] = utc_now) -> None:
        self._database = database
        self._keyring = keyring
        self._clock = clock

    async def create_tenant(self, name: str) -> Tenant:
        """
        Raises:
            NameTaken
        """
        now = self._clock()
        tenant = Tenant(
            id="ten_" + random_id(_ID_DIGITS),
            name=name,
            status="active",
            account=os.urandom(ACCOUNT_BYTES),
            epoch=1,
            created_at=now,
            updated_at=now,
        )
        async with self._database.write() as session:
            session.add(tenant)
            try:
                await session.flush()
            except IntegrityError:
                raise NameTaken(name) from None
            session.add(unused_state(tenant.id))
            await self._begin_epoch(session, tenant)
        return tenant

    async def tenant(self, tenant_id: str) -> Tenant | None:
        async with self._database.read() as session:
            return await session.get(Tenant, tenant_id)

    async def tenants(self, limit: int, after: Position | None = None, name: str | None = None) -> Sequence[Tenant]:
        """At most `limit` tenants in the order they were made."""
        statement = select(Tenant).order_by(Tenant.created_at, Tenant.id).limit(limit)
        if after is not None:
            statement = statement.where(tuple_(Tenant.created_at, Tenant.id) > after)
        if name is not None:
            statement = statement.where(Tenant.name == name)
        async with self._database.read() as session:
            return (await session.scalars(statement)).all()

    async def delete_tenant(self, tenant_id: str) -> PendingFence | None:
        """Keys and secrets go with it and its name is free; the answer is what stores still have to drop."""
        async with self._database.write() as session:
            tenant = await session.get(Tenant, tenant_id, with_for_update=_LOCK)
            if tenant is None:
                return None
            await self._keyring.destroy(session, tenant_id)
            await session.delete(tenant)
            fence = await self._fence(session, tenant.account, None)
        self._keyring.forget(tenant_id)
        await self._database.scrub()
        return fence

    async def create_key(
        self, tenant_id: str, name: str | None, scopes: frozenset[str], expires_at: datetime | None
    ) -> tuple[ApiKey, Secret] | None:
        """The key's row, and its text, which is nowhere else."""
        key = await new_key(self._keyring, "tenant", scopes, self._clock(), name, expires_at)
        row = ApiKey(tenant_id=tenant_id, **key.row)
        async with self._database.write() as session:
            if await session.get(Tenant, tenant_id, with_for_update=_LOCK) is None:
                return None
            session.add(row)
        return row, key.text

    async def keys(self, tenant_id: str, limit: int, after: Position | None = None) -> Sequence[ApiKey] | None:
        """At most `limit` keys in the order they were made."""
        statement = select(ApiKey).where(ApiKey.tenant_id == tenant_id)
        if after is not None:
            statement = statement.where(tuple_(ApiKey.created_at, ApiKey.id) > after)
        async with self._database.read() as session:
            if await session.get(Tenant, tenant_id) is None:
                return None
            return (await session.scalars(statement.order_by(ApiKey.created_at, ApiKey.id).limit(limit))).all()

    async def key(self, tenant_id: str, key_id: str) -> ApiKey | None:
        async with self._database.read() as session:
            return await session.scalar(_key(tenant_id, key_id))

    async def change_key(self, tenant_id: str, key_id: str, values: Mapping[str, Any]) -> ApiKey | None:
        """Set these columns: name, scopes, status or expires_at. The next request with the key meets them."""
        async with self._database.write() as session:
            await session.get(Tenant, tenant_id, with_for_update=_LOCK)
            row = await session.scalar(_key(tenant_id, key_id))
            if row is not None:
                for name, value in values.items():
                    setattr(row, name, value)
        return row

    async def rotate_key(self, tenant_id: str, key_id: str, grace: timedelta) -> tuple[ApiKey, Secret] | None:
        """A new secret for the key; the one before it opens until `grace` is over. Other ones open no longer."""
        async with self._database.write() as session:
            await session.get(Tenant, tenant_id, with_for_update=_LOCK)
            row = await session.scalar(_key(tenant_id, key_id))
            if row is None:
                return None
            text, secret = await new_secret(self._keyring, "tenant", row.id)
            row.previous_digest, row.previous_pepper_version = row.digest, row.pepper_version
            row.previous_until = self._clock() + grace
            for name, value in secret.items():
                setattr(row, name, value)
        return row, text

    async def delete_key(self, tenant_id: str, key_id: str) -> bool:
        """Whether there was such a key. The next request with it is refused."""
        statement = delete(ApiKey).where(ApiKey.id == key_id, ApiKey.tenant_id == tenant_id).returning(ApiKey.id)
        async with self._database.write() as session:
            await session.get(Tenant, tenant_id, with_for_update=_LOCK)
            found = await session.scalar(statement) is not None
        if found:
            await self._database.scrub()
        return found

    async def salts(self, tenant_id: str, limit: int, after: int = 0) -> list[SaltHistory] | None:
        """At most `limit` epochs above `after`, oldest first. Never a secret."""
        async with self._database.read() as session:
            tenant = await session.get(Tenant, tenant_id)
            if tenant is None:
                return None
            epochs = await session.scalars(
                select(Epoch)
                .where(Epoch.tenant_id == tenant_id, Epoch.epoch > after)
                .order_by(Epoch.epoch)
                .limit(limit)
            )
            return [SaltHistory(row.epoch, row.created_at, _salt_state(row, tenant)) for row in epochs]

    async def rotate(self, tenant_id: str) -> PendingFence | None:
        """New secrets under the next epoch, the old ones destroyed; the answer is what stores still have to drop."""
        async with self._database.write() as session:
            tenant = await session.get(Tenant, tenant_id, with_for_update=_LOCK)
            if tenant is None:
                return None
            tenant.epoch += 1
            tenant.updated_at = self._clock()
            await self._keyring.destroy(session, tenant_id)
            await self._begin_epoch(session, tenant)
            fence = await self._fence(session, tenant.account, tenant.epoch)
        self._keyring.forget(tenant_id)
        await self._database.scrub()
        return fence

    async def _begin_epoch(self, session: AsyncSession, tenant: Tenant) -> None:
        session.add(Epoch(tenant_id=tenant.id, epoch=tenant.epoch, created_at=self._clock()))
        await self._keyring.create(session, Place("salt", tenant.id, tenant.epoch))
        await self._keyring.create(session, Place("offload_key", tenant.id, tenant.epoch))

    async def _fence(self, session: AsyncSession, account: bytes, epoch: int | None) -> PendingFence:
        # A later fence asks for all that an earlier one did.
        await session.execute(delete(Fence).where(Fence.account == account))
        row = Fence(id="fen_" + random_id(_ID_DIGITS), account=account, epoch=epoch, created_at=self._clock())
        session.add(row)
        return PendingFence(row.id, account, epoch)


def _key(tenant_id: str, key_id: str) -> Select[ApiKey]:
    return select(ApiKey).where(ApiKey.id == key_id, ApiKey.tenant_id == tenant_id)


def _salt_state(row: Epoch, tenant: Tenant) -> SaltState:
    if row.epoch == tenant.epoch:
        return "active"
    return "dropping" if row.dropped_at is None else "dropped"
