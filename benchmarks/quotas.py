"""What quotas cost a request: authentication, reservation and settlement on SQLite, beside authentication alone.

    python -m benchmarks.quotas [--requests 10000] [--json]

Three runs, each in turns with the same requests without quotas (authenticated, and their standing read, which has to be
done anyway), in slices within one process:

    busy       16 clients, each sends its next request when the last is settled: CPU per request
    offered    500 requests a second, whether the last ones are settled or not: how long they take
    tenants    as offered, on a database of 10,000 tenants with 3 keys each; and how long it takes to open it
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import uvloop
from sqlalchemy import insert

from benchmarks.figures import percentile, table
from gateway.secret import Secret
from gateway.tenants import api_keys
from gateway.tenants.database import Database
from gateway.tenants.directory import Directory
from gateway.tenants.keyring import PEPPER_VERSION
from gateway.tenants.ledger import Ask, Settlement
from gateway.tenants.quotas import Quotas
from gateway.tenants.registry import Registry
from gateway.tenants.tables import ApiKey, Quota, QuotaState, Tenant, unused_state, utc_now

CLIENTS = 16
PER_SECOND = 500
SLICES = 10
MANY_TENANTS = 10_000
KEYS_EACH = 3
LIMIT = 10**9
SCOPES = ["completions"]

Headers = list[tuple[bytes, bytes]]


@dataclass
class Timed:
    """Of one way: CPU seconds of the process, and how long each request took."""

    cpu_seconds: float = 0.0
    seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Figures:
    requests: int
    cpu_ms: float
    p50_ms: float
    p99_ms: float

    @classmethod
    def of(cls, timed: Timed) -> Figures:
        count = len(timed.seconds)
        return cls(
            count,
            timed.cpu_seconds / count * 1e3,
            percentile(timed.seconds, 0.5) * 1e3,
            percentile(timed.seconds, 0.99) * 1e3,
        )


class Desk:
    """Requests of a tenant's keys, with quotas and without."""

    def __init__(self, directory: Directory, quotas: Quotas, keys: Sequence[Headers]) -> None:
        self._directory = directory
        self._quotas = quotas
        self._keys = keys
        self._next = 0

    def _key(self) -> Headers:
        self._next += 1
        return self._keys[self._next % len(self._keys)]

    async def with_quotas(self) -> None:
        who = await self._directory.authenticate(self._key())
        await self._quotas.look(who.tenant_id, who.key_id)
        reservation = secrets.token_hex(12)
        await self._quotas.reserve(Ask(reservation, who.tenant_id, who.key_id, 100, 200, 200))
        await self._quotas.settle(Settlement(reservation, who.tenant_id, who.key_id, "finished", 100, 0, 50))

    async def without(self) -> None:
        await self._directory.standing(await self._directory.authenticate(self._key()))


async def busy(request: Callable[[], Awaitable[None]], requests: int, timed: Timed) -> None:
    async def client() -> None:
        for _ in range(requests // CLIENTS):
            await _one(request, timed)

    begun = time.process_time()
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    timed.cpu_seconds += time.process_time() - begun


async def offered(request: Callable[[], Awaitable[None]], requests: int, timed: Timed) -> None:
    begun, start, running = time.process_time(), time.perf_counter(), []
    for number in range(requests):
        await asyncio.sleep(max(0.0, start + number / PER_SECOND - time.perf_counter()))
        running.append(asyncio.create_task(_one(request, timed)))
    await asyncio.gather(*running)
    timed.cpu_seconds += time.process_time() - begun


async def _one(request: Callable[[], Awaitable[None]], timed: Timed) -> None:
    begun = time.perf_counter()
    await request()
    timed.seconds.append(time.perf_counter() - begun)


@asynccontextmanager
async def desk(folder: Path, tenants: int, keys_each: int) -> AsyncIterator[tuple[Desk, float]]:
    """On a new database, opened again once it is filled; with the seconds that took."""
    url, kek = f"sqlite+aiosqlite:///{folder / 'saltern.db'}", folder / "kek"
    database = await Database.open(url)
    keys = await _fill(await Directory.open(database, kek), tenants, keys_each)
    await database.close()
    begun = time.perf_counter()
    database = await Database.open(url)
    directory, quotas = await Directory.open(database, kek), Quotas(database)
    await quotas.start()
    opened_seconds = time.perf_counter() - begun
    try:
        yield Desk(directory, quotas, keys), opened_seconds
    finally:
        await quotas.close()
        await database.close()


async def _fill(directory: Directory, tenants: int, keys_each: int) -> list[Headers]:
    """One tenant through the registry, the others' rows written at once. Answers the headers of all keys."""
    first = await Registry(directory.database, directory.keyring).create_tenant("t-0")
    made = [first.id]
    keys: list[Headers] = []
    now = utc_now()
    columns: dict[type, list[dict[str, object]]] = {Tenant: [], QuotaState: [], ApiKey: [], Quota: []}
    for number in range(1, tenants):
        made.append(f"ten_{number:016d}")
        columns[Tenant].append(
            {"id": made[-1], "name": f"t-{number}", "status": "active", "account": secrets.token_bytes(16)}
            | {"epoch": 1, "created_at": now, "updated_at": now}
        )
        state = unused_state(made[-1])
        columns[QuotaState].append({column.key: getattr(state, column.key) for column in QuotaState.__table__.columns})
    for tenant_id in made:
        limits = ("requests_per_minute", "tokens_per_minute", "concurrent_requests", "tokens_per_day")
        columns[Quota].append(
            {"scope": tenant_id, "tenant_id": tenant_id, "time_zone": "UTC", "cached_token_weight": 100}
            | dict.fromkeys(limits, LIMIT)
        )
        for _ in range(keys_each):
            text = api_keys.mint("tenant", f"{len(keys):012d}", secrets.token_bytes(api_keys.SECRET_BYTES))
            parsed = api_keys.parse("tenant", text.reveal())
            assert parsed is not None
            digest = await directory.keyring.digest(Secret(parsed.secret.reveal()), PEPPER_VERSION)
            columns[ApiKey].append(
                {"id": parsed.id, "tenant_id": tenant_id, "digest": digest, "pepper_version": PEPPER_VERSION}
                | {"last4": "0000", "scopes": SCOPES, "status": "active", "created_at": now}
            )
            keys.append([(b"authorization", b"Bearer " + text.reveal())])
    async with directory.database.write() as session:
        for table_, rows in columns.items():
            if rows:
                await session.execute(insert(table_), rows)
    return keys


async def measure(requests: int) -> dict[str, dict[str, Figures] | float]:
    found: dict[str, dict[str, Figures] | float] = {}
    for name, run, tenants, keys_each in (
        ("busy", busy, 1, 1),
        ("offered", offered, 1, 1),
        ("tenants", offered, MANY_TENANTS, KEYS_EACH),
    ):
        with tempfile.TemporaryDirectory() as folder:
            async with desk(Path(folder), tenants, keys_each) as (requesting, opened_seconds):
                ways = {"with quotas": requesting.with_quotas, "without": requesting.without}
                timed = {way: Timed() for way in ways}
                for request in ways.values():
                    await run(request, CLIENTS * 4, Timed())
                for _ in range(SLICES):
                    for way, request in ways.items():
                        await run(request, requests // SLICES, timed[way])
                found[name] = {way: Figures.of(each) for way, each in timed.items()}
                found[f"{name}: seconds to open"] = opened_seconds
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    found = uvloop.run(measure(options.requests))
    if options.json:
        print(json.dumps({name: _plain(each) for name, each in found.items()}, indent=2))
        return 0
    rows = [["run", "way", "requests", "CPU ms", "p50 ms", "p99 ms"]]
    for name, ways in found.items():
        if isinstance(ways, dict):
            for way, each in ways.items():
                figures = (f"{each.cpu_ms:.3f}", f"{each.p50_ms:.2f}", f"{each.p99_ms:.2f}")
                rows.append([name, way, str(each.requests), *figures])
    print(table(rows))
    for name, seconds in found.items():
        if not isinstance(seconds, dict):
            print(f"{name}: {seconds:.2f}")
    return 0


def _plain(each: dict[str, Figures] | float) -> object:
    return {way: asdict(figures) for way, figures in each.items()} if isinstance(each, dict) else each


if __name__ == "__main__":
    sys.exit(main())
