"""Everything that has to hold of a database at any moment at which nobody is writing, whatever happened before."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from sqlalchemy import select

from gateway.tenants.database import Database
from gateway.tenants.ledger import HOUR_MS
from gateway.tenants.tables import (
    Epoch,
    Fence,
    GatewayRow,
    Quota,
    QuotaState,
    Reservation,
    Tenant,
    Usage,
    UsageHour,
    WrappedSecret,
)
from policies.rates import Meter, _windows

TABLES = (Tenant, Epoch, Fence, GatewayRow, Quota, QuotaState, Reservation, Usage, UsageHour, WrappedSecret)
SUMS = ("input_tokens", "cached_tokens", "output_tokens", "cost")


async def check_ledger(database: Database) -> None:
    """Raises AssertionError for whatever does not hold."""
    rows: dict[type, list[Any]] = {}
    async with database.read() as session:
        for table in TABLES:
            rows[table] = list((await session.scalars(select(table))).all())
    _check_secrets(rows)
    _check_usage(rows)
    _check_meters(rows)


def _check_secrets(rows: dict[type, list[Any]]) -> None:
    tenants = {tenant.id: tenant for tenant in rows[Tenant]}
    of_tenants = [secret for secret in rows[WrappedSecret] if secret.tenant_id]
    assert {secret.tenant_id for secret in of_tenants} <= tenants.keys(), "a secret of no tenant"
    kinds = Counter((secret.tenant_id, secret.purpose) for secret in of_tenants)
    for tenant in tenants.values():
        for purpose in ("salt", "offload_key"):
            assert kinds[tenant.id, purpose] == 1, (tenant.name, purpose, kinds)
        epochs = sorted(epoch.epoch for epoch in rows[Epoch] if epoch.tenant_id == tenant.id)
        assert epochs == list(range(1, tenant.epoch + 1)), "an epoch without its row"
    assert all(secret.epoch == tenants[secret.tenant_id].epoch for secret in of_tenants), "a secret of an old epoch"
    accounts = Counter(fence.account for fence in rows[Fence])
    assert all(count == 1 for count in accounts.values()), "two fences of an account"
    living = {tenant.account: tenant for tenant in tenants.values()}
    for fence in rows[Fence]:
        if fence.account in living:
            assert fence.epoch == living[fence.account].epoch, "a fence of another epoch than the tenant's"
        else:
            assert fence.epoch is None, "a deleted tenant's fence keeps its account"


def _check_usage(rows: dict[type, list[Any]]) -> None:
    assert not {row.id for row in rows[Usage]} & {row.id for row in rows[Reservation]}, "booked and still reserved"
    assert {row.gateway_id for row in rows[Reservation]} <= {row.id for row in rows[GatewayRow]}
    hours: defaultdict[tuple[str, int], Counter[str]] = defaultdict(Counter)
    for row in rows[Usage]:
        assert row.cost >= 0
        assert 0 <= row.cached_tokens <= row.input_tokens
        sums = hours[row.tenant_id, row.at_ms - row.at_ms % HOUR_MS]
        sums.update({"requests": 1, **{name: getattr(row, name) for name in SUMS}})
    found = {
        (row.tenant_id, row.hour_ms): Counter({name: getattr(row, name) for name in ("requests", *SUMS)})
        for row in rows[UsageHour]
    }
    assert found.keys() == hours.keys()
    for hour, sums in hours.items():
        assert found[hour] == sums, (hour, found[hour], sums)


def _check_meters(rows: dict[type, list[Any]]) -> None:
    limits = {row.scope: row for row in rows[Quota]}
    for state in rows[QuotaState]:
        meter = Meter(*(getattr(state, name) for name in Meter.__slots__))
        quota = limits.get(state.scope)
        zone = quota.time_zone if quota else "UTC"
        assert min(meter.requests_level, meter.tokens_level, meter.day_used, meter.month_used) >= 0, meter
        column = "key_id" if state.key_id else "tenant_id"
        used = [row for row in rows[Usage] if getattr(row, column) == state.scope]
        day = sum(row.cost for row in used if _windows(zone, row.at_ms)[0] == meter.day)
        month = sum(row.cost for row in used if _windows(zone, row.at_ms)[1] == meter.month)
        assert (meter.day_used, meter.month_used) == (day, month), (state.scope, meter, day, month)
        held = sum(row.amount for row in rows[Reservation] if getattr(row, column) == state.scope)
        if quota is not None:
            for limit, spent in ((quota.tokens_per_day, day), (quota.tokens_per_month, month)):
                assert limit is None or spent + held <= limit, (state.scope, spent, held, limit)
