"""Who calls, and with which secrets: what every request asks of the database.

Nothing that decides is cached: key status, tenant status and epoch are read for each request, so a decision is
never stale, whichever gateway wrote the change. Only unwrapped secrets are kept, for five minutes at most.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import bindparam, delete, exists, or_, select, update

from gateway.http.errors import Unauthorized
from gateway.secret import Secret
from gateway.tenants import api_keys
from gateway.tenants.api_keys import Kind, ParsedKey
from gateway.tenants.database import Database
from gateway.tenants.fences import PendingFence
from gateway.tenants.keyring import PEPPER_VERSION, Keyring
from gateway.tenants.last_used import LastUsed
from gateway.tenants.minting import new_key
from gateway.tenants.private_file import write_beside
from gateway.tenants.tables import AdminKey, ApiKey, Epoch, Fence, Tenant, is_active, utc_now
from gateway.tenants.vault import Place

ADMIN_SCOPES = frozenset(
    {f"{resource}:{verb}" for resource in ("tenants", "keys", "salts", "quotas", "cache") for verb in ("read", "write")}
    | {"usage:read"}
)

# What an unknown key is compared with, so that it takes the same path as a wrong one. No digest is all zeros.
_DUMMY_DIGEST = bytes(32)

Headers = list[tuple[bytes, bytes]]

# Statements of every request, made once.


def _key_columns(key: type[ApiKey] | type[AdminKey]) -> list[Any]:
    return [key.id, key.digest, key.pepper_version, key.status, key.expires_at, key.scopes]


_TENANT_KEY = (
    select(
        *_key_columns(ApiKey),
        ApiKey.previous_digest,
        ApiKey.previous_pepper_version,
        ApiKey.previous_until,
        ApiKey.tenant_id,
        Tenant.account,
        Tenant.epoch,
        Tenant.status.label("tenant_status"),
    )
    .join(Tenant, Tenant.id == ApiKey.tenant_id)
    .where(ApiKey.id == bindparam("key_id"))
)
_ADMIN_KEY = select(*_key_columns(AdminKey)).where(AdminKey.id == bindparam("key_id"))
_STANDING = (
    select(Tenant.account, Tenant.epoch)
    .join(ApiKey, ApiKey.tenant_id == Tenant.id)
    .where(
        ApiKey.id == bindparam("key_id"),
        Tenant.id == bindparam("tenant_id"),
        ApiKey.status == "active",
        or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > bindparam("now")),
        Tenant.status == "active",
    )
)


@dataclass(frozen=True, slots=True)
class Principal:
    """Who an API key speaks for.

    Attributes:
        account: the 16 bytes that stores know the tenant by.
        epoch: the tenant's when the key was looked up; `Directory.standing` has the one that counts.
    """

    key_id: str
    tenant_id: str
    account: bytes
    epoch: int
    scopes: frozenset[str]


@dataclass(frozen=True, slots=True)
class AdminPrincipal:
    key_id: str
    scopes: frozenset[str]


@dataclass(frozen=True, slots=True)
class Standing:
    """That a key and its tenant are active now, and the tenant's epoch at the same instant."""

    account: bytes
    epoch: int


class Directory:
    """Reads on behalf of requests. What administrators change is in `registry`."""

    def __init__(self, database: Database, keyring: Keyring, clock: Callable[[], datetime] = utc_now) -> None:
        self.database = database
        self.keyring = keyring
        self.clock = clock
        self.last_used = LastUsed(database)

    @classmethod
    async def open(cls, database: Database, kek_file: Path, clock: Callable[[], datetime] = utc_now) -> Directory:
        """
        Raises:
            VaultError: the key-encryption key is missing beside secrets that need it, or is not kept safely.
        """
        return cls(database, await Keyring.open(database, kek_file, clock), clock)

    async def authenticate(self, headers: Headers) -> Principal:
        """The tenant key that a request's raw headers carry.

        Raises:
            Unauthorized: missing, malformed, doubled, unknown, wrong, revoked, disabled or expired: all alike.
            SaltUnavailable: the pepper does not open.
        """
        presented = _presented("tenant", headers)
        key = await self.database.row(_TENANT_KEY, {"key_id": presented.id})
        matches = await self._matches(presented, key)
        if key is None or not matches or key.tenant_status != "active":
            raise Unauthorized
        self.last_used.note(key.id, self.clock())
        return Principal(key.id, key.tenant_id, key.account, key.epoch, frozenset(key.scopes))

    async def authenticate_admin(self, headers: Headers) -> AdminPrincipal:
        """The admin key that a request's raw headers carry; a tenant's is malformed here. Raises as `authenticate`."""
        presented = _presented("admin", headers)
        key = await self.database.row(_ADMIN_KEY, {"key_id": presented.id})
        matches = await self._matches(presented, key)
        if key is None or not matches:
            raise Unauthorized
        return AdminPrincipal(key.id, frozenset(key.scopes))

    async def standing(self, principal: Principal) -> Standing:
        """Key status, tenant status and epoch in one statement: to be asked right before `Submit`.

        Raises:
            Unauthorized: key or tenant is gone or not active.
        """
        asked = {"key_id": principal.key_id, "tenant_id": principal.tenant_id, "now": self.clock()}
        row = await self.database.row(_STANDING, asked)
        if row is None:
            raise Unauthorized
        return Standing(row.account, row.epoch)

    async def salt(self, tenant_id: str, epoch: int) -> Secret:
        """The 32 bytes that name the tenant's blocks.

        Raises:
            SaltUnavailable: the epoch has ended, or the salt does not open. Never an empty value.
        """
        return await self.keyring.reveal(Place("salt", tenant_id, epoch))

    async def offload_key(self, tenant_id: str, epoch: int) -> Secret:
        """The 32 bytes that encrypt the tenant's blocks outside the store's memory. Raises as `salt`."""
        return await self.keyring.reveal(Place("offload_key", tenant_id, epoch))

    async def pending_fences(self) -> list[PendingFence]:
        """Every drop that no store has confirmed, oldest first."""
        async with self.database.read() as session:
            rows = await session.scalars(select(Fence).order_by(Fence.created_at, Fence.id))
            return [PendingFence(row.id, row.account, row.epoch) for row in rows]

    async def fence_done(self, fence: PendingFence) -> None:
        """A store has confirmed it. Idempotent."""
        async with self.database.write() as session:
            of_account = select(Tenant.id).where(Tenant.account == fence.account)
            # First, as whoever else changes a tenant: two that lock rows in different orders wait for each other.
            tenant_id = await session.scalar(of_account.with_for_update(key_share=True))
            await session.execute(delete(Fence).where(Fence.id == fence.id))
            if fence.epoch is not None:
                await session.execute(
                    update(Epoch)
                    .where(Epoch.tenant_id == tenant_id, Epoch.epoch < fence.epoch, Epoch.dropped_at.is_(None))
                    .values(dropped_at=self.clock())
                )

    async def ensure_first_admin_key(self, data_dir: Path) -> Path:
        """The path of the admin key file, which an empty database gets together with its first admin key."""
        path = data_dir / "admin-key"
        async with self.database.write(alone=True) as session:
            if await session.scalar(select(exists(select(AdminKey.id)))):
                return path
            key = await new_key(self.keyring, "admin", ADMIN_SCOPES, self.clock(), name="first")
            session.add(AdminKey(**key.row))
            # Before the commit: a key in the database that nobody has would lock everybody out.
            os.replace(write_beside(path, key.text.reveal() + b"\n"), path)
        return path

    async def _matches(self, presented: ParsedKey, stored: Any | None) -> bool:
        """Compared with the secret and with the one before it, or with nobody's: always as much work."""
        now = self.clock()
        is_current = await self._is(presented, stored and stored.digest, stored and stored.pepper_version)
        before = getattr(stored, "previous_digest", None)
        is_previous = await self._is(presented, before, getattr(stored, "previous_pepper_version", None))
        until = getattr(stored, "previous_until", None)
        is_one = is_current or (is_previous and until is not None and now < until)
        return is_one and stored is not None and is_active(stored.status, stored.expires_at, now)

    async def _is(self, presented: ParsedKey, digest: bytes | None, pepper_version: int | None) -> bool:
        found = await self.keyring.digest(presented.secret, pepper_version or PEPPER_VERSION)
        return hmac.compare_digest(found, digest or _DUMMY_DIGEST)


def _presented(kind: Kind, headers: Headers) -> ParsedKey:
    text = api_keys.credential(headers)
    parsed = None if text is None else api_keys.parse(kind, text)
    if parsed is None:
        raise Unauthorized
    return parsed
