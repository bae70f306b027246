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
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from gateway.admin_cli import keys_app, salts_app, tenants_app
from gateway.admin_client import default_data_dir
from gateway.settings import (
    DeviceChoice,
    DTypeChoice,
    Settings,
    SettingsError,
    check_environment,
    prepare_data_dir,
    size_bytes,
    socket_path,
)

EXIT_REFUSED = 2

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="A multi-tenant LLM server with a tenant-isolated prefix cache.",
)
app.add_typer(tenants_app, name="tenants")
app.add_typer(keys_app, name="keys")
app.add_typer(salts_app, name="salts")

DataDir = Annotated[
    Path,
    typer.Option(
        envvar="SALTERN_DATA_DIR",
        default_factory=default_data_dir,
        show_default="~/.local/share/saltern",
        help="Database, keys and socket.",
    ),
]
DatabaseUrl = Annotated[
    str | None, typer.Option(envvar="SALTERN_DATABASE_URL", help="Default saltern.db in the data directory.")
]
KekFile = Annotated[
    Path | None, typer.Option(envvar="SALTERN_KEK_FILE", help="Default kek in the data directory.")
]
Socket = Annotated[
    Path | None, typer.Option(envvar="SALTERN_SOCKET", help="Default run/store.sock in the data directory.")
]
Model = Annotated[
    str | None, typer.Option(envvar="SALTERN_MODEL", help="A model folder or hub id; default SmolLM2-135M-Instruct.")
]
TokenizerDir = Annotated[
    str | None,
    typer.Option(envvar="SALTERN_MODEL", help="A folder with the store's tokenizer files; default the store's own."),
]
ModelName = Annotated[
    str | None, typer.Option(envvar="SALTERN_MODEL_NAME", help="What clients call it; default the folder's name.")
]
Host = Annotated[str, typer.Option(envvar="SALTERN_HOST", help="Address of the tenant API.")]
Port = Annotated[int, typer.Option(envvar="SALTERN_PORT", min=0, max=65535, help="Of the tenant API.")]
AdminPort = Annotated[
    int, typer.Option(envvar="SALTERN_ADMIN_PORT", min=0, max=65535, help="Of the admin API, on loopback.")
]
Drain = Annotated[
    float, typer.Option(envvar="SALTERN_DRAIN_SECONDS", min=0, help="How long running answers may take at the end.")
]
Device = Annotated[DeviceChoice, typer.Option(envvar="SALTERN_DEVICE")]
DType = Annotated[DTypeChoice, typer.Option(envvar="SALTERN_DTYPE", help="auto: fp32 on CPU, bf16 on CUDA.")]
BlockTokens = Annotated[
    int, typer.Option(envvar="SALTERN_BLOCK_TOKENS", help="8, 16, 32, 64 or 128: the smallest prefix that is reused.")
]
CacheMemory = Annotated[
    str | None,
    typer.Option(envvar="SALTERN_CACHE_MEMORY", help="Such as 4GiB; default 1GiB on CPU, 80 % of free memory on CUDA."),
]
MaxContext = Annotated[
    int | None, typer.Option(envvar="SALTERN_MAX_CONTEXT", min=1, help="Tokens; default the lesser of model and cache.")
]
MaxRunning = Annotated[
    int | None, typer.Option(envvar="SALTERN_MAX_RUNNING", min=1, help="Requests; default 32 on CPU, 256 on CUDA.")
]
StepTokens = Annotated[
    int | None, typer.Option(envvar="SALTERN_STEP_TOKENS", min=1, help="Tokens; default 256 on CPU, 2048 on CUDA.")
]
Threads = Annotated[int | None, typer.Option(envvar="SALTERN_THREADS", min=1, help="Default: all physical cores.")]
LifeDescriptor = Annotated[int | None, typer.Option(hidden=True)]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("saltern"))
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    with _refusals():
        check_environment(os.environ, _setting_variables())


@app.command()
def serve(
    data_dir: DataDir,
    model: Model = None,
    model_name: ModelName = None,
    database_url: DatabaseUrl = None,
    kek_file: KekFile = None,
    socket: Socket = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    admin_port: AdminPort = 8001,
    device: Device = "auto",
    dtype: DType = "auto",
    block_tokens: BlockTokens = 16,
    cache_memory: CacheMemory = None,
    max_context: MaxContext = None,
    max_running: MaxRunning = None,
    step_tokens: StepTokens = None,
    threads: Threads = None,
    drain_seconds: Drain = 4.0,
) -> None:
    """Serve a model: a gateway that starts and watches its store."""
    with _refusals():
        settings = Settings.of(
            data_dir=data_dir,
            database_url=database_url,
            kek_file=kek_file,
            socket=socket,
            model=model,
            model_name=model_name,
            host=host,
            port=port,
            admin_port=admin_port,
            drain_seconds=drain_seconds,
        )
        if cache_memory is not None:
            size_bytes(cache_memory)
        store_options: dict[str, object] = {
            "--socket": settings.socket,
            "--model": model,
            "--device": device,
            "--dtype": dtype,
            "--block-tokens": block_tokens,
            "--cache-memory": cache_memory,
            "--max-context": max_context,
            "--max-running": max_running,
            "--step-tokens": step_tokens,
            "--threads": threads,
        }
        arguments = [part for name, value in store_options.items() if value is not None for part in (name, str(value))]
        with _locked(settings.data_dir, fcntl.LOCK_EX):
            _run(settings, arguments)


@app.command("gateway")
def gateway_only(
    data_dir: DataDir,
    model: TokenizerDir = None,
    model_name: ModelName = None,
    database_url: DatabaseUrl = None,
    kek_file: KekFile = None,
    socket: Socket = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    admin_port: AdminPort = 8001,
    drain_seconds: Drain = 4.0,
) -> None:
    """Serve through a store that was started with `saltern store`; waits for it, and finds it again."""
    with _refusals():
        settings = Settings.of(
            data_dir=data_dir,
            database_url=database_url,
            kek_file=kek_file,
            socket=socket,
            model=model,
            model_name=model_name,
            host=host,
            port=port,
            admin_port=admin_port,
            drain_seconds=drain_seconds,
        )
        with _locked(settings.data_dir, fcntl.LOCK_SH):
            _run(settings, None)


@app.command()
def store(
    data_dir: DataDir,
    socket: Socket = None,
    model: Model = None,
    device: Device = "auto",
    dtype: DType = "auto",
    block_tokens: BlockTokens = 16,
    cache_memory: CacheMemory = None,
    max_context: MaxContext = None,
    max_running: MaxRunning = None,
    step_tokens: StepTokens = None,
    threads: Threads = None,
    life_descriptor: LifeDescriptor = None,
) -> None:
    """Run a store: the process that owns the accelerator, the model and the cache."""
    # The composition root: nothing else of the gateway sees this module of the store.
    from cachestore.cli import StoreOptions, run_store

    _configure_logging()
    with _refusals():
        if socket is None:
            data_dir = data_dir.expanduser().absolute()
            prepare_data_dir(data_dir)
        options = StoreOptions(
            model=model,
            socket=socket_path(data_dir, socket),
            device=device,
            dtype=dtype,
            block_tokens=block_tokens,
            cache_memory_bytes=None if cache_memory is None else size_bytes(cache_memory),
            max_context_tokens=max_context,
            max_running=max_running,
            step_tokens=step_tokens,
            threads=threads,
            life_descriptor=life_descriptor,
        )
    _end(run_store(options, version("saltern")))


def main() -> None:
    app()


def _setting_variables() -> set[str]:
    """The environment variables that some option of some command reads."""
    commands = typer.main.get_group(app).commands.values()
    variables = {parameter.envvar for command in commands for parameter in command.params}
    return {variable for variable in variables if isinstance(variable, str)}


@contextmanager
def _refusals(kinds: tuple[type[Exception], ...] = (SettingsError,)) -> Iterator[None]:
    """What makes a start impossible is one line on stderr and exit code 2."""
    try:
        yield
    except kinds as error:
        typer.echo(f"saltern: {error}", err=True)
        raise typer.Exit(EXIT_REFUSED) from None


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


def _configure_logging() -> None:
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    logging.getLogger("saltern").setLevel(logging.INFO)


def _run(settings: Settings, store_arguments: Sequence[str] | None) -> None:
    # Not before: the admin commands have no use for a server, and start in a third of the time without it.
    from gateway import process

    _configure_logging()
    with _refusals(process.REFUSALS):
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
