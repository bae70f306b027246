"""Why a block that was cached once is missing: the names of those that gave way. Pure.

A name falls to one bucket of a table, where 62 bits of it take the oldest place: 8 bytes a name and O(1), where a list
in the order of eviction would take more memory than all else that is known of a cached block. Names are uniformly
distributed and nobody can choose them (they are keyed hashes), so buckets fill alike, and the odds of taking one name
for another are 2^-60.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from itertools import count
from typing import Literal

GHOSTS_PER_BLOCK = 4

_BUCKET = 8
# The two lowest bits of a place: something is here, and its lifetime was over.
_TAKEN, _EXPIRED = 0b01, 0b10
_NAME = (1 << 64) - 1 & ~0b11

Ghost = Literal["evicted", "expired"]


class _Table:
    """Four places for each of so many blocks, in whole buckets."""

    __slots__ = ("_oldest", "_places", "blocks")

    def __init__(self, blocks: int) -> None:
        buckets = -(-GHOSTS_PER_BLOCK * blocks // _BUCKET) or 1
        self.blocks = blocks
        self._places = array("Q", bytes(8 * _BUCKET * buckets))
        self._oldest = bytearray(buckets)

    def put(self, name: int, flags: int) -> None:
        """A name of 128 bits."""
        bucket = (name >> 64) % len(self._oldest)
        oldest = self._oldest[bucket]
        self._places[bucket * _BUCKET + oldest] = name & _NAME | flags
        self._oldest[bucket] = (oldest + 1) % _BUCKET

    def get(self, name: int) -> int:
        """The flags it was last put with, 0 where it is not known."""
        bucket = (name >> 64) % len(self._oldest)
        for back in range(1, _BUCKET + 1):
            place = self._places[bucket * _BUCKET + (self._oldest[bucket] - back) % _BUCKET]
            if place & _TAKEN and not (place ^ name) & _NAME:
                return place & ~_NAME
        return 0


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

    def remember(self, account: bytes, keys: Sequence[bytes], expired: Collection[bytes]) -> None:
        """These gave way; `expired`: those whose lifetime was over."""
        put = self._own.get(account, self._shared).put
        if (number := self._numbers.get(account)) is None:
            number = self._numbers[account] = next(self._next) << 2
        for key in keys:
            put(int.from_bytes(key[:16], "little") ^ number, _TAKEN | _EXPIRED if key in expired else _TAKEN)

    def recall(self, account: bytes, key: bytes) -> Ghost | None:
        """How the block of that name went, as far as that is remembered."""
        if (number := self._numbers.get(account)) is None:
            return None
        flags = self._own.get(account, self._shared).get(int.from_bytes(key[:16], "little") ^ number)
        return ("expired" if flags & _EXPIRED else "evicted") if flags else None

    def forget(self, account: bytes) -> None:
        """All that is remembered of the account."""
        self._numbers.pop(account, None)
