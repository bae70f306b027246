"""When each API key was last used: noted at once, written now and then, so that no request waits or pays for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from datetime import datetime
from functools import partial

from sqlalchemy import Connection, bindparam, or_, select, update

from gateway.tenants.database import Database, DatabaseUnavailable
from gateway.tenants.tables import ApiKey, Tenant

log = logging.getLogger("saltern.gateway")

WRITE_SECONDS = 10.0
# Of one transaction: requests wait for it.
MOST_PER_TRANSACTION = 128

# As whoever changes a tenant or its keys does first: two that lock rows in different orders wait for each other.
_LOCK_TENANTS = (
    select(Tenant.id)
    .where(Tenant.id.in_(select(ApiKey.tenant_id).where(ApiKey.id.in_(bindparam("key_ids", expanding=True)))))
    .order_by(Tenant.id)
    .with_for_update(key_share=True)
)
# Forward only: another gateway may have seen the key later.
_USED = (
    update(ApiKey)
    .where(
        ApiKey.id == bindparam("key_id"),
        or_(ApiKey.last_used_at.is_(None), ApiKey.last_used_at < bindparam("used_at")),
    )
    .values(last_used_at=bindparam("used_at"))
)


class LastUsed:
    """Of the keys that this gateway has seen. One that is killed forgets those of the last `WRITE_SECONDS`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._unwritten: dict[str, datetime] = {}

    def note(self, key_id: str, at: datetime) -> None:
        self._unwritten[key_id] = at

    async def run(self) -> None:
        """Write every `WRITE_SECONDS`, until cancelled."""
        while True:
            await asyncio.sleep(WRITE_SECONDS)
            await self.write()

    async def write(self) -> None:
        """What the database does not take stays for the next time."""
        noted = sorted(self._unwritten.items())
        for start in range(0, len(noted), MOST_PER_TRANSACTION):
            batch = noted[start : start + MOST_PER_TRANSACTION]
            try:
                await self._database.transact(partial(_write, batch))
            except DatabaseUnavailable:
                return
            except Exception as error:
                # Not its words: they may quote a row.
                log.error("when keys were last used could not be written: %s", type(error).__name__)
                return
            for key_id, at in batch:
                if self._unwritten[key_id] == at:
                    del self._unwritten[key_id]


def _write(batch: Sequence[tuple[str, datetime]], connection: Connection) -> None:
    connection.execute(_LOCK_TENANTS, {"key_ids": [key_id for key_id, _ in batch]})
    connection.execute(_USED, [{"key_id": key_id, "used_at": at} for key_id, at in batch])
