import asyncio
import sqlite3
import traceback
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, bindparam, func, select, text, update
from sqlalchemy.exc import IntegrityError

from gateway.tenants import engines
from gateway.tenants.database import Database, DatabaseUnavailable
from gateway.tenants.engines import CannotOpen
from gateway.tenants.tables import Base, Fence, QuotaState, Tenant, unused_state, utc_now
from tests import postgres
from tests.gateway.tenants.opened import database_url as sqlite_url

pytestmark = pytest.mark.anyio


async def test_the_migrations_make_what_the_models_say(database_url: str) -> None:
    def differences(connection: Connection) -> list[object]:
        return list(compare_metadata(MigrationContext.configure(connection), Base.metadata))

    database = await Database.open(database_url)
    async with database.read() as session:
        assert await (await session.connection()).run_sync(differences) == []
        await session.execute(text("CREATE TABLE stray (id INTEGER)"))
        assert await (await session.connection()).run_sync(differences) != []
    await database.close()


async def test_sqlite_is_set_up_for_concurrency_integrity_and_deletion(tmp_path: Path) -> None:
    database = await Database.open(sqlite_url(tmp_path))
    expected = {"busy_timeout": 5000, "journal_mode": "wal", "foreign_keys": 1, "secure_delete": 1}
    async with database.read() as session:
        found = {name: await session.scalar(text(f"PRAGMA {name}")) for name in expected}
    assert found == expected

    def pragmas(connection: Connection) -> dict[str, object]:
        return {name: connection.scalar(text(f"PRAGMA {name}")) for name in expected}

    assert await database.transact(pragmas) == expected
    await database.close()


async def test_what_does_not_open_is_one_line_without_the_password(tmp_path: Path) -> None:
    (tmp_path / "saltern.db").write_bytes(b"not a database, but long enough to be read as the header of one" * 20)
    unused = "postgresql+asyncpg://user:canary-password@127.0.0.1:1/none"
    missing = f"sqlite+aiosqlite:///{tmp_path}/no/such/folder/x.db"
    # What is no driver's is warned of, by its name.
    query = f"{missing}?isolation_level=canary-password"
    port = "postgresql+asyncpg://user:canary-password@127.0.0.1:canary-password/none"
    for url in (missing, query, sqlite_url(tmp_path), "nonsense", unused, port):
        with pytest.raises(CannotOpen) as caught:
            await Database.open(url)
        assert len(str(caught.value).splitlines()) == 1
        assert "does not open" in str(caught.value)
        assert "canary-password" not in str(caught.value)
    (tmp_path / "saltern.db").unlink()
    await (await Database.open(sqlite_url(tmp_path))).close()


ONE = {"id": "one"}
INSERT = text("INSERT INTO gateways (id, beats) VALUES (:id, 0)")
GATEWAYS = text("SELECT count(*) FROM gateways")


def insert_one(connection: Connection) -> None:
    connection.execute(INSERT, ONE)


async def gateways(database: Database) -> int:
    async with database.read() as session:
        return int(await session.scalar(GATEWAYS) or 0)


async def test_a_failed_transaction_leaves_nothing(database_url: str) -> None:
    database = await Database.open(database_url)

    async def write_twice() -> None:
        async with database.write() as session:
            await session.execute(INSERT, ONE)
            await session.execute(INSERT, ONE)

    def insert_twice(connection: Connection) -> None:
        insert_one(connection)
        insert_one(connection)

    with pytest.raises(IntegrityError):
        await write_twice()
    assert await gateways(database) == 0
    with pytest.raises(IntegrityError):
        await database.transact(insert_twice)
    assert await gateways(database) == 0
    await database.transact(insert_one)
    assert await gateways(database) == 1
    await database.close()


async def test_a_locked_database_is_503_and_recovers(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def delete(connection: Connection) -> None:
        connection.execute(text("DELETE FROM gateways"))

    other = await Database.open(database_url)
    await other.transact(insert_one)
    monkeypatch.setattr(engines, "BUSY_TIMEOUT_MS", 10)
    database = await Database.open(database_url)
    async with other.write() as session:
        await session.execute(text("UPDATE gateways SET beats = 1"))
        with pytest.raises(DatabaseUnavailable) as caught:
            await database.transact(delete)
        assert caught.value.status == 503
        with pytest.raises(DatabaseUnavailable):
            async with database.write() as writing:
                await writing.execute(text("DELETE FROM gateways"))
        assert await gateways(database) == 1
    await database.transact(delete)
    assert await gateways(database) == 0
    await database.close()
    await other.close()


async def test_connections_that_a_server_has_ended_are_made_anew(postgres_url: str) -> None:
    end_others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() " + (
        "AND pid != pg_backend_pid()"
    )
    database = await Database.open(postgres_url)
    await gateways(database)
    postgres.execute(postgres_url, end_others)
    assert await gateways(database) == 0

    async def write_twice() -> None:
        async with database.write() as session:
            await session.execute(INSERT, ONE)
            postgres.execute(postgres_url, end_others)
            await session.execute(INSERT, {"id": "two"})

    with pytest.raises(DatabaseUnavailable):
        await write_twice()
    assert await gateways(database) == 0
    await database.transact(insert_one)
    assert await gateways(database) == 1
    await database.close()


@pytest.mark.postgres
async def test_a_server_that_is_gone_is_503_until_it_is_back() -> None:
    binaries = postgres.find_binaries()
    assert binaries is not None
    with closing(postgres.Cluster(binaries)) as cluster:
        database = await Database.open(cluster.url())
        await gateways(database)
        cluster.stop()
        for asked in (
            lambda: gateways(database),
            lambda: database.row(COUNT, ONE),
            lambda: database.transact(insert_one),
        ):
            with pytest.raises(DatabaseUnavailable):
                await asked()
        with pytest.raises(CannotOpen, match="does not open"):
            await Database.open(cluster.url())
        cluster.start()
        assert await gateways(database) == 0
        await database.close()


async def test_b188_fifty_transactions_that_read_a_row_and_then_write_it_lose_nothing(database_url: str) -> None:
    databases = [await Database.open(database_url) for _ in range(5)]
    now = utc_now()
    async with databases[0].write() as session:
        session.add(Tenant(id="a", name="a", status="active", account=b"a", epoch=1, created_at=now, updated_at=now))
        await session.flush()
        session.add(unused_state("a"))

    async def add_one(database: Database) -> None:
        async with database.write() as session:
            await session.get(Tenant, "a", with_for_update={"key_share": True})  # type: ignore[arg-type]
            state = await session.get_one(QuotaState, "a")
            state.day_used += 1

    def add_one_at_once(connection: Connection) -> None:
        connection.execute(select(Tenant.id).where(Tenant.id == "a").with_for_update(key_share=True))
        used = connection.scalar(select(QuotaState.day_used)) or 0
        connection.execute(update(QuotaState).values(day_used=used + 1))

    await asyncio.gather(
        *(add_one(database) for database in databases * 5),
        *(database.transact(add_one_at_once) for database in databases * 5),
    )
    async with databases[0].read() as session:
        assert (await session.get_one(QuotaState, "a")).day_used == 50
    for database in databases:
        await database.close()


async def test_a_database_error_does_not_quote_values(database_url: str) -> None:
    insert = text("INSERT INTO usage_hours (tenant_id, hour_ms) VALUES (:id, 1)")
    database = await Database.open(database_url)
    with pytest.raises(IntegrityError) as caught:
        async with database.write() as session:
            await session.execute(insert, {"id": "a-canary"})
    told = "".join(traceback.format_exception(caught.value))
    assert "usage_hours" in told
    assert "a-canary" not in told.replace('{"id": "a-canary"}', "")
    await database.close()


COUNT = select(func.count().label("count")).select_from(Fence).where(Fence.id == bindparam("id"))


async def count(database: Database) -> int:
    row = await database.row(COUNT, ONE)
    assert row is not None
    return int(row.count)


async def test_a_row_is_as_it_was_last_committed_by_whoever(tmp_path: Path) -> None:
    database = await Database.open(sqlite_url(tmp_path))
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

    database = await Database.open(sqlite_url(tmp_path))
    here, database._here = database._here, Busy()  # type: ignore[assignment]
    assert here is not None
    assert await count(database) == 0
    database._here = here
    await database.close()


async def test_nothing_is_written_where_rows_are_read(tmp_path: Path) -> None:
    database = await Database.open(sqlite_url(tmp_path))
    assert database._here is not None
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        database._here.execute("DELETE FROM tenants")
    await database.close()


async def test_a_database_in_memory_has_one_connection(tmp_path: Path) -> None:
    database = await Database.open("sqlite+aiosqlite://")
    assert database._here is None
    assert await count(database) == 0
    await database.close()


async def test_a_reader_that_is_cancelled_does_not_keep_what_was_deleted_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    database = await Database.open(sqlite_url(tmp_path))
    loop = asyncio.get_running_loop()

    def cancel() -> None:
        loop.call_soon_threadsafe(reading.cancel)

    async def read() -> None:
        async with database.read() as session:
            driver = (await (await session.connection()).get_raw_connection()).driver_connection
            assert driver is not None
            await driver.create_function("cancel", 0, cancel)
            await session.execute(text("SELECT cancel() FROM sqlite_schema"))

    reading = asyncio.create_task(read())
    with pytest.raises(asyncio.CancelledError):
        await reading
    async with database.write() as session:
        session.add(Fence(id="fen_1", account=b"account", epoch=None, created_at=utc_now()))
    await database.scrub()
    assert "was not emptied" not in caplog.text
    await database.close()
