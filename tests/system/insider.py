"""What no tenant has: the secrets behind the names of blocks, a seat at the store's socket, and the database file."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from cachestore.client import StoreClient
from cachestore.protocol import Finished, Rejected, Sampling, Started, Welcome
from gateway.tenants.database import Database
from gateway.tenants.directory import Directory
from tests.gateway import second_naming
from tests.system.support import Server, Tenant

T = TypeVar("T")


@dataclass(frozen=True)
class Secrets:
    """A tenant's, as they are at the moment."""

    account: bytes
    epoch: int
    salt: bytes
    offload_key: bytes


COUNTED = ("quota_states", "gateways", "reservations", "usage", "usage_hours")


@dataclass(frozen=True)
class Insider:
    """Reads over the shoulder of a running server."""

    server: Server

    def secrets(self, tenant: Tenant) -> Secrets:
        """Opened by a second gateway's directory on the same database and key file."""

        async def read() -> Secrets:
            database = await Database.open(f"sqlite+aiosqlite:///{self.server.data_dir / 'saltern.db'}")
            try:
                directory = await Directory.open(database, self.server.data_dir / "kek")
                salt = await directory.salt(tenant.id, epoch)
                offload_key = await directory.offload_key(tenant.id, epoch)
                return Secrets(account, epoch, salt.reveal(), offload_key.reveal())
            finally:
                await database.close()

        with self.database() as database:
            statement = "SELECT account, epoch FROM tenants WHERE id = ?"
            account, epoch = database.execute(statement, (tenant.id,)).fetchone()
        return asyncio.run(read())

    @contextmanager
    def database(self) -> Iterator[sqlite3.Connection]:
        """The file that the server works on, past all of its code."""
        with closing(sqlite3.connect(self.server.data_dir / "saltern.db", isolation_level=None)) as connection:
            yield connection

    def dump(self) -> str:
        """Every row of every table as SQL; blobs in hexadecimal."""
        with self.database() as database:
            return "\n".join(database.iterdump())

    def settings(self) -> str:
        """As `dump`, without what requests and heartbeats write."""
        with self.database() as database, closing(sqlite3.connect(":memory:")) as copy:
            database.backup(copy)
            for table in COUNTED:
                copy.execute(f"DELETE FROM {table}")
            copy.execute("UPDATE api_keys SET last_used_at = NULL")
            return "\n".join(copy.iterdump())

    def files(self) -> bytes:
        """Every byte of the database, write-ahead log included."""
        return b"".join(path.read_bytes() for path in sorted(self.server.data_dir.glob("saltern.db*")))

    def welcome(self) -> Welcome:
        async def ask(client: StoreClient) -> Welcome:
            return client.welcome

        return self._at_the_store(ask)

    def cached_tokens(self, account: bytes, epoch: int, prompt: list[int], keys: list[bytes]) -> int | str:
        """What a gateway that submits these names is told: cached tokens, or the code of the refusal."""

        async def ask(client: StoreClient) -> int | str:
            request = client.submit(
                account=account,
                epoch=epoch,
                tokens=array("I", prompt).tobytes(),
                keys=keys,
                sampling=Sampling(temperature=0),
                max_tokens=1,
                queue_deadline_ns=time.monotonic_ns() + 30_000_000_000,
            )
            first = await request.next()
            if isinstance(first, Rejected):
                return first.code
            assert isinstance(first, Started)
            while not isinstance(await request.next(), Finished):
                pass
            request.seal([], last=True)
            # Answered after the seal was taken: nothing is held when this returns.
            await client.stats()
            return first.cached_tokens

        return self._at_the_store(ask)

    def _at_the_store(self, ask: Callable[[StoreClient], Awaitable[T]]) -> T:
        async def connected() -> T:
            client = await StoreClient.connect(self.server.socket)
            try:
                async with asyncio.timeout(30):
                    return await ask(client)
            finally:
                client.close()

        return asyncio.run(connected())


def block_names(salt: bytes, store: Welcome, prompt: list[int], **changed: Any) -> list[bytes]:
    """The names of the full blocks of `prompt`, by the second implementation.

    Args:
        changed: fields of the context that are not as the store says.
    """
    geometry = store.geometry
    context = second_naming.Context(
        model_fingerprint=store.model_fingerprint,
        tokenizer_fingerprint=store.tokenizer_fingerprint,
        dtype=store.dtype,
        kv_dtype=geometry.kv_dtype,
        block_tokens=geometry.block_tokens,
        layers=geometry.layers,
        kv_heads=geometry.kv_heads,
        key_dim=geometry.key_dim,
        value_dim=geometry.value_dim,
        layout_version=geometry.layout_version,
        rope_context_tokens=geometry.rope_context_tokens,
        scope="",
    )
    chain = second_naming.chain_key(salt, second_naming.context_digest(replace(context, **changed)))
    return second_naming.block_keys(chain, prompt, geometry.block_tokens)
