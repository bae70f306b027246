"""From the name of a block to the block: (account, epoch, key) → block number.

Only the highest epoch ever seen of an account is indexed, so "all three must match" is one comparison of the epoch
and one dictionary of that account; a fence is dropping that dictionary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, cast

# How many keys of a prompt are looked up at once, before the first that is missing ends it: at first, and later on.
_FIRST_SLICE, _SLICE = 4, 64


class BlockName(NamedTuple):
    account: bytes
    epoch: int
    key: bytes


@dataclass(slots=True)
class _Account:
    epoch: int
    blocks: dict[bytes, int] = field(default_factory=dict)


class PrefixIndex:
    """The names of all blocks that can be reused. Owns no block: the pool adds and removes names.

    Args:
        takes_names: False: no account is ever open, so nothing is reused.
    """

    def __init__(self, *, takes_names: bool = True) -> None:
        self.takes_names = takes_names
        self._accounts: dict[bytes, _Account] = {}
        # Accounts that were dropped: a message on its way must not bring one back.
        self._tombstones: set[bytes] = set()

    def __len__(self) -> int:
        return sum(len(account.blocks) for account in self._accounts.values())

    def names(self) -> Iterator[tuple[BlockName, int]]:
        for name, account in self._accounts.items():
            for key, block in account.blocks.items():
                yield BlockName(name, account.epoch, key), block

    def epoch(self, account: bytes) -> int | None:
        """The highest epoch seen, None for an account that was never opened or was dropped."""
        known = self._accounts.get(account)
        return known.epoch if known else None

    def is_open(self, account: bytes, epoch: int) -> bool:
        """Whether names of the account are taken at that epoch."""
        return self.takes_names and self.epoch(account) == epoch

    def raise_epoch(self, account: bytes, epoch: int) -> list[int]:
        """Open the account at `epoch` or a higher one it already has.

        Returns:
            The blocks that lost their names because the epoch rose.
        """
        if account in self._tombstones:
            return []
        known = self._accounts.get(account)
        if known is None:
            self._accounts[account] = _Account(epoch)
            return []
        if epoch <= known.epoch:
            return []
        self._accounts[account] = _Account(epoch)
        return list(known.blocks.values())

    def drop(self, account: bytes) -> list[int]:
        """Forget the account for good. Returns the blocks that lost their names."""
        self._tombstones.add(account)
        known = self._accounts.pop(account, None)
        return list(known.blocks.values()) if known else []

    def get(self, name: BlockName) -> int | None:
        known = self._accounts.get(name.account)
        if known is None or known.epoch != name.epoch:
            return None
        return known.blocks.get(name.key)

    def match(self, account: bytes, epoch: int, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest run of `keys`, from the first on, that are all indexed."""
        known = self._accounts.get(account)
        if known is None or known.epoch != epoch:
            return []
        found: list[int] = []
        for start, end in pairwise([0, *range(_FIRST_SLICE, len(keys), _SLICE), len(keys)]):
            blocks = list(map(known.blocks.get, keys[start:end]))
            if None in blocks:
                found += cast("list[int]", blocks[: blocks.index(None)])
                break
            found += cast("list[int]", blocks)
        return found

    def add(self, account: bytes, epoch: int, keys: Sequence[bytes], blocks: Sequence[int]) -> dict[int, int]:
        """Names for blocks, one each. Where a name is taken it stays where it is.

        Returns:
            For each block whose name another one bears already, that one.

        Raises:
            ValueError: the account is not open at that epoch.
        """
        known = self._accounts.get(account)
        if known is None or known.epoch != epoch:
            raise ValueError("a name of an account or epoch that is not open")
        bearers = list(map(known.blocks.setdefault, keys, blocks))
        if bearers == blocks:
            return {}
        return {block: bearer for block, bearer in zip(blocks, bearers, strict=True) if bearer != block}

    def remove(self, account: bytes, keys: Iterable[bytes]) -> None:
        """Raises KeyError for a name that is not indexed."""
        blocks = self._accounts[account].blocks
        for key in keys:
            del blocks[key]
