"""What an operator can choose. Each option is declared here once; its flag, its variable and its key in a file are one
name (`--cache-memory`, `SALTERN_CACHE_MEMORY`, `cache_memory`), and a command takes all of its options as one object.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from gateway.admin_client import default_data_dir
from gateway.settings import KeyPair, Settings, size_bytes, socket_path
from gateway.telemetry.names import MAX_TENANT_LABELS

LogLevel = Literal["debug", "info", "warning", "error"]


def _checked_size(text: str | None) -> str | None:
    if text is not None:
        size_bytes(text)
    return text


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    config: Annotated[
        Path | None,
        typer.Option(
            envvar="SALTERN_CONFIG", help="A TOML file of settings; default saltern.toml in the data directory, if any."
        ),
    ] = None
    data_dir: Annotated[
        Path,
        typer.Option(
            envvar="SALTERN_DATA_DIR",
            default_factory=default_data_dir,
            show_default="~/.local/share/saltern",
            help="Database, keys and socket.",
        ),
    ]
    socket: Annotated[
        Path | None, typer.Option(envvar="SALTERN_SOCKET", help="Default run/store.sock in the data directory.")
    ] = None
    log_level: Annotated[
        LogLevel, typer.Option(envvar="SALTERN_LOG_LEVEL", help="Of Saltern's own log, on stderr.")
    ] = "info"

    @property
    def directory(self) -> Path:
        """The data directory, absolute."""
        return self.data_dir.expanduser().absolute()

    @property
    def socket_path(self) -> Path:
        """Raises SettingsError: it is too long."""
        return socket_path(self.directory, self.socket)

    def effective(self) -> dict[str, object]:
        """All options by name, with the defaults that depend on the data directory. Raises SettingsError."""
        return dataclasses.asdict(self) | {"data_dir": self.directory, "socket": self.socket_path}


@dataclass(frozen=True, kw_only=True)
class DatabaseOptions(CommonOptions):
    """Of whoever opens the database."""

    database_url: Annotated[
        str | None, typer.Option(envvar="SALTERN_DATABASE_URL", help="Default saltern.db in the data directory.")
    ] = None
    kek_file: Annotated[
        Path | None, typer.Option(envvar="SALTERN_KEK_FILE", help="Default kek in the data directory.")
    ] = None

    @property
    def effective_database_url(self) -> str:
        return self.database_url or f"sqlite+aiosqlite:///{self.directory / 'saltern.db'}"

    @property
    def kek_path(self) -> Path:
        """The file of the key-encryption key, absolute."""
        return (self.kek_file or self.directory / "kek").expanduser().absolute()

    def effective(self) -> dict[str, object]:
        return super().effective() | {"database_url": self.effective_database_url, "kek_file": self.kek_path}


@dataclass(frozen=True, kw_only=True)
class GatewayOptions(DatabaseOptions):
    """Of the process that speaks HTTP."""

    model: Annotated[
        str | None,
        typer.Option(envvar="SALTERN_MODEL", help="A folder of the store's tokenizer files; default the store's."),
    ] = None
    model_name: Annotated[
        str | None, typer.Option(envvar="SALTERN_MODEL_NAME", help="What clients call it; default the folder's name.")
    ] = None
    host: Annotated[str, typer.Option(envvar="SALTERN_HOST", help="Address of the tenant API.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(envvar="SALTERN_PORT", min=0, max=65535, help="Of the tenant API.")] = 8000
    admin_port: Annotated[
        int, typer.Option(envvar="SALTERN_ADMIN_PORT", min=0, max=65535, help="Of the admin API, on loopback.")
    ] = 8001
    tls_cert: Annotated[
        Path | None, typer.Option(envvar="SALTERN_TLS_CERT", help="PEM: certificate and chain of the tenant API.")
    ] = None
    tls_key: Annotated[Path | None, typer.Option(envvar="SALTERN_TLS_KEY", help="PEM: its private key.")] = None
    admin_tls_cert: Annotated[
        Path | None, typer.Option(envvar="SALTERN_ADMIN_TLS_CERT", help="PEM: certificate and chain of the admin API.")
    ] = None
    admin_tls_key: Annotated[
        Path | None, typer.Option(envvar="SALTERN_ADMIN_TLS_KEY", help="PEM: its private key.")
    ] = None
    drain_seconds: Annotated[
        float,
        typer.Option(
            envvar="SALTERN_DRAIN_SECONDS", min=0, max=3600, help="How long running answers may take at the end."
        ),
    ] = 4.0
    tenant_metrics: Annotated[
        int,
        typer.Option(
            envvar="SALTERN_TENANT_METRICS",
            min=0,
            max=MAX_TENANT_LABELS,
            help="How many tenants have metrics of their own.",
        ),
    ] = 0

    def settings(self) -> Settings:
        """With the defaults that depend on the data directory.

        Raises:
            SettingsError: the socket's path is too long, or a certificate is without its key.
        """
        return Settings(
            data_dir=self.directory,
            database_url=self.effective_database_url,
            kek_file=self.kek_path,
            socket=self.socket_path,
            model=self.model,
            model_name=self.model_name,
            host=self.host,
            port=self.port,
            admin_port=self.admin_port,
            tls=KeyPair.of("--tls", self.tls_cert, self.tls_key),
            admin_tls=KeyPair.of("--admin-tls", self.admin_tls_cert, self.admin_tls_key),
            drain_seconds=self.drain_seconds,
            tenant_metrics=self.tenant_metrics,
        )

    def effective(self) -> dict[str, object]:
        self.settings()  # raises what a start would
        return super().effective()


@dataclass(frozen=True, kw_only=True)
class StoreOptions(CommonOptions):
    """Of the process that owns the accelerator."""

    model: Annotated[
        str | None,
        typer.Option(envvar="SALTERN_MODEL", help="A model folder or hub id; default SmolLM2-135M-Instruct."),
    ] = None
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(envvar="SALTERN_DEVICE")] = "auto"
    dtype: Annotated[
        Literal["auto", "fp32", "bf16", "fp16"],
        typer.Option(envvar="SALTERN_DTYPE", help="auto: fp32 on CPU, bf16 on CUDA."),
    ] = "auto"
    kv_dtype: Annotated[
        Literal["auto", "fp32", "bf16", "fp16", "int8", "fp8"],
        typer.Option(envvar="SALTERN_KV_DTYPE", help="Of the cache; auto: as the model."),
    ] = "auto"
    block_tokens: Annotated[
        int,
        typer.Option(envvar="SALTERN_BLOCK_TOKENS", help="8, 16, 32, 64 or 128: the smallest prefix that is reused."),
    ] = 16
    cache_memory: Annotated[
        str | None,
        typer.Option(
            envvar="SALTERN_CACHE_MEMORY",
            callback=_checked_size,
            help="Such as 4GiB; default 1GiB on CPU, 80 % of free memory on CUDA.",
        ),
    ] = None
    max_context: Annotated[
        int | None,
        typer.Option(envvar="SALTERN_MAX_CONTEXT", min=1, help="Tokens; default the lesser of model and cache."),
    ] = None
    max_running: Annotated[
        int | None, typer.Option(envvar="SALTERN_MAX_RUNNING", min=1, help="Requests; default 32 on CPU, 256 on CUDA.")
    ] = None
    step_tokens: Annotated[
        int | None, typer.Option(envvar="SALTERN_STEP_TOKENS", min=1, help="Tokens; default 256 on CPU, 2048 on CUDA.")
    ] = None
    eviction: Annotated[
        Literal["lru", "reuse"],
        typer.Option(
            envvar="SALTERN_EVICTION", help="Of a tenant's cached blocks: the least recently used, or by learnt reuse."
        ),
    ] = "lru"
    threads: Annotated[
        int | None, typer.Option(envvar="SALTERN_THREADS", min=1, help="Default: all physical cores.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class ServeOptions(StoreOptions, GatewayOptions):
    """Of both: all there are."""

    def store_arguments(self) -> list[str]:
        """The command line of the store that is started, which reads no file of its own."""
        names = {field.name for field in dataclasses.fields(StoreOptions)} - {"config", "data_dir"}
        chosen = [(name, value) for name, value in self.effective().items() if name in names and value is not None]
        return [
            "--config",
            "/dev/null",
            *(part for name, value in chosen for part in (f"--{name.replace('_', '-')}", str(value))),
        ]
