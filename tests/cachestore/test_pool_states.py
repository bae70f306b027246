"""Random histories of pool and index: whatever holders do, everything stays in exactly one place."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cachestore.blocks import BlockPool, OutOfBlocks
from cachestore.index import BlockName, PrefixIndex
from policies.eviction import Account, AccountLimits, LeastRecentlyUsed, Order
from policies.lifetimes import Lifetimes
from tests.cachestore.contrary import Contrary
from tests.cachestore.support import ALICE, BOB, CAROL, Clock, assert_prefix_closed, chain_keys

ACCOUNTS = (ALICE, BOB, CAROL)
# Chains of up to seven blocks over two words: many share a beginning, and few are equal.
CHAINS = st.lists(st.integers(0, 1), min_size=1, max_size=7)
# Rare events happen at one value of a die, so that histories grow between them.
DIE = st.integers(0, 19)
WEIGHTS = st.sampled_from([1.0, 1.0, 3.0])


@dataclass
class Holder:
    """A request, as the pool sees it: `table` holds blocks, the first `published` of them under their names."""

    account: bytes
    epoch: int
    keys: list[bytes]
    table: list[int] = field(default_factory=list)
    published: int = 0


class PoolMachine(RuleBasedStateMachine):
    """`content` is the truth: under which name each block was last filled. Nobody may be given another content.

    Of every indexed name it is known until when it is wanted (`until_ns`) and whether it was gone on from (`gone_on`);
    of every block when it was last let go of (`let_go`); of names that gave way, how they did (`went`).
    """

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.index = PrefixIndex()
        self.pool = BlockPool(8, self.index, self.make_order, self.clock)
        self.until_ns: dict[BlockName, int] = {}
        self.gone_on: set[BlockName] = set()
        self.let_go: dict[int, tuple[int, int]] = {}
        self.went: dict[BlockName, str] = {}
        self.indexed: set[BlockName] = set()
        self.releases = 0
        self.holders: list[Holder] = []
        self.parents: dict[bytes, bytes | None] = {}
        self.content: dict[int, BlockName] = {}
        self.dropped: set[bytes] = set()

    def make_order(self, lifetimes: Lifetimes) -> Order:
        return LeastRecentlyUsed(lifetimes)

    @rule(account=st.sampled_from(ACCOUNTS), epoch=st.integers(1, 4), die=DIE)
    def raise_epoch(self, account: bytes, epoch: int, die: int) -> None:
        if self.index.epoch(account) is not None and die < 15:
            return
        before = self.index.epoch(account)
        self.pool.forget(account, self.index.raise_epoch(account, epoch))
        self.forget(account)
        if account in self.dropped:
            assert self.index.epoch(account) is None
        else:
            assert self.index.epoch(account) == max(epoch, before or 0)

    @rule(account=st.sampled_from(ACCOUNTS), die=DIE)
    def drop(self, account: bytes, die: int) -> None:
        if die != 13:
            return
        self.pool.drop(account, self.index.drop(account))
        self.forget(account)
        self.dropped.add(account)

    @rule(account=st.sampled_from(ACCOUNTS), die=DIE)
    def flush(self, account: bytes, die: int) -> None:
        if die != 13 or self.index.epoch(account) is None:
            return
        cached = len(self.pool.shares.account(account).cached)
        assert self.pool.flush(account) == cached
        assert not len(self.pool.shares.account(account).cached)
        self.forget(account)

    def forget(self, account: bytes) -> None:
        """Nothing is said any more of what the account had and has not."""
        self.indexed = {name for name, _ in self.index.names()}
        self.went = {name: how for name, how in self.went.items() if name.account != account}

    @rule(seconds=st.integers(1, 20))
    def wait(self, seconds: int) -> None:
        self.clock.advance(seconds)

    @rule(account=st.sampled_from(ACCOUNTS), chain=CHAINS, stale=st.booleans())
    def admit(self, account: bytes, chain: list[int], stale: bool) -> None:
        """Adopt what is indexed and take the rest, or change nothing."""
        if self.index.epoch(account) is None:
            self.index.raise_epoch(account, 1)
        epoch = self.index.epoch(account) or 1
        keys = chain_keys(account, epoch, chain, 1)
        self.parents.update(zip(keys, [None, *keys], strict=False))
        matched = self.index.match(account, epoch + 1 if stale else epoch, keys)
        assert not (stale and matched)
        for block, key in zip(matched, keys, strict=False):
            assert self.content[block] == (account, epoch, key)
        if not stale:
            self.check_miss(account, epoch, keys, matched)
        needed = len(keys) - len(matched)
        before = (self.pool.free, self.pool.cached, self.pool.held)
        share = self.pool.shares.account(account)
        if share.held + len(keys) <= share.reserved:
            assert not self.pool.short(account, matched, needed), "an account within its reservation has to wait"
        if self.short(account, matched, needed):
            if not matched and self.pool.short(account, matched, needed):
                with pytest.raises(OutOfBlocks):
                    self.pool.allocate(account, needed)
            assert (self.pool.free, self.pool.cached, self.pool.held) == before
            return
        self.pool.share(account, matched)
        holder = Holder(account, epoch, keys, matched + self.allocate(account, needed), len(matched))
        for block, key in list(zip(holder.table, keys, strict=True))[len(matched) :]:
            self.content[block] = BlockName(account, epoch, key)
        self.holders.append(holder)

    @precondition(lambda self: self.holders)
    @rule(choice=st.integers(0, 99), count=st.integers(1, 6))
    def publish(self, choice: int, count: int) -> None:
        holder = self.holders[choice % len(self.holders)]
        if not self.index.is_open(holder.account, holder.epoch):
            return
        begin, end = holder.published, min(holder.published + count, len(holder.keys))
        parent = holder.table[begin - 1] if begin else None
        holder.table[begin:end] = self.pool.publish(
            holder.account, holder.epoch, holder.table[begin:end], holder.keys[begin:end], parent
        )
        for block, key in zip(holder.table[begin:end], holder.keys[begin:end], strict=True):
            assert self.content[block] == BlockName(holder.account, holder.epoch, key)
        for parent_key in holder.keys[max(0, begin - 1) : max(0, end - 1)]:
            self.gone_on.add(BlockName(holder.account, holder.epoch, parent_key))
        holder.published = end

    @precondition(lambda self: self.holders)
    @rule(choice=st.integers(0, 99))
    def grow(self, choice: int) -> None:
        """A decode takes one block more, which has no name yet."""
        holder = self.holders[choice % len(self.holders)]
        if not self.short(holder.account, [], 1):
            holder.table += self.allocate(holder.account, 1)
            self.content.pop(holder.table[-1], None)

    @precondition(lambda self: self.holders)
    @rule(choice=st.integers(0, 99), ttl_seconds=st.sampled_from([0, 0, 10, 30]))
    def release(self, choice: int, ttl_seconds: int) -> None:
        holder = self.holders.pop(choice % len(self.holders))
        if ttl_seconds:
            self.pool.keep(holder.table, ttl_seconds * 1_000_000_000)
            for block, key in zip(holder.table, holder.keys, strict=False):
                if self.pool.key(block) == key:
                    name = BlockName(holder.account, holder.epoch, key)
                    until_ns = self.clock.ns + ttl_seconds * 1_000_000_000
                    self.until_ns[name] = max(until_ns, self.until_ns.get(name, 0))
        self.releases += 1
        self.let_go.update((block, (self.releases, place)) for place, block in enumerate(reversed(holder.table)))
        self.pool.release(holder.account, holder.table)

    @rule(account=st.sampled_from(ACCOUNTS), count=st.integers(1, 10))
    def evict(self, account: bytes, count: int) -> None:
        """Somebody takes blocks and gives them back."""
        count = max(0, count - self.short(account, [], count))
        blocks = self.allocate(account, count)
        for block in blocks:
            assert self.pool.key(block) is None
            self.content.pop(block, None)
        self.pool.release(account, blocks)

    @rule(
        account=st.sampled_from(ACCOUNTS),
        die=DIE,
        reserved=st.integers(0, 9),
        more=st.integers(0, 4),
        weight=WEIGHTS,
    )
    def set_limits(self, account: bytes, die: int, reserved: int, more: int, weight: float) -> None:
        if die < 12 or account in self.dropped:
            return
        limits = [
            AccountLimits(weight=weight),
            AccountLimits(reserved=reserved, weight=weight),
            AccountLimits(reserved=reserved, max=reserved + more, weight=weight),
            AccountLimits(reserved=reserved, max=reserved, weight=weight, strict=True),
        ][die % 4]
        held = {each.name: each.held for each in self.pool.shares}
        self.pool.set_limits(account, limits)
        # Nothing that runs loses a block.
        assert {each.name: each.held for each in self.pool.shares} == held | {account: held.get(account, 0)}

    def allocate(self, account: bytes, count: int) -> list[int]:
        """What was promised to the others stays theirs; who gives way is furthest over its reservation."""
        shares = self.pool.shares
        mine = shares.account(account)
        others = {each: (each.used, self.by_use(each)) for each in shares if each is not mine}
        room, evictions = self.pool.free, self.pool.evictions
        blocks = self.pool.allocate(account, count)
        losses = {each: used - each.used for each, (used, _) in others.items()}
        for each, (used, cached) in others.items():
            left = set(each.cached)
            if isinstance(each.cached, LeastRecentlyUsed):
                # From the cold end.
                assert left == set(cached[losses[each] :])
            lost = set(cached) - left
            assert all(map(self.is_wanted, left)) or not any(map(self.is_wanted, lost)), "a wanted block went first"
            assert each.used >= min(used, each.reserved)
            assert not (losses[each] and (each.limits.strict or mine.limits.strict))
        assert mine.used <= shares.cap(mine) or not len(mine.cached)
        if not any(each.limits.strict for each in shares) and mine.limits.max is None:
            assert self.pool.evictions - evictions == max(0, count - room)
        for each in others:
            # Whoever lost something ends no more than a block below those who could have given it instead.
            if losses[each]:
                for other in (other for other in others if len(other.cached) and not other.limits.strict):
                    assert other.over <= each.over + 1 / each.limits.weight + 1e-9
        return blocks

    def by_use(self, account: Account) -> list[int]:
        """Cached blocks: the least recently used first, and then those that are wanted, by how long."""
        wanted = {block: self.until_ns[self.content[block]] for block in account.cached if self.is_wanted(block)}
        return sorted(account.cached, key=lambda block: (wanted.get(block, 0), self.let_go[block]))

    def is_wanted(self, block: int) -> bool:
        return self.until_ns.get(self.content[block], 0) > self.clock.ns

    def check_miss(self, account: bytes, epoch: int, keys: list[bytes], matched: list[int]) -> None:
        miss = self.pool.miss(account, epoch, keys, matched)
        if len(matched) == len(keys):
            assert miss is None
            return
        assert miss is not None
        at, reason = miss
        assert at == len(matched)
        is_gone_on = bool(matched) and BlockName(account, epoch, keys[at - 1]) in self.gone_on
        # Ghosts are bounded: what gave way long ago may be forgotten.
        assert reason in ("diverged" if is_gone_on else "cold", self.went.get(BlockName(account, epoch, keys[at])))

    def short(self, account: bytes, shared: list[int], count: int) -> int:
        """By what it may have itself, and by what all have."""
        return max(self.pool.above(account, shared, count), self.pool.short(account, shared, count))

    @invariant()
    def everything_agrees(self) -> None:
        self.pool.check((holder.account, holder.table) for holder in self.holders)
        assert_prefix_closed(self.index, self.parents)
        indexed = {name for name, _ in self.index.names()}
        for name in self.indexed - indexed:
            self.went[name] = "expired" if 0 < self.until_ns.get(name, 0) <= self.clock.ns else "evicted"
        for name in indexed:
            self.went.pop(name, None)
        self.indexed = indexed
        self.gone_on &= indexed
        self.until_ns = {name: until_ns for name, until_ns in self.until_ns.items() if name in indexed}
        for name, block in self.index.names():
            assert self.content[block] == name
            assert name.account not in self.dropped

    def teardown(self) -> None:
        for holder in self.holders:
            self.pool.release(holder.account, holder.table)
        self.pool.check([])
        assert self.pool.held == 0
        # With nothing held every reservation is in force, as far as they fit.
        missing = sum(each.limits.reserved - each.reserved for each in self.pool.shares)
        assert not missing or self.pool.shares.reserved == self.pool.total


# Well over 1,000 operations, with a check after each.
TestPoolStates = PoolMachine.TestCase
TestPoolStates.settings = settings(max_examples=300, stateful_step_count=60, derandomize=True, deadline=None)


class ReusePoolMachine(PoolMachine):
    """The same, where it is learnt who gives way, and the wrong is learnt."""

    def make_order(self, lifetimes: Lifetimes) -> Order:
        return Contrary(8, lifetimes)


TestReusePoolStates = ReusePoolMachine.TestCase
TestReusePoolStates.settings = settings(TestPoolStates.settings)
