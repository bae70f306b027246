"""What tenants may have of a store's cache, as stores are told it; and the size of the store that was last seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.tenants.database import Database
from gateway.tenants.tables import Quota, Store, Tenant

#: The columns of `tables.Quota` that stores are told of.
COLUMNS = ("device_reserved_tokens", "device_max_tokens", "weight", "strict")

_OF_TENANTS = Quota.key_id.is_(None)
# Every change raises a revision, so that these differ; a deleted tenant takes its own with it.
_MARK = select(func.count().label("rows"), func.sum(Quota.revision).label("revisions")).where(_OF_TENANTS)
_THE_STORE = 1


@dataclass(frozen=True, slots=True)
class Pool:
    """The cache of a store."""

    blocks: int
    block_tokens: int

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_tokens

    def blocks_for(self, tokens: int) -> int:
        """Whole blocks."""
        return -(-tokens // self.block_tokens)


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """Of a tenant's account, by the 16 bytes that stores know it by. `max_tokens` None is the pool."""

    account: bytes
    epoch: int
    revision: int
    reserved_tokens: int
    max_tokens: int | None
    weight: float
    strict: bool

    @classmethod
    def of(cls, tenant: Any, quota: Any) -> CacheLimits:
        """From rows, or from one row that has the columns of both."""
        return cls(
            tenant.account, tenant.epoch, quota.revision, *(getattr(quota, name) for name in COLUMNS)
        )


@dataclass(frozen=True, slots=True)
class AccountCache:
    """What a tenant has of a store's cache. `reserved_tokens`, `max_tokens`: as they are in force there."""

    blocks: int
    tokens: int
    bytes: int
    reserved_tokens: int
    max_tokens: int | None
    hit_tokens: int
    miss_tokens: int


class Overbooked(Exception):
    """All reservations together are more than the pool has. In tokens of whole blocks.

    Attributes:
        wanted_tokens: for this tenant.
        free_tokens: what is left for it beside those of others, which may be nothing.
    """

    def __init__(self, wanted_tokens: int, free_tokens: int, pool: Pool) -> None:
        super().__init__(f"{wanted_tokens} tokens of {free_tokens}")
        self.wanted_tokens = wanted_tokens
        self.free_tokens = free_tokens
        self.pool = pool


def reserved_blocks(limits: Sequence[CacheLimits], pool: Pool) -> int:
    """Of all together, in whole blocks of this cache."""
    return sum(pool.blocks_for(each.reserved_tokens) for each in limits)


def part_blocks(reserved_tokens: int, all_blocks: int, pool: Pool) -> int:
    """What is in force of a reservation where all together are `all_blocks`: all, or the same part of each."""
    blocks = pool.blocks_for(reserved_tokens)
    return blocks if all_blocks <= pool.blocks else blocks * pool.blocks // all_blocks


def fit(limits: Sequence[CacheLimits], pool: Pool) -> list[CacheLimits]:
    """What is in force of the limits of all tenants in this cache.

    Where it has less than they have reserved (it was larger once), a strict one's maximum goes with its reservation.
    """
    reserved = reserved_blocks(limits, pool)
    if reserved <= pool.blocks:
        return list(limits)
    fitted = []
    for each in limits:
        tokens = part_blocks(each.reserved_tokens, reserved, pool) * pool.block_tokens
        fitted.append(replace(each, reserved_tokens=tokens, max_tokens=tokens if each.strict else each.max_tokens))
    return fitted


async def refuse_overbooked(session: AsyncSession, tenant_id: str, reserved_tokens: int) -> None:
    """In the transaction that raises a tenant's reservation, which no other one of its kind runs beside.

    Raises:
        Overbooked
    """
    row = await session.get(Store, _THE_STORE)
    if row is None:
        # Nobody knows yet. The store puts reservations into force as far as it has room.
        return
    pool = Pool(row.blocks, row.block_tokens)
    others = await session.scalars(
        select(Quota.device_reserved_tokens).where(_OF_TENANTS, Quota.tenant_id != tenant_id)
    )
    free_blocks = pool.blocks - sum(map(pool.blocks_for, others))
    if (wanted := pool.blocks_for(reserved_tokens)) > free_blocks:
        raise Overbooked(wanted * pool.block_tokens, max(0, free_blocks) * pool.block_tokens, pool)


async def read_limits(database: Database) -> list[CacheLimits]:
    """Of every tenant whose limits were ever set: a store may know older ones, and not that they are gone."""
    statement = (
        select(Tenant.account, Tenant.epoch, Quota.revision, *(getattr(Quota, name) for name in COLUMNS))
        .join(Tenant, Tenant.id == Quota.tenant_id)
        .where(_OF_TENANTS, Quota.revision > 0)
    )
    async with database.read() as session:
        return [CacheLimits.of(row, row) for row in (await session.execute(statement)).all()]


async def mark(database: Database) -> tuple[object, ...]:
    """Another one after every change of what `read_limits` answers."""
    return tuple(await database.row(_MARK, {}) or ())


async def remember_pool(database: Database, pool: Pool) -> None:
    """Reservations have to fit in this one from now on."""
    async with database.read() as session:
        row = await session.get(Store, _THE_STORE)
    if row is not None and Pool(row.blocks, row.block_tokens) == pool:
        return
    async with database.write(alone=True) as session:
        row = await session.get(Store, _THE_STORE)
        if row is None:
            session.add(Store(id=_THE_STORE, blocks=pool.blocks, block_tokens=pool.block_tokens))
        else:
            row.blocks, row.block_tokens = pool.blocks, pool.block_tokens
