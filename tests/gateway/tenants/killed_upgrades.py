"""A database of the oldest schema, and upgrades that are killed: before the first statement, the second, and so on.

    python -m tests.gateway.tenants.killed_upgrades URL

prints, after each of these deaths and after the upgrade that came through, the version of the schema and its tables.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

from alembic import command
from sqlalchemy import Connection, Engine, event, insert, inspect

from gateway.tenants import engines, schema
from gateway.tenants.tables import AdminKey, ApiKey, Tenant

THEN = datetime(2030, 1, 1, tzinfo=UTC)
TENANTS: list[dict[str, Any]] = [
    {
        "id": f"ten_{name}",
        "name": name,
        "status": "active",
        "account": name.encode() * 16,
        "epoch": 1,
        "created_at": THEN,
        "updated_at": THEN,
    }
    for name in ("a", "b")
]
KEY: dict[str, Any] = {
    "id": "key_a",
    "digest": b"d",
    "pepper_version": 1,
    "last4": "1234",
    "scopes": ["usage:read"],
    "status": "active",
    "created_at": THEN,
}
OLD_SCOPES = [
    *(f"{resource}:{verb}" for resource in ("keys", "quotas", "salts", "tenants") for verb in ("read", "write")),
    "usage:read",
]


async def upgrade_to(url: str, version: str) -> None:
    engine = engines.engine(url)
    await engines.alone(engine, lambda connection: _upgrade(connection, version))
    await engine.dispose()


def _upgrade(connection: Connection, version: str) -> None:
    config = schema._config()
    config.attributes["connection"] = connection
    command.upgrade(config, version)


async def write_oldest(url: str) -> None:
    def write(connection: Connection) -> None:
        _upgrade(connection, "0001")
        connection.execute(insert(Tenant), TENANTS)
        connection.execute(insert(ApiKey).values(KEY | {"tenant_id": "ten_a"}))
        for id, scopes in (("key_all", OLD_SCOPES), ("key_some", OLD_SCOPES[1:])):
            connection.execute(insert(AdminKey).values(KEY | {"id": id, "scopes": scopes}))

    engine = engines.engine(url)
    await engines.alone(engine, write)
    await engine.dispose()


async def upgrade(url: str, killed_before: int) -> None:
    count = itertools.count(1)

    def kill(connection: Connection, *arguments: object) -> None:
        if next(count) == killed_before:
            os.kill(os.getpid(), signal.SIGKILL)

    event.listen(Engine, "before_cursor_execute", kill)
    event.listen(Engine, "commit", kill)
    await schema.upgrade_database(url)


async def look(url: str) -> None:
    engine = engines.engine(url)
    async with engine.connect() as connection:
        version = await connection.run_sync(schema.version_of)
        tables = await connection.run_sync(lambda connection: sorted(inspect(connection).get_table_names()))
    await engine.dispose()
    print(json.dumps([version, tables]), flush=True)


def status_of(work: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Of a child process that does it."""
    child = os.fork()
    if child == 0:
        asyncio.run(work())
        os._exit(0)
    return os.waitpid(child, 0)[1]


def main(url: str) -> int:
    for number in itertools.count(1):
        upgraded = status_of(lambda number=number: upgrade(url, number))  # type: ignore[misc]
        if upgraded not in (0, signal.SIGKILL) or status_of(lambda: look(url)):
            return 1
        if upgraded == 0:
            return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
