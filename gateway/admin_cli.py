"""`saltern tenants`, `saltern keys` and `saltern salts`: a client of the admin API."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.admin_client import TENANTS, AdminClient, AdminClientError, default_data_dir

tenants_app = typer.Typer(no_args_is_help=True, help="Create, list, show and delete tenants.")
keys_app = typer.Typer(no_args_is_help=True, help="Create, list and delete a tenant's API keys.")
salts_app = typer.Typer(no_args_is_help=True, help="List and rotate a tenant's salts.")

DataDir = Annotated[
    Path,
    typer.Option(
        envvar="SALTERN_DATA_DIR",
        default_factory=default_data_dir,
        show_default="~/.local/share/saltern",
        help="Its admin-url and admin-key are used unless SALTERN_ADMIN_URL and SALTERN_ADMIN_KEY are set.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, as the admin API answers; lists whole.")]
TenantArgument = Annotated[str, typer.Argument(metavar="TENANT", help="Name or id.")]
TenantOption = Annotated[str, typer.Option("--tenant", help="Name or id.")]

TENANT_COLUMNS = ("id", "name", "status", "created_at")
KEY_COLUMNS = ("id", "name", "last4", "status", "created_at", "expires_at")
SALT_COLUMNS = ("epoch", "state", "created_at", "blocks", "bytes")


@tenants_app.command("create")
def create_tenant(
    name: Annotated[str, typer.Argument(help="1-64 of a-z, 0-9 and -.")], data_dir: DataDir, as_json: Json = False
) -> None:
    """Create a tenant with a salt of its own."""
    with _client(data_dir) as client:
        tenant = client.request("POST", TENANTS, {"name": name})
    _print(tenant, as_json, f"created tenant {tenant['name']} ({tenant['id']})")


@tenants_app.command("list")
def list_tenants(data_dir: DataDir, as_json: Json = False) -> None:
    """List all tenants."""
    with _client(data_dir) as client:
        _print_rows(list(client.rows(TENANTS)), TENANT_COLUMNS, as_json)


@tenants_app.command("get")
def get_tenant(tenant: TenantArgument, data_dir: DataDir, as_json: Json = False) -> None:
    """Show one tenant."""
    with _client(data_dir) as client:
        found = client.request("GET", client.tenant_path(tenant))
    _print(found, as_json, "\n".join(f"{field}: {value}" for field, value in found.items()))


@tenants_app.command("delete")
def delete_tenant(tenant: TenantArgument, data_dir: DataDir, as_json: Json = False) -> None:
    """Delete a tenant, its keys, its salts and what is cached under them."""
    with _client(data_dir) as client:
        path = client.tenant_path(tenant)
        client.request("DELETE", path)
    _print({"id": path.rpartition("/")[2], "deleted": True}, as_json, f"deleted tenant {tenant}")


@keys_app.command("create")
def create_key(
    tenant: TenantOption,
    data_dir: DataDir,
    name: Annotated[str | None, typer.Option(help="To tell it from others.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the key and nothing else.")] = False,
    as_json: Json = False,
) -> None:
    """Create an API key. It is shown once."""
    if quiet and as_json:
        raise typer.BadParameter("--quiet prints the key and nothing else: leave it or --json out")
    with _client(data_dir) as client:
        key = client.request("POST", client.tenant_path(tenant) + "/keys", {"name": name})
    if quiet:
        typer.echo(key["secret"])
    else:
        _print(key, as_json, f"created key {key['id']}, shown this once:\n{key['secret']}")


@keys_app.command("list")
def list_keys(tenant: TenantOption, data_dir: DataDir, as_json: Json = False) -> None:
    """List a tenant's keys, without their secrets."""
    with _client(data_dir) as client:
        _print_rows(list(client.rows(client.tenant_path(tenant) + "/keys")), KEY_COLUMNS, as_json)


@keys_app.command("delete")
def delete_key(
    key_id: Annotated[str, typer.Argument(metavar="KEY", help="An id from `saltern keys list`.")],
    tenant: TenantOption,
    data_dir: DataDir,
    as_json: Json = False,
) -> None:
    """Delete a key. The next request with it is refused."""
    with _client(data_dir) as client:
        client.request("DELETE", client.key_path(tenant, key_id))
    _print({"id": key_id, "deleted": True}, as_json, f"deleted key {key_id}")


@salts_app.command("list")
def list_salts(tenant: TenantOption, data_dir: DataDir, as_json: Json = False) -> None:
    """List a tenant's salts by epoch. The salts themselves are never shown."""
    with _client(data_dir) as client:
        _print_rows(list(client.rows(client.tenant_path(tenant) + "/salts")), SALT_COLUMNS, as_json)


@salts_app.command("rotate")
def rotate_salt(tenant: TenantOption, data_dir: DataDir, as_json: Json = False) -> None:
    """Make all that is cached for a tenant unreachable, before this returns."""
    with _client(data_dir) as client:
        answer = client.request("POST", client.tenant_path(tenant) + "/salts/rotate")
    dropped = answer["dropped"]
    counts = (
        "no store answered: it drops the old blocks before its next request"
        if dropped is None
        else f"dropped {dropped['blocks']} blocks, {dropped['bytes']} bytes"
    )
    _print(answer, as_json, f"salt of {tenant} is now epoch {answer['epoch']}; {counts}")


@contextmanager
def _client(data_dir: Path) -> Iterator[AdminClient]:
    try:
        yield AdminClient.open(data_dir)
    except AdminClientError as error:
        typer.echo(f"saltern: {error}", err=True)
        raise typer.Exit(1) from None


def _print(answer: Any, as_json: bool, text: str) -> None:
    typer.echo(json.dumps(answer, indent=2) if as_json else text)


def _print_rows(rows: Sequence[dict[str, Any]], columns: Sequence[str], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"data": rows, "next_cursor": None}, indent=2))
        return
    table = [columns, *[["-" if row[column] is None else str(row[column]) for column in columns] for row in rows]]
    widths = [max(len(line[index]) for line in table) for index in range(len(columns))]
    for line in table:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
