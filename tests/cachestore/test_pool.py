"""The pool of blocks, call by call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import pytest

from cachestore.blocks import NO_BLOCK, BlockPool, OutOfBlocks, PoolError
from cachestore.index import BlockName, PrefixIndex
from policies.eviction import LeastRecentlyUsed, Order
from policies.lifetimes import Lifetimes
from policies.reuse import LearntReuse
from tests.cachestore.support import ALICE, BOB, name_of, pool_state


def make_pool(total: int, make_order: Callable[[Lifetimes], Order] = LeastRecentlyUsed) -> BlockPool:
    index = PrefixIndex()
    for account in (ALICE, BOB):
        index.raise_epoch(account, 1)
    return BlockPool(total, index, make_order)


def cache_chain(pool: BlockPool, length: int, account: bytes = ALICE) -> list[int]:
    """A chain of named blocks that nobody holds."""
    blocks = pool.allocate(account, length)
    keys = [name_of(account, 1, word).key for word in range(length)]
    assert pool.publish(account, 1, blocks, keys, None) == blocks
    pool.release(account, blocks)
    return blocks


def publish(pool: BlockPool, block: int, name: BlockName) -> int:
    (kept,) = pool.publish(name.account, name.epoch, [block], [name.key], None)
    return kept


def check(pool: BlockPool, tables: Iterable[list[int]], account: bytes = ALICE) -> None:
    """That nobody else than these of one account holds anything."""
    pool.check((account, table) for table in tables)


def match(pool: BlockPool, length: int, account: bytes = ALICE) -> list[int]:
    return pool.index.match(account, 1, [name_of(account, 1, word).key for word in range(length)])


def test_b025_the_tail_is_evicted_first_and_the_rest_still_hits() -> None:
    pool = make_pool(4)
    chain = cache_chain(pool, 4)
    assert pool.free == 0
    assert pool.allocate(ALICE, 1) == [chain[3]]
    assert match(pool, 4) == chain[:3]
    check(pool, [[chain[3]]])


def test_blocks_to_be_reused_are_no_room_for_new_ones() -> None:
    pool = make_pool(10)
    prefix = cache_chain(pool, 8)
    assert pool.short(ALICE, prefix, 2) == 0
    assert pool.short(ALICE, prefix, 5) == 3
    pool.share(ALICE, prefix[:3])
    assert pool.short(ALICE, prefix, 2) == 0
    assert pool.short(ALICE, prefix, 3) == 1
    assert pool.short(BOB, [], 7) == 0
    assert pool.short(BOB, [], 8) == 1


def test_b028_bad_calls_of_free_raise_and_change_nothing() -> None:
    pool = make_pool(8)
    held = pool.allocate(ALICE, 8)
    pool.release(ALICE, [6])
    before = pool_state(pool)
    for bad, reason in (
        ([5, 7, 5], "twice"),
        ([6], "held by nobody"),
        ([5, 6], "held by nobody"),
        ([NO_BLOCK], "outside"),
        ([5, NO_BLOCK], "outside"),
        ([8], "outside"),
    ):
        with pytest.raises(PoolError, match=reason):
            pool.release(ALICE, bad)
        assert pool_state(pool) == before
    pool.release(ALICE, [5, 7])
    taken = pool.allocate(ALICE, 3)
    assert sorted(taken) == [5, 6, 7]
    check(pool, [[block] for block in held])


def test_b029_an_evicted_block_leaves_its_name_behind() -> None:
    pool = make_pool(5)
    others = pool.allocate(ALICE, 4)
    (block,) = pool.allocate(ALICE, 1)
    assert block == 4
    first, second = name_of(ALICE, 1, "K1"), name_of(BOB, 1, "K2")
    publish(pool, 4, first)
    pool.release(ALICE, [4])
    assert pool.index.get(first) == 4
    assert pool.allocate(BOB, 1) == [4]
    assert pool.index.get(first) is None
    assert pool.key(4) is None
    publish(pool, 4, second)
    assert pool.index.get(first) is None
    assert pool.index.get(second) == 4
    assert pool.key(4) == second.key
    pool.check([*((ALICE, [block]) for block in others), (BOB, [4])])


def test_allocation_is_all_or_nothing() -> None:
    pool = make_pool(4)
    cache_chain(pool, 2)
    before = pool_state(pool)
    reason = "5 blocks wanted, 2 free and 2 cached of 4; the account holds 0 and may have 4"
    with pytest.raises(OutOfBlocks, match=reason):
        pool.allocate(ALICE, 5)
    assert pool_state(pool) == before
    assert len(pool.allocate(ALICE, 4)) == 4
    assert pool.evictions == 2


def test_free_blocks_are_used_before_cached_ones_are_evicted() -> None:
    pool = make_pool(4)
    chain = cache_chain(pool, 2)
    assert not set(pool.allocate(ALICE, 2)) & set(chain)
    assert pool.evictions == 0
    assert match(pool, 2) == chain


def test_a_shared_block_is_evicted_only_after_its_last_holder_let_go() -> None:
    pool = make_pool(2)
    chain = cache_chain(pool, 2)
    pool.share(ALICE, chain)
    pool.share(ALICE, chain)
    pool.release(ALICE, chain)
    assert (pool.free, pool.cached, pool.held) == (0, 0, 2)
    with pytest.raises(OutOfBlocks):
        pool.allocate(ALICE, 1)
    pool.release(ALICE, chain)
    assert (pool.free, pool.cached) == (0, 2)
    assert pool.allocate(ALICE, 1) == [chain[1]]


def test_a_nameless_block_is_not_shared() -> None:
    pool = make_pool(3)
    chain = cache_chain(pool, 1)
    nameless = pool.allocate(ALICE, 1)
    before = pool_state(pool)
    for bad in (nameless, [*chain, *nameless], [NO_BLOCK], [3]):
        with pytest.raises(PoolError, match="no name"):
            pool.share(ALICE, bad)
        assert pool_state(pool) == before
    pool.share(ALICE, chain)
    assert pool.references(chain[0]) == 1


def test_only_a_block_held_once_and_unnamed_is_published() -> None:
    pool = make_pool(4)
    named = cache_chain(pool, 1)
    pool.share(ALICE, named)
    free = 3
    before = pool_state(pool)
    for bad in (named[0], free, NO_BLOCK, 4):
        with pytest.raises(PoolError, match="held once and unnamed"):
            publish(pool, bad, name_of(ALICE, 1, "new"))
        assert pool_state(pool) == before


def test_a_duplicate_gives_way_to_the_block_that_bears_the_name() -> None:
    pool = make_pool(3)
    chain = cache_chain(pool, 1)
    (copy,) = pool.allocate(ALICE, 1)
    assert publish(pool, copy, name_of(ALICE, 1, 0)) == chain[0]
    assert pool.free == 2
    assert pool.references(chain[0]) == 1
    check(pool, [chain])


def test_forgotten_blocks_are_free_at_once_or_when_their_holder_lets_go() -> None:
    pool = make_pool(5)
    chain = cache_chain(pool, 3)
    others = cache_chain(pool, 1, BOB)
    pool.share(ALICE, chain[:2])
    pool.forget(ALICE, pool.index.raise_epoch(ALICE, 2))
    assert (pool.free, pool.cached, pool.held) == (2, 1, 2)
    check(pool, [chain[:2]])
    pool.release(ALICE, chain[:2])
    assert (pool.free, pool.cached, pool.held) == (4, 1, 0)
    assert match(pool, 1, BOB) == others
    check(pool, [])


def test_check_sees_what_is_wrong() -> None:
    """Each corruption is one that a bug could make; the positive control is the same pool before it."""
    for corrupt in (
        lambda pool: pool._free.append(0),
        lambda pool: pool._free.pop(),
        lambda pool: pool._references.__setitem__(0, 2),
        lambda pool: pool.shares.account(ALICE).cached.add([0]),
        lambda pool: pool.shares.account(BOB).cached.pop(1),
        lambda pool: setattr(pool.shares.account(ALICE), "held", 2),
        lambda pool: setattr(pool.shares.account(BOB), "_entry", None),
        lambda pool: setattr(pool.shares, "reserved", 1),
        lambda pool: setattr(pool, "cached", 2),
        lambda pool: pool._keys.__setitem__(0, name_of(ALICE, 1, "x").key),
        lambda pool: pool.index.remove(BOB, [name_of(BOB, 1, 0).key]),
        lambda pool: pool.index.add(ALICE, 1, [name_of(ALICE, 1, "x").key], [0]),
    ):
        pool = make_pool(4)
        held = pool.allocate(ALICE, 1)
        cache_chain(pool, 1, BOB)
        check(pool, [held])
        corrupt(pool)
        with pytest.raises(AssertionError):
            check(pool, [held])


def test_check_sees_a_holder_without_the_ancestors() -> None:
    pool = make_pool(3)
    chain = pool.allocate(ALICE, 2)
    for word, block in enumerate(chain):
        publish(pool, block, name_of(ALICE, 1, word))
    pool.share(ALICE, chain[1:])
    with pytest.raises(AssertionError, match="without its ancestors"):
        check(pool, [chain, chain[1:]])
    pool.share(ALICE, chain[:1])
    check(pool, [chain, chain])


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        make_pool(0)
    assert make_pool(1).free == 1


def test_a_fence_leaves_nothing_of_what_the_order_knew_of_names_held_or_cached() -> None:
    pool = make_pool(6, partial(LearntReuse, 6))
    cache_chain(pool, 6)
    held = match(pool, 2)
    pool.share(ALICE, held)
    pool.release(BOB, pool.allocate(BOB, 1))
    order = pool.shares.account(ALICE).cached
    assert isinstance(order, LearntReuse)
    assert order.ghosts == 1
    pool.forget(ALICE, pool.index.raise_epoch(ALICE, 2))
    assert (order.ghosts, len(order)) == (0, 0)
    check(pool, [held])


def test_a_child_needs_a_parent_that_has_its_name() -> None:
    pool = make_pool(4)
    parent, child = pool.allocate(ALICE, 2)
    before = pool_state(pool)
    with pytest.raises(PoolError, match=f"block {parent} has no name: its child"):
        pool.publish(ALICE, 1, [child], [name_of(ALICE, 1, 1).key], parent)
    assert pool_state(pool) == before
