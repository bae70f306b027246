"""`saltern tenants`."""

from __future__ import annotations

from typing import Annotated

import typer

from gateway.admin_cli.terminal import DataDir, Json, open_client, show, show_fields, show_rows
from gateway.admin_client import TENANTS

tenants_app = typer.Typer(no_args_is_help=True, help="Create, list, show and delete tenants.")

TenantArgument = Annotated[str, typer.Argument(metavar="TENANT", help="Name or id.")]

COLUMNS = ("id", "name", "status", "created_at")


@tenants_app.command("create")
def create_tenant(
    name: Annotated[str, typer.Argument(help="1-64 of a-z, 0-9 and -.")], data_dir: DataDir, as_json: Json = False
) -> None:
    """Create a tenant with a salt of its own."""
    with open_client(data_dir) as client:
        tenant = client.request("POST", TENANTS, {"name": name})
    show(tenant, as_json, f"created tenant {tenant['name']} ({tenant['id']})")


@tenants_app.command("list")
def list_tenants(data_dir: DataDir, as_json: Json = False) -> None:
    """List all tenants."""
    with open_client(data_dir) as client:
        show_rows(list(client.rows(TENANTS)), COLUMNS, as_json)


@tenants_app.command("get")
def get_tenant(tenant: TenantArgument, data_dir: DataDir, as_json: Json = False) -> None:
    """Show one tenant."""
    with open_client(data_dir) as client:
        show_fields(client.request("GET", client.tenant_path(tenant)), as_json)


@tenants_app.command("delete")
def delete_tenant(tenant: TenantArgument, data_dir: DataDir, as_json: Json = False) -> None:
    """Delete a tenant, its keys, its salts and what is cached under them."""
    with open_client(data_dir) as client:
        path = client.tenant_path(tenant)
        client.request("DELETE", path)
    show({"id": path.rpartition("/")[2], "deleted": True}, as_json, f"deleted tenant {tenant}")
