"""`saltern keys`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.admin_cli.terminal import DataDir, Json, TenantOption, open_client, show, show_fields, show_rows

keys_app = typer.Typer(no_args_is_help=True, help="Create, list, show, change and delete a tenant's API keys.")

KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help="An id from `saltern keys list`.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print the key and nothing else.")]

COLUMNS = ("id", "name", "last4", "status", "created_at", "expires_at", "last_used_at")


@keys_app.command("create")
def create_key(
    tenant: TenantOption,
    data_dir: DataDir,
    name: Annotated[str | None, typer.Option(help="To tell it from others.")] = None,
    scopes: Annotated[
        list[str] | None,
        typer.Option(
            "--scope",
            metavar="SCOPE",
            help="What it may do: completions, cache:read or usage:read; may be repeated.",
            show_default="all",
        ),
    ] = None,
    expires_at: Annotated[
        str | None, typer.Option(metavar="TIME", help="When it ends, such as 2030-01-31T00:00:00Z.")
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Create an API key. It is shown once."""
    _check_form(quiet, as_json)
    asked = {"name": name, "expires_at": expires_at} | ({"scopes": scopes} if scopes else {})
    with open_client(data_dir) as client:
        key = client.request("POST", client.tenant_path(tenant) + "/keys", asked)
    _show_secret(key, quiet, as_json, f"created key {key['id']}")


@keys_app.command("list")
def list_keys(tenant: TenantOption, data_dir: DataDir, as_json: Json = False) -> None:
    """List a tenant's keys, without their secrets."""
    with open_client(data_dir) as client:
        show_rows(list(client.rows(client.tenant_path(tenant) + "/keys")), COLUMNS, as_json)


@keys_app.command("get")
def get_key(key_id: KeyArgument, tenant: TenantOption, data_dir: DataDir, as_json: Json = False) -> None:
    """Show one key, without its secret."""
    with open_client(data_dir) as client:
        show_fields(client.request("GET", client.key_path(tenant, key_id)), as_json)


@keys_app.command("disable")
def disable_key(key_id: KeyArgument, tenant: TenantOption, data_dir: DataDir, as_json: Json = False) -> None:
    """Refuse a key from the next request on, until it is enabled."""
    _set_status("disabled", key_id, tenant, data_dir, as_json)


@keys_app.command("enable")
def enable_key(key_id: KeyArgument, tenant: TenantOption, data_dir: DataDir, as_json: Json = False) -> None:
    """Accept a key again that was disabled."""
    _set_status("active", key_id, tenant, data_dir, as_json)


@keys_app.command("rotate")
def rotate_key(
    key_id: KeyArgument,
    tenant: TenantOption,
    data_dir: DataDir,
    grace_seconds: Annotated[int, typer.Option(help="How long the secret before this one is still accepted.")] = 0,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Give a key a new secret. It is shown once."""
    _check_form(quiet, as_json)
    with open_client(data_dir) as client:
        path = client.key_path(tenant, key_id) + "/rotate"
        key = client.request("POST", path, {"grace_seconds": grace_seconds})
    _show_secret(key, quiet, as_json, f"rotated key {key['id']}")


@keys_app.command("delete")
def delete_key(key_id: KeyArgument, tenant: TenantOption, data_dir: DataDir, as_json: Json = False) -> None:
    """Delete a key. The next request with it is refused."""
    with open_client(data_dir) as client:
        client.request("DELETE", client.key_path(tenant, key_id))
    show({"id": key_id, "deleted": True}, as_json, f"deleted key {key_id}")


def _set_status(status: str, key_id: str, tenant: str, data_dir: Path, as_json: bool) -> None:
    with open_client(data_dir) as client:
        key = client.request("PATCH", client.key_path(tenant, key_id), {"status": status})
    # An expired key stays one, whatever is set.
    show(key, as_json, f"key {key_id} is {key['status']}")


def _check_form(quiet: bool, as_json: bool) -> None:
    """Before a secret is made: it is shown once."""
    if quiet and as_json:
        raise typer.BadParameter("--quiet prints the key and nothing else: leave it or --json out")


def _show_secret(key: dict[str, Any], quiet: bool, as_json: bool, done: str) -> None:
    if quiet:
        typer.echo(key["secret"])
    else:
        show(key, as_json, f"{done}, shown this once:\n{key['secret']}")
