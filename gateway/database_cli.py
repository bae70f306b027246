"""`saltern db`: which schema a database has, and the way to this version's."""

from __future__ import annotations

import asyncio

import typer

from gateway.configured import command, refusals
from gateway.options import DatabaseOptions

EXIT_OTHER_SCHEMA = 1

db_app = typer.Typer(no_args_is_help=True, help="Check and upgrade the schema of the database.")


@command(db_app, "check", DatabaseOptions)
def check(options: DatabaseOptions) -> None:
    """Print the schema that the database has and the one that this version needs; exit 1 if they differ."""
    # Only in the commands: SQLAlchemy is slow to come.
    from gateway.tenants import engines, schema

    with refusals((engines.CannotOpen,)):
        found = asyncio.run(schema.database_version(options.effective_database_url))
    typer.echo(f"database: {found or 'empty'}\nsaltern: {schema.newest()}")
    if found != schema.newest():
        raise typer.Exit(EXIT_OTHER_SCHEMA)


@command(db_app, "upgrade", DatabaseOptions)
def upgrade(options: DatabaseOptions) -> None:
    """Bring the database to this version's schema, in one transaction; make a backup first."""
    from gateway.tenants import engines, schema

    with refusals((engines.CannotOpen,)):
        before = asyncio.run(schema.upgrade_database(options.effective_database_url))
    if before == schema.newest():
        typer.echo(f"the database has schema {before} already")
    else:
        typer.echo(f"the database went from schema {before or 'none'} to {schema.newest()}")
