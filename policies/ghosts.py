"""Why a block that was cached once is missing: the names of those that gave way. Pure.

A name falls to one bucket of a table, where 64 bits of it take the oldest place: 8 bytes a name and O(1), where a list
in the order of eviction would take more memory than all else that is known of a cached block. Names are uniformly
distributed and nobody can choose them (they are keyed hashes), so buckets fill alike, and the odds of taking one name
for another are 2^-60. The latest names are put aside and moved to the table together: many at once cost a tenth each of
what one does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from itertools import count
from typing import Literal

import numpy as np

GHOSTS_PER_BLOCK = 4

_BUCKET = 8
_MOST_LATEST_BYTES = 24 << 10
# Of the mark of a name: the lifetime of its block was over. The other bits are the number of its account.
_EXPIRED = 0b1

Ghost = Literal["evicted", "expired"]


class _Table:
    """Four places for each of so many blocks, in whole buckets. A place has a part of a name, mixed with its mark."""

    __slots__ = ("_counts", "_latest", "_marks", "_oldest", "_places", "blocks")

    def __init__(self, blocks: int) -> None:
        buckets = -(-GHOSTS_PER_BLOCK * blocks // _BUCKET) or 1
        self.blocks = blocks
        self._places = np.zeros(_BUCKET * buckets, np.uint64)
        # Of each bucket.
        self._oldest = np.arange(0, len(self._places), _BUCKET, dtype=np.int32)
        # Names that are not in the table yet, and for how many of them in turn which mark is meant.
        self._latest = bytearray()
        self._counts: list[int] = []
        self._marks: list[int] = []

    def put(self, keys: Collection[bytes], mark: int) -> None:
        self._latest += b"".join(keys)
        self._counts.append(len(keys))
        self._marks.append(mark)
        if len(self._latest) >= min(_MOST_LATEST_BYTES, 8 * len(self._places)):
            self._move()

    def get(self, key: bytes, marks: tuple[int, ...]) -> int | None:
        """Which of these marks it was put with last; None where that is not known."""
        if key in self._latest:
            self._move()
        name = int.from_bytes(key[:8], "little")
        bucket = int.from_bytes(key[8:16], "little") % len(self._oldest)
        places = self._places[_BUCKET * bucket : _BUCKET * (bucket + 1)].tolist()
        found = [mark for mark in marks if name ^ mark in places]
        if not found:
            return None
        oldest = int(self._oldest[bucket]) % _BUCKET
        latest_first = (places[oldest:] + places[:oldest])[::-1]
        return min(found, key=lambda mark: latest_first.index(name ^ mark))

    def _move(self) -> None:
        # Of more than twice what there is room for hardly any of the first would be left.
        most = 2 * len(self._places)
        words = np.frombuffer(self._latest, "<u8").reshape(sum(self._counts), -1)[-most:]
        marks = np.repeat(np.array(self._marks, np.uint64), self._counts)[-most:]
        self._latest, self._counts, self._marks = bytearray(), [], []
        # The last first: of several that are assigned to one place at once, the last assigned is left.
        names = (words[:, 0] ^ marks)[::-1]
        buckets = (words[:, 1] % len(self._oldest)).astype(np.intp)[::-1]
        while len(names):
            oldest = self._oldest[buckets]
            self._places[oldest] = names
            self._oldest[buckets] = oldest & -_BUCKET | oldest + 1 & _BUCKET - 1
            left = self._places[oldest] != names
            names, buckets = names[left], buckets[left]


class Ghosts:
    """Of all accounts of a pool. Accounts that share it share a table; each strict one has its own, so that what is
    said to it depends on nothing of others.

    Args:
        total: blocks of the pool.
    """

    def __init__(self, total: int) -> None:
        self._shared = _Table(total)
        self._own: dict[bytes, _Table] = {}
        # Mixed into the names of an account: two accounts' names differ, and another number forgets all of its own.
        self._numbers: dict[bytes, int] = {}
        self._next = count(1)

    def separate(self, account: bytes, blocks: int | None) -> None:
        """The account has a table of its own, for so many blocks; None: it shares the pool's."""
        own = self._own.get(account)
        if blocks == (own.blocks if own else None):
            return
        self.forget(account)
        if blocks is None:
            del self._own[account]
        else:
            self._own[account] = _Table(blocks)

    def remember(self, account: bytes, keys: Sequence[bytes], expired: Set[bytes]) -> None:
        """These gave way; `expired`: those of them whose lifetime was over.

        Args:
            keys: of one length, two words of 8 bytes or more.
        """
        table = self._own.get(account, self._shared)
        if (number := self._numbers.get(account)) is None:
            number = self._numbers[account] = next(self._next) << 1
        if expired:
            table.put(expired, number | _EXPIRED)
            keys = [key for key in keys if key not in expired]
        table.put(keys, number)

    def recall(self, account: bytes, key: bytes) -> Ghost | None:
        """How the block of that name went, as far as that is remembered."""
        if (number := self._numbers.get(account)) is None:
            return None
        mark = self._own.get(account, self._shared).get(key, (number, number | _EXPIRED))
        return None if mark is None else "expired" if mark & _EXPIRED else "evicted"

    def forget(self, account: bytes) -> None:
        """All that is remembered of the account."""
        self._numbers.pop(account, None)
