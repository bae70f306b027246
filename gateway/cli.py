"""`saltern …`: the composition root. What is read from the command line and the environment becomes typed here, and
every refusal to start becomes one line and exit code 2.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from gateway.admin_cli.cache import cache_app
from gateway.admin_cli.keys import keys_app
from gateway.admin_cli.quotas import quotas_app
from gateway.admin_cli.salts import salts_app
from gateway.admin_cli.tenants import tenants_app
from gateway.admin_cli.usage import usage
from gateway.config_cli import config_app
from gateway.configured import command, refusals
from gateway.database_cli import db_app
from gateway.kek_cli import kek_app
from gateway.options import GatewayOptions, LogLevel, ServeOptions, StoreOptions
from gateway.settings import SettingsError, check_environment, prepare_data_dir, size_bytes

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="A multi-tenant LLM server with a tenant-isolated prefix cache.",
)
app.add_typer(tenants_app, name="tenants")
app.add_typer(keys_app, name="keys")
app.add_typer(salts_app, name="salts")
app.add_typer(quotas_app, name="quotas")
app.command("usage")(usage)
app.add_typer(cache_app, name="cache")
app.add_typer(config_app, name="config")
app.add_typer(db_app, name="db")
app.add_typer(kek_app, name="kek")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("saltern"))
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    with refusals():
        check_environment(os.environ, _setting_variables(context))


@command(app, "serve", ServeOptions)
def serve(options: ServeOptions) -> None:
    """Serve a model: a gateway that starts and watches its store."""
    with refusals():
        store_arguments = options.store_arguments()
    _run(options, fcntl.LOCK_EX, store_arguments)


@command(app, "gateway", GatewayOptions)
def gateway_only(options: GatewayOptions) -> None:
    """Serve through a store that was started with `saltern store`; waits for it, and finds it again."""
    _run(options, fcntl.LOCK_SH, None)


@dataclass(frozen=True, kw_only=True)
class StoreProcessOptions(StoreOptions):
    """Of a store that may have been started by a gateway."""

    prefix_cache: Annotated[
        bool, typer.Option(envvar="SALTERN_PREFIX_CACHE", help="Without it nothing is reused: for measurements.")
    ] = True
    life_descriptor: Annotated[int | None, typer.Option(hidden=True)] = None


@command(app, "store", StoreProcessOptions)
def store(options: StoreProcessOptions) -> None:
    """Run a store: the process that owns the accelerator, the model and the cache."""
    # The composition root: nothing else of the gateway sees this module of the store.
    from cachestore import cli

    _configure_logging(options.log_level)
    with refusals():
        if options.socket is None:
            prepare_data_dir(options.directory)
        store_options = cli.StoreOptions(
            model=options.model,
            socket=options.socket_path,
            device=options.device,
            dtype=options.dtype,
            kv_dtype=options.kv_dtype,
            block_tokens=options.block_tokens,
            cache_memory_bytes=None if options.cache_memory is None else size_bytes(options.cache_memory),
            max_context_tokens=options.max_context,
            max_running=options.max_running,
            step_tokens=options.step_tokens,
            eviction=options.eviction,
            prefix_cache=options.prefix_cache,
            threads=options.threads,
            life_descriptor=options.life_descriptor,
        )
    _end(cli.run_store(store_options, version("saltern")))


def main() -> None:
    app()


def _setting_variables(context: typer.Context) -> set[str]:
    """The environment variables that some option of some command reads."""
    group: Any = context.command
    variables = {parameter.envvar for command in group.commands.values() for parameter in command.params}
    return {variable for variable in variables if isinstance(variable, str)}


@contextmanager
def _locked(data_dir: Path, kind: int) -> Iterator[None]:
    """One `serve` per data directory; several gateways may share one, beside no `serve`."""
    with open(data_dir / "lock", "w") as file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingsError(
                f"another saltern runs on {data_dir}: stop it, or choose another --data-dir"
            ) from None
        yield


def _configure_logging(level: LogLevel) -> None:
    """Only Saltern's own loggers follow the level: at debug, those of libraries say what they send to a database."""
    chosen = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(
        level=max(logging.WARNING, chosen),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    logging.getLogger("saltern").setLevel(chosen)


def _run(options: GatewayOptions, lock: int, store_arguments: Sequence[str] | None) -> None:
    # Not before: the admin commands have no use for a server, and start in a third of the time without it.
    from gateway import process

    _configure_logging(options.log_level)
    with refusals(process.REFUSALS):
        settings = options.settings()
        prepare_data_dir(settings.data_dir)
        with _locked(settings.data_dir, lock):
            status = process.run(settings, store_arguments)
    _end(status)


def _end(status: int) -> NoReturn:
    """End the process, whose work was ended in order, now.

    Else the interpreter takes its modules apart, half a second for a gateway and more than one for a store, and waits
    for threads that tokenise, which can't be told to stop.
    """
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
