"""The versions of the schema: which one a database has, which one this version of Saltern knows, and the way there."""

from __future__ import annotations

import errno
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Connection

import migrations
from gateway.tenants import engines
from gateway.tenants.engines import CannotOpen


class SchemaTooOld(CannotOpen):
    """It was written by an older version than this one."""


class SchemaTooNew(CannotOpen):
    """It was written by a newer version than this one."""


def version_of(connection: Connection) -> str | None:
    """That of the database; None for an empty one."""
    return MigrationContext.configure(connection).get_current_revision()


def newest() -> str:
    """That of this version of Saltern."""
    head = _scripts().get_current_head()
    assert head is not None
    return head


def refuse_other(connection: Connection) -> None:
    """
    Raises:
        SchemaTooOld, SchemaTooNew: the database has another schema than this version's.
    """
    version = version_of(connection)
    _refuse_too_new(version)
    if version != newest():
        raise SchemaTooOld(
            f"the database has schema {version}, this version of Saltern needs {newest()}: make a backup, then run "
            "`saltern db upgrade`"
        )


def _refuse_too_new(version: str | None) -> None:
    known = {script.revision for script in _scripts().walk_revisions()}
    if version is not None and version not in known:
        raise SchemaTooNew(
            f"the database has schema {version}, this version of Saltern knows schemas up to {newest()}: "
            "start the version that wrote it, or a newer one"
        )


def create(connection: Connection) -> None:
    """The newest schema in a database that is empty; nothing in one that is not. Within a lock of it."""
    if version_of(connection) is None:
        upgrade(connection)


def upgrade(connection: Connection) -> str | None:
    """Bring the database to the newest schema; answers which one it had. Within a lock of it.

    Raises:
        SchemaTooNew
    """
    before = version_of(connection)
    _refuse_too_new(before)
    config = _config()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
    return before


async def upgrade_database(url: str) -> str | None:
    """Bring a database to this version's schema; answers which one it had, None for an empty one.

    Raises:
        CannotOpen: the URL leads to no database, or to one whose schema this version does not know.
    """
    engine = engines.engine(url)
    try:
        with engines.cannot_open(url):
            await engines.first_connection(engine)
            return await engines.alone(engine, upgrade)
    finally:
        await engine.dispose()


async def database_version(url: str) -> str | None:
    """Of a database's schema, None for an empty one. Raises CannotOpen: the URL leads to no database."""
    engine = engines.engine(url)
    try:
        with engines.cannot_open(url):
            _refuse_missing(engine.url)
            await engines.first_connection(engine)
            async with engine.connect() as connection:
                return await connection.run_sync(version_of)
    finally:
        await engine.dispose()


def _refuse_missing(url: URL) -> None:
    """Asking for its version would make the file."""
    if engines.is_file(url) and not Path(url.database or "").exists():
        raise FileNotFoundError(errno.ENOENT, "there is no such file")


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent).replace("%", "%%"))
    return config


def _scripts() -> ScriptDirectory:
    return ScriptDirectory.from_config(_config())
