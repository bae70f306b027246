"""`saltern salts`."""

from __future__ import annotations

import typer

from gateway.admin_cli.terminal import DataDir, Json, TenantOption, open_client, show, show_rows

salts_app = typer.Typer(no_args_is_help=True, help="List and rotate a tenant's salts.")

COLUMNS = ("epoch", "state", "created_at", "blocks", "bytes")


@salts_app.command("list")
def list_salts(tenant: TenantOption, data_dir: DataDir, as_json: Json = False) -> None:
    """List a tenant's salts by epoch. The salts themselves are never shown."""
    with open_client(data_dir) as client:
        show_rows(list(client.rows(client.tenant_path(tenant) + "/salts")), COLUMNS, as_json)


@salts_app.command("rotate")
def rotate_salt(tenant: TenantOption, data_dir: DataDir, as_json: Json = False) -> None:
    """Make all that is cached for a tenant unreachable, before this returns."""
    with open_client(data_dir) as client:
        answer = client.request("POST", client.tenant_path(tenant) + "/salts/rotate")
    dropped = answer["dropped"]
    counts = (
        "no store answered: it drops the old blocks before its next request"
        if dropped is None
        else f"dropped {dropped['blocks']} blocks, {dropped['bytes']} bytes"
    )
    show(answer, as_json, f"salt of {tenant} is now epoch {answer['epoch']}; {counts}")
