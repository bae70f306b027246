"""`saltern usage`."""

from __future__ import annotations

from typing import Annotated

import typer

from gateway.admin_cli.terminal import DataDir, Json, TenantOption, open_client, show, table

COLUMNS = ("start", "requests", "input_tokens", "cached_tokens", "output_tokens", "cost")


def usage(
    tenant: TenantOption,
    data_dir: DataDir,
    bucket: Annotated[str, typer.Option(metavar="hour|day", help="What a line sums up, in UTC.")] = "day",
    start: Annotated[
        str | None, typer.Option(metavar="TIME", help="RFC 3339.", show_default="30 days before the end")
    ] = None,
    end: Annotated[
        str | None, typer.Option(metavar="TIME", help="RFC 3339, such as 2030-01-31T00:00:00Z.", show_default="now")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what a tenant has used: requests, tokens, and their cost as budgets count it."""
    span = {"start": start, "end": end}
    query = {"bucket": bucket} | {name: value for name, value in span.items() if value is not None}
    with open_client(data_dir) as client:
        used = client.request("GET", client.tenant_path(tenant) + "/usage", query=query)
    show(used, as_json, table([*used["data"], {"start": "total", **used["total"]}], COLUMNS))
