"""The SQL database: opened and brought to the current schema, read and written in transactions.

SQLite by default, PostgreSQL by URL. Nothing here knows what the tables mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Connection, Select, create_engine, event
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

import migrations
from gateway.http.errors import Unavailable
from gateway.tenants.database_url import without_secrets
from gateway.tenants.prepared import Prepared

log = logging.getLogger("saltern.gateway")

T = TypeVar("T")

BUSY_TIMEOUT_MS = 5000
_RETRY_SECONDS = 0.02


class CannotOpen(Exception):
    """The database cannot be used as it is: one line for the operator."""


class SchemaTooNew(CannotOpen):
    """It was written by a newer version than this one."""


class DatabaseUnavailable(Unavailable):
    """503: the database is locked or gone; nothing was changed."""

    def __init__(self) -> None:
        super().__init__("The database does not answer. Nothing was changed; try again in a second.")


class Database:
    """Transactions on one database. Sessions come from `read` and `write` and end with their block.

    One transaction writes at a time: SQLite allows no second one, and who waits for it here is woken at once, while
    SQLite would look again later.

    Args:
        here: SQLite's file, read in the caller's own thread; None for other databases.
        there: the same file, written in a thread of its own.
    """

    def __init__(self, engine: AsyncEngine, here: sqlite3.Connection | None, there: Connection | None) -> None:
        self._engine = engine
        self._here = here
        self._prepared: dict[Select[*tuple[Any, ...]], Prepared] = {}
        self._there = there
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="database") if there is not None else None
        self._writing = asyncio.Lock()
        self._reader = async_sessionmaker(engine, expire_on_commit=False)
        self._writer = async_sessionmaker(engine.execution_options(writes=True), expire_on_commit=False)

    @classmethod
    async def open(cls, url: str) -> Database:
        """Connect and migrate to this version's schema.

        Raises:
            CannotOpen: the URL leads to no database, or to one whose schema this version does not know.
        """
        try:
            # Statements go into error messages with their values unless this is set.
            engine = create_async_engine(url, hide_parameters=True)
        except (ArgumentError, ModuleNotFoundError, ValueError) as error:
            reason = f"no driver {error.name}" if isinstance(error, ModuleNotFoundError) else "no database URL"
            raise CannotOpen(
                f"the database does not open: {reason}; give sqlite+aiosqlite:///PATH, or install saltern[postgres] "
                "and give postgresql+asyncpg://USER:PASSWORD@HOST/NAME"
            ) from None
        if engine.dialect.name == "sqlite":
            event.listen(engine.sync_engine, "connect", _configure_sqlite)
            event.listen(engine.sync_engine, "begin", _begin_sqlite)
        try:
            await _first_connection(engine)
            async with engine.execution_options(writes=True).begin() as connection:
                await connection.run_sync(_migrate)
            database = cls(engine, _read_here(engine.url), _write_there(engine.url))
            await database.scrub()
        except BaseException as error:
            await engine.dispose()
            if isinstance(error, (DBAPIError, OSError)):
                cause = error.orig if isinstance(error, DBAPIError) else error.strerror
                raise CannotOpen(f"the database {without_secrets(url)} does not open: {cause}") from error
            raise
        return database

    async def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        if self._here is not None:
            self._here.close()
        if self._there is not None:
            self._there.close()
            self._there.engine.dispose()
        await self._engine.dispose()

    @property
    def dialect(self) -> str:
        """sqlite or postgresql."""
        return self._engine.dialect.name

    async def row(self, statement: Select[*tuple[Any, ...]], values: Mapping[str, object]) -> Any | None:
        """The one row of a statement, or None. As `rows`."""
        found = await self.rows(statement, values)
        return found[0] if found else None

    async def rows(self, statement: Select[*tuple[Any, ...]], values: Mapping[str, object]) -> list[Any]:
        """The rows of a statement: a consistent view by itself, without a transaction around it.

        What every request asks goes this way. SQLite answers in a few hundredths of a millisecond, much less than it
        takes to hand a question to another thread; where it would have to wait, it is asked there after all.

        Args:
            statement: made once and executed often.
            values: of its bound parameters.

        Raises:
            DatabaseUnavailable: it is locked or gone.
        """
        if self._here is not None:
            if statement not in self._prepared:
                self._prepared[statement] = Prepared(statement, self._engine.dialect)
            with contextlib.suppress(sqlite3.OperationalError):
                return self._prepared[statement].rows(self._here, values)
        async with self.read() as session:
            return list((await session.execute(statement, values)).all())

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncSession]:
        """One consistent view.

        Raises:
            DatabaseUnavailable: it is locked or gone.
        """
        async with _unavailable(), self._reader.begin() as session:
            yield session

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncSession]:
        """One transaction, committed at the end of the block; on SQLite the only writer from its first statement.

        Raises:
            DatabaseUnavailable: it is locked or gone.
        """
        async with _unavailable(), self._writing, self._writer.begin() as session:
            yield session

    async def transact(self, work: Callable[[Connection], T]) -> T:
        """One write transaction, made by a function that is given its connection: what it returns, once committed.

        What many requests write goes this way: all of a transaction's statements are one hand-over to a thread.

        Raises:
            DatabaseUnavailable: it is locked or gone; most likely nothing was changed, but a commit may have been lost
                on its way back.
        """
        async with _unavailable(), self._writing:
            if self._thread is None:
                async with self._engine.execution_options(writes=True).begin() as connection:
                    return await connection.run_sync(work)
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._transact_there, work)

    def _transact_there(self, work: Callable[[Connection], T]) -> T:
        assert self._there is not None
        with self._there.begin():
            return work(self._there)

    async def scrub(self) -> None:
        """Leave nothing deleted behind in SQLite's write-ahead log; `secure_delete` has zeroed the pages."""
        if self._engine.dialect.name != "sqlite":
            return
        async with _unavailable(), self._engine.connect() as connection:
            raw: Any = (await connection.get_raw_connection()).driver_connection
            async with raw.execute("PRAGMA wal_checkpoint(TRUNCATE)") as cursor:
                busy, pages, copied = await cursor.fetchone()
        if busy:
            log.warning(
                "the write-ahead log was not emptied within %d ms (%d of %d pages copied): a reader holds it; "
                "deleted secrets stay in it, wrapped, until the next rotation, deletion or start",
                BUSY_TIMEOUT_MS,
                copied,
                pages,
            )


@asynccontextmanager
async def _unavailable() -> AsyncIterator[None]:
    try:
        yield
    except (OperationalError, InterfaceError, ConnectionError) as error:
        log.error("the database does not answer: %s", error)
        raise DatabaseUnavailable from error


async def _first_connection(engine: AsyncEngine) -> None:
    """Two processes that turn a new SQLite file to write-ahead logging at once: one is refused without waiting."""
    deadline = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            async with engine.connect():
                return
        except OperationalError as error:
            if getattr(error.orig, "sqlite_errorname", None) != "SQLITE_BUSY" or time.monotonic() > deadline:
                raise
            await asyncio.sleep(_RETRY_SECONDS)


def _configure_sqlite(connection: Any, record: object) -> None:
    connection.isolation_level = None  # or the driver would choose where transactions begin
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.execute("PRAGMA secure_delete = ON")
    cursor.close()


def _is_file(url: URL) -> bool:
    return url.get_backend_name() == "sqlite" and url.database not in (None, "", ":memory:") and not url.query


def _write_there(url: URL) -> Connection | None:
    """A connection for a thread that writes, to a database that is a file of this host."""
    if not _is_file(url):
        return None
    arguments = {"check_same_thread": False}  # opened and closed by another thread than the one that uses it
    engine = create_engine(url.set(drivername="sqlite"), hide_parameters=True, connect_args=arguments)
    event.listen(engine, "connect", _configure_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine.connect().execution_options(writes=True)


def _read_here(url: URL) -> sqlite3.Connection | None:
    """A connection that waits for nobody, to a database that is a file of this host."""
    if not _is_file(url):
        return None
    assert url.database is not None
    connection = sqlite3.connect(url.database, isolation_level=None, timeout=0)
    connection.execute("PRAGMA query_only = ON")
    return connection


def _begin_sqlite(connection: Connection) -> None:
    # A reader that turns writer can't wait for another writer, only fail; so writers say so first.
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _migrate(connection: Connection) -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    known = ScriptDirectory.from_config(config)
    current = MigrationContext.configure(connection).get_current_revision()
    if current is not None and current not in {script.revision for script in known.walk_revisions()}:
        raise SchemaTooNew(
            f"the database has schema {current}, this version of Saltern knows schemas up to "
            f"{known.get_current_head()}: start the version that wrote it, or a newer one"
        )
    command.upgrade(config, "head")
