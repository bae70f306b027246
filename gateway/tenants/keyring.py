"""The secrets of tenants and of the instance: made, kept wrapped in the database, opened for five minutes at most."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal

from sqlalchemy import delete, exists, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.http.errors import Unavailable
from gateway.secret import Secret
from gateway.tenants import api_keys
from gateway.tenants.database import Database
from gateway.tenants.tables import WrappedSecret, utc_now
from gateway.tenants.vault import KekFile, KeyProvider, Place, UnknownKey, VaultError, Wrapped

log = logging.getLogger("saltern.gateway")

SECRET_BYTES = 32
OPEN_AT_MOST = timedelta(minutes=5)

PEPPER_VERSION = 1
_CANARY = Place("boot-canary", "", 1)


class SaltUnavailable(Unavailable):
    """503: a secret that the request needs is missing or does not open. It is never served without."""

    def __init__(self) -> None:
        super().__init__(
            "A secret that this request needs is not available. Try again in a second; if it persists, "
            "the operator finds the reason in the log."
        )


class SecretGone(VaultError):
    """No secret is kept for that place."""


class Keyring:
    """Owns the table of wrapped secrets. Writers pass their own transaction; readers need none."""

    def __init__(self, database: Database, provider: KeyProvider, clock: Callable[[], datetime] = utc_now) -> None:
        self._database = database
        self._provider = provider
        self._clock = clock
        # By purpose; a secret that is gone did not fail to open.
        self.unwrap_failures: Counter[str] = Counter()
        self._opened: dict[Place, tuple[Secret, datetime]] = {}  # oldest first

    @classmethod
    async def open(cls, database: Database, kek_file: Path, clock: Callable[[], datetime] = utc_now) -> Keyring:
        """Open the KEK and prove by the canary that it is this database's; a first start makes what there is to make.

        Raises:
            VaultError: secrets are there and the KEK that opens them is not.
        """
        async with database.write(alone=True) as session:
            if await session.scalar(select(exists(select(WrappedSecret.purpose)))):
                keyring = cls(database, KekFile.open(kek_file), clock)
                await keyring._unwrap(session, _CANARY)
            else:
                keyring = cls(database, KekFile.open_or_create(kek_file), clock)
                await keyring.create(session, _CANARY)
                await keyring.create(session, _pepper(PEPPER_VERSION))
        return keyring

    async def create(self, session: AsyncSession, place: Place) -> None:
        """A new secret of random bytes, derived from nothing: a derived one could not be destroyed.

        Raises:
            SaltUnavailable: the KEK cannot be read now.
        """
        # Before the KEK is read, and until the row is committed, no rotation of it can come to its end.
        await hold_wrapped_secrets(session, "ROW EXCLUSIVE")
        try:
            wrapped = await self._provider.wrap(place, Secret(os.urandom(SECRET_BYTES)))
        except VaultError as error:
            log.error("%s", error)
            raise SaltUnavailable from error
        session.add(
            WrappedSecret(
                purpose=place.purpose,
                tenant_id=place.tenant_id,
                epoch=place.epoch,
                kek_id=wrapped.kek_id,
                wrapped=wrapped.blob,
            )
        )

    async def destroy(self, session: AsyncSession, tenant_id: str) -> None:
        """Every secret of a tenant, of all epochs."""
        await session.execute(delete(WrappedSecret).where(WrappedSecret.tenant_id == tenant_id))

    async def reveal(self, place: Place) -> Secret:
        """
        Raises:
            SaltUnavailable: there is no such secret, or it does not open.
        """
        now = self._clock()
        while self._opened:
            oldest, (_, since) = next(iter(self._opened.items()))
            if now - OPEN_AT_MOST < since <= now:  # a clock set back closes too
                break
            del self._opened[oldest]
        if place in self._opened:
            return self._opened[place][0]
        try:
            try:
                secret = await self._read(place)
            except UnknownKey:
                # Re-wrapped, and its key removed, between the two reads of row and file: the next pair agrees.
                secret = await self._read(place)
        except VaultError as error:
            # One that is gone was destroyed by a rotation that the caller has not seen yet, most of the time.
            if not isinstance(error, SecretGone):
                self.unwrap_failures[place.purpose] += 1
                log.error("%s", error)
            raise SaltUnavailable from error
        self._opened.setdefault(place, (secret, now))
        return secret

    async def digest(self, secret: Secret, pepper_version: int) -> bytes:
        """What the database holds of an API key's secret. Raises as `reveal`."""
        return api_keys.digest(await self.reveal(_pepper(pepper_version)), secret)

    def forget(self, tenant_id: str) -> None:
        """Close what is open of a tenant, after its secrets were destroyed."""
        for place in [place for place in self._opened if place.tenant_id == tenant_id]:
            del self._opened[place]

    async def _read(self, place: Place) -> Secret:
        async with self._database.read() as session:
            return await self._unwrap(session, place)

    async def _unwrap(self, session: AsyncSession, place: Place) -> Secret:
        row = await session.get(WrappedSecret, (place.purpose, place.tenant_id, place.epoch))
        if row is None:
            raise SecretGone(f"there is no {place.purpose} of tenant {place.tenant_id!r}, epoch {place.epoch}")
        return await self._provider.unwrap(place, Wrapped(row.kek_id, row.wrapped))


async def hold_wrapped_secrets(session: AsyncSession, mode: Literal["ROW EXCLUSIVE", "SHARE ROW EXCLUSIVE"]) -> None:
    """Until the transaction ends, hold the table of wrapped secrets in a mode of PostgreSQL's LOCK TABLE.

    The first mode goes along with itself and not with the second. On SQLite both are its one write lock.
    """
    connection = await session.connection()  # SQLite: BEGIN IMMEDIATE, unless it was said before
    if connection.dialect.name == "postgresql":
        await session.execute(text(f"LOCK TABLE wrapped_secrets IN {mode} MODE"))


def _pepper(version: int) -> Place:
    return Place("apikey-pepper", "", version)
