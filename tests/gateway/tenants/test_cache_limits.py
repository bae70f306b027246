"""Reservations that several gateways of one database make at once."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from gateway.tenants import cache_limits
from gateway.tenants.cache_limits import Overbooked, Pool
from gateway.tenants.limits import LimitRegistry
from tests.gateway.tenants.opened import opened

pytestmark = pytest.mark.anyio

GATEWAYS = 6
ROUNDS = 5


async def test_gateways_that_reserve_at_once_can_not_have_more_than_the_pool(
    database_url: str, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        doors = [await stack.enter_async_context(opened(tmp_path, database_url)) for _ in range(GATEWAYS)]
        databases = [door.directory.database for door in doors]
        tenants = [await doors[0].tenant(f"tenant-{number}") for number in range(GATEWAYS)]
        await cache_limits.remember_pool(databases[0], Pool(blocks=10, block_tokens=16))

        async def reserve(tokens: int) -> list[object]:
            """Each gateway for a tenant of its own."""
            changes = (
                LimitRegistry(database).change(
                    tenant.id, None, lambda values: {**values, "device_reserved_tokens": tokens}
                )
                for database, tenant in zip(databases, tenants, strict=True)
            )
            return list(await asyncio.gather(*changes, return_exceptions=True))

        for _ in range(ROUNDS):
            # Also so that all of them are connected.
            await reserve(0)
            refusals = [answer for answer in await reserve(48) if isinstance(answer, Overbooked)]
            assert len(refusals) == GATEWAYS - 3
            assert {(each.wanted_tokens, each.free_tokens) for each in refusals} == {(48, 16)}
            # What was refused is nowhere.
            limits = await cache_limits.read_limits(databases[0])
            assert sum(each.reserved_tokens for each in limits) == 3 * 48
