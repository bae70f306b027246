"""The SQL database: opened and brought to the current schema, read and written in transactions.

SQLite by default, PostgreSQL by URL. Nothing here knows what the tables mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from sqlalchemy import Connection, Select
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker

from gateway.http.errors import Unavailable
from gateway.tenants import engines, schema
from gateway.tenants.prepared import Prepared

log = logging.getLogger("saltern.gateway")

T = TypeVar("T")

# SQLSTATEs of PostgreSQL that say nothing of the statement: connection exceptions, transactions rolled back for the
# sake of others, insufficient resources, locks that were not to be had, cancelled statements, and servers that end.
_UNAVAILABLE_STATES = ("08", "40", "53", "55P03", "57")


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
        self._is_postgres = engine.dialect.name == "postgresql"
        # PostgreSQL's default shows each statement what was committed before it; SQLite knows nothing but one view.
        view = {"isolation_level": "REPEATABLE READ"} if self._is_postgres else {}
        self._reader = async_sessionmaker(engine.execution_options(**view), expire_on_commit=False)
        self._writer = async_sessionmaker(engine.execution_options(writes=True), expire_on_commit=False)

    @classmethod
    async def open(cls, url: str) -> Database:
        """Connect; an empty database gets this version's schema.

        Raises:
            CannotOpen: the URL leads to no database, or to one with another schema.
        """
        engine = engines.engine(url)
        try:
            with engines.cannot_open(url):
                await engines.first_connection(engine)
                async with engine.connect() as connection:
                    is_empty = await connection.run_sync(schema.version_of) is None
                if is_empty:
                    await engines.alone(engine, schema.create)
                async with engine.connect() as connection:
                    await connection.run_sync(schema.refuse_other)
                database = cls(engine, engines.read_here(engine.url), engines.write_there(engine.url))
                await database.scrub()
        except BaseException:
            await engine.dispose()
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
    async def write(self, *, alone: bool = False) -> AsyncIterator[AsyncSession]:
        """One transaction, committed at the end of the block; on SQLite the only writer from its first statement.

        Args:
            alone: on PostgreSQL too there is only one of these at a time, for rows that one gateway makes for all.

        Raises:
            DatabaseUnavailable: it is locked or gone.
        """
        async with _unavailable(), self._writing, self._writer.begin() as session:
            if alone and self._is_postgres:
                await session.execute(engines.ALONE)
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
        if self._is_postgres:
            return
        async with _unavailable(), self._engine.connect() as connection:
            raw: Any = (await connection.get_raw_connection()).driver_connection
            async with raw.execute("PRAGMA wal_checkpoint(TRUNCATE)") as cursor:
                busy, pages, copied = await cursor.fetchone()
        if busy:
            log.warning(
                "the write-ahead log was not emptied within %d ms (%d of %d pages copied): a reader holds it; "
                "deleted secrets stay in it, wrapped, until the next rotation, deletion or start",
                engines.BUSY_TIMEOUT_MS,
                copied,
                pages,
            )


@asynccontextmanager
async def _unavailable() -> AsyncIterator[None]:
    try:
        yield
    except (DBAPIError, ConnectionError) as error:
        if isinstance(error, DBAPIError) and not _is_unavailable(error):
            raise
        log.error("the database does not answer: %s", error)
        raise DatabaseUnavailable from error


def _is_unavailable(error: DBAPIError) -> bool:
    state = getattr(error.orig, "sqlstate", None) or ""
    is_of_driver = isinstance(error, (OperationalError, InterfaceError))
    return is_of_driver or error.connection_invalidated or state.startswith(_UNAVAILABLE_STATES)
