"""The limits of tenants and of their keys, as administrators set them. What was used is never touched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.tenants.database import Database
from gateway.tenants.ledger import DEFAULT_CACHED_WEIGHT
from gateway.tenants.tables import ApiKey, Quota, QuotaState, Tenant, unused_state

#: Of a scope that has no row.
NO_LIMITS: Mapping[str, Any] = {
    column.key: {"time_zone": "UTC", "cached_token_weight": DEFAULT_CACHED_WEIGHT}.get(column.key)
    for column in Quota.__table__.columns
    if column.key not in ("scope", "tenant_id", "key_id")
}

Values = Mapping[str, Any]


class LimitRegistry:
    """Methods answer None for a tenant or key that does not exist. `key_id` None: the tenant's own limits."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def get(self, tenant_id: str, key_id: str | None) -> Values | None:
        """By the columns of `tables.Quota`."""
        async with self._database.read() as session:
            if not await _exists(session, tenant_id, key_id):
                return None
            return _values(await session.get(Quota, key_id or tenant_id))

    async def change(
        self, tenant_id: str, key_id: str | None, change: Callable[[Values], Values]
    ) -> Values | None:
        """Put what `change` makes of the limits in their place, in one transaction. What it raises changes nothing."""
        async with self._database.write() as session:
            lock = {"key_share": True}
            if await session.get(Tenant, tenant_id, with_for_update=lock) is None:
                return None
            if not await _exists(session, tenant_id, key_id):
                return None
            scope = key_id or tenant_id
            row = await session.get(Quota, scope)
            values = change(_values(row))
            if row is None:
                session.add(Quota(scope=scope, tenant_id=tenant_id, key_id=key_id, **values))
            else:
                for name, value in values.items():
                    setattr(row, name, value)
            if await session.get(QuotaState, scope) is None:
                session.add(unused_state(tenant_id, key_id))
            return values


async def _exists(session: AsyncSession, tenant_id: str, key_id: str | None) -> bool:
    if key_id is None:
        return await session.get(Tenant, tenant_id) is not None
    of_tenant = select(ApiKey.id).where(ApiKey.id == key_id, ApiKey.tenant_id == tenant_id)
    return await session.scalar(of_tenant) is not None


def _values(row: Quota | None) -> Values:
    return NO_LIMITS if row is None else {name: getattr(row, name) for name in NO_LIMITS}
