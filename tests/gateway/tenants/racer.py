"""A gateway's quotas in a process of its own, with clients that ask, run and settle until the budget is spent.

    python -m tests.gateway.tenants.racer '{"url": …}'

One line of JSON on stdout for each settlement that is known to be booked, and one at the end.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys

import msgspec

from gateway.tenants import quotas as quotas_module
from gateway.tenants.database import Database, DatabaseUnavailable
from gateway.tenants.ledger import Ask, Settlement
from gateway.tenants.quota_errors import QuotaExceeded
from gateway.tenants.quotas import Quotas

# Seldom enough that on a busy machine nobody is taken for dead who is not.
BEAT_SECONDS = 1.0
NOON_MS = 1_900_000_000_000 // 86_400_000 * 86_400_000 + 43_200_000


class Race(msgspec.Struct, frozen=True):
    """`aborts`: share of requests that are cancelled while they ask. `clock_steps`: the clock jumps, within a day."""

    url: str
    tenant_id: str
    key_ids: list[str]
    clients: int
    requests: int
    seed: int
    aborts: float = 0.0
    clock_steps: bool = False
    most: int = 150


class Settled(msgspec.Struct, frozen=True):
    id: str
    cost: int


class Clock:
    """Noon, and up to three hours before and after it, in no order."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def __call__(self) -> int:
        return NOON_MS + self._rng.randint(-10_800_000, 10_800_000)


async def race(given: Race) -> None:
    quotas_module.BEAT_SECONDS = BEAT_SECONDS
    rng = random.Random(given.seed)
    database = await Database.open(given.url)
    quotas = Quotas(database, Clock(rng) if given.clock_steps else None)
    await quotas.start()
    attempts, spent = 0, 0

    async def request(number: int) -> bool:
        """Whether the budget may have something left."""
        key_id, most = rng.choice(given.key_ids), rng.randint(1, given.most)
        ask = Ask(f"res_{given.seed}_{number}", given.tenant_id, key_id, most // 2, most, most)
        reserving = asyncio.ensure_future(quotas.reserve(ask))
        if rng.random() < given.aborts:
            await asyncio.sleep(rng.random() * 0.01)
            reserving.cancel()
        try:
            await reserving
        except asyncio.CancelledError:
            return True
        except QuotaExceeded as refusal:
            return refusal.code != "insufficient_quota" or refusal.scope == "key"
        except DatabaseUnavailable:
            return True
        await asyncio.sleep(rng.random() * 0.002)
        used = rng.randint(0, most)
        inputs = min(used, most // 2)
        await quotas.settle(
            Settlement(ask.id, given.tenant_id, key_id, "finished", inputs, 0, used - inputs)
        )
        os.write(1, msgspec.json.encode(Settled(ask.id, used)) + b"\n")
        return True

    async def client() -> None:
        nonlocal attempts, spent
        while attempts < given.requests:
            attempts += 1
            if not await request(attempts):
                spent += 1
                return

    await asyncio.gather(*(client() for _ in range(given.clients)))
    await quotas.close()
    await database.close()
    os.write(1, json.dumps({"attempts": attempts, "spent": spent}).encode() + b"\n")


if __name__ == "__main__":
    asyncio.run(race(msgspec.json.decode(sys.argv[1], type=Race)))
