"""Random histories of pool and index: whatever holders do, everything stays in exactly one place."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cachestore.blocks import BlockPool, OutOfBlocks
from cachestore.index import BlockName, PrefixIndex
from tests.cachestore.support import ALICE, BOB, CAROL, assert_prefix_closed, chain_keys

ACCOUNTS = (ALICE, BOB, CAROL)
# Chains of up to seven blocks over two words: many share a beginning, and few are equal.
CHAINS = st.lists(st.integers(0, 1), min_size=1, max_size=7)
# Rare events happen at one value of a die, so that histories grow between them.
DIE = st.integers(0, 19)


@dataclass
class Holder:
    """A request, as the pool sees it: `table` holds blocks, the first `published` of them under their names."""

    account: bytes
    epoch: int
    keys: list[bytes]
    table: list[int] = field(default_factory=list)
    published: int = 0


class PoolMachine(RuleBasedStateMachine):
    """`content` is the truth: under which name each block was last filled. Nobody may be given another content."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.pool = BlockPool(8, self.index)
        self.holders: list[Holder] = []
        self.parents: dict[bytes, bytes | None] = {}
        self.content: dict[int, BlockName] = {}
        self.dropped: set[bytes] = set()

    @rule(account=st.sampled_from(ACCOUNTS), epoch=st.integers(1, 4), die=DIE)
    def raise_epoch(self, account: bytes, epoch: int, die: int) -> None:
        if self.index.epoch(account) is not None and die < 15:
            return
        before = self.index.epoch(account)
        self.pool.forget(self.index.raise_epoch(account, epoch))
        if account in self.dropped:
            assert self.index.epoch(account) is None
        else:
            assert self.index.epoch(account) == max(epoch, before or 0)

    @rule(account=st.sampled_from(ACCOUNTS), die=DIE)
    def drop(self, account: bytes, die: int) -> None:
        if die != 13:
            return
        self.pool.forget(self.index.drop(account))
        self.dropped.add(account)

    @rule(account=st.sampled_from(ACCOUNTS), chain=CHAINS, stale=st.booleans())
    def admit(self, account: bytes, chain: list[int], stale: bool) -> None:
        """Adopt what is indexed and take the rest, or change nothing."""
        if self.index.epoch(account) is None:
            self.pool.forget(self.index.raise_epoch(account, 1))
        epoch = self.index.epoch(account) or 1
        keys = chain_keys(account, epoch, chain, 1)
        self.parents.update(zip(keys, [None, *keys], strict=False))
        matched = self.index.match(account, epoch + 1 if stale else epoch, keys)
        assert not (stale and matched)
        for block, key in zip(matched, keys, strict=False):
            assert self.content[block] == (account, epoch, key)
        needed = len(keys) - len(matched)
        before = (self.pool.free, self.pool.cached, self.pool.held)
        if needed > self.pool.usable_beside(matched):
            if not matched:
                with pytest.raises(OutOfBlocks):
                    self.pool.allocate(needed)
            assert (self.pool.free, self.pool.cached, self.pool.held) == before
            return
        self.pool.share(matched)
        holder = Holder(account, epoch, keys, matched + self.pool.allocate(needed), len(matched))
        for block, key in list(zip(holder.table, keys, strict=True))[len(matched) :]:
            self.content[block] = BlockName(account, epoch, key)
        self.holders.append(holder)

    @precondition(lambda self: self.holders)
    @rule(choice=st.integers(0, 99), count=st.integers(1, 6))
    def publish(self, choice: int, count: int) -> None:
        holder = self.holders[choice % len(self.holders)]
        if not self.index.is_open(holder.account, holder.epoch):
            return
        for position in range(holder.published, min(holder.published + count, len(holder.keys))):
            name = BlockName(holder.account, holder.epoch, holder.keys[position])
            holder.table[position] = self.pool.publish(holder.table[position], name)
            assert self.content[holder.table[position]] == name
            holder.published += 1

    @precondition(lambda self: self.holders)
    @rule(choice=st.integers(0, 99))
    def grow(self, choice: int) -> None:
        """A decode takes one block more, which has no name yet."""
        holder = self.holders[choice % len(self.holders)]
        if self.pool.usable:
            holder.table += self.pool.allocate(1)
            self.content.pop(holder.table[-1], None)

    @precondition(lambda self: self.holders)
    @rule(choice=st.integers(0, 99))
    def release(self, choice: int) -> None:
        self.pool.release(self.holders.pop(choice % len(self.holders)).table)

    @rule(count=st.integers(1, 10))
    def evict(self, count: int) -> None:
        """Somebody takes all that is free and some of what is cached, and gives it back."""
        count = min(self.pool.free + count, self.pool.usable)
        evictions, free = self.pool.evictions, self.pool.free
        blocks = self.pool.allocate(count)
        assert self.pool.evictions - evictions == max(0, count - free)
        for block in blocks:
            assert self.pool.name(block) is None
            self.content.pop(block, None)
        self.pool.release(blocks)

    @invariant()
    def everything_agrees(self) -> None:
        self.pool.check(holder.table for holder in self.holders)
        assert_prefix_closed(self.index, self.parents)
        for name, block in self.index.names():
            assert self.content[block] == name
            assert name.account not in self.dropped

    def teardown(self) -> None:
        for holder in self.holders:
            self.pool.release(holder.table)
        self.pool.check([])
        assert self.pool.held == 0


# Well over 1,000 operations, with a check after each.
TestPoolStates = PoolMachine.TestCase
TestPoolStates.settings = settings(max_examples=100, stateful_step_count=50, derandomize=True, deadline=None)
