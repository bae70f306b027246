"""What a tenant has used, by hour or day of UTC."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from sqlalchemy import func, select

from gateway.tenants.database import Database
from gateway.tenants.ledger import HOUR_MS
from gateway.tenants.tables import Tenant, UsageHour

Bucket = Literal["hour", "day"]

_BUCKET_MS: dict[Bucket, int] = {"hour": HOUR_MS, "day": 24 * HOUR_MS}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class UsageSum:
    """Of the requests that ended from `start` on, within one hour or day of UTC.

    `input_tokens` includes cached ones; `cost`: tokens as budgets count them.
    """

    start: datetime
    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    cost: int


class UsageReport:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def of(self, tenant_id: str, start: datetime, end: datetime, bucket: Bucket) -> list[UsageSum] | None:
        """Buckets in which something was used, in order, from that of `start` to before `end`; None: no such tenant."""
        size_ms = _BUCKET_MS[bucket]
        start_ms = (start - _EPOCH) // timedelta(milliseconds=1)
        number = (UsageHour.hour_ms - UsageHour.hour_ms % size_ms).label("start_ms")
        sums = [
            func.sum(column)
            for column in (
                UsageHour.requests,
                UsageHour.input_tokens,
                UsageHour.cached_tokens,
                UsageHour.output_tokens,
                UsageHour.cost,
            )
        ]
        statement = (
            select(number, *sums)
            .where(
                UsageHour.tenant_id == tenant_id,
                UsageHour.hour_ms >= start_ms - start_ms % size_ms,
                UsageHour.hour_ms < (end - _EPOCH) // timedelta(milliseconds=1),
            )
            .group_by(number)
            .order_by(number)
        )
        async with self._database.read() as session:
            if await session.get(Tenant, tenant_id) is None:
                return None
            rows = (await session.execute(statement)).all()
        return [UsageSum(_EPOCH + timedelta(milliseconds=row[0]), *map(int, row[1:])) for row in rows]
