"""The gateway's process: listeners, signals, and the order in which things start and end.

Start: certificates read → sockets bound → database, vault → listeners → store (as a child, for `serve`) → the store
connected → banner.
End: new work refused → running answers to their end or the deadline → listeners → store. A second signal ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import signal
import socket
import ssl
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

import uvicorn
import uvloop
from starlette.types import ASGIApp

from gateway.admin_client import default_data_dir
from gateway.app import Gateway, open_gateway
from gateway.http import connection
from gateway.served_model import ServedModel
from gateway.settings import Settings, SettingsError
from gateway.supervisor import StoreEnded, Supervisor, store_command
from gateway.telemetry.providers import Exporters
from gateway.telemetry.telemetry import Telemetry
from gateway.tenants.engines import CannotOpen
from gateway.tenants.vault import VaultError
from gateway.tls import server_context

log = logging.getLogger("saltern.gateway")

REFUSALS = (SettingsError, CannotOpen, VaultError)

KEEPALIVE_SECONDS = 75
# For listeners to end, once running answers had their time.
LISTENERS_END_SECONDS = 0.5
# How long the store of a gateway that was killed may take to end.
LAST_STORE_SECONDS = 5.0
# What the kernel may hold of an answer for a client that does not read; more waits in the process and is noticed.
SEND_BUFFER_BYTES = 128 << 10
ADMIN_HOST = "127.0.0.1"


def run(settings: Settings, store_arguments: Sequence[str] | None) -> int:
    """Serve until a signal; answers the exit status.

    Args:
        store_arguments: of a `saltern store` to start and watch; None to use one that runs by itself.

    Raises:
        SettingsError, CannotOpen, VaultError: one line why nothing was started.
    """
    # Every waiting connection takes a descriptor; the soft limit is made for programs that use select().
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings, store_arguments))


async def _serve(settings: Settings, store_arguments: Sequence[str] | None) -> int:
    tenant_tls, admin_tls = server_context(settings.tls), server_context(settings.admin_tls)
    tenant_socket = _bind("--port", settings.host, settings.port)
    admin_socket = _bind("--admin-port", ADMIN_HOST, settings.admin_port)
    stop = asyncio.Event()
    supervisors: list[Supervisor] = []
    _handle_signals(stop, supervisors)
    telemetry = _telemetry(settings)
    try:
        if store_arguments is not None:
            await _until_nobody_serves(settings.socket, stop)
        async with open_gateway(
            database_url=settings.database_url,
            kek_file=settings.kek_file,
            socket_path=settings.socket,
            # The store's own word is the directory; a gateway of its own may have the files elsewhere.
            model_dir=settings.model_dir if store_arguments is None else None,
            model_name=settings.model_name,
            telemetry=telemetry,
        ) as gateway:
            admin_key = await gateway.directory.ensure_first_admin_key(settings.data_dir)
            admin_url = _url(ADMIN_HOST, admin_socket, admin_tls)
            (settings.data_dir / "admin-url").write_text(admin_url + "\n")
            servers = [_server(gateway.tenant_app, tenant_tls), _server(gateway.admin_app, admin_tls)]
            listening = [
                asyncio.create_task(server.serve(sockets=[listener]))
                for server, listener in zip(servers, (tenant_socket, admin_socket), strict=True)
            ]
            if store_arguments is not None:
                command = store_command(store_arguments)
                supervisors.append(Supervisor(command, settings.socket, lambda: gateway.link.heard_at))
            else:
                log.info("waiting for a store at %s", settings.socket)
            watching = [asyncio.create_task(supervisor.run()) for supervisor in supervisors]
            announcing = asyncio.create_task(
                _announce(
                    gateway, supervisors, settings, _url(settings.host, tenant_socket, tenant_tls), admin_url, admin_key
                )
            )
            stopping = asyncio.create_task(stop.wait())
            try:
                await asyncio.wait((stopping, *watching, *listening), return_when=asyncio.FIRST_COMPLETED)
                for task in watching:
                    if task.done():
                        task.result()
            except StoreEnded as ended:
                # Its own line on stderr said why.
                return ended.code if ended.code > 0 else 1
            finally:
                announcing.cancel()
                stopping.cancel()
                if stop.is_set():
                    log.info("stopping: answers have %g s; a second signal ends at once", settings.drain_seconds)
                await gateway.completions.drain(settings.drain_seconds)
                for server in servers:
                    server.should_exit = server.force_exit = True
                for supervisor in supervisors:
                    supervisor.stop()
                await asyncio.wait(listening, timeout=LISTENERS_END_SECONDS)
                await asyncio.gather(*watching, return_exceptions=True)
    finally:
        await telemetry.close()
        tenant_socket.close()
        admin_socket.close()
    return 0


def _telemetry(settings: Settings) -> Telemetry:
    """Raises SettingsError: a variable of OpenTelemetry says what its library can't use."""
    try:
        return Telemetry(Exporters.from_environment(os.environ), tenant_labels=settings.tenant_metrics)
    except ValueError as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise SettingsError(
            f"OpenTelemetry can't use what one of the OTEL_ variables says ({reason}): correct it, or leave it out"
        ) from None


def _bind(option: str, host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named so that asyncio's transports turn Nagle's algorithm off.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        remedy = "--host" if error.errno == errno.EADDRNOTAVAIL else option
        raise SettingsError(f"can't listen on {host} port {port} ({reason}): choose another {remedy}") from None
    listener.listen(2048)
    listener.setblocking(False)
    return listener


async def _until_nobody_serves(path: Path, stop: asyncio.Event) -> None:
    """The store of a gateway that was killed is about to end: nobody is to be connected to it any more.

    Raises:
        SettingsError: another store serves there, and stays.
    """
    deadline = time.monotonic() + LAST_STORE_SECONDS
    while not stop.is_set() and _is_served(path):
        if time.monotonic() > deadline:
            raise SettingsError(f"another store serves at {path}: stop it, or choose another --socket")
        await asyncio.sleep(0.05)


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except BlockingIOError:
            # So many wait there already that it accepts nobody for the moment.
            pass
    return True


def _url(host: str, listener: socket.socket, tls: ssl.SSLContext | None) -> str:
    name = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{name}:{listener.getsockname()[1]}"


class _Server(uvicorn.Server):
    """uvicorn, without its signal handlers: one process has two of it and one order in which to end."""

    def __init__(self, config: uvicorn.Config, tls: ssl.SSLContext | None) -> None:
        super().__init__(config)
        self._tls = tls

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's own, which knows no deadlines for TLS."""
        make = partial(
            self.config.http_protocol_class,
            config=self.config,  # type: ignore[call-arg]
            server_state=self.server_state,
            app_state={},
        )
        self.servers = [
            await asyncio.get_running_loop().create_server(
                make,
                sock=listener,
                backlog=self.config.backlog,
                ssl=self._tls,
                ssl_handshake_timeout=connection.HEAD_SECONDS if self._tls else None,
                ssl_shutdown_timeout=connection.STALLED_READER_SECONDS if self._tls else None,
            )
            for listener in sockets or ()
        ]
        self.started = True


def _server(app: ASGIApp, tls: ssl.SSLContext | None = None) -> _Server:
    config = uvicorn.Config(
        app,
        http=connection.Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEPALIVE_SECONDS,
    )
    return _Server(config, tls)


def _handle_signals(stop: asyncio.Event, supervisors: list[Supervisor]) -> None:
    def on_signal() -> None:
        if stop.is_set():
            for supervisor in supervisors:
                supervisor.kill()
            os._exit(130)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)


async def _announce(
    gateway: Gateway, supervisors: list[Supervisor], settings: Settings, url: str, admin_url: str, admin_key: Path
) -> None:
    model = await gateway.link.first_model()
    for supervisor in supervisors:
        supervisor.settled()
    print(_banner(settings, model, url, admin_url, admin_key), flush=True)


def _banner(settings: Settings, model: ServedModel, url: str, admin_url: str, admin_key: Path) -> str:
    """What runs where, and lines that work when pasted into a second terminal."""
    geometry, limits = model.store.geometry, model.store.limits
    has_tls = settings.tls or settings.admin_tls
    activate = Path(sys.prefix) / "bin" / "activate"
    if model.template.exists:
        path, asked = "chat/completions", '"messages": [{"role": "user", "content": "What is salt made of?"}]'
        call, answer = "chat.completions", "message.content"
        argument = 'messages=[{"role": "user", "content": "What is salt made of?"}]'
    else:
        path, asked = "completions", '"prompt": "Salt is made of"'
        call, answer, argument = "completions", "text", 'prompt="Salt is made of"'
    body = f'{{"model": "{model.name}", {asked}, "max_tokens": 64}}'
    lines = [
        f"Saltern {version('saltern')}",
        f"  tenant API   {url}/v1",
        f"  admin API    {admin_url}/admin/v1 (key: {admin_key})",
        f"  model        {model.name} ({model.store.dtype}, context {limits.max_context_tokens} tokens)",
        f"  cache        {limits.blocks * geometry.block_tokens} tokens in {limits.blocks} blocks; the smallest prefix "
        f"that is reused is {geometry.block_tokens} tokens",
        f"  data         {settings.data_dir}",
        "",
        "In a second terminal:",
        "",
        *([f"source {activate}"] if activate.exists() else []),
        *([f"export SALTERN_DATA_DIR={settings.data_dir}"] if settings.data_dir != default_data_dir() else []),
        *(["# Where a certificate is of your own CA: export SSL_CERT_FILE=/path/to/ca.pem"] if has_tls else []),
        "saltern tenants create demo",
        "export OPENAI_API_KEY=$(saltern keys create --tenant demo --quiet)",
        f"""curl -s {url}/v1/{path} -H "Authorization: Bearer $OPENAI_API_KEY" """
        f"""-H 'Content-Type: application/json' -d '{body}'; echo""",
        "",
        "pip install --quiet openai",
        "python - <<'EOF'",
        "from openai import OpenAI",
        f'client = OpenAI(base_url="{url}/v1")',
        f'print(client.{call}.create(model="{model.name}", max_tokens=64, {argument}).choices[0].{answer})',
        "EOF",
        "",
        "Ctrl-C stops it.",
        "",
    ]
    return "\n".join(lines)
