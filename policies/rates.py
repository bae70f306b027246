"""Rates, budgets and concurrency: whether a request fits, and what a scope has used after it. Pure, integers only.

A scope (a tenant, or one of its keys) has `Limits`, a `Meter` of what it has used, and what its running requests hold.
A request reserves the most that it can cost, in all of its scopes or in none, and settles what it did cost.

Rates are drained evenly: a level falls by limit / 60 per second and may rise to the limit (the leaky bucket as a meter;
GCRA in another notation), so that at most limit × (1 + T / 60) pass in any T seconds. A level is counted in 1/60,000 of
a request or token: what drains in a millisecond is then the limit, a whole number.

Budgets count by calendar day and month of a time zone. What was used and what running requests hold never exceed a
budget together, so what is used never does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Literal
from zoneinfo import ZoneInfo

MINUTE_MS = 60_000
# When to ask again where only running requests stand in the way: they may end at any time.
SOON_MS = 1000
# The highest limit whose levels a signed 64-bit column holds, with room to spare.
MAX_LIMIT = 10**12

LimitName = Literal[
    "concurrent_requests", "requests_per_minute", "tokens_per_minute", "tokens_per_day", "tokens_per_month"
]
# rate: drains in time. held: running requests hold the rest. spent: until the window ends. too_large: never fits.
Reason = Literal["rate", "held", "spent", "too_large"]


@dataclass(frozen=True, slots=True)
class Limits:
    """None is unlimited; others are from 1 to `MAX_LIMIT`. `time_zone`: an IANA name, whose days and months count."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    time_zone: str = "UTC"


@dataclass(frozen=True, slots=True)
class Meter:
    """What a scope has used.

    Attributes:
        requests_level, tokens_level: undrained at `at_ms`, in 1/60,000.
        at_ms: since 1970; never goes back, whatever the clock does.
        tokens_charged: all that was ever charged to the token rate, refunds not taken off.
        day: of `day_used`, days since the year 1; `month`: of `month_used`, months since the year 0.
    """

    requests_level: int = 0
    tokens_level: int = 0
    at_ms: int = 0
    tokens_charged: int = 0
    day: int = 0
    day_used: int = 0
    month: int = 0
    month_used: int = 0


@dataclass(frozen=True, slots=True)
class Held:
    """What running requests of a scope hold: how many there are, and the most that they can cost."""

    requests: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Scope:
    id: str
    limits: Limits
    meter: Meter
    held: Held


@dataclass(frozen=True, slots=True)
class Grant:
    """A request that fits.

    Attributes:
        tokens: what it may cost at most.
        scopes: after it, in the order given.
        marks: where it stands in each scope's `tokens_charged`; None without a token rate.
    """

    tokens: int
    scopes: tuple[Scope, ...]
    marks: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that does not fit; nothing was charged.

    Attributes:
        used, held: of `limit` in `scope`, rounded up; `cost` is what did not fit.
        running: requests that hold something.
        retry_ms: when it may fit; None for never.
    """

    scope: str
    name: LimitName
    reason: Reason
    limit: int
    used: int
    held: int
    cost: int
    running: int
    retry_ms: int | None


@dataclass(frozen=True, slots=True)
class Left:
    """What is left of a limit, and in how many ms all of it will be again if nothing else comes."""

    limit: int
    remaining: int
    reset_ms: int


def decide(scopes: Sequence[Scope], least: int, most: int, now_ms: int) -> Grant | Refusal:
    """Whether one more request fits into every scope, with as much of `most` as there is.

    Args:
        least: the lowest cost, in tokens, that is worth admitting it for.
        most: what it would like to be able to cost; at least `least`.
        now_ms: since 1970.
    """
    current = [dataclasses.replace(scope, meter=_at(scope.limits, scope.meter, now_ms)) for scope in scopes]
    refusals = [refusal for scope in current for refusal in _refusals(scope, least, now_ms)]
    if refusals:
        # Concurrency comes first; of several others, what takes longest to pass.
        return max(refusals, key=lambda each: (each.name == "concurrent_requests", _wait_ms(each)))
    tokens = min([most, *(left for scope in current for left in _tokens_left(scope))])
    charged = [_charge(scope, tokens) for scope in current]
    return Grant(tokens, tuple(scope for scope, _ in charged), tuple(mark for _, mark in charged))


def settle(limits: Limits, meter: Meter, now_ms: int, *, reserved: int, mark: int | None, cost: int) -> Meter:
    """The meter once a request has ended that reserved `reserved` and cost `cost`, at most as much.

    The rate gets back what was not used, but only of what has not drained yet: a level is drained in the order of
    its charges, so all that was charged after this one lies behind it. Without that, a tenant could spend what drained
    a second time.
    """
    meter = _at(limits, meter, now_ms)
    level = meter.tokens_level
    if mark is not None:
        undrained = max(0, level - (meter.tokens_charged - mark) * MINUTE_MS)
        level -= min(undrained, (reserved - cost) * MINUTE_MS)
    return dataclasses.replace(
        meter, tokens_level=level, day_used=meter.day_used + cost, month_used=meter.month_used + cost
    )


def correct(meter: Meter, limits: Limits, booked_ms: int, *, booked: int, cost: int) -> Meter:
    """The meter once a cost that was booked at `booked_ms` turned out to be another, if its windows still run."""
    day, month = _windows(limits.time_zone, booked_ms)
    return dataclasses.replace(
        meter,
        day_used=max(0, meter.day_used + (cost - booked if day >= meter.day else 0)),
        month_used=max(0, meter.month_used + (cost - booked if month >= meter.month else 0)),
    )


def requests_left(scopes: Iterable[Scope], now_ms: int) -> Left | None:
    """Of the tightest rate of requests; None where there is none."""
    found = []
    for scope in scopes:
        if limit := scope.limits.requests_per_minute:
            level = _at(scope.limits, scope.meter, now_ms).requests_level
            found.append(_rate_left(limit, level))
    return min(found, key=lambda left: left.remaining, default=None)


def tokens_left(scopes: Iterable[Scope], now_ms: int) -> Left | None:
    """Of the tightest limit of tokens; None where there is none."""
    found = []
    for scope in scopes:
        limits, meter, held = scope.limits, _at(scope.limits, scope.meter, now_ms), scope.held.tokens
        if limits.tokens_per_minute:
            found.append(_rate_left(limits.tokens_per_minute, meter.tokens_level))
        for name, limit, used in _budgets(limits, meter):
            reset_ms = _window_end_ms(limits.time_zone, name, now_ms) - now_ms
            found.append(Left(limit, max(0, limit - used - held), reset_ms))
    return min(found, key=lambda left: left.remaining, default=None)


def _rate_left(limit: int, level: int) -> Left:
    return Left(limit, max(0, limit * MINUTE_MS - level) // MINUTE_MS, -(-level // limit))


def _at(limits: Limits, meter: Meter, now_ms: int) -> Meter:
    """Levels drained, and windows begun anew, until now. A clock that was set back changes nothing."""
    passed_ms = max(0, now_ms - meter.at_ms)
    day, month = _windows(limits.time_zone, now_ms)
    return Meter(
        requests_level=_drained(meter.requests_level, limits.requests_per_minute, passed_ms),
        tokens_level=_drained(meter.tokens_level, limits.tokens_per_minute, passed_ms),
        at_ms=meter.at_ms + passed_ms,
        tokens_charged=meter.tokens_charged,
        day=max(day, meter.day),
        day_used=0 if day > meter.day else meter.day_used,
        month=max(month, meter.month),
        month_used=0 if month > meter.month else meter.month_used,
    )


def _drained(level: int, limit: int | None, passed_ms: int) -> int:
    return 0 if limit is None else max(0, level - limit * passed_ms)


def _refusals(scope: Scope, cost: int, now_ms: int) -> Iterator[Refusal]:
    limits, meter, held = scope.limits, scope.meter, scope.held

    def refusal(
        name: LimitName, reason: Reason, limit: int, retry_ms: int | None, *, used: int = 0, cost: int = cost
    ) -> Refusal:
        tokens = held.tokens if name in ("tokens_per_day", "tokens_per_month") else 0
        return Refusal(scope.id, name, reason, limit, used, tokens, cost, held.requests, retry_ms)

    if (limit := limits.concurrent_requests) and held.requests >= limit:
        yield refusal("concurrent_requests", "held", limit, SOON_MS, used=held.requests, cost=1)
    if limit := limits.requests_per_minute:
        level = meter.requests_level
        if (over := level + MINUTE_MS - limit * MINUTE_MS) > 0:
            yield refusal(
                "requests_per_minute", "rate", limit, -(-over // limit), used=-(-level // MINUTE_MS), cost=1
            )
    if limit := limits.tokens_per_minute:
        level = meter.tokens_level
        if cost > limit:
            yield refusal("tokens_per_minute", "too_large", limit, None, used=-(-level // MINUTE_MS))
        elif (over := level + (cost - limit) * MINUTE_MS) > 0:
            yield refusal("tokens_per_minute", "rate", limit, -(-over // limit), used=-(-level // MINUTE_MS))
    for name, limit, used in _budgets(limits, meter):
        if cost > limit:
            yield refusal(name, "too_large", limit, None, used=used)
        elif used + cost > limit:
            end_ms = _window_end_ms(limits.time_zone, name, max(now_ms, meter.at_ms))
            yield refusal(name, "spent", limit, end_ms - now_ms, used=used)
        elif used + held.tokens + cost > limit:
            yield refusal(name, "held", limit, SOON_MS, used=used)


def _wait_ms(refusal: Refusal) -> float:
    return float("inf") if refusal.retry_ms is None else refusal.retry_ms


def _tokens_left(scope: Scope) -> Iterator[int]:
    limits, meter = scope.limits, scope.meter
    if limits.tokens_per_minute:
        yield (limits.tokens_per_minute * MINUTE_MS - meter.tokens_level) // MINUTE_MS
    for _, limit, used in _budgets(limits, meter):
        yield limit - used - scope.held.tokens


def _charge(scope: Scope, tokens: int) -> tuple[Scope, int | None]:
    limits, meter = scope.limits, scope.meter
    charged = tokens if limits.tokens_per_minute else 0
    meter = dataclasses.replace(
        meter,
        requests_level=meter.requests_level + (MINUTE_MS if limits.requests_per_minute else 0),
        tokens_level=meter.tokens_level + charged * MINUTE_MS,
        tokens_charged=meter.tokens_charged + charged,
    )
    held = Held(scope.held.requests + 1, scope.held.tokens + tokens)
    after = dataclasses.replace(scope, meter=meter, held=held)
    return after, meter.tokens_charged if limits.tokens_per_minute else None


def _budgets(limits: Limits, meter: Meter) -> Iterator[tuple[LimitName, int, int]]:
    if limits.tokens_per_day:
        yield "tokens_per_day", limits.tokens_per_day, meter.day_used
    if limits.tokens_per_month:
        yield "tokens_per_month", limits.tokens_per_month, meter.month_used


@lru_cache(maxsize=4096)
def _minute_windows(time_zone: str, minute: int) -> tuple[int, int]:
    local = datetime.fromtimestamp(minute * 60, ZoneInfo(time_zone))
    return local.toordinal(), local.year * 12 + local.month


def _windows(time_zone: str, now_ms: int) -> tuple[int, int]:
    """Number of the day and of the month. Offsets of time zones are whole minutes, so a minute is within one day."""
    return _minute_windows(time_zone, now_ms // MINUTE_MS)


def _window_end_ms(time_zone: str, name: LimitName, now_ms: int) -> int:
    """When the next day, or month, begins there."""
    zone = ZoneInfo(time_zone)
    today = datetime.fromtimestamp(now_ms / 1000, zone).date()
    if name == "tokens_per_day":
        following = today + timedelta(days=1)
    else:
        following = (today.replace(day=1) + timedelta(days=32)).replace(day=1)
    start = datetime(following.year, following.month, following.day, tzinfo=zone)
    return int(start.astimezone(UTC).timestamp() * 1000)
