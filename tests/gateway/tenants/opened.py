"""A directory and a registry on a real database, with a clock that tests move."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from gateway.tenants.database import Database
from gateway.tenants.directory import Directory, Headers
from gateway.tenants.registry import Registry
from gateway.tenants.tables import ApiKey, Tenant

SCOPES = frozenset({"completions", "cache:read", "usage:read"})


@dataclass
class Clock:
    """Moved by tests, and by a microsecond when it is read, so that no two rows are made at the same time."""

    now: datetime = field(default=datetime(2030, 1, 1, tzinfo=UTC))

    def __call__(self) -> datetime:
        self.advance(microseconds=1)
        return self.now

    def advance(self, **amount: float) -> None:
        self.now += timedelta(**amount)


@dataclass
class Opened:
    directory: Directory
    registry: Registry
    clock: Clock
    data_dir: Path

    async def tenant(self, name: str) -> Tenant:
        return await self.registry.create_tenant(name)

    async def key(self, tenant: Tenant, expires_at: datetime | None = None) -> tuple[ApiKey, bytes]:
        created = await self.registry.create_key(tenant.id, None, SCOPES, expires_at)
        assert created is not None
        row, text = created
        return row, text.reveal()

    def files(self) -> bytes:
        """Every byte of a SQLite database on disk, write-ahead log included."""
        return b"".join(path.read_bytes() for path in sorted(self.data_dir.glob("saltern.db*")))


def database_url(data_dir: Path) -> str:
    return f"sqlite+aiosqlite:///{data_dir / 'saltern.db'}"


@asynccontextmanager
async def opened(data_dir: Path, url: str | None = None) -> AsyncIterator[Opened]:
    """On the database of that URL, else on a SQLite file."""
    clock = Clock()
    database = await Database.open(url or database_url(data_dir))
    try:
        directory = await Directory.open(database, data_dir / "kek", clock)
        yield Opened(directory, Registry(database, directory.keyring, clock), clock, data_dir)
    finally:
        await database.close()


def bearer(text: bytes) -> Headers:
    return [(b"host", b"localhost"), (b"authorization", b"Bearer " + text)]
