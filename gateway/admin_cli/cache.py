"""`saltern cache`: what the store has of a tenant."""

from __future__ import annotations

import typer

from gateway.admin_cli.terminal import DataDir, Json, TenantOption, open_client, show

cache_app = typer.Typer(no_args_is_help=True, help="Show and flush what is cached for a tenant.")


@cache_app.command("get")
def get_cache(tenant: TenantOption, data_dir: DataDir, as_json: Json = False) -> None:
    """Show what a tenant has of the cache, what it may have, and how much of its prompts was found there."""
    with open_client(data_dir) as client:
        answer = client.request("GET", client.tenant_path(tenant) + "/cache")
    device = {f"device_{name}": value for name, value in answer["device"].items()}
    fields = device | {name: answer[name] for name in ("hit_tokens", "miss_tokens")}
    lines = (f"{name}: {'unlimited' if value is None else value}" for name, value in fields.items())
    show(answer, as_json, "\n".join(lines))


@cache_app.command("flush")
def flush_cache(tenant: TenantOption, data_dir: DataDir, as_json: Json = False) -> None:
    """Drop all that is cached for a tenant. Running requests go on; the salt stays."""
    with open_client(data_dir) as client:
        dropped = client.request("DELETE", client.tenant_path(tenant) + "/cache")
    show(dropped, as_json, f"dropped {dropped['blocks']} blocks, {dropped['bytes']} bytes")
