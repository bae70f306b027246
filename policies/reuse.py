"""Which cached block gives way, by the rate at which blocks like it were used again. Pure; time is a count.

Learnt is a table: for a class of blocks (how often used, in which turn of a conversation they were made) and an age,
how many were used again, and how long they were waited for. The quotient is a hazard rate. From the rates of a class at
one age and at all later ones follows what a place in the cache yields if it is left to such a block: the greatest, over
all times at which one could give up, of expected uses by expected time. That is Gittins' index. The block with the
lowest gives way. Where the rate falls with age, as is believed before anything is seen, that is the least recently used
block; where it rises (a loop; a conversation, whose user reads and writes), the old stay and the young give way.

Evicted blocks are remembered (ghosts) and observed on, or nothing would be learnt of ages that no block reaches in the
cache. Observations fade: what was learnt long ago does not bind.

After LHD (Beckmann, Chen, Cidon: *LHD: Improving Cache Hit Rate by Maximizing Hit Density*, NSDI 2018), which has the
classes, the ages and the rate by space and time; the index, into which the policy's own evictions do not enter, is from
Gittins (*Bandit Processes and Dynamic Allocation Indices*, 1979); ghosts are those of ARC (Megiddo, Modha, FAST 2003).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import expm1

from policies.eviction import LeastRecentlyUsed, Order
from policies.ghosts import GHOSTS_PER_BLOCK
from policies.lifetimes import Kept, Lifetimes

# A tick is the time in which so large a part of the capacity is let go: an account with a hundredth of the pool sees
# its blocks grow old, too.
TICKS_PER_CAPACITY = 128
# From 0, 1, 2, 4, … 1,024 ticks on: the last is eight times the capacity and beyond, more than ghosts live to see.
AGES = 12
# Used once, twice, three times, more often; made in the first turn, the second, the third, a later one.
USES, TURNS = 4, 4
TICKS_PER_RANKING = 16
# After so many ticks an observation counts half. It takes half as many to see a block through all ages.
HALF_LIFE_TICKS = 2 ** (AGES - 1)
# What was believed before weighs as much as so many uses.
PRIOR_USES = 4.0

_FADED = 0.5 ** (TICKS_PER_RANKING / HALF_LIFE_TICKS)


@dataclass(slots=True, eq=False)
class _Cell:
    """One class at one age: what was seen of it, and which blocks of it could give way."""

    known: int = 0
    reused: float = 0.0
    waited_ticks: float = 0.0
    index: float = 0.0
    # By tick; only cohorts that have leaves.
    cohorts: OrderedDict[int, _Cohort] = field(default_factory=OrderedDict)


@dataclass(slots=True, eq=False)
class _Cohort:
    """Blocks of one class that were let go in one tick. They grow old together."""

    tick: int
    cell: _Cell
    known: int = 0
    # Blocks without a cached child, in the order in which they give way.
    leaves: OrderedDict[int, None] = field(default_factory=OrderedDict)


@dataclass(slots=True, eq=False)
class _Named:
    """A block that has a name, or (a ghost) had one. Without a cohort it is held."""

    block: int
    key: bytes
    parent: _Named | None
    uses: int
    turn: int
    children: int = 0
    cohort: _Cohort | None = None


class LearntReuse:
    """The order of what a block is expected to yield.

    A block can give way when nobody holds it and no named block has it as its parent, so no chain is cut in two. Time
    is the number of blocks let go. Every operation on a block is O(1): the pass over the table, which a tick costs, is
    shared by all that are let go in it. Memory is for what the account has, not for what it might have.

    Args:
        capacity: the unit of age, in blocks: those of the pool. How many of them an account gets is for the others to
            say, from one moment to the next; an age that depended on it would change its meaning with every need of
            theirs, and what was learnt with it.

    Raises:
        ValueError: `capacity` is less than 1.
    """

    def __init__(self, capacity: int, lifetimes: Lifetimes) -> None:
        if capacity < 1:
            raise ValueError(f"a cache holds at least one block, not {capacity}")
        self._adds_per_tick = max(1, capacity // TICKS_PER_CAPACITY)
        self._adds = 0
        self._tick = 0
        self._cached = 0
        self._lifetimes = lifetimes
        # They grow old as the others do, and are not offered as long as their lifetimes last.
        self._kept = Kept(lifetimes)
        self._named: dict[int, _Named] = {}
        self._ghosts: OrderedDict[bytes, _Named] = OrderedDict()
        # By class, from when it is first met on: a row with a column for each age, and the cohorts by tick, until they
        # have the greatest age.
        self._table: dict[int, list[_Cell]] = {}
        self._cohorts: dict[int, dict[int, _Cohort]] = {}
        self._ranked: list[_Cell] = []

    def __len__(self) -> int:
        return self._cached

    def __iter__(self) -> Iterator[int]:
        """In no particular order: which one gives way is decided when one has to."""
        return (block for block, named in self._named.items() if named.cohort is not None)

    @property
    def ghosts(self) -> int:
        """Keys of evicted blocks that are remembered: at most four for each block that has a name."""
        return len(self._ghosts)

    def publish(self, blocks: Sequence[int], keys: Sequence[bytes], parent: int | None) -> None:
        """Raises KeyError for a parent without a name."""
        above = None if parent is None else self._named[parent]
        for block, key in zip(blocks, keys, strict=True):
            ghost = self._ghosts.pop(key, None)
            if ghost is not None:
                self._leave(ghost, reused=True)
                uses, turn = ghost.uses + 1, ghost.turn
            else:
                # A parent that was used before was not made by this request: here a turn begins.
                uses, turn = 1, 1 if above is None else above.turn + (above.uses > 1)
            if above is not None:
                above.children += 1
            above = self._named[block] = _Named(block, key, above, uses, turn)

    def add(self, blocks: Sequence[int]) -> None:
        """Raises KeyError for a block without a name."""
        lasting = self._lifetimes.lasting(blocks) if len(self._lifetimes) else ()
        for block in blocks:
            named = self._named[block]
            self._adds += 1
            if self._adds % self._adds_per_tick == 0:
                self._grow_older()
            cohort = named.cohort = self._youngest(named)
            cohort.known += 1
            cohort.cell.known += 1
            self._cached += 1
            if block in lasting:
                self._kept.add(block, (self._adds, 0))
            elif not named.children:
                self._offer(named, first=False)

    def remove(self, blocks: Sequence[int]) -> None:
        """Raises KeyError for a block that is not cached."""
        for block in blocks:
            named = self._named[block]
            self._withdraw(named)
            self._leave(named, reused=True)
            named.uses += 1

    def forget(self, blocks: Sequence[int]) -> None:
        """Raises KeyError for a block without a name."""
        for block in blocks:
            named = self._named.pop(block)
            if named.cohort is not None:
                self._withdraw(named)
                self._leave(named, reused=False)
            self._orphan(named)
        self._forget_ghosts()

    def pop(self, count: int) -> list[int]:
        victims = []
        # As many as give way, and more: those whose lifetimes ended long ago are none that give way last.
        for _ in range(2 * count):
            if not len(self._kept) or not self._kept.oldest_over():
                break
            named = self._named[self._kept.pop_over()]
            if not named.children:
                self._offer(named, first=True)
        for _ in range(min(count, self._cached)):
            cell = next((cell for cell in self._ranked if cell.cohorts), None)
            block = next(iter(next(iter(cell.cohorts.values())).leaves)) if cell else self._kept.pop_lasting()
            named = self._named.pop(block)
            self._withdraw(named)
            self._orphan(named)
            self._ghosts[named.key] = named
            victims.append(block)
        self._forget_ghosts()
        return victims

    def _youngest(self, named: _Named) -> _Cohort:
        """The cohort of its class that is let go now."""
        row = USES * (min(named.turn, TURNS) - 1) + min(named.uses, USES) - 1
        if row not in self._table:
            self._table[row] = [_Cell() for _ in range(AGES)]
            self._cohorts[row] = {}
            self._ranked = self._rank()
        cohort = self._cohorts[row].get(self._tick)
        if cohort is None:
            cohort = self._cohorts[row][self._tick] = _Cohort(self._tick, self._table[row][0])
        return cohort

    def _withdraw(self, named: _Named) -> None:
        """It cannot give way any longer. Raises KeyError for a block that is held."""
        block, cohort = named.block, named.cohort
        if cohort is None:
            raise KeyError(f"block {block} is held")
        if block in self._kept:
            self._kept.remove(block)
        elif block in cohort.leaves:
            del cohort.leaves[block]
            if not cohort.leaves:
                del cohort.cell.cohorts[cohort.tick]
        self._cached -= 1

    def _forget_ghosts(self) -> None:
        """As many as its blocks allow stay, the latest: accounts together remember no more than the pool allows."""
        while len(self._ghosts) > GHOSTS_PER_BLOCK * len(self._named):
            self._leave(self._ghosts.popitem(last=False)[1], reused=False)

    def _offer(self, named: _Named, *, first: bool) -> None:
        """It can give way from now on.

        `first` of its class and age: a parent, which is as old as the child that gave way before it, and whatever was
        wanted for a time that is over.
        """
        cohort = named.cohort
        assert cohort is not None
        if not cohort.leaves:
            cohort.cell.cohorts[cohort.tick] = cohort
            if first:
                cohort.cell.cohorts.move_to_end(cohort.tick, last=False)
        cohort.leaves[named.block] = None
        if first:
            cohort.leaves.move_to_end(named.block, last=False)

    def _orphan(self, named: _Named) -> None:
        """Its parent has one cached child less."""
        parent, named.parent = named.parent, None
        if parent is not None:
            parent.children -= 1
            if not parent.children and parent.cohort is not None and parent.block not in self._kept:
                self._offer(parent, first=True)

    @staticmethod
    def _leave(named: _Named, *, reused: bool) -> None:
        """Nobody waits for its next use any longer."""
        cohort, named.cohort = named.cohort, None
        assert cohort is not None
        cohort.known -= 1
        cohort.cell.known -= 1
        cohort.cell.reused += reused

    def _grow_older(self) -> None:
        """A tick has passed."""
        self._tick += 1
        for row, cells in self._table.items():
            cohorts = self._cohorts[row]
            for age, (younger, older) in enumerate(pairwise(cells)):
                tick = self._tick - (1 << age)
                cohort = cohorts.get(tick)
                if cohort is None:
                    continue
                if cohort.leaves:
                    older.cohorts[tick] = younger.cohorts.pop(tick)
                younger.known -= cohort.known
                older.known += cohort.known
                cohort.cell = older
                if older is cells[-1] or not cohort.known:
                    del cohorts[tick]
            for cell in cells:
                cell.waited_ticks += cell.known
        if self._tick % TICKS_PER_RANKING == 0:
            self._ranked = self._rank()
            for cells in self._table.values():
                for cell in cells:
                    cell.reused *= _FADED
                    cell.waited_ticks *= _FADED

    def _rank(self) -> list[_Cell]:
        """The cells in the order in which their blocks give way."""
        columns = list(zip(*self._table.values(), strict=True))
        spans = [1, *(1 << age for age in range(AGES - 1))]
        believed: list[float] = []
        for column in columns:
            # Before anything is seen of an age: half the rate of the age before it, which is half as old.
            before = believed[-1] / 2 if believed else 1.0
            uses = PRIOR_USES + sum(cell.reused for cell in column)
            believed.append(uses / (PRIOR_USES / before + sum(cell.waited_ticks for cell in column)))
        for cells in self._table.values():
            # From some age on to where it is best to give up: uses, time, and the share that is left then. The last
            # begins at the age in hand; a later one is joined to it if it yields more than what lies before it.
            stretches: list[tuple[float, float, float]] = []
            for cell, span, prior in zip(reversed(cells), reversed(spans), reversed(believed), strict=True):
                rate = (cell.reused + PRIOR_USES) / (cell.waited_ticks + PRIOR_USES / prior)
                uses = -expm1(-rate * span)
                time, left = uses / rate, 1 - uses
                while stretches and stretches[-1][0] * time > uses * stretches[-1][1]:
                    later_uses, later_time, later_left = stretches.pop()
                    uses, time, left = uses + left * later_uses, time + left * later_time, left * later_left
                stretches.append((uses, time, left))
                cell.index = uses / time
        return sorted((cell for cells in self._table.values() for cell in cells), key=lambda cell: cell.index)


#: The strategies by their names in options, each for a pool of so many blocks and their lifetimes.
ORDERS: Mapping[str, Callable[[int, Lifetimes], Order]] = {
    "lru": lambda _, lifetimes: LeastRecentlyUsed(lifetimes),
    "reuse": LearntReuse,
}
