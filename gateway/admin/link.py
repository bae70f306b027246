"""What the admin API needs of the connection to the store."""

from __future__ import annotations

from typing import Protocol

from gateway.tenants.fences import Dropped


class StoreLink(Protocol):
    """Both answer None while no store can be reached: the fence stays pending and is sent on the next connect."""

    async def fence(self, account: bytes, epoch: int) -> Dropped | None:
        """Everything of the account older than `epoch` has left the store's index when this returns."""

    async def drop_account(self, account: bytes) -> Dropped | None:
        """All of the account has left the store's index when this returns, and its requests are aborted."""
