"""Why a block that was cached once is missing: the names of those that gave way. Pure.

A name leaves 62 bits in one place of a table, which a later one may overwrite: 8 bytes a name and O(1), where a list in
the order of eviction would take more memory than all else that is known of a cached block. Names are uniformly
distributed and nobody can choose them (they are keyed hashes), so the names that are lost are any of the older ones,
and the odds of taking one name for another are 2^-62.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from itertools import count
from typing import Literal

GHOSTS_PER_BLOCK = 4

_HALF = (1 << 64) - 1
# The two lowest bits of a place: something is here, and its lifetime was over.
_TAKEN, _EXPIRED = 0b01, 0b10
_NAME = _HALF & ~0b11

Ghost = Literal["evicted", "expired"]


class Ghosts:
    """Of all accounts of a pool. Accounts that share it share a table; each strict one has its own, so that what is
    said to it depends on nothing of others.

    Args:
        total: blocks of the pool.
    """

    def __init__(self, total: int) -> None:
        self._shared = _table(total)
        self._own: dict[bytes, array[int]] = {}
        # Mixed into the names of an account: two accounts' names differ, and another number forgets all of its own.
        self._numbers: dict[bytes, int] = {}
        self._next = count(1)

    def separate(self, account: bytes, blocks: int | None) -> None:
        """The account has a table of its own, for so many blocks; None: it shares the pool's."""
        own = self._own.get(account)
        if blocks is None:
            self._own.pop(account, None)
        elif own is None or len(own) != len(_table(blocks)):
            self._own[account] = _table(blocks)

    def remember(self, account: bytes, keys: Sequence[bytes], expired: Collection[bytes]) -> None:
        """These gave way; `expired`: those whose lifetime was over."""
        table, number = self._own.get(account, self._shared), self._number(account)
        size = len(table)
        for key in keys:
            name = int.from_bytes(key[:16], "little") ^ number
            table[(name >> 64) % size] = name & _NAME | (_TAKEN | _EXPIRED if key in expired else _TAKEN)

    def recall(self, account: bytes, key: bytes) -> Ghost | None:
        """How the block of that name went, as far as that is remembered."""
        table = self._own.get(account, self._shared)
        name = int.from_bytes(key[:16], "little") ^ self._number(account)
        ghost = table[(name >> 64) % len(table)]
        if not ghost & _TAKEN or (ghost ^ name) & _NAME:
            return None
        return "expired" if ghost & _EXPIRED else "evicted"

    def forget(self, account: bytes) -> None:
        """All that is remembered of the account."""
        self._numbers.pop(account, None)

    def _number(self, account: bytes) -> int:
        number = self._numbers.get(account)
        if number is None:
            number = self._numbers[account] = next(self._next) << 2
        return number


def _table(blocks: int) -> array[int]:
    return array("Q", bytes(8 * GHOSTS_PER_BLOCK * max(1, blocks)))
