"""Which cached block gives way when a new one is needed. Pure: block numbers in, block numbers out."""

from __future__ import annotations

from collections import OrderedDict


class LeastRecentlyUsed:
    """Cached blocks in the order in which they give way.

    A block enters when its last holder lets go of it and leaves when somebody takes it up again, so the order of
    entry is the order of last use. Holders let go of a chain from tail to head: the list is leaves-first by
    construction, and taking its head never cuts a chain in two. Every operation is O(1).
    """

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, block: int) -> bool:
        return block in self._order

    def add(self, block: int) -> None:
        self._order[block] = None

    def remove(self, block: int) -> None:
        """Raises KeyError for a block that is not in the list."""
        del self._order[block]

    def pop_victim(self) -> int:
        """The block that gives way now. Raises KeyError when there is none."""
        return self._order.popitem(last=False)[0]
