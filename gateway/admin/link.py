"""What the admin API needs of the connection to the store."""

from __future__ import annotations

from typing import Protocol

from gateway.tenants.fences import Dropped, PendingFence


class StoreLink(Protocol):
    async def drop(self, fence: PendingFence) -> Dropped | None:
        """What the fence asks for has left the store's index when this returns.

        None while no store can be reached: the fence stays pending and is sent on the next connect.
        """
