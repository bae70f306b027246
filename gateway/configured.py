"""Commands whose options come from the command line, the environment and a file, in this order, and then defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand

from gateway.config_file import check_values, config_path, read_config
from gateway.flags import with_flags
from gateway.options import CommonOptions
from gateway.settings import SettingsError

EXIT_REFUSED = 2

OptionsT = TypeVar("OptionsT", bound=CommonOptions)


@contextmanager
def refusals(kinds: tuple[type[Exception], ...] = (SettingsError,)) -> Iterator[None]:
    """What makes a start impossible is one line on stderr and exit code 2."""
    try:
        yield
    except kinds as error:
        typer.echo(f"saltern: {error}", err=True)
        raise typer.Exit(EXIT_REFUSED) from None


class ConfiguredCommand(TyperCommand):
    """A command that takes what the file says as its defaults, so that flags and the environment come before it."""

    # typer takes click's context from one place in one version and from another in the next.
    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        with refusals():
            if "--help" not in args:
                # Refuses nothing: what is wrong with the command line is said below.
                given = super().make_context(info_name, list(args), parent, resilient_parsing=True).params
                config, data_dir = given.get("config"), given["data_dir"]
                extra["default_map"] = read_config(config, data_dir)
                commands = parent.find_root().command.commands
                options = {option.name: option for option in commands["serve"].params}
                check_values(config_path(config, data_dir), extra["default_map"], options, parent)
            return super().make_context(info_name, args, parent, **extra)


def command(
    app: typer.Typer, name: str, options: type[OptionsT]
) -> Callable[[Callable[[OptionsT], None]], Callable[[OptionsT], None]]:
    """Make a function a command whose flags are the fields of the one object it takes."""

    def register(run: Callable[[OptionsT], None]) -> Callable[[OptionsT], None]:
        app.command(name, cls=ConfiguredCommand)(with_flags(options)(run))
        return run

    return register
