"""`saltern config show`: what a command would run with, and where each value comes from."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from gateway.config_file import KEYS, config_path
from gateway.configured import refusals
from gateway.options import CommonOptions, GatewayOptions, ServeOptions, StoreOptions
from gateway.settings import HIDDEN

config_app = typer.Typer(no_args_is_help=True, help="Show the settings that are in force.")

# How the command line calls where a value comes from, and how we do.
_SOURCES = {"COMMANDLINE": "flag", "ENVIRONMENT": "environment", "DEFAULT_MAP": "file", "DEFAULT": "default"}
_OPTIONS: dict[str, type[CommonOptions]] = {"serve": ServeOptions, "gateway": GatewayOptions, "store": StoreOptions}


@config_app.callback()
def config() -> None:
    # Without it, typer would take the only command for the whole of `saltern config`.
    pass


@config_app.command("show", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def show(
    context: typer.Context,
    command: Annotated[
        Literal["serve", "gateway", "store"], typer.Option(help="The command whose settings are shown.")
    ] = "serve",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print what `saltern serve` would run with, as TOML, and where each value comes from; passwords are hidden.

    Options of that command can be added, and count as they would there: saltern config show --data-dir DIR.
    """
    root: Any = context.find_root()
    with refusals():
        chosen = root.command.commands[command].make_context(command, context.args, parent=root)
        kind = _OPTIONS[command]
        options = kind(**{field.name: chosen.params[field.name] for field in dataclasses.fields(kind)})
        values = {name: _shown(name, value) for name, value in options.effective().items() if name in KEYS}
    file = config_path(options.config, options.data_dir)
    sources = {name: _SOURCES[chosen.get_parameter_source(name).name] for name in values}
    if as_json:
        settings = {name: {"value": values[name], "source": sources[name]} for name in values}
        typer.echo(json.dumps({"command": command, "file": str(file) if file.exists() else None, "settings": settings}))
        return
    typer.echo(f"# saltern {command}; the file is {file}" + ("" if file.exists() else ", which is not there"))
    helps = {option.name: option.help for option in chosen.command.params}
    for name, value in values.items():
        if value is None:
            typer.echo(f"# {name} is not set. {helps[name]}")
            continue
        line = f"{name} = {_toml(value)}"
        # The file of a data directory can't move it, and what is hidden is no value.
        is_comment = name == "data_dir" or HIDDEN in str(value)
        typer.echo(f"{'# ' if is_comment else ''}{line:<40} # {sources[name]}")


def _shown(name: str, value: object) -> object:
    if name == "database_url":
        # Only here: SQLAlchemy is slow to come.
        from gateway.tenants.database_url import without_secrets

        return without_secrets(str(value))
    return str(value) if isinstance(value, Path) else value


def _toml(value: object) -> str:
    # JSON's text in quotes is TOML's, but for one character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
