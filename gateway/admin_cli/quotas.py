"""`saltern quotas`: the limits of a tenant, or of one of its keys."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from gateway.admin_cli.terminal import DataDir, Json, TenantOption, open_client, show_fields
from gateway.admin_client import AdminClient
from gateway.flags import with_flags

quotas_app = typer.Typer(no_args_is_help=True, help="Show and set the limits of a tenant, or of one of its keys.")

NONE = "none"


@dataclass(frozen=True)
class Limit:
    """One that was given; None is unlimited."""

    value: int | None


def _limit(text: str) -> Limit:
    try:
        return Limit(None if text == NONE else int(text))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a whole number nor {NONE}") from None


LimitOption = Annotated[Limit | None, typer.Option(parser=_limit, metavar=f"N|{NONE}")]


@dataclass(frozen=True, kw_only=True)
class Scope:
    tenant: TenantOption
    key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Of this key, by its id; else those of the tenant.")
    ] = None
    data_dir: DataDir
    as_json: Json = False

    def path(self, client: AdminClient) -> str:
        owner = client.tenant_path(self.tenant) if self.key is None else client.key_path(self.tenant, self.key)
        return owner + "/quotas"


@dataclass(frozen=True, kw_only=True)
class Changes(Scope):
    """What is to be set, by the names of the API; None is left as it is."""

    requests_per_minute: LimitOption = None
    tokens_per_minute: LimitOption = None
    concurrent_requests: LimitOption = None
    tokens_per_day: LimitOption = None
    tokens_per_month: LimitOption = None
    time_zone: Annotated[
        str | None, typer.Option(metavar="ZONE", help="Whose days and months count, such as Europe/Berlin.")
    ] = None
    max_context_tokens: LimitOption = None
    max_output_tokens: LimitOption = None
    cached_token_weight: Annotated[
        int | None, typer.Option(metavar="N", help="Cost of a cached prompt token, in thousandths of a token.")
    ] = None
    device_reserved_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Of the cache, for this tenant alone.")
    ] = None
    device_max_tokens: LimitOption = None
    weight: Annotated[
        float | None, typer.Option(metavar="N", help="Of its part in what nobody has reserved, 1 at first.")
    ] = None
    strict: Annotated[
        bool | None,
        typer.Option("--strict/--no-strict", help="Neither lend nor borrow; all that is reserved is the maximum too."),
    ] = None
    queue_wait_seconds: Annotated[
        int | None, typer.Option(metavar="N", help="How long a request may wait to be admitted.")
    ] = None
    models: Annotated[
        list[str] | None,
        typer.Option("--model", metavar=f"MODEL|{NONE}", help=f"May be used; may be repeated, {NONE} is all."),
    ] = None

    def patch(self) -> dict[str, Any]:
        given = {
            field.name: value
            for field in dataclasses.fields(self)
            if field.name not in Scope.__dataclass_fields__ and (value := getattr(self, field.name)) is not None
        }
        if not given:
            raise typer.BadParameter("nothing to set: give a limit, such as --tokens-per-day 1000000")
        if self.models is not None and NONE in self.models:
            if len(self.models) > 1:
                raise typer.BadParameter(f"--model {NONE} is all models: leave it or the others out")
            given["models"] = None
        return {name: value.value if isinstance(value, Limit) else value for name, value in given.items()}


@quotas_app.command("get")
@with_flags(Scope)
def get_quotas(scope: Scope) -> None:
    """Show all limits."""
    with open_client(scope.data_dir) as client:
        show_fields(client.request("GET", scope.path(client)), scope.as_json, "unlimited")


@quotas_app.command("set")
@with_flags(Changes)
def set_quotas(changes: Changes) -> None:
    """Set the limits that are given, `none` for unlimited, and show all. What was used stays counted."""
    patch = changes.patch()
    with open_client(changes.data_dir) as client:
        show_fields(client.request("PATCH", changes.path(client), patch), changes.as_json, "unlimited")
