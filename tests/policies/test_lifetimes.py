"""Blocks that are wanted for a time give way after the others, and afterwards as if they had never been wanted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.eviction import LeastRecentlyUsed, Order
from policies.lifetimes import Lifetimes
from policies.reuse import LearntReuse

SECOND = 1_000_000_000


class Clock:
    def __init__(self) -> None:
        self.ns = 5 * SECOND

    def __call__(self) -> int:
        return self.ns


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lifetimes(clock: Clock) -> Lifetimes:
    return Lifetimes(clock)


@pytest.fixture(params=[LeastRecentlyUsed, lambda lifetimes: LearntReuse(100, lifetimes)], ids=["lru", "reuse"])
def order(request: pytest.FixtureRequest, lifetimes: Lifetimes) -> Order:
    make: Callable[[Lifetimes], Order] = request.param
    return make(lifetimes)


def cache(order: Order, *chains: list[int]) -> None:
    """Each is given from head to tail, and let go of from tail to head."""
    for chain in chains:
        order.publish(chain, [b"%d" % block for block in chain], None)
        order.add(chain[::-1])


def test_a_wanted_block_gives_way_after_all_others(order: Order, lifetimes: Lifetimes) -> None:
    lifetimes.extend([1, 2], 10 * SECOND)
    cache(order, [1, 2], [3, 4], [5])
    assert order.pop(3) == [4, 3, 5]
    assert order.pop(9) == [2, 1]
    assert not len(order)


def test_when_its_time_is_over_it_is_as_any_other(order: Order, lifetimes: Lifetimes, clock: Clock) -> None:
    lifetimes.extend([1, 2], 10 * SECOND)
    cache(order, [1, 2], [3, 4], [5])
    clock.ns += 10 * SECOND
    assert order.pop(9) == [2, 1, 4, 3, 5]


def test_of_wanted_blocks_the_one_whose_time_ends_first(order: Order, lifetimes: Lifetimes) -> None:
    lifetimes.extend([1, 2], 30 * SECOND)
    lifetimes.extend([3], 10 * SECOND)
    lifetimes.extend([4, 5], 20 * SECOND)
    cache(order, [1, 2], [3], [4, 5])
    assert order.pop(9) == [3, 5, 4, 2, 1]


def test_a_time_is_only_ever_extended(order: Order, lifetimes: Lifetimes, clock: Clock) -> None:
    lifetimes.extend([1], 30 * SECOND)
    lifetimes.extend([1], 10 * SECOND)
    cache(order, [1], [2])
    clock.ns += 20 * SECOND
    assert order.pop(1) == [2]


def test_a_head_is_wanted_and_its_tail_is_not(order: Order, lifetimes: Lifetimes) -> None:
    lifetimes.extend([1, 2], 10 * SECOND)
    cache(order, [1, 2, 3, 4], [5])
    assert order.pop(9) == [4, 3, 5, 2, 1]


def test_a_wanted_block_that_is_taken_up_again_is_not_there(order: Order, lifetimes: Lifetimes, clock: Clock) -> None:
    lifetimes.extend([1, 2], 10 * SECOND)
    cache(order, [1, 2], [3])
    order.remove([1, 2])
    assert list(order) == [3]
    clock.ns += 20 * SECOND
    order.add([2, 1])
    # Its time is over, and it was used last.
    assert order.pop(9) == [3, 2, 1]


def test_a_wanted_block_whose_name_is_gone_is_not_there(order: Order, lifetimes: Lifetimes) -> None:
    lifetimes.extend([1, 2], 10 * SECOND)
    cache(order, [1, 2], [3])
    order.forget([2, 1])
    lifetimes.forget([1, 2])
    assert order.pop(9) == [3]


def test_only_what_had_a_time_is_over(lifetimes: Lifetimes, clock: Clock) -> None:
    lifetimes.extend([1], 10 * SECOND)
    lifetimes.extend([2], 20 * SECOND)
    assert lifetimes.lasting([1, 2, 3]) == {1, 2}
    clock.ns += 10 * SECOND
    assert lifetimes.over([1, 2, 3]) == {1}
    assert lifetimes.lasting([1, 2, 3]) == {2}
    lifetimes.forget([1, 2])
    assert not len(lifetimes)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 11), st.sampled_from([0, 0, 5, 20]), st.integers(0, 6), st.integers(0, 3)),
        max_size=80,
    )
)
def test_the_least_recently_used_that_is_not_wanted_gives_way(uses: list[tuple[int, int, int, int]]) -> None:
    """Against sorting: single blocks that are used again and again, time that goes on, some evicted in between."""
    clock = Clock()
    lifetimes = Lifetimes(clock)
    order = LeastRecentlyUsed(lifetimes)
    used: dict[int, int] = {}
    until_ns: dict[int, int] = {}
    for number, (block, ttl_seconds, pause_seconds, evicted) in enumerate(uses):
        if block in used:
            order.remove([block])
        if ttl_seconds:
            lifetimes.extend([block], ttl_seconds * SECOND)
            until_ns[block] = max(until_ns.get(block, 0), clock.ns + ttl_seconds * SECOND)
        order.add([block])
        used[block] = number
        clock.ns += pause_seconds * SECOND
        lasting = {each for each in used if until_ns.get(each, 0) > clock.ns}
        expected = sorted(used.keys() - lasting, key=used.__getitem__)
        expected += sorted(lasting, key=lambda each: (until_ns[each], used[each]))
        assert order.pop(evicted) == expected[:evicted]
        for each in expected[:evicted]:
            del used[each]
            until_ns.pop(each, None)
        lifetimes.forget(expected[:evicted])
        assert sorted(order) == sorted(used)
        assert len(order) == len(used)


def test_uses_of_wanted_blocks_leave_nothing_behind(lifetimes: Lifetimes) -> None:
    """A chain that is used for ever, and never gives way."""
    order = LeastRecentlyUsed(lifetimes)
    lifetimes.extend(range(10), 10**6 * SECOND)
    order.add(range(10))
    for _ in range(1000):
        order.remove(range(10))
        order.add(range(10))
    assert len(order._kept._lasting) < 50


def test_nobody_waits_for_all_whose_times_end_together(
    order: Order, lifetimes: Lifetimes, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    lifetimes.extend(range(1, 1001), 10 * SECOND)
    cache(order, *([block] for block in range(1, 1001)), [2000])
    clock.ns += 20 * SECOND
    looks = 0

    def over(blocks: list[int]) -> set[int]:
        nonlocal looks
        looks += len(blocks)
        return set(blocks)

    monkeypatch.setattr(lifetimes, "over", over)
    first = order.pop(1)
    assert looks < 50
    # Each gives way in the end, and before the one that is newer and was never wanted.
    assert sorted(first + order.pop(999)) == list(range(1, 1001))
    assert order.pop(2) == [2000]
