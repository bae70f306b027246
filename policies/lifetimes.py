"""How long the owner of a block wants it kept. Pure; the clock is given.

A lifetime orders the blocks of one account among themselves: until it is over, all others of the account give way
first. It protects from nothing else. Whoever gives a block a lifetime gives it to the whole chain down to that block,
so a block is wanted at least as long as its descendants.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence


class Turns:
    """In which turn each cached block of a pool was let go; no two calls of `add`, of any account, have the same.

    Attributes:
        of: by block; 0 for one that is not cached.
    """

    def __init__(self) -> None:
        self.of: list[int] = []
        self._last = 0

    def next(self) -> int:
        self._last += 1
        return self._last

    def give(self, blocks: Sequence[int], turn: int) -> None:
        of = self.of
        try:
            for block in blocks:
                of[block] = turn
        except IndexError:
            # As long as there are blocks that were never cached.
            of += [0] * (max(blocks) + 1 - len(of))
            self.give(blocks, turn)


class Lifetimes:
    """Of all blocks of a pool that have one.

    Attributes:
        turns: of all its blocks, for the orders of its accounts.
    """

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self.turns = Turns()
        self._clock_ns = clock_ns
        self._until_ns: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._until_ns)

    def extend(self, blocks: Iterable[int], ttl_ns: int) -> None:
        """Each is wanted for so long from now, or longer where it was already."""
        until_ns = self._clock_ns() + ttl_ns
        for block in blocks:
            self._until_ns[block] = max(until_ns, self._until_ns.get(block, 0))

    def forget(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._until_ns.pop(block, None)

    def until_ns(self, block: int) -> int:
        """When its lifetime ends or ended, 0 without one."""
        return self._until_ns.get(block, 0)

    def over(self, blocks: Iterable[int]) -> set[int]:
        """Those that had a lifetime, which has ended."""
        now_ns = self._clock_ns()
        return {block for block in blocks if 0 < self.until_ns(block) <= now_ns}

    def lasting(self, blocks: Iterable[int]) -> set[int]:
        """Those whose lifetime has not ended."""
        now_ns = self._clock_ns()
        return {block for block in blocks if self.until_ns(block) > now_ns}


# The number of the `add` that a block came with, and its position there: a tail has a lower one than its head.
Place = tuple[int, int]


# So many blocks whose lifetimes end together are looked at for each that gives way: nobody waits for all of them.
MOST_AT_ONCE = 8


class Kept:
    """Cached blocks that had a lifetime when they were added: the lasting ones, and those that are over by now.

    Every operation is O(log n). What was taken out stays in the heaps until it is met or there is too much of it.
    """

    def __init__(self, lifetimes: Lifetimes) -> None:
        self._lifetimes = lifetimes
        self._places: dict[int, Place] = {}
        self._lasting: list[tuple[int, Place, int]] = []
        self._over: list[tuple[int, Place, int]] = []

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __contains__(self, block: int) -> bool:
        return block in self._places

    def add(self, block: int, place: Place) -> None:
        self._places[block] = place
        self._push(self._lasting, (self._lifetimes.until_ns(block), place, block))

    def remove(self, block: int) -> None:
        """Raises KeyError for a block that is not kept."""
        del self._places[block]

    def oldest_over(self) -> Place | None:
        """Of the blocks whose lifetime is over the place of the one that was added first; None without any.

        Of very many that end together some are as yet unknown here, and follow later.
        """
        for _ in range(MOST_AT_ONCE):
            if not (soonest := self._first(self._lasting)) or not self._lifetimes.over([block := soonest[2]]):
                break
            heapq.heappop(self._lasting)
            self._push(self._over, (0, self._places[block], block))
        oldest = self._first(self._over)
        return oldest[1] if oldest else None

    def pop_over(self) -> int:
        """That block."""
        return self._pop(self._over)

    def pop_lasting(self) -> int:
        """The block whose lifetime ends first; of equal ones that which was added first."""
        return self._pop(self._lasting)

    def _first(self, heap: list[tuple[int, Place, int]]) -> tuple[int, Place, int] | None:
        while heap and self._places.get(heap[0][2]) != heap[0][1]:
            heapq.heappop(heap)
        return heap[0] if heap else None

    def _pop(self, heap: list[tuple[int, Place, int]]) -> int:
        """Raises IndexError where there is none."""
        self._first(heap)
        block = heapq.heappop(heap)[2]
        del self._places[block]
        return block

    def _push(self, heap: list[tuple[int, Place, int]], entry: tuple[int, Place, int]) -> None:
        heapq.heappush(heap, entry)
        if len(heap) > 2 * len(self._places) + 16:
            heap[:] = [each for each in heap if self._places.get(each[2]) == each[1]]
            heapq.heapify(heap)
