"""Rotation of the key-encryption key: a new key in front, every secret re-wrapped under it, the old key removed.

It may be killed anywhere and run again, beside gateways that serve and make new secrets. What that rests on:

1. A key is removed only when no row is under it. A file of several keys is the mark of a rotation that has not ended:
   the next run goes on with the first of them and makes no other.
2. What was re-wrapped is on the disk before a key is removed: every commit is flushed.
3. Nobody wraps under the old key afterwards. A writer reads the file only while it holds the table of wrapped secrets,
   and commits before it lets go (`Keyring.create`). The old key is removed while the rotation holds that table against
   writers, after it has looked for rows under another key. So a writer has either committed, and its row was seen; or
   it reads the file later, and finds the new key alone.
4. Nobody reads in vain: who read a row, and then a file without its key, reads both again (`Keyring.reveal`).
"""

from __future__ import annotations

import asyncio
import fcntl
import glob
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from sqlalchemy import exists, select, text, update

from gateway.tenants.database import Database
from gateway.tenants.keyring import hold_wrapped_secrets
from gateway.tenants.tables import WrappedSecret
from gateway.tenants.vault import KekFile, Place, Purpose, Wrapped


class RotationRefused(Exception):
    """Nothing was done: one line for the operator."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What there is to do.

    Attributes:
        secrets: of the database.
        to_wrap: how many of them are not under the new key.
        new_key_id: None if the rotation has not begun: the key is still to be made.
        old_key_ids: that will be removed.
    """

    secrets: int
    to_wrap: int
    new_key_id: str | None
    old_key_ids: list[str]


@dataclass(frozen=True, slots=True)
class Rotated:
    wrapped: int
    key_id: str
    removed_key_ids: list[str]


async def plan(database: Database, kek: KekFile) -> Plan:
    """Every secret is opened for it.

    Raises:
        RotationRefused: the database has no secrets.
        VaultError: a secret does not open under any key of the file.
    """
    rows = await _rows(database)
    if not rows:
        raise RotationRefused("the database has no secrets: name the one that belongs to the key-encryption key")
    for row in rows:
        await kek.unwrap(_place(row), Wrapped(row.kek_id, row.wrapped))
    if not kek.old_key_ids:
        return Plan(len(rows), len(rows), None, [kek.key_id])
    return Plan(len(rows), sum(row.kek_id != kek.key_id for row in rows), kek.key_id, kek.old_key_ids)


async def rotate(database: Database, kek_file: Path) -> Rotated:
    """Rotate, or end the rotation that another run began.

    Raises:
        RotationRefused: another one runs, or the database has no secrets.
        VaultError: a secret does not open, or the file cannot be written. The old keys stay.
        DatabaseUnavailable: it is locked or gone. The old keys stay.
    """
    kek = KekFile.open(kek_file)  # before a lock is put beside what may not be there
    with _alone(kek_file):
        await kek.health()
        if (await plan(database, kek)).new_key_id is None:
            kek.prepend_new_key()
        wrapped = 0
        while (removed := await _remove_old_keys(database, kek)) is None:
            for row in await _rows(database, other_than=kek.key_id):
                started = time.monotonic()
                wrapped += await _rewrap(database, kek, row)
                # Who waits for SQLite's write lock looks only now and then: half of the time it is free.
                await asyncio.sleep(time.monotonic() - started)
        await database.scrub()
    return Rotated(wrapped, kek.key_id, removed)


async def _rewrap(database: Database, kek: KekFile, row: WrappedSecret) -> bool:
    """Whether the row was still there, as it was read."""
    place = _place(row)
    wrapped = await kek.wrap(place, await kek.unwrap(place, Wrapped(row.kek_id, row.wrapped)))
    as_read = (
        WrappedSecret.purpose == row.purpose,
        WrappedSecret.tenant_id == row.tenant_id,
        WrappedSecret.epoch == row.epoch,
        WrappedSecret.wrapped == row.wrapped,
    )
    change = update(WrappedSecret).where(*as_read).values(kek_id=wrapped.kek_id, wrapped=wrapped.blob)
    # One row each: a transaction of several could wait for one that deletes a tenant, and that one for it.
    async with database.write() as session:
        if database.dialect == "postgresql":
            # Whatever the server's default is; SQLite's default flushes every commit.
            await session.execute(text("SET LOCAL synchronous_commit = on"))
        return await session.scalar(change.returning(WrappedSecret.epoch)) is not None


async def _remove_old_keys(database: Database, kek: KekFile) -> list[str] | None:
    """Those that were removed; None if rows are left under them."""
    async with database.write() as session:
        await hold_wrapped_secrets(session, "SHARE ROW EXCLUSIVE")
        if await session.scalar(select(exists().where(WrappedSecret.kek_id != kek.key_id))):
            return None
        removed = kek.old_key_ids
        kek.remove_old_keys()
    return removed


async def _rows(database: Database, other_than: str = "") -> Sequence[WrappedSecret]:
    async with database.read() as session:
        return (await session.scalars(select(WrappedSecret).where(WrappedSecret.kek_id != other_than))).all()


def _place(row: WrappedSecret) -> Place:
    # What the row says, whatever it is: a purpose that nobody wrapped for does not open.
    return Place(cast(Purpose, row.purpose), row.tenant_id, row.epoch)


@contextmanager
def _alone(kek_file: Path) -> Iterator[None]:
    """One rotation of a file at a time; what a killed one left half written beside it is removed."""
    kek_file = kek_file.resolve()
    path = kek_file.with_name(f"{kek_file.name}.lock")
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise RotationRefused(f"{path} cannot be made: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for unfinished in kek_file.parent.glob(f"{glob.escape(kek_file.name)}.*.new"):
            unfinished.unlink()
        yield
    except BlockingIOError:
        raise RotationRefused(f"another rotation of {kek_file} is running") from None
    finally:
        os.close(lock)
