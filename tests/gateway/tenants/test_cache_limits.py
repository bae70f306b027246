"""Reservations that several gateways of one database make at once, and those that no longer fit."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from gateway.tenants import cache_limits
from gateway.tenants.cache_limits import CacheLimits, Overbooked, Pool, fit
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


def limits(reserved_tokens: int, max_tokens: int | None = None, *, strict: bool = False) -> CacheLimits:
    return CacheLimits(bytes(16), 1, 1, reserved_tokens, max_tokens, 1.0, strict)


def test_reservations_that_fit_stay_as_they_are() -> None:
    pool = Pool(blocks=10, block_tokens=16)
    # 7, 2 and 1 whole blocks.
    every = [limits(100, 500), limits(32, 32, strict=True), limits(1), limits(0, 16)]
    assert fit(every, pool) == every
    assert fit([], pool) == []


def test_of_reservations_that_do_not_fit_each_has_the_same_part() -> None:
    # 40, 20, 19 and 1 whole blocks of 80 in a cache of 30: three eighths of each.
    every = [limits(640, 2000), limits(320, 320, strict=True), limits(300, 304), limits(16), limits(0, 8), limits(0)]
    fitted = fit(every, Pool(blocks=30, block_tokens=16))
    assert [each.reserved_tokens // 16 for each in fitted] == [15, 7, 7, 0, 0, 0]
    assert all(each.reserved_tokens % 16 == 0 for each in fitted)
    # A strict one has no more than it has reserved, all others what they may.
    assert [each.max_tokens for each in fitted] == [2000, 7 * 16, 304, None, 8, None]
    assert [each.strict for each in fitted] == [each.strict for each in every]


def test_whatever_is_reserved_fits_in_the_end() -> None:
    for blocks in (1, 2, 7, 100, 10**9):
        for tokens in (1, 16, 17, 10**12):
            every = [limits(tokens), limits(3 * tokens, 3 * tokens, strict=True), limits(5)]
            fitted = fit(every, Pool(blocks, 16))
            assert sum(-(-each.reserved_tokens // 16) for each in fitted) <= blocks
