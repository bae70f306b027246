"""The books of quotas, written within a transaction: reservations made and settled, usage, what a dead gateway left.

Every function is given the connection of a write transaction and leaves nothing half done: whoever calls commits or
rolls back. `policies.rates` decides; here are the rows it decides over.
"""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any, Literal

from sqlalchemy import Connection, Row, bindparam, case, delete, func, insert, literal_column, select, update
from sqlalchemy.dialects import postgresql, sqlite

from gateway.tenants.tables import (
    ApiKey,
    GatewayRow,
    Quota,
    QuotaState,
    Reservation,
    Tenant,
    Usage,
    UsageHour,
    is_active,
)
from policies import rates
from policies.rates import Held, Limits, Meter, Refusal, Scope

Outcome = Literal["finished", "cancelled", "refused", "failed", "lost"]

HOUR_MS = 3_600_000
DEFAULT_CACHED_WEIGHT = 100
DEFAULT_QUEUE_WAIT_SECONDS = 30
_WHOLE = 1000

_METER = [field.name for field in dataclasses.fields(Meter)]
_LIMITS = [field.name for field in dataclasses.fields(Limits)]
_meter_of, _limits_of = attrgetter(*_METER), attrgetter(*_LIMITS)
_SUMS = ("requests", "input_tokens", "cached_tokens", "output_tokens", "cost")


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that wants to run. `least` and `most`: of its cost, the output it is capped to included."""

    id: str
    tenant_id: str
    key_id: str
    prompt_tokens: int
    least: int
    most: int

    def settlement(
        self, outcome: Outcome, input_tokens: int = 0, cached_tokens: int = 0, output_tokens: int = 0
    ) -> Settlement:
        """What settles its reservation."""
        return Settlement(
            self.id, self.tenant_id, self.key_id, outcome, input_tokens, cached_tokens, output_tokens
        )


@dataclass(frozen=True, slots=True)
class Reserved:
    """A request that may run, and the tenant's epoch at that instant. `tokens`: what it may cost at most."""

    account: bytes
    epoch: int
    tokens: int
    requests_left: rates.Left | None
    tokens_left: rates.Left | None


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that does not fit, with what is left of the limits."""

    refusal: Refusal
    requests_left: rates.Left | None
    tokens_left: rates.Left | None


@dataclass(frozen=True, slots=True)
class Settlement:
    """What a request used: prompt tokens, those of them that were cached, and sampled tokens."""

    id: str
    tenant_id: str
    key_id: str
    outcome: Outcome
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def cost(self, cached_weight: int) -> int:
        """⌈uncached prompt + cached prompt at its weight in thousandths + output⌉."""
        whole = self.input_tokens - self.cached_tokens + self.output_tokens
        return -(-(whole * _WHOLE + self.cached_tokens * cached_weight) // _WHOLE)


@dataclass(slots=True)
class _Account:
    """A scope of this transaction. `changed`: its meter has to be written."""

    scope: Scope
    cached_weight: int
    changed: bool = False

    def set(self, scope: Scope) -> None:
        self.changed = self.changed or scope.meter != self.scope.meter
        self.scope = scope


def _scope_columns() -> list[Any]:
    def held(what: Any) -> Any:
        of_key = select(what).where(Reservation.key_id == QuotaState.scope).scalar_subquery()
        of_tenant = select(what).where(Reservation.tenant_id == QuotaState.scope).scalar_subquery()
        return case((QuotaState.key_id.is_(None), of_tenant), else_=of_key)

    return [
        QuotaState.scope,
        *(getattr(QuotaState, name) for name in _METER),
        *(getattr(Quota, name) for name in _LIMITS),
        Quota.cached_token_weight,
        held(func.count()).label("running"),
        held(func.coalesce(func.sum(Reservation.amount), 0)).label("held_tokens"),
    ]


_IDS: Any = bindparam("ids", expanding=True)
_SCOPES = (
    select(*_scope_columns())
    .outerjoin(Quota, Quota.scope == QuotaState.scope)
    .where(QuotaState.scope.in_(bindparam("scopes", expanding=True)))
)
_STANDING = (
    select(
        ApiKey.id,
        ApiKey.status,
        ApiKey.expires_at,
        Tenant.id.label("tenant_id"),
        Tenant.status.label("tenant_status"),
        Tenant.account,
        Tenant.epoch,
    )
    .join(Tenant, Tenant.id == ApiKey.tenant_id)
    .where(ApiKey.id.in_(_IDS))
)
_LOCK_TENANTS = select(Tenant.id).where(Tenant.id.in_(_IDS)).order_by(Tenant.id).with_for_update(key_share=True)
_TAKE = (
    delete(Reservation)
    .where(Reservation.id.in_(_IDS))
    .returning(
        Reservation.id,
        Reservation.tenant_id,
        Reservation.key_id,
        Reservation.prompt_tokens,
        Reservation.amount,
        Reservation.tenant_mark,
        Reservation.key_mark,
    )
)
_LOST = select(Usage.id, Usage.at_ms, Usage.input_tokens, Usage.output_tokens, Usage.cost).where(
    Usage.id.in_(_IDS), Usage.outcome == "lost"
)
_RESERVE = insert(Reservation)
_BOOK = insert(Usage)
_CORRECT = (
    update(Usage)
    .where(Usage.id == bindparam("usage_id"))
    .values({name: bindparam(name) for name in ("outcome", "input_tokens", "cached_tokens", "output_tokens", "cost")})
)
_METERS = (
    update(QuotaState)
    .where(QuotaState.scope == bindparam("meter_scope"))
    .values({name: bindparam(name) for name in _METER})
)
_LEFT_BY = select(Reservation.id, Reservation.tenant_id, Reservation.key_id).where(
    Reservation.gateway_id == bindparam("gateway_id")
)
_BEATS = select(GatewayRow.beats).where(GatewayRow.id == bindparam("gateway_id"))
_END = delete(GatewayRow).where(GatewayRow.id == bindparam("gateway_id"))
_POSTGRES_NOW: Any = literal_column("CAST(extract(epoch FROM clock_timestamp()) * 1000 AS BIGINT)")


class Ledger:
    """
    Args:
        dialect: sqlite or postgresql.
        clock_ms: since 1970, for tests; else the database's own clock, which all gateways share.
    """

    def __init__(self, dialect: str, clock_ms: Callable[[], int] | None = None) -> None:
        self._locks_rows = dialect == "postgresql"
        self._clock_ms = clock_ms or (None if self._locks_rows else _host_clock_ms)
        upsert: Any = postgresql.insert if self._locks_rows else sqlite.insert
        hours = upsert(UsageHour)
        self._add_hours = hours.on_conflict_do_update(
            index_elements=[UsageHour.tenant_id, UsageHour.hour_ms],
            set_={name: getattr(UsageHour, name) + getattr(hours.excluded, name) for name in _SUMS},
        )
        beat = upsert(GatewayRow).values(id=bindparam("gateway_id"), beats=1)
        self._beat = beat.on_conflict_do_update(
            index_elements=[GatewayRow.id], set_={"beats": GatewayRow.beats + 1}
        )
        now: Any = _POSTGRES_NOW if self._clock_ms is None else bindparam("now_ms")
        of_requests = (
            Quota.max_context_tokens,
            Quota.device_max_tokens,
            Quota.device_reserved_tokens,
            Quota.strict,
            Quota.max_output_tokens,
            Quota.models,
            Quota.queue_wait_seconds,
        )
        limited = select(*_scope_columns(), *of_requests)
        #: The scopes with limits of a tenant and its key, at one instant, before a request is charged.
        self.look = (
            limited.add_columns(now.label("now_ms"))
            .join(Quota, Quota.scope == QuotaState.scope)
            .where(QuotaState.scope.in_([bindparam("tenant_id"), bindparam("key_id")]))
        )

    def look_values(self, tenant_id: str, key_id: str) -> dict[str, object]:
        """The parameters of `look`."""
        clock = {} if self._clock_ms is None else {"now_ms": self._clock_ms()}
        return {"tenant_id": tenant_id, "key_id": key_id, **clock}

    def write(
        self, connection: Connection, gateway_id: str, settlements: Sequence[Settlement], asks: Sequence[Ask]
    ) -> list[Reserved | Refused | None]:
        """Settle, then decide each of `asks` in its order; None for a key that is not active.

        A settlement whose reservation is gone books nothing, unless it was booked as lost, which is then corrected.
        """
        everybody: list[Settlement | Ask] = [*settlements, *asks]
        tenants = sorted({each.tenant_id for each in everybody})
        if self._locks_rows:
            connection.execute(_LOCK_TENANTS, {"ids": tenants})
        now_ms = self._now_ms(connection)
        taken = _take(connection, settlements)
        scopes = {*tenants, *(each.key_id for each in everybody)}
        accounts = _accounts(connection, scopes)
        self._settle(connection, accounts, settlements, taken, now_ms)
        answers = _decide(connection, accounts, gateway_id, asks, now_ms) if asks else []
        _write_meters(connection, accounts.values())
        return answers

    def beat(self, connection: Connection, gateway_id: str) -> None:
        """This gateway lives."""
        connection.execute(self._beat, {"gateway_id": gateway_id})

    def lose(self, connection: Connection, gateway_id: str, beats: int) -> int:
        """Book what a dead gateway had reserved, all of it, as lost; answers how many reservations that were.

        Args:
            beats: those after which it was taken for dead. If it has beaten since, nothing is done.
        """
        asked = {"gateway_id": gateway_id}
        left = connection.execute(_LEFT_BY, asked).all()
        if self._locks_rows and left:
            connection.execute(_LOCK_TENANTS, {"ids": sorted({row.tenant_id for row in left})})
        if connection.scalar(_BEATS.with_for_update(), asked) != beats:
            return 0
        now_ms = self._now_ms(connection)
        lost = [Settlement(row.id, row.tenant_id, row.key_id, "lost") for row in left]
        taken = _take(connection, lost)
        accounts = _accounts(connection, {scope for each in lost for scope in (each.tenant_id, each.key_id)})
        self._settle(connection, accounts, lost, taken, now_ms)
        _write_meters(connection, accounts.values())
        self.end(connection, gateway_id)
        return len(taken)

    def end(self, connection: Connection, gateway_id: str) -> None:
        """Forget a gateway that ended, unless reservations of it are left, which another one then books."""
        if connection.execute(_LEFT_BY, {"gateway_id": gateway_id}).first() is None:
            connection.execute(_END, {"gateway_id": gateway_id})

    def _now_ms(self, connection: Connection) -> int:
        if self._clock_ms is not None:
            return self._clock_ms()
        return int(connection.execute(select(_POSTGRES_NOW)).scalar_one())

    def _settle(
        self,
        connection: Connection,
        accounts: dict[str, _Account],
        settlements: Sequence[Settlement],
        taken: dict[str, Row[Any]],
        now_ms: int,
    ) -> None:
        hours: defaultdict[tuple[str, int], list[int]] = defaultdict(lambda: [0] * len(_SUMS))
        rows: list[dict[str, object]] = []
        late: list[Settlement] = []
        unsettled = dict(taken)
        for each in settlements:
            if (row := unsettled.pop(each.id, None)) is None:
                late.append(each)
                continue
            if each.outcome == "lost":
                counts = [row.prompt_tokens, 0, row.amount - row.prompt_tokens]
                cost = row.amount
            else:
                counts = [each.input_tokens, each.cached_tokens, each.output_tokens]
                cost = each.cost(_weight(accounts, each.tenant_id))
            for scope, mark in ((each.tenant_id, row.tenant_mark), (each.key_id, row.key_mark)):
                if account := accounts.get(scope):
                    before = account.scope
                    meter = rates.settle(
                        before.limits, before.meter, now_ms, reserved=row.amount, mark=mark, cost=cost
                    )
                    account.set(dataclasses.replace(before, meter=meter))
            values = dict(zip(_SUMS, [1, *counts, cost], strict=True))
            _add(hours[each.tenant_id, now_ms - now_ms % HOUR_MS], values.values())
            del values["requests"]
            who = {"id": each.id, "tenant_id": each.tenant_id, "key_id": each.key_id}
            rows.append({**who, "at_ms": now_ms, "outcome": each.outcome, **values})
        if rows:
            connection.execute(_BOOK, rows)
        _correct_lost(connection, accounts, [each for each in late if each.outcome != "lost"], hours)
        if hours:
            connection.execute(
                self._add_hours,
                [
                    {"tenant_id": tenant_id, "hour_ms": hour_ms, **dict(zip(_SUMS, sums, strict=True))}
                    for (tenant_id, hour_ms), sums in sorted(hours.items())
                ],
            )


def scope_of(row: Any) -> Scope:
    """A row of `Ledger.look`."""
    return _account(row).scope


def _take(connection: Connection, settlements: Sequence[Settlement]) -> dict[str, Row[Any]]:
    """The reservations that these settle, gone from their table."""
    if not settlements:
        return {}
    rows: Iterable[Row[Any]] = connection.execute(_TAKE, {"ids": [each.id for each in settlements]})
    return {row.id: row for row in rows}


def _accounts(connection: Connection, scopes: Iterable[str]) -> dict[str, _Account]:
    return {row.scope: _account(row) for row in connection.execute(_SCOPES, {"scopes": list(scopes)})}


def _account(row: Any) -> _Account:
    meter = Meter(*_meter_of(row))
    if row.cached_token_weight is None:
        limits, weight = Limits(), DEFAULT_CACHED_WEIGHT
    else:
        limits, weight = Limits(*_limits_of(row)), row.cached_token_weight
    return _Account(Scope(row.scope, limits, meter, Held(row.running, int(row.held_tokens))), weight)


def _weight(accounts: dict[str, _Account], tenant_id: str) -> int:
    account = accounts.get(tenant_id)
    return account.cached_weight if account else DEFAULT_CACHED_WEIGHT


def _decide(
    connection: Connection, accounts: dict[str, _Account], gateway_id: str, asks: Sequence[Ask], now_ms: int
) -> list[Reserved | Refused | None]:
    standing = {row.id: row for row in connection.execute(_STANDING, {"ids": list({ask.key_id for ask in asks})})}
    now = datetime.fromtimestamp(now_ms / 1000, UTC)
    answers: list[Reserved | Refused | None] = []
    rows: list[dict[str, object]] = []
    for ask in asks:
        key = standing.get(ask.key_id)
        if (
            key is None
            or key.tenant_id != ask.tenant_id
            or key.tenant_status != "active"
            or not is_active(key.status, key.expires_at, now)
        ):
            answers.append(None)
            continue
        mine = [account for scope in (ask.tenant_id, ask.key_id) if (account := accounts.get(scope))]
        decision = rates.decide([account.scope for account in mine], ask.least, ask.most, now_ms)
        if isinstance(decision, Refusal):
            answers.append(Refused(decision, *left_of([account.scope for account in mine], now_ms)))
            continue
        marks: dict[str, int | None] = {}
        for account, scope, mark in zip(mine, decision.scopes, decision.marks, strict=True):
            account.set(scope)
            marks[scope.id] = mark
        rows.append(
            {
                "id": ask.id,
                "gateway_id": gateway_id,
                "tenant_id": ask.tenant_id,
                "key_id": ask.key_id,
                "prompt_tokens": ask.prompt_tokens,
                "amount": decision.tokens,
                "tenant_mark": marks.get(ask.tenant_id),
                "key_mark": marks.get(ask.key_id),
            }
        )
        answers.append(Reserved(key.account, key.epoch, decision.tokens, *left_of(decision.scopes, now_ms)))
    if rows:
        connection.execute(_RESERVE, rows)
    return answers


def left_of(scopes: Sequence[Scope], now_ms: int) -> tuple[rates.Left | None, rates.Left | None]:
    """What is left of requests, and of tokens."""
    return rates.requests_left(scopes, now_ms), rates.tokens_left(scopes, now_ms)


def _write_meters(connection: Connection, accounts: Iterable[_Account]) -> None:
    rows = [
        {"meter_scope": each.scope.id, **{name: getattr(each.scope.meter, name) for name in _METER}}
        for each in accounts
        if each.changed
    ]
    if rows:
        connection.execute(_METERS, rows)


def _correct_lost(
    connection: Connection,
    accounts: dict[str, _Account],
    late: Sequence[Settlement],
    hours: defaultdict[tuple[str, int], list[int]],
) -> None:
    """The gateway was taken for dead and lives: what it says now takes the place of what was booked for it."""
    if not late:
        return
    booked = {row.id: row for row in connection.execute(_LOST, {"ids": [each.id for each in late]})}
    for each in late:
        if (row := booked.pop(each.id, None)) is None:
            continue
        cost = each.cost(_weight(accounts, each.tenant_id))
        counts = {
            "input_tokens": each.input_tokens,
            "cached_tokens": each.cached_tokens,
            "output_tokens": each.output_tokens,
            "cost": cost,
        }
        connection.execute(_CORRECT, {"usage_id": each.id, "outcome": each.outcome, **counts})
        change = (each.input_tokens - row.input_tokens, each.cached_tokens, each.output_tokens - row.output_tokens)
        _add(hours[each.tenant_id, row.at_ms - row.at_ms % HOUR_MS], (0, *change, cost - row.cost))
        for scope in (each.tenant_id, each.key_id):
            if account := accounts.get(scope):
                before = account.scope
                meter = rates.correct(before.meter, before.limits, row.at_ms, booked=row.cost, cost=cost)
                account.set(dataclasses.replace(before, meter=meter))


def _add(sums: list[int], values: Iterable[int]) -> None:
    for index, value in enumerate(values):
        sums[index] += value


def _host_clock_ms() -> int:
    return time.time_ns() // 1_000_000


