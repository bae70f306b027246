"""Connections to the SQL database, set up for how it is used: SQLite's, and PostgreSQL's."""

from __future__ import annotations

import asyncio
import errno
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakSet

from sqlalchemy import URL, Connection, create_engine, event, text
from sqlalchemy.engine import ExceptionContext, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from gateway.tenants.database_url import without_secrets

T = TypeVar("T")

# How long a transaction waits for another one, on both kinds of database.
BUSY_TIMEOUT_MS = 5000
_CONNECT_SECONDS = 5
_RETRY_SECONDS = 0.02

# Of PostgreSQL's advisory locks, the one that is held by whoever must be alone on the whole database.
ALONE = text("SELECT pg_advisory_xact_lock(8314129117)")


class CannotOpen(Exception):
    """The database cannot be used as it is: one line for the operator."""


def engine(url: str) -> AsyncEngine:
    """Raises CannotOpen: no such URL, or no driver for it."""
    try:
        parsed, options = make_url(url), dict[str, Any]()
        if parsed.get_backend_name() == "postgresql":
            settings = {"lock_timeout": f"{BUSY_TIMEOUT_MS}ms"}
            options = {
                "connect_args": {"server_settings": settings, "timeout": _CONNECT_SECONDS},
                "isolation_level": "READ COMMITTED",
                # A server that was started anew is found at once, and not by a request that fails.
                "pool_pre_ping": True,
            }
        elif parsed.get_backend_name() == "sqlite":
            options = {"connect_args": {"factory": _ClosesCursors}}
        # Statements go into error messages with their values unless this is set.
        engine = create_async_engine(parsed, hide_parameters=True, **options)
    except (ArgumentError, ModuleNotFoundError, ValueError) as error:
        reason = f"no driver {error.name}" if isinstance(error, ModuleNotFoundError) else "no database URL"
        raise CannotOpen(
            f"the database does not open: {reason}; give sqlite+aiosqlite:///PATH, or install saltern[postgres] "
            "and give postgresql+asyncpg://USER:PASSWORD@HOST/NAME"
        ) from None
    if engine.dialect.name == "sqlite":
        event.listen(engine.sync_engine, "connect", _configure_sqlite)
        event.listen(engine.sync_engine, "begin", _begin_sqlite)
    elif engine.dialect.name == "postgresql":
        event.listen(engine.sync_engine, "do_connect", _connect_postgres)
        event.listen(engine.sync_engine, "handle_error", _drop_details)
    return engine


@contextmanager
def cannot_open(url: str) -> Iterator[None]:
    """What a driver or the system says becomes CannotOpen: one line without secrets."""
    try:
        yield
    except (DBAPIError, OSError) as error:
        cause = error.orig if isinstance(error, DBAPIError) else error.strerror
        raise CannotOpen(f"the database {without_secrets(url)} does not open: {cause}") from error


async def first_connection(engine: AsyncEngine) -> None:
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


async def alone(engine: AsyncEngine, work: Callable[[Connection], T]) -> T:
    """A transaction that no other one of these runs beside: SQLite has one writer, PostgreSQL a lock for it."""
    async with engine.execution_options(writes=True).begin() as connection:
        if engine.dialect.name == "postgresql":
            await connection.execute(ALONE)
        return await connection.run_sync(work)


def is_file(url: URL) -> bool:
    return url.get_backend_name() == "sqlite" and url.database not in (None, "", ":memory:") and not url.query


def write_there(url: URL) -> Connection | None:
    """A connection for a thread that writes, to a database that is a file of this host."""
    if not is_file(url):
        return None
    arguments = {"check_same_thread": False}  # opened and closed by another thread than the one that uses it
    engine = create_engine(url.set(drivername="sqlite"), hide_parameters=True, connect_args=arguments)
    event.listen(engine, "connect", _configure_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine.connect().execution_options(writes=True)


def read_here(url: URL) -> sqlite3.Connection | None:
    """A connection that waits for nobody, to a database that is a file of this host."""
    if not is_file(url):
        return None
    assert url.database is not None
    connection = sqlite3.connect(url.database, isolation_level=None, timeout=0)
    connection.execute("PRAGMA query_only = ON")
    return connection


class _ClosesCursors(sqlite3.Connection):
    """Closed together with its cursors.

    A task that is cancelled while it reads leaves a cursor behind, which keeps the snapshot it reads, and with that
    the write-ahead log, until garbage is collected, although its connection was closed at once.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._cursors: WeakSet[sqlite3.Cursor] = WeakSet()

    def cursor(self, *arguments: Any, **options: Any) -> Any:
        cursor = super().cursor(*arguments, **options)
        self._cursors.add(cursor)
        return cursor

    def close(self) -> None:
        for cursor in list(self._cursors):
            cursor.close()
        super().close()


def _connect_postgres(dialect: Any, record: object, arguments: Sequence[Any], parameters: dict[str, Any]) -> Any:
    """Whatever keeps the driver from connecting, it tells as errors of many kinds; here it becomes one."""
    try:
        return dialect.connect(*arguments, **parameters)
    except (OSError, dialect.loaded_dbapi.asyncpg.PostgresError) as error:
        number, text = getattr(error, "errno", None), getattr(error, "strerror", None)
        raise ConnectionError(number or errno.ECONNREFUSED, text or str(error) or type(error).__name__) from error


def _drop_details(context: ExceptionContext) -> None:
    """The server tells with an error of a row the values in it, which would go into every traceback."""
    context.original_exception.__cause__ = None


def _configure_sqlite(connection: Any, record: object) -> None:
    connection.isolation_level = None  # or the driver would choose where transactions begin
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.execute("PRAGMA secure_delete = ON")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    # A reader that turns writer can't wait for another writer, only fail; so writers say so first.
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
