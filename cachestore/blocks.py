"""The pool of KV blocks: who holds which, which are named, which give way.

A block is in exactly one of three states:

    free ──allocate──► held ──release──► free      (it has no name)
                        ▲ │
                  share │ └──release──► cached     (it has a name: `publish`)
                        └───────────────── │
    free ◄──allocate evicts, forget────────┘

*held*: one or more requests refer to it; *cached*: named, nobody refers to it, evictable. Reference counts live
here and nowhere else. The content of a named block never changes.

After PagedAttention (Kwon et al., 2023); the prefix index is a hash table by block name, not a tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cachestore.index import BlockName, PrefixIndex
from policies.eviction import LeastRecentlyUsed

# Fills the unused end of a block table. It is never a block, so handing it to the pool is an error.
NO_BLOCK = -1


class PoolError(Exception):
    """A call that would have corrupted the pool. Nothing was changed."""


class OutOfBlocks(PoolError):
    """Fewer blocks are free or evictable than were asked for. Nothing was changed."""


class BlockPool:
    """Allocates, shares and frees block numbers 0 … total − 1. Not thread-safe: one engine thread owns it."""

    def __init__(self, total: int, index: PrefixIndex) -> None:
        if total < 1:
            raise ValueError(f"a pool needs at least one block, not {total}")
        self.total = total
        self.index = index
        self.evictions = 0
        # Popped from its end: low numbers first, and the block freed last is used first.
        self._free = list(range(total - 1, -1, -1))
        self._references = [0] * total
        self._names: list[BlockName | None] = [None] * total
        self._cached = LeastRecentlyUsed()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def held(self) -> int:
        return self.total - self.free - self.cached

    @property
    def usable(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return self.free + self.cached

    def usable_beside(self, shared: Iterable[int]) -> int:
        """Blocks that `allocate` could hand out after `share(shared)`: what is reused is not room for new blocks."""
        return self.usable - sum(1 for block in shared if block in self._cached)

    def name(self, block: int) -> BlockName | None:
        return self._names[block]

    def references(self, block: int) -> int:
        return self._references[block]

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks without content, evicting cached ones where no free ones are left.

        Raises:
            OutOfBlocks: fewer than `count` are free or cached.
        """
        if count > self.usable:
            raise OutOfBlocks(f"{count} blocks wanted, {self.free} free and {self.cached} evictable of {self.total}")
        taken = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._references[block] = 1
            taken.append(block)
        return taken

    def _evict(self) -> int:
        block = self._cached.pop_victim()
        name = self._names[block]
        assert name is not None
        self.index.remove(name)
        self._names[block] = None
        self.evictions += 1
        return block

    def share(self, blocks: Sequence[int]) -> None:
        """One more holder for each of these named blocks.

        Raises:
            PoolError: one of them is not named.
        """
        for block in blocks:
            if not 0 <= block < self.total or self._names[block] is None:
                raise PoolError(f"block {block} has no name: it can't be shared")
        for block in blocks:
            if self._references[block] == 0:
                self._cached.remove(block)
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less for each block of a chain, given from head to tail.

        They are let go from tail to head, so that a leaf is always older than its parent in the order of eviction.

        Raises:
            PoolError: a number outside the pool, twice in the call, or of a block that nobody holds.
        """
        if len(set(blocks)) != len(blocks):
            raise PoolError("a chain holds no block twice")
        for block in blocks:
            if not 0 <= block < self.total:
                raise PoolError(f"block {block} is outside the pool of {self.total}")
            if self._references[block] == 0:
                raise PoolError(f"block {block} is held by nobody: it can't be released")
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._names[block] is None:
                    self._free.append(block)
                else:
                    self._cached.add(block)

    def publish(self, block: int, name: BlockName) -> int:
        """Give a held, filled block its name, so that others can share it.

        Returns:
            The block to hold from now on: `block`, or the one that already bears the name; then `block` is free.

        Raises:
            PoolError: the block is not held, is shared, or has a name already.
        """
        if not 0 <= block < self.total or self._references[block] != 1 or self._names[block] is not None:
            raise PoolError(f"block {block} must be held once and unnamed to get a name")
        existing = self.index.get(name)
        if existing is None:
            self.index.add(name, block)
            self._names[block] = name
            return block
        self.share([existing])
        self.release([block])
        return existing

    def forget(self, blocks: Iterable[int]) -> None:
        """Blocks whose names have left the index: held ones lose the name, cached ones become free."""
        for block in blocks:
            self._names[block] = None
            if block in self._cached:
                self._cached.remove(block)
                self._free.append(block)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless pool, index and the block tables of all holders agree. For tests.

        Args:
            tables: the blocks of every holder, from head to tail.
        """
        held: dict[int, int] = {}
        heads: dict[int, tuple[int, ...]] = {}
        for table in tables:
            assert len(set(table)) == len(table), f"a table holds a block twice: {table}"
            for position, block in enumerate(table):
                held[block] = held.get(block, 0) + 1
                before = heads.setdefault(block, tuple(table[:position]))
                assert before == tuple(table[:position]), f"block {block} is held without its ancestors"
        free, cached = set(self._free), {block for block in range(self.total) if block in self._cached}
        assert len(free) == len(self._free), "a block is free twice"
        assert len(cached) == len(self._cached), "a block outside the pool is cached"
        assert not free & cached, f"free and cached at once: {free & cached}"
        assert not free & held.keys(), f"free and held at once: {free & held.keys()}"
        assert not cached & held.keys(), f"cached and held at once: {cached & held.keys()}"
        assert len(free) + len(cached) + len(held) == self.total, "a block is in no place"
        for block, count in enumerate(self._references):
            assert count == held.get(block, 0), f"block {block}: {count} references, {held.get(block, 0)} holders"
        indexed = {}
        for name, block in self.index.names():
            assert self._names[block] == name, f"block {block} does not bear the name it is indexed under"
            assert block not in indexed, f"block {block} is indexed twice"
            indexed[block] = name
        named = {block for block, name in enumerate(self._names) if name is not None}
        assert named == indexed.keys(), f"named but not indexed: {named - indexed.keys()}"
        assert cached <= named, f"cached without a name: {cached - named}"
        assert not free & named, f"free with a name: {free & named}"
