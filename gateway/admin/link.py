"""What the admin API needs of the connection to the store."""

from __future__ import annotations

from typing import Protocol

from gateway.tenants.cache_limits import AccountCache, CacheLimits
from gateway.tenants.fences import Dropped, PendingFence


class StoreLink(Protocol):
    async def drop(self, fence: PendingFence) -> Dropped | None:
        """What the fence asks for has left the store's index when this returns.

        None while no store can be reached: the fence stays pending and is sent on the next connect.
        """

    async def set_limits(self, limits: CacheLimits) -> None:
        """They are in force when this returns; while no store can be reached, they are sent on the next connect."""

    async def flush(self, account: bytes) -> Dropped:
        """All that is cached of the account has left the index when this returns. Raises ApiError: 503."""

    async def account_cache(self, account: bytes) -> AccountCache:
        """What the account has. Raises ApiError: 503."""
