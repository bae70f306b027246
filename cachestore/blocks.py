"""The pool of KV blocks: who holds which, which are named, which give way.

A block is in exactly one of three states:

    free ──allocate──► held ──release──► free      (it has no name)
                        ▲ │
                  share │ └──release──► cached     (it has a name: `publish`)
                        └───────────────── │
    free ◄──allocate evicts, forget────────┘

*held*: one or more requests refer to it; *cached*: named, nobody refers to it, evictable. Reference counts live
here and nowhere else. The content of a named block never changes. A block that is not free belongs to the account of
the request that allocated it; how many blocks an account may have is `policies.eviction`'s to say.

After PagedAttention (Kwon et al., 2023); the prefix index is a hash table by block name, not a tree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import cast

from cachestore.index import BlockName, PrefixIndex
from cachestore.protocol import MissReason
from policies.eviction import Account, AccountLimits, LeastRecentlyUsed, Order, Shares
from policies.ghosts import Ghosts
from policies.lifetimes import Lifetimes

# Fills the unused end of a block table. It is never a block, so handing it to the pool is an error.
NO_BLOCK = -1


class PoolError(Exception):
    """A call that would have corrupted the pool. Nothing was changed."""


class OutOfBlocks(PoolError):
    """The account may not hold so many more. Nothing was changed."""


class BlockPool:
    """Allocates, shares and frees block numbers 0 … total − 1. Not thread-safe: one engine thread owns it.

    Args:
        make_order: of the cached blocks of each account.

    Attributes:
        evictions: how many cached blocks gave way.
        limit_evictions: those of them that did because their account may not have so many.
    """

    def __init__(
        self,
        total: int,
        index: PrefixIndex,
        make_order: Callable[[Lifetimes], Order] = LeastRecentlyUsed,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        if total < 1:
            raise ValueError(f"a pool needs at least one block, not {total}")
        self.total = total
        self.index = index
        self.evictions = 0
        self.limit_evictions = 0
        self.cached = 0
        self._lifetimes = Lifetimes(clock_ns)
        self._ghosts = Ghosts(total)
        self.shares = Shares(total, partial(make_order, self._lifetimes))
        # Popped from its end: low numbers first, and the block freed last is used first.
        self._free = list(range(total - 1, -1, -1))
        self._references = [0] * total
        self._keys: list[bytes | None] = [None] * total
        # Named blocks after which no other one got a name.
        self._tails: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def held(self) -> int:
        return self.total - self.free - self.cached

    def key(self, block: int) -> bytes | None:
        """The key under which it is indexed, None without a name."""
        return self._keys[block]

    def references(self, block: int) -> int:
        return self._references[block]

    def revived(self, blocks: Sequence[int]) -> int:
        """How many of these nobody holds."""
        references = self._references
        return [references[block] for block in blocks].count(0)

    def above(self, account: bytes, shared: Sequence[int], count: int) -> int:
        """How many blocks the account has to let go to `share` these and `allocate` so many within its own limit."""
        return self.shares.above(self.shares.account(account), self.revived(shared) + count)

    def short(self, account: bytes, shared: Sequence[int], count: int) -> int:
        """How many blocks, whosever, have to be let go before the account can `share` these and `allocate` so many."""
        return self.shares.short(self.shares.account(account), self.revived(shared) + count)

    def set_limits(self, account: bytes, limits: AccountLimits) -> None:
        """From now on; cached blocks that they leave no room for are evicted."""
        self.shares.set_limits(self.shares.account(account), limits)
        self._ghosts.separate(account, min(limits.reserved, self.total) if limits.strict else None)
        self._evict_excess()

    def grow_reservations(self) -> None:
        """Those that are not wholly in force, now that other requests have ended."""
        self.shares.grow()
        self._evict_excess()

    def allocate(self, account: bytes, count: int) -> list[int]:
        """Take `count` blocks without content, evicting cached ones where no free ones are left for the account.

        Raises:
            OutOfBlocks: the account may not hold `count` more.
        """
        shares = self.shares
        owner = shares.account(account)
        if shares.short(owner, count):
            raise OutOfBlocks(
                f"{count} blocks wanted, {self.free} free and {self.cached} cached of {self.total}; the account holds "
                f"{owner.held} and may have {shares.cap(owner)}"
            )
        own, anybodys = shares.to_evict(owner, count)
        self._evict(owner, own)
        if shares.cap(owner) < self.total:
            self.limit_evictions += own
        shares.hold(owner, count - anybodys)
        taken = self._take(count - anybodys)
        for victim, blocks in shares.victims(owner, anybodys):
            self._evict(victim, blocks)
            shares.hold(owner, blocks)
            taken += self._take(blocks)
        return taken

    def share(self, account: bytes, blocks: Sequence[int]) -> None:
        """One more holder for each of these named blocks of the account.

        Raises:
            PoolError: one of them is not named.
        """
        references = self._references
        for block in blocks:
            if not 0 <= block < self.total or self._keys[block] is None:
                raise PoolError(f"block {block} has no name: it can't be shared")
        revived = [block for block in blocks if not references[block]]
        for block in blocks:
            references[block] += 1
        if revived:
            self.shares.revive(self.shares.account(account), revived)
            self.cached -= len(revived)

    def keep(self, blocks: Sequence[int], ttl_ns: int) -> None:
        """Held blocks of a chain, from its head on, are wanted for so long from now: see `policies.lifetimes`."""
        self._lifetimes.extend((block for block in blocks if self._keys[block] is not None), ttl_ns)

    def release(self, account: bytes, blocks: Sequence[int]) -> None:
        """One holder less for each block of a chain of the account, given from head to tail.

        They are let go from tail to head, so that a leaf is always older than its parent in the order of eviction.

        Raises:
            PoolError: a number outside the pool, twice in the call, or of a block that nobody holds.
        """
        if not blocks:
            return
        references, keys = self._references, self._keys
        if len(set(blocks)) != len(blocks):
            raise PoolError("a chain holds no block twice")
        if min(blocks) < 0 or max(blocks) >= self.total:
            raise PoolError(f"a block is outside the pool of {self.total}: {min(blocks)} or {max(blocks)}")
        holders = [references[block] for block in blocks]
        if 0 in holders:
            raise PoolError(f"block {blocks[holders.index(0)]} is held by nobody: it can't be released")
        if holders.count(1) == len(holders):
            # As a rule; it takes a third of the time.
            for block in blocks:
                references[block] = 0
            let_go = blocks[::-1]
        else:
            for block in blocks:
                references[block] -= 1
            let_go = [block for block in reversed(blocks) if not references[block]]
        cached = [block for block in let_go if keys[block] is not None]
        freed = [block for block in let_go if keys[block] is None] if len(cached) < len(let_go) else []
        if let_go:
            self._free += freed
            self.cached += len(cached)
            self.shares.release(self.shares.account(account), len(freed), cached)
            self._evict_excess()

    def publish(
        self, account: bytes, epoch: int, blocks: Sequence[int], keys: Sequence[bytes], parent: int | None
    ) -> list[int]:
        """Give held, filled blocks of a chain their names, so that others can share them.

        Args:
            parent: the block before the first of them, which has its name; None at the head of the chain.

        Returns:
            The blocks to hold from now on: each of `blocks`, or the one that already bears its name; then it is free.

        Raises:
            PoolError: one of them is not held, is shared, or has a name already; the parent has none; or two keys are
                the same.
        """
        total, references, names = self.total, self._references, self._keys
        for block in blocks:
            if not 0 <= block < total or references[block] != 1 or names[block] is not None:
                raise PoolError(f"block {block} must be held once and unnamed to get a name")
        if parent is not None and names[parent] is None:
            raise PoolError(f"block {parent} has no name: its child can't get one")
        bearers = self.index.add(account, epoch, keys, blocks)
        kept = list(blocks)
        if bearers:
            # First, or they could give way to what limits ask for.
            self.share(account, list(bearers.values()))
            self.release(account, list(bearers))
            kept = [bearers.get(block, block) for block in blocks]
        # Whatever has a name has ancestors that have: the taken names are the first ones.
        taken = len(bearers)
        new, before = kept[taken:], kept[taken - 1] if taken else parent
        for block, key in zip(new, keys[taken:], strict=True):
            names[block] = key
        self.shares.account(account).cached.publish(new, keys[taken:], before)
        if new:
            self._tails.discard(before)
            self._tails.add(new[-1])
        return kept

    def forget(self, account: bytes, blocks: Iterable[int]) -> None:
        """Blocks of the account whose names have left the index: held ones lose the name, cached ones become free.

        Nor is remembered what gave way before.
        """
        self._ghosts.forget(account)
        unnamed = list(blocks)
        if not unnamed:
            return
        self._unname(unnamed)
        freed = [block for block in unnamed if not self._references[block]]
        self._free += freed
        self.cached -= len(freed)
        self.shares.discard(self.shares.account(account), unnamed)
        self._evict_excess()

    def flush(self, account: bytes) -> int:
        """Free all that the account has cached; answers how many blocks that were. What is held keeps its names."""
        owner = self.shares.account(account)
        self._ghosts.forget(account)
        return len(self._free_cached(owner, len(owner.cached))[0])

    def drop(self, account: bytes, blocks: Iterable[int]) -> None:
        """The account is no more, once nobody holds a block of it; `blocks` as in `forget`."""
        self.forget(account, blocks)
        self._ghosts.separate(account, None)
        self.shares.forget(self.shares.account(account))
        # What was reserved for it may be another's now.
        self._evict_excess()

    def miss(
        self, account: bytes, epoch: int, keys: Sequence[bytes], matched: Sequence[int]
    ) -> tuple[int, MissReason] | None:
        """Position and reason of the first of a chain's keys that is not indexed; None: all are.

        Args:
            matched: the blocks of the keys before it.
        """
        at = len(matched)
        if at == len(keys) or self.index.get(BlockName(account, epoch, keys[at])) is not None:
            return None
        if not self.index.takes_names or epoch < (self.index.epoch(account) or 0):
            return at, "not_stored"
        if ghost := self._ghosts.recall(account, keys[at]):
            return at, ghost
        return at, "diverged" if matched and matched[-1] not in self._tails else "cold"

    def _take(self, count: int) -> list[int]:
        """Free blocks, held once from now on."""
        if not count:
            return []
        taken = self._free[: -count - 1 : -1]
        assert len(taken) == count, "more blocks are taken than are free"
        del self._free[-count:]
        references = self._references
        for block in taken:
            references[block] = 1
        return taken

    def _evict(self, victim: Account, count: int) -> None:
        if not count:
            return
        keys, expired = self._free_cached(victim, count)
        self._ghosts.remember(victim.name, keys, expired)
        victim.evictions += count
        self.evictions += count

    def _free_cached(self, account: Account, count: int) -> tuple[list[bytes], set[bytes]]:
        """So many that give way first; answers their keys, and the keys of those whose lifetime was over."""
        blocks = self.shares.evict(account, count)
        # Whatever is cached has a name.
        keys = cast("list[bytes]", [self._keys[block] for block in blocks])
        over = self._lifetimes.over(blocks) if len(self._lifetimes) else ()
        expired = {key for block, key in zip(blocks, keys, strict=True) if block in over} if over else set()
        self.index.remove(account.name, keys)
        self._unname(blocks)
        self._free += blocks
        self.cached -= count
        return keys, expired

    def _unname(self, blocks: list[int]) -> None:
        keys = self._keys
        for block in blocks:
            keys[block] = None
        self._tails.difference_update(blocks)
        if len(self._lifetimes):
            self._lifetimes.forget(blocks)

    def _evict_excess(self) -> None:
        for victim, count in self.shares.excess():
            self._evict(victim, count)
            self.limit_evictions += count

    def check(self, tables: Iterable[tuple[bytes, Sequence[int]]]) -> None:
        """Raise AssertionError unless pool, index, shares and the block tables of all holders agree. For tests.

        Args:
            tables: of every holder, its account and its blocks from head to tail.
        """
        held: dict[int, int] = {}
        heads: dict[int, tuple[int, ...]] = {}
        owners: dict[int, bytes] = {}
        for account, table in tables:
            assert len(set(table)) == len(table), f"a table holds a block twice: {table}"
            for position, block in enumerate(table):
                held[block] = held.get(block, 0) + 1
                before = heads.setdefault(block, tuple(table[:position]))
                assert before == tuple(table[:position]), f"block {block} is held without its ancestors"
                assert owners.setdefault(block, account) == account, f"block {block} is held by two accounts"
        named: dict[int, bytes] = {}
        indexed: dict[bytes, set[int]] = {}
        for name, block in self.index.names():
            assert self._keys[block] == name.key, f"block {block} does not bear the name it is indexed under"
            assert block not in named, f"block {block} is indexed twice"
            assert owners.get(block, name.account) == name.account, f"block {block} is held by another account"
            named[block] = name.key
            indexed.setdefault(name.account, set()).add(block)
        assert named.keys() == {block for block, key in enumerate(self._keys) if key is not None}
        free, cached = set(self._free), named.keys() - held.keys()
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & held.keys(), f"free and held at once: {free & held.keys()}"
        assert not free & named.keys(), f"free with a name: {free & named.keys()}"
        assert len(cached) == self.cached, f"{len(cached)} blocks are cached, not {self.cached}"
        assert len(free) + len(cached) + len(held) == self.total, "a block is in no place"
        for block, count in enumerate(self._references):
            assert count == held.get(block, 0), f"block {block}: {count} references, {held.get(block, 0)} holders"
        for share in self.shares:
            mine = {block for block, owner in owners.items() if owner == share.name}
            assert share.held == len(mine), f"{share.held} blocks held, not {len(mine)}"
            assert set(share.cached) == indexed.pop(share.name, set()) - held.keys()
        assert not indexed, "names of an account that has no share"
        self.shares.check()
