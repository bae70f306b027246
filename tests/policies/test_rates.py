"""What fits and what does not, exactly: against a meter that knows from the beginning what each request will cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import rates
from policies.rates import MINUTE_MS, Grant, Held, Limits, Meter, Refusal, Scope

NOW = int(datetime(2030, 5, 17, 12, 0, tzinfo=UTC).timestamp() * 1000)


def scope(name: str = "ten_a", meter: Meter | None = None, held: Held | None = None, **limits: Any) -> Scope:
    return Scope(name, Limits(**limits), meter or Meter(), held or Held())


def granted(scopes: Sequence[Scope], cost: int, now_ms: int = NOW) -> Grant:
    decision = rates.decide(scopes, cost, cost, now_ms)
    assert isinstance(decision, Grant), decision
    return decision


def refused(scopes: Sequence[Scope], cost: int, now_ms: int = NOW) -> Refusal:
    decision = rates.decide(scopes, cost, cost, now_ms)
    assert isinstance(decision, Refusal), decision
    return decision


def ended(mine: Scope, *, reserved: int, mark: int | None, cost: int, now_ms: int = NOW) -> Scope:
    meter = rates.settle(mine.limits, mine.meter, now_ms, reserved=reserved, mark=mark, cost=cost)
    return dataclasses.replace(mine, meter=meter, held=Held(mine.held.requests - 1, mine.held.tokens - reserved))


# --- rates


@pytest.mark.parametrize("limit", [1, 3])
def test_b150_exactly_as_many_are_admitted_as_the_limit_says(limit: int) -> None:
    mine = scope(requests_per_minute=limit)
    for _ in range(limit):
        (mine,) = granted([mine], 1).scopes
    refusal = refused([mine], 1)
    assert (refusal.name, refusal.used, refusal.retry_ms) == ("requests_per_minute", limit, MINUTE_MS // limit)


def test_b143_twenty_at_once_are_five_of_200_in_1000() -> None:
    mine, decisions = scope(tokens_per_minute=1000), []
    for _ in range(20):
        decisions.append(decision := rates.decide([mine], 200, 200, NOW))
        if isinstance(decision, Grant):
            (mine,) = decision.scopes
    grants = [decision for decision in decisions if isinstance(decision, Grant)]
    assert len(grants) == 5
    # What the first did not use is there for the next as soon as it ends.
    mine = ended(mine, reserved=200, mark=grants[0].marks[0], cost=50)
    assert refused([mine], 151).reason == "rate"
    granted([mine], 150)


def test_b144_requests_and_tokens_drain_each_by_itself() -> None:
    mine = scope(requests_per_minute=100, tokens_per_minute=1000)
    for minute in range(3):
        (mine,) = granted([mine], 900, NOW + minute * MINUTE_MS).scopes
        refused([mine], 900, NOW + minute * MINUTE_MS + 1000)


def test_b145_what_exceeds_the_whole_limit_never_fits() -> None:
    mine = scope(tokens_per_minute=100)
    refusal = refused([mine], 301)
    assert (refusal.reason, refusal.cost, refusal.limit, refusal.retry_ms) == ("too_large", 301, 100, None)
    assert refused([mine], 550).reason == "too_large"
    granted([mine], 100)


def test_b146_what_is_refused_uses_nothing_up() -> None:
    mine = scope(requests_per_minute=2, concurrent_requests=1)
    first = granted([mine], 10)
    (running,) = first.scopes
    assert refused([running], 10).name == "concurrent_requests"
    mine = ended(running, reserved=10, mark=first.marks[0], cost=10)
    (running,) = granted([mine], 10).scopes
    assert rates.requests_left([running], NOW) == rates.Left(2, 0, MINUTE_MS)


def test_b154_a_limit_that_falls_below_what_is_used_leaves_nothing_and_never_less() -> None:
    before = scope(tokens_per_minute=5000)
    first = granted([before], 1100)
    lowered = dataclasses.replace(first.scopes[0], limits=Limits(tokens_per_minute=1000))
    ended_at_1020 = ended(lowered, reserved=1100, mark=first.marks[0], cost=1020)
    left = rates.tokens_left([ended_at_1020], NOW)
    assert left is not None
    assert (left.limit, left.remaining) == (1000, 0)
    refusal = refused([ended_at_1020], 1)
    assert (refusal.name, refusal.used) == ("tokens_per_minute", 1020)
    assert refusal.retry_ms == -(-21 * MINUTE_MS // 1000)


@given(
    limit=st.integers(1, 5000),
    costs=st.lists(st.integers(1, 400), min_size=1, max_size=8),
    cost=st.integers(1, 5000),
    gap_ms=st.integers(0, 30_000),
)
def test_it_fits_when_it_was_said_to_and_not_a_millisecond_before(
    limit: int, costs: list[int], cost: int, gap_ms: int
) -> None:
    mine, now = scope(tokens_per_minute=limit, requests_per_minute=limit), NOW
    for each in costs:
        if isinstance(decision := rates.decide([mine], each, each, now), Grant):
            (mine,) = decision.scopes
        now += gap_ms
    decision = rates.decide([mine], cost, cost, now)
    if isinstance(decision, Refusal) and decision.retry_ms is not None:
        assert decision.retry_ms > 0
        refused([mine], cost, now + decision.retry_ms - 1)
        granted([mine], cost, now + decision.retry_ms)


@dataclasses.dataclass(frozen=True)
class Ended:
    at_ms: int
    charged_at_ms: int
    cost: int


Step = tuple[str, int, int, int]
STEPS = st.lists(
    st.tuples(st.sampled_from(["ask", "end"]), st.integers(0, 40_000), st.integers(1, 700), st.integers(0, 100)),
    min_size=1,
    max_size=40,
)


@given(limit=st.integers(1, 1000), steps=STEPS, in_order=st.booleans())
def test_a_rate_is_never_exceeded_whatever_is_given_back(limit: int, steps: list[Step], in_order: bool) -> None:
    """In any T seconds pass at most limit × (1 + T / 60), true costs counted when they were reserved."""
    mine, now = scope(tokens_per_minute=limit), NOW
    running: list[tuple[int, int, int | None]] = []
    done: list[Ended] = []
    for kind, later_ms, amount, share in steps:
        now += later_ms
        if kind == "ask":
            decision = rates.decide([mine], amount, amount, now)
            if isinstance(decision, Grant):
                (mine,) = decision.scopes
                running.append((now, amount, decision.marks[0]))
        elif running:
            charged_at, reserved, mark = running.pop(0 if in_order else share % len(running))
            cost = reserved * share // 100
            mine = ended(mine, reserved=reserved, mark=mark, cost=cost, now_ms=now)
            done.append(Ended(now, charged_at, cost))
    done += [Ended(now, charged_at, reserved) for charged_at, reserved, _ in running]
    done.sort(key=lambda each: each.charged_at_ms)
    for first in range(len(done)):
        total = 0
        for last in range(first, len(done)):
            total += done[last].cost
            passed_ms = done[last].charged_at_ms - done[first].charged_at_ms
            assert total * MINUTE_MS <= limit * (MINUTE_MS + passed_ms)
    assert mine.meter.tokens_level >= 0


@given(limit=st.integers(100, 1000), steps=STEPS)
def test_what_is_given_back_is_exact_when_requests_end_in_the_order_they_began(limit: int, steps: list[Step]) -> None:
    """The level is that of a queue that drains in order and from which what was not used is taken out."""
    mine, now = scope(tokens_per_minute=limit), NOW
    queue: list[list[int]] = []  # [number of the request, what of it has not drained]
    running: list[tuple[int, int, int | None]] = []

    def drain(units: int) -> None:
        while queue and units:
            taken = min(units, queue[0][1])
            queue[0][1] -= taken
            units -= taken
            if not queue[0][1]:
                queue.pop(0)

    for number, (kind, later_ms, amount, share) in enumerate(steps):
        now += later_ms
        drain(limit * later_ms)
        if kind == "ask" and isinstance(decision := rates.decide([mine], amount, amount, now), Grant):
            (mine,) = decision.scopes
            queue.append([number, amount * MINUTE_MS])
            running.append((number, amount, decision.marks[0]))
        elif kind == "end" and running:
            which, reserved, mark = running.pop(0)
            spare = (reserved - reserved * share // 100) * MINUTE_MS
            for entry in queue:
                if entry[0] == which:
                    entry[1] -= min(entry[1], spare)
            mine = ended(mine, reserved=reserved, mark=mark, cost=reserved * share // 100, now_ms=now)
        left = rates.tokens_left([mine], now)
        assert left is not None
        level = sum(units for _, units in queue)
        assert left.remaining == max(0, limit * MINUTE_MS - level) // MINUTE_MS


# --- budgets


def test_a_budget_tells_what_is_spent_from_what_is_only_held() -> None:
    fresh = scope(tokens_per_day=1000)
    first = granted([fresh], 600)
    (mine,) = first.scopes
    held = refused([mine], 401)
    assert (held.reason, held.used, held.held, held.running, held.retry_ms) == ("held", 0, 600, 1, rates.SOON_MS)
    (mine,) = granted([mine], 400).scopes
    mine = ended(mine, reserved=600, mark=first.marks[0], cost=600)
    spent = refused([mine], 401)
    assert (spent.reason, spent.used) == ("spent", 600)
    midnight = int(datetime(2030, 5, 18, tzinfo=UTC).timestamp() * 1000)
    assert spent.retry_ms == midnight - NOW
    assert refused([mine], 1001).reason == "too_large"
    # What still runs is held in the next day too.
    assert refused([mine], 601, midnight).reason == "held"
    granted([mine], 600, midnight)


def test_as_much_is_granted_as_there_is_and_no_less_than_is_worth_it() -> None:
    mine = scope(tokens_per_day=1000, tokens_per_minute=500)
    decision = rates.decide([mine], 101, 5000, NOW)
    assert isinstance(decision, Grant)
    assert decision.tokens == 500
    narrow = scope("key_a", tokens_per_month=120)
    decision = rates.decide([mine, narrow], 101, 5000, NOW)
    assert isinstance(decision, Grant)
    assert decision.tokens == 120
    assert [each.held.tokens for each in decision.scopes] == [120, 120]
    assert refused([mine, narrow], 121).scope == "key_a"


def test_concurrency_is_told_before_anything_else() -> None:
    busy = scope(held=Held(2, 50), concurrent_requests=2, requests_per_minute=1, tokens_per_day=10)
    assert refused([busy], 100).name == "concurrent_requests"
    free = scope(requests_per_minute=1, tokens_per_day=10)
    assert refused([free], 100).name == "tokens_per_day"


@pytest.mark.parametrize(
    ("zone", "before", "after"),
    [
        ("UTC", (2030, 1, 31, 23, 59), (2030, 2, 1, 0, 0)),
        ("Europe/Berlin", (2030, 3, 31, 23, 59), (2030, 4, 1, 0, 0)),
        ("America/New_York", (2030, 10, 31, 23, 59), (2030, 11, 1, 0, 0)),
        ("Asia/Kathmandu", (2031, 12, 31, 23, 59), (2032, 1, 1, 0, 0)),
        ("Pacific/Chatham", (2032, 2, 29, 23, 59), (2032, 3, 1, 0, 0)),
    ],
)
def test_b151_days_and_months_begin_at_midnight_of_their_zone(zone: str, before: Any, after: Any) -> None:
    late, midnight = (int(datetime(*when, tzinfo=ZoneInfo(zone)).timestamp() * 1000) for when in (before, after))
    fresh = scope(tokens_per_day=500, tokens_per_month=500, time_zone=zone)
    first = granted([fresh], 500, late)
    mine = ended(first.scopes[0], reserved=500, mark=first.marks[0], cost=500, now_ms=late)
    for name in ("tokens_per_day", "tokens_per_month"):
        alone = dataclasses.replace(mine, limits=Limits(**{name: 500}, time_zone=zone))
        refusal = refused([alone], 1, midnight - 1)
        assert (refusal.reason, refusal.used, refusal.retry_ms) == ("spent", 500, 1)
        granted([alone], 500, midnight)
        # Once only: after midnight it counts on from what was used after midnight.
        again = granted([alone], 300, midnight)
        booked = ended(again.scopes[0], reserved=300, mark=again.marks[0], cost=300, now_ms=midnight + 1)
        assert refused([booked], 201, midnight + 2).reason == "spent"


def test_days_of_a_change_of_the_clock_end_at_their_midnight() -> None:
    zone = ZoneInfo("Europe/Berlin")
    for day, hours in ((datetime(2030, 3, 31, tzinfo=zone), 23), (datetime(2030, 10, 27, tzinfo=zone), 25)):
        start = int(day.timestamp() * 1000)
        mine = scope(tokens_per_day=1, time_zone="Europe/Berlin")
        first = granted([mine], 1, start)
        spent = ended(first.scopes[0], reserved=1, mark=None, cost=1, now_ms=start)
        assert refused([spent], 1, start).retry_ms == hours * 3_600_000


def test_a_clock_that_is_set_back_gives_nothing_back() -> None:
    mine = scope(tokens_per_day=100, tokens_per_minute=100, requests_per_minute=1)
    first = granted([mine], 100)
    mine = ended(first.scopes[0], reserved=100, mark=first.marks[0], cost=100)
    day_ms = 24 * 3_600_000
    for back_ms in (1, MINUTE_MS, day_ms, 40 * day_ms):
        refused([mine], 1, NOW - back_ms)
        left = rates.tokens_left([mine], NOW - back_ms)
        assert left is not None
        assert left.remaining == 0
    # Nor does it take anything: where it was, everything is as it was.
    moved = rates.settle(mine.limits, mine.meter, NOW - day_ms, reserved=0, mark=None, cost=0)
    assert moved == mine.meter


def test_a_late_truth_corrects_only_windows_that_still_run() -> None:
    limits = Limits(tokens_per_day=1000, tokens_per_month=1000)
    booked = rates.settle(limits, Meter(), NOW, reserved=600, mark=None, cost=600)
    assert (booked.day_used, booked.month_used) == (600, 600)
    corrected = rates.correct(booked, limits, NOW, booked=600, cost=50)
    assert (corrected.day_used, corrected.month_used) == (50, 50)
    next_day = rates.settle(limits, booked, NOW + 24 * 3_600_000, reserved=7, mark=None, cost=7)
    corrected = rates.correct(next_day, limits, NOW, booked=600, cost=50)
    assert (corrected.day_used, corrected.month_used) == (7, 57)


def test_unlimited_scopes_refuse_nothing_and_say_nothing() -> None:
    mine = scope()
    for _ in range(100):
        (mine,) = granted([mine], 10**9).scopes
    assert rates.requests_left([mine], NOW) is None
    assert rates.tokens_left([mine], NOW) is None
    granted([], 5)


@given(limit=st.integers(1, rates.MAX_LIMIT), cost=st.integers(1, rates.MAX_LIMIT))
def test_every_number_fits_into_64_bits(limit: int, cost: int) -> None:
    mine = scope(tokens_per_minute=limit, tokens_per_day=limit, requests_per_minute=limit)
    if isinstance(decision := rates.decide([mine], cost, cost, NOW), Grant):
        assert all(value < 1 << 63 for value in dataclasses.astuple(decision.scopes[0].meter))
