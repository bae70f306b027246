"""The limits of tenants and of their keys, as administrators set them. What was used is never touched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.tenants import cache_limits
from gateway.tenants.cache_limits import CacheLimits
from gateway.tenants.database import Database
from gateway.tenants.ledger import DEFAULT_CACHED_WEIGHT, DEFAULT_QUEUE_WAIT_SECONDS
from gateway.tenants.tables import ApiKey, Quota, QuotaState, Tenant, unused_state

_DEFAULTS: Mapping[str, Any] = {
    "time_zone": "UTC",
    "cached_token_weight": DEFAULT_CACHED_WEIGHT,
    "device_reserved_tokens": 0,
    "weight": 1.0,
    "strict": False,
    "queue_wait_seconds": DEFAULT_QUEUE_WAIT_SECONDS,
}
#: Of a scope that has no row.
NO_LIMITS: Mapping[str, Any] = {
    column.key: _DEFAULTS.get(column.key)
    for column in Quota.__table__.columns
    if column.key not in ("scope", "tenant_id", "key_id", "revision")
}

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Changed:
    """`cache`: what stores have to be told, where that changed."""

    values: Values
    cache: CacheLimits | None


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
    ) -> Changed | None:
        """Put what `change` makes of the limits in their place, in one transaction. What it raises changes nothing.

        Raises:
            Overbooked: it would raise a reservation beyond what the pool has for it.
        """
        # Alone, or two could each take the last of the pool.
        async with self._database.write(alone=True) as session:
            lock = {"key_share": True}
            tenant = await session.get(Tenant, tenant_id, with_for_update=lock)
            if tenant is None or not await _exists(session, tenant_id, key_id):
                return None
            scope = key_id or tenant_id
            row = await session.get(Quota, scope)
            before = _values(row)
            values = change(before)
            if values["device_reserved_tokens"] > before["device_reserved_tokens"]:
                await cache_limits.refuse_overbooked(session, tenant_id, values["device_reserved_tokens"])
            if row is None:
                row = Quota(scope=scope, tenant_id=tenant_id, key_id=key_id, revision=0)
                session.add(row)
            for name, value in values.items():
                setattr(row, name, value)
            cache = None
            if any(values[name] != before[name] for name in cache_limits.COLUMNS):
                row.revision += 1
                cache = CacheLimits.of(tenant, row)
            if await session.get(QuotaState, scope) is None:
                session.add(unused_state(tenant_id, key_id))
            return Changed(values, cache)


async def _exists(session: AsyncSession, tenant_id: str, key_id: str | None) -> bool:
    if key_id is None:
        return await session.get(Tenant, tenant_id) is not None
    of_tenant = select(ApiKey.id).where(ApiKey.id == key_id, ApiKey.tenant_id == tenant_id)
    return await session.scalar(of_tenant) is not None


def _values(row: Quota | None) -> Values:
    return NO_LIMITS if row is None else {name: getattr(row, name) for name in NO_LIMITS}
