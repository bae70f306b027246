from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from policies.eviction import Account, AccountLimits, LeastRecentlyUsed, Shares
from policies.lifetimes import Lifetimes
from tests.policies.made_traces import NO_LIFETIMES


def test_blocks_give_way_in_the_order_in_which_they_came() -> None:
    order = LeastRecentlyUsed(NO_LIFETIMES)
    order.add([3, 1, 2])
    assert order.pop(2) == [3, 1]
    assert list(order) == [2]
    assert order.pop(5) == [2]
    assert len(order) == 0


def test_a_block_that_was_taken_up_and_let_go_again_is_the_newest() -> None:
    order = LeastRecentlyUsed(NO_LIFETIMES)
    order.add([3, 1, 2])
    order.remove([3])
    order.add([3])
    assert order.pop(3) == [1, 2, 3]


@pytest.mark.parametrize("ttl_ns", [0, 1000])
def test_the_list_does_not_grow_with_how_often_its_blocks_are_used(ttl_ns: int) -> None:
    lifetimes = Lifetimes(lambda: 1)
    order = LeastRecentlyUsed(lifetimes)
    order.add([9])
    for _ in range(1000):
        if ttl_ns:
            lifetimes.extend([3, 1, 2], ttl_ns)
        order.add([3, 1, 2])
        order.remove([3, 1, 2])
    assert list(order) == [9]
    assert len(order._added) < 50


def test_what_is_not_there_is_not_removed() -> None:
    order = LeastRecentlyUsed(Lifetimes(int))
    assert order.pop(1) == []
    order.add([2, 1, 3])
    order.remove([1])
    with pytest.raises(KeyError):
        order.remove([1])
    # Held, and held for the first time.
    order.forget([1, 9])
    assert list(order) == [2, 3]


def test_what_is_used_over_and_over_is_listed_twice_at_most() -> None:
    order = LeastRecentlyUsed(Lifetimes(int))
    order.add(range(100))
    for _ in range(1000):
        order.remove(range(40, 100))
        order.add(range(99, 39, -1))
        assert sum(len(added) for _, added in order._added) <= 2 * 100 + 16
    assert order.pop(100) == [*range(40), *range(99, 39, -1)]
    assert not order._added


def test_a_block_that_another_account_has_now_is_not_given_up_by_the_one_before() -> None:
    lifetimes = Lifetimes(int)
    first, second = LeastRecentlyUsed(lifetimes), LeastRecentlyUsed(lifetimes)
    first.add([1, 2, 3])
    first.forget([2])
    second.add([2])
    assert first.pop(3) == [1, 3]
    assert second.pop(3) == [2]


def test_limits_that_contradict_each_other_are_refused() -> None:
    contradictions: tuple[dict[str, Any], ...] = (
        {"reserved": -1},
        {"weight": 0.0},
        {"weight": float("inf")},
        {"reserved": 3, "max": 2},
        {"strict": True},
        {"reserved": 2, "max": 3, "strict": True},
    )
    for broken in contradictions:
        with pytest.raises(ValueError, match="account"):
            AccountLimits(**broken)


def caching(shares: Shares, name: bytes, blocks: int, **limits: Any) -> Account:
    """An account that has the next so many numbers cached."""
    account = shares.account(name)
    shares.set_limits(account, AccountLimits(**limits))
    first = sum(each.used for each in shares)
    shares.hold(account, blocks)
    shares.release(account, 0, range(first, first + blocks))
    return account


def victims(shares: Shares, account: Account, blocks: int) -> dict[bytes, int]:
    """Who gave up how many for so many new blocks of an account."""
    gave: dict[bytes, int] = {}
    own, anybodys = shares.to_evict(account, blocks)
    shares.evict(account, own)
    shares.hold(account, blocks - anybodys)
    for victim, count in shares.victims(account, anybodys):
        gave[victim.name] = gave.get(victim.name, 0) + len(shares.evict(victim, count))
        shares.hold(account, count)
    shares.check()
    return gave


def test_who_has_most_over_its_reservation_gives_way_by_weight() -> None:
    shares = Shares(100, partial(LeastRecentlyUsed, NO_LIFETIMES))
    caching(shares, b"large", 60)
    caching(shares, b"heavy", 30, weight=3.0)
    caching(shares, b"reserved", 10, reserved=10)
    new = shares.account(b"new")
    # Until the new one, the large one and a third of the heavy one are alike.
    assert victims(shares, new, 20) == {b"large": 20}
    assert victims(shares, new, 10) == {b"large": 10}
    # Now all are alike: 30 new, 30 large; the heavy one stays until others are down to a third of it.
    assert victims(shares, new, 5) == {b"large": 5}
    assert {each.name: each.used for each in shares} == {b"large": 25, b"heavy": 30, b"reserved": 10, b"new": 35}


def test_one_account_gives_way_to_itself_in_its_own_order() -> None:
    shares = Shares(10, partial(LeastRecentlyUsed, NO_LIFETIMES))
    only = caching(shares, b"only", 10)
    assert shares.to_evict(only, 4) == (4, 0)
    assert victims(shares, only, 4) == {}
    assert list(only.cached) == [4, 5, 6, 7, 8, 9]


def test_a_strict_account_takes_from_nobody_and_gives_nothing() -> None:
    shares = Shares(20, partial(LeastRecentlyUsed, NO_LIFETIMES))
    strict = caching(shares, b"strict", 5, reserved=5, max=5, strict=True)
    other = caching(shares, b"other", 10)
    assert shares.short(other, 15) == 0
    assert shares.short(other, 16) == 1
    assert shares.to_evict(other, 6) == (0, 1)
    assert shares.to_evict(strict, 2) == (2, 0)
    assert shares.above(strict, 6) == 1
    assert victims(shares, other, 6) == {b"other": 1}


def test_where_nothing_is_left_to_reserve_nobody_is_asked_what_requests_need() -> None:
    shares = Shares(20, partial(LeastRecentlyUsed, NO_LIFETIMES))
    shares.set_limits(shares.account(b"a"), AccountLimits(reserved=20))
    shares.begun = lambda: pytest.fail("nothing is left to reserve")
    shares.set_limits(shares.account(b"b"), AccountLimits(reserved=5))
    shares.grow()
    assert shares.missing == 5
    shares.check()


def test_the_heap_of_victims_does_not_keep_accounts_that_are_no_more() -> None:
    shares = Shares(1000, partial(LeastRecentlyUsed, NO_LIFETIMES))
    for number in range(1000):
        account = caching(shares, str(number).encode(), 1)
        shares.discard(account, list(account.cached))
        shares.forget(account)
    assert not list(shares)
    assert len(shares._victims) < 100


def test_the_heap_of_victims_does_not_grow_with_what_happens() -> None:
    shares = Shares(1000, partial(LeastRecentlyUsed, NO_LIFETIMES))
    accounts = [caching(shares, bytes([number]), 1) for number in range(10)]
    for step in range(5000):
        account = accounts[step % 10]
        shares.hold(account, 3)
        shares.release(account, 3, [])
    assert len(shares._victims) < 100
    shares.check()
