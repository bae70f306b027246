"""Gateway and store in one process: real database, real socket, real engine; only the model computes nothing.

So that thousands of requests take seconds, and a test can look at the index and act between two steps of a request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from msgspec.structs import replace

from cachestore.engine import Engine
from cachestore.protocol import Geometry, Limits, Welcome
from cachestore.server import StoreServer
from gateway.app import Gateway, open_gateway
from gateway.prompt.model_files import read_model_files
from gateway.telemetry.providers import Exporters
from gateway.telemetry.telemetry import Telemetry
from tests.cachestore.support import RememberingRunner

BLOCK_TOKENS = 16
BLOCK_BYTES = 512
# In fact much less: more only where the machine is busy.
PATIENCE_SECONDS = 20.0


async def until(condition: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
    """Wait for what another thread or task brings about."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so within {seconds} s"
        await asyncio.sleep(0.001)


@dataclass(frozen=True)
class Customer:
    """A tenant with one key."""

    id: str
    key: str
    account: bytes

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}


@dataclass
class InProcess:
    """`http` reaches the tenant API without a credential, `admin` the admin API with the first admin key."""

    gateway: Gateway
    store: StoreServer
    runner: RememberingRunner
    http: httpx.AsyncClient
    admin: httpx.AsyncClient
    model: str

    @property
    def engine(self) -> Engine:
        return self.store.engine

    async def customer(self, name: str) -> Customer:
        created = (await self.admin.post("/admin/v1/tenants", json={"name": name})).json()
        key = (await self.admin.post(f"/admin/v1/tenants/{created['id']}/keys", json={})).json()
        principal = await self.gateway.directory.authenticate([(b"x-api-key", key["secret"].encode())])
        return Customer(created["id"], key["secret"], principal.account)

    async def rotate(self, customer: Customer) -> dict[str, Any]:
        answer = await self.admin.post(f"/admin/v1/tenants/{customer.id}/salts/rotate")
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        return body

    async def complete(self, customer: Customer, prompt: list[int]) -> httpx.Response:
        body = {"model": self.model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        return await self.http.post("/v1/completions", json=body, headers=customer.headers)

    async def cached_tokens(self, customer: Customer, prompt: list[int]) -> int:
        answer = await self.complete(customer, prompt)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    def blocks(self, account: bytes) -> dict[int, set[int]]:
        """Which blocks the index has of an account, by epoch. To be asked while nothing runs."""
        found: dict[int, set[int]] = {}
        for name, block in self.engine.index.names():
            if name.account == account:
                found.setdefault(name.epoch, set()).add(block)
        return found

    async def check(self, seconds: float = PATIENCE_SECONDS) -> None:
        """Once the store knows of no request: blocks, index and tables agree, and none read what another account or
        epoch wrote. An answer reaches its client before the last `Seal` reaches the engine's thread.
        """
        await until(lambda: not self.engine._sequences, seconds)
        self.engine.check()
        assert self.runner.mistakes == []


@asynccontextmanager
async def in_process(
    data_dir: Path,
    model_dir: Path,
    blocks: int = 4096,
    *,
    runner: RememberingRunner | None = None,
    telemetry: Telemetry | None = None,
    database_url: str | None = None,
    **limited: int,
) -> AsyncIterator[InProcess]:
    """A gateway connected to a store of `blocks` blocks, until the block ends.

    Args:
        data_dir: for the database, the key file and the socket.
        model_dir: whose tokenizer the gateway uses.
        runner: what computes instead of the usual double.
        telemetry: what is told of requests; nobody hears of them otherwise.
        database_url: of another database than a file in `data_dir`.
        limited: fields of `Limits` that are not as usual.
    """
    runner = runner or RememberingRunner(BLOCK_TOKENS)
    usual = Limits(
        blocks=blocks, max_context_tokens=2048, max_running=256, step_tokens=4096, vocabulary_tokens=49152
    )
    limits = replace(usual, **limited)
    geometry = Geometry(
        layers=1,
        kv_heads=1,
        key_dim=4,
        value_dim=4,
        block_tokens=BLOCK_TOKENS,
        kv_dtype="fp32",
        layout_version=1,
        rope_context_tokens=0,
        bytes_per_token=BLOCK_BYTES // BLOCK_TOKENS,
    )
    welcome = Welcome(
        store="in-process",
        model_dir=str(model_dir),
        model_fingerprint=bytes(32),
        tokenizer_fingerprint=read_model_files(model_dir).fingerprint,
        geometry=geometry,
        dtype="fp32",
        limits=limits,
    )

    def make_engine(emit: Any) -> Engine:
        return Engine(
            runner,
            limits=limits,
            block_tokens=BLOCK_TOKENS,
            block_bytes=BLOCK_BYTES,
            emit=emit,
            clock_ns=time.monotonic_ns,
        )

    store, stopped = StoreServer(data_dir / "run" / "store.sock", welcome, make_engine), asyncio.Event()
    serving = asyncio.create_task(store.serve(stopped))
    try:
        async with (
            open_gateway(
                database_url=database_url or f"sqlite+aiosqlite:///{data_dir / 'saltern.db'}",
                kek_file=data_dir / "kek",
                socket_path=store.socket_path,
                telemetry=telemetry or Telemetry(Exporters()),
            ) as gateway,
            _reached(gateway, store, runner, data_dir) as inside,
        ):
            yield inside
    finally:
        stopped.set()
        await serving


@asynccontextmanager
async def second_gateway(
    first: InProcess, data_dir: Path, *, database_url: str | None = None
) -> AsyncIterator[InProcess]:
    """Another gateway on the same database, key file and store as `first`, which was made with these arguments."""
    async with (
        open_gateway(
            database_url=database_url or f"sqlite+aiosqlite:///{data_dir / 'saltern.db'}",
            kek_file=data_dir / "kek",
            socket_path=first.store.socket_path,
            telemetry=Telemetry(Exporters()),
        ) as gateway,
        _reached(gateway, first.store, first.runner, data_dir) as inside,
    ):
        yield inside


@asynccontextmanager
async def _reached(
    gateway: Gateway, store: StoreServer, runner: RememberingRunner, data_dir: Path
) -> AsyncIterator[InProcess]:
    async with _client(gateway.tenant_app) as http, _client(gateway.admin_app) as admin:
        key = (await gateway.directory.ensure_first_admin_key(data_dir)).read_text().strip()
        admin.headers["authorization"] = f"Bearer {key}"
        await gateway.link.connected.wait()
        yield InProcess(gateway, store, runner, http, admin, gateway.link.connection().model.name)


def _client(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://saltern", timeout=60)
