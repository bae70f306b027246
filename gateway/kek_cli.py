"""`saltern kek rotate`: a new key-encryption key, on the database and the key's file themselves."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.configured import command, refusals
from gateway.options import DatabaseOptions

if TYPE_CHECKING:
    from gateway.tenants.kek_rotation import Plan

kek_app = typer.Typer(no_args_is_help=True, help="Rotate the key-encryption key.")


@kek_app.callback()
def kek() -> None:
    # Without it, typer would take the only command for the whole of `saltern kek`.
    pass


@dataclass(frozen=True, kw_only=True)
class RotateOptions(DatabaseOptions):
    plan: Annotated[bool, typer.Option("--plan", help="Change nothing; print what there is to do.")] = False


@command(kek_app, "rotate", RotateOptions)
def rotate(options: RotateOptions) -> None:
    """Wrap every secret under a new key-encryption key and remove the old one; gateways may go on serving.

    Killed, it goes on where it was when it is run again.
    """
    # Only here: SQLAlchemy is slow to come.
    from gateway.tenants import kek_rotation
    from gateway.tenants.database import Database, DatabaseUnavailable
    from gateway.tenants.engines import CannotOpen
    from gateway.tenants.vault import KekFile, VaultError

    async def plan_or_rotate() -> str:
        kek = KekFile.open(options.kek_path)  # first: opening the database may make one
        database = await Database.open(options.effective_database_url)
        try:
            if options.plan:
                return _planned(await kek_rotation.plan(database, kek))
            done = await kek_rotation.rotate(database, options.kek_path)
            return f"wrapped {done.wrapped} secrets under {done.key_id}, removed {', '.join(done.removed_key_ids)}"
        finally:
            await database.close()

    with refusals((CannotOpen, DatabaseUnavailable, VaultError, kek_rotation.RotationRefused)):
        typer.echo(asyncio.run(plan_or_rotate()))


def _planned(plan: Plan) -> str:
    into = "a new key" if plan.new_key_id is None else f"{plan.new_key_id}, as a rotation began that has not ended"
    return (
        f"would wrap {plan.to_wrap} of {plan.secrets} secrets under {into}\n"
        f"would remove {', '.join(plan.old_key_ids)}"
    )
