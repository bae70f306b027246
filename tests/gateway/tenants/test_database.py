import asyncio
import sqlite3
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, bindparam, func, select, text
from sqlalchemy.exc import IntegrityError

from gateway.tenants import database as database_module
from gateway.tenants.database import CannotOpen, Database, DatabaseUnavailable, SchemaTooNew
from gateway.tenants.tables import Base, Fence, Tenant
from tests.gateway.tenants.opened import database_url

pytestmark = pytest.mark.anyio


async def test_the_migrations_make_what_the_models_say(tmp_path: Path) -> None:
    def differences(connection: Connection) -> list[object]:
        return list(compare_metadata(MigrationContext.configure(connection), Base.metadata))

    database = await Database.open(database_url(tmp_path))
    async with database.read() as session:
        assert await (await session.connection()).run_sync(differences) == []
        await session.execute(text("CREATE TABLE stray (id INTEGER)"))
        assert await (await session.connection()).run_sync(differences) != []
    await database.close()


async def test_sqlite_is_set_up_for_concurrency_integrity_and_deletion(tmp_path: Path) -> None:
    database = await Database.open(database_url(tmp_path))
    expected = {"busy_timeout": 5000, "journal_mode": "wal", "foreign_keys": 1, "secure_delete": 1}
    async with database.read() as session:
        found = {name: await session.scalar(text(f"PRAGMA {name}")) for name in expected}
    assert found == expected
    await database.close()


async def test_two_gateways_that_start_at_once_migrate_once(tmp_path: Path) -> None:
    both = await asyncio.gather(*(Database.open(database_url(tmp_path)) for _ in range(2)))
    for database in both:
        async with database.read() as session:
            assert (await session.scalars(text("SELECT version_num FROM alembic_version"))).all() == ["0002"]
        await database.close()


async def test_a_newer_schema_is_refused_naming_both(tmp_path: Path) -> None:
    await (await Database.open(database_url(tmp_path))).close()
    await (await Database.open(database_url(tmp_path))).close()
    with sqlite3.connect(tmp_path / "saltern.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    with pytest.raises(SchemaTooNew, match=r"9999.*0002"):
        await Database.open(database_url(tmp_path))


async def test_what_does_not_open_is_one_line_without_the_password(tmp_path: Path) -> None:
    (tmp_path / "saltern.db").write_bytes(b"not a database, but long enough to be read as the header of one" * 20)
    unused = "postgresql+asyncpg://user:canary-password@127.0.0.1:1/none"
    missing = f"sqlite+aiosqlite:///{tmp_path}/no/such/folder/x.db"
    # What is no driver's is warned of, by its name.
    query = f"{missing}?isolation_level=canary-password"
    port = "postgresql+asyncpg://user:canary-password@127.0.0.1:canary-password/none"
    for url in (missing, query, database_url(tmp_path), "nonsense", unused, port):
        with pytest.raises(CannotOpen) as caught:
            await Database.open(url)
        assert len(str(caught.value).splitlines()) == 1
        assert "does not open" in str(caught.value)
        assert "canary-password" not in str(caught.value)
    (tmp_path / "saltern.db").unlink()
    await (await Database.open(database_url(tmp_path))).close()


async def test_a_failed_transaction_leaves_nothing(tmp_path: Path) -> None:
    insert = text("INSERT INTO pending_fences (id, account, created_at) VALUES (:id, 'a', '2030-01-01')")
    count = text("SELECT count(*) FROM pending_fences")
    database = await Database.open(database_url(tmp_path))

    async def insert_twice() -> None:
        async with database.write() as session:
            await session.execute(insert, {"id": "one"})
            await session.execute(insert, {"id": "one"})

    with pytest.raises(IntegrityError):
        await insert_twice()
    async with database.read() as session:
        assert await session.scalar(count) == 0
    async with database.write() as session:
        await session.execute(insert, {"id": "one"})
    async with database.read() as session:
        assert await session.scalar(count) == 1
    await database.close()


async def test_a_locked_database_is_503_and_recovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_module, "BUSY_TIMEOUT_MS", 10)
    database = await Database.open(database_url(tmp_path))
    other = sqlite3.connect(tmp_path / "saltern.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(DatabaseUnavailable) as caught:
        async with database.write() as session:
            await session.execute(text("DELETE FROM tenants"))
    assert caught.value.status == 503
    async with database.read() as session:
        assert await session.scalar(text("SELECT count(*) FROM tenants")) == 0
    other.close()
    async with database.write() as session:
        await session.execute(text("DELETE FROM tenants"))
    await database.close()


async def test_a_database_error_does_not_quote_values(tmp_path: Path) -> None:
    insert = text("INSERT INTO pending_fences (id, account) VALUES (:id, 'a')")
    database = await Database.open(database_url(tmp_path))
    with pytest.raises(IntegrityError) as caught:
        async with database.write() as session:
            await session.execute(insert, {"id": "a-canary"})
    assert "pending_fences" in str(caught.value)
    assert "a-canary" not in str(caught.value)
    await database.close()


COUNT = select(func.count().label("count")).select_from(Fence).where(Fence.id == bindparam("id"))
ONE = {"id": "one"}


async def count(database: Database) -> int:
    row = await database.row(COUNT, ONE)
    assert row is not None
    return int(row.count)


async def test_a_row_is_as_it_was_last_committed_by_whoever(tmp_path: Path) -> None:
    database = await Database.open(database_url(tmp_path))
    other = sqlite3.connect(tmp_path / "saltern.db", isolation_level=None)
    for statement, found in (
        ("BEGIN IMMEDIATE", 0),
        ("INSERT INTO pending_fences (id, account, created_at) VALUES ('one', 'a', '2030-01-01')", 0),
        ("COMMIT", 1),
        ("DELETE FROM pending_fences", 0),
    ):
        other.execute(statement)
        assert await count(database) == found
    other.close()
    assert await database.row(select(Tenant.id).where(Tenant.id == bindparam("id")), ONE) is None
    await database.close()


async def test_a_row_that_can_not_be_read_at_once_is_waited_for(tmp_path: Path) -> None:
    class Busy:
        def execute(self, statement: object, values: object) -> None:
            raise sqlite3.OperationalError("database is locked")

    database = await Database.open(database_url(tmp_path))
    here, database._here = database._here, Busy()  # type: ignore[assignment]
    assert here is not None
    assert await count(database) == 0
    database._here = here
    await database.close()


async def test_nothing_is_written_where_rows_are_read(tmp_path: Path) -> None:
    database = await Database.open(database_url(tmp_path))
    assert database._here is not None
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        database._here.execute("DELETE FROM tenants")
    await database.close()


async def test_a_database_in_memory_has_one_connection(tmp_path: Path) -> None:
    database = await Database.open("sqlite+aiosqlite://")
    assert database._here is None
    assert await count(database) == 0
    await database.close()
