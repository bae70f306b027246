"""How a pool of blocks is divided among accounts, and who gives up a cached block when another one is needed. Pure.

Each account holds blocks (requests refer to them) and has cached ones (nobody does). What is promised to it:

    reserved   nobody else takes these; what of it is unused is lent to cached blocks of others, never to held ones
    max        it never has more, held and cached together; it evicts its own first
    weight     of its part in what nobody has reserved
    strict     reserved = max, and nothing is lent or borrowed: nothing of others changes what it finds cached

At any time, with what is reserved as far as it is in force,

    Σ max(0, held − reserved)  ≤  total − Σ reserved

so that an account within its reservation always gets a block without preempting anybody: whatever else lies there is
cached. A reservation that is raised comes into force as blocks come free. Every operation is O(1) or O(log accounts).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf
from typing import Protocol

from policies.lifetimes import Kept, Lifetimes


class Order(Protocol):
    """Cached blocks of one account in the order in which they give way."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...

    def publish(self, blocks: Sequence[int], keys: Sequence[bytes], parent: int | None) -> None:
        """Held blocks of a chain have got names, head first. `parent`: the named one before them, None at the head."""

    def add(self, blocks: Sequence[int]) -> None:
        """Their last holder let go of them: blocks of a chain, tail first."""

    def remove(self, blocks: Sequence[int]) -> None:
        """Somebody took them up again."""

    def forget(self, blocks: Sequence[int]) -> None:
        """Their names are gone, and not because they gave way. They are held or cached."""

    def pop(self, count: int) -> list[int]:
        """The blocks that give way now, fewer where there are fewer; no block before its cached descendants."""


class LeastRecentlyUsed:
    """The order of last use, of blocks whose lifetime lasts after all others.

    A block enters when its last holder lets go of it and leaves when somebody takes it up again, so the order of entry
    is the order of last use. Holders let go of a chain from tail to head: the list is leaves-first by construction, and
    taking its head never cuts a chain in two. A block whose lifetime has ended gives way as if it never had one.

    Blocks stay listed as they were added; one counts as long as its turn is that of its list. That takes a third of the
    time of an OrderedDict, and a tenth of its memory.
    """

    def __init__(self, lifetimes: Lifetimes) -> None:
        self._lifetimes = lifetimes
        self._turns = lifetimes.turns
        self._added: deque[tuple[int, list[int]]] = deque()
        # Of the first list, how many have given way or were passed over.
        self._passed = 0
        # In all lists, and how many of those count.
        self._listed = self._counted = 0
        self._kept = Kept(lifetimes)

    def __len__(self) -> int:
        return self._counted + len(self._kept)

    def __iter__(self) -> Iterator[int]:
        turns = self._turns.of
        return chain((block for turn, added in self._added for block in added if turns[block] == turn), self._kept)

    def publish(self, blocks: Sequence[int], keys: Sequence[bytes], parent: int | None) -> None:
        """Names say nothing about when a block was used."""

    def add(self, blocks: Sequence[int]) -> None:
        turn = self._turns.next()
        added = list(blocks)
        self._turns.give(added, turn)
        if len(self._lifetimes) and (lasting := self._lifetimes.lasting(blocks)):
            for position, block in enumerate(blocks):
                if block in lasting:
                    self._turns.of[block] = 0
                    self._kept.add(block, (turn, position))
            added = [block for block in blocks if block not in lasting]
        if added:
            self._added.append((turn, added))
        self._listed += len(added)
        self._counted += len(added)
        if self._listed > 2 * self._counted + 16:
            self._tidy()

    def remove(self, blocks: Sequence[int]) -> None:
        """Raises KeyError for a block that is not in the list."""
        turns = self._turns.of
        for block in blocks:
            if not turns[block]:
                self._kept.remove(block)
                self._counted += 1
            turns[block] = 0
        self._counted -= len(blocks)

    def forget(self, blocks: Sequence[int]) -> None:
        turns, kept = self._turns.of, self._kept
        self.remove([block for block in blocks if block < len(turns) and (turns[block] or block in kept)])

    def pop(self, count: int) -> list[int]:
        if not len(self._kept):
            return self._pop_oldest(count)
        victims: list[int] = []
        while len(self) and len(victims) < count:
            over = self._kept.oldest_over()
            turn = self._oldest_turn()
            # Blocks of one `add` have lifetimes from the head on: those that have none are its tail.
            if over and (turn is None or over[0] < turn):
                victims.append(self._kept.pop_over())
            elif turn is not None:
                victims += self._pop_oldest(1)
            else:
                victims.append(self._kept.pop_lasting())
        return victims

    def _oldest_turn(self) -> int | None:
        """Of the block that was let go of first, once those are passed over that don't count any more."""
        turns = self._turns.of
        while self._added:
            turn, added = self._added[0]
            while self._passed < len(added):
                if turns[added[self._passed]] == turn:
                    return turn
                self._passed += 1
                self._listed -= 1
            self._added.popleft()
            self._passed = 0
        return None

    def _pop_oldest(self, count: int) -> list[int]:
        turns = self._turns.of
        victims: list[int] = []
        while self._added and len(victims) < count:
            turn, added = self._added[0]
            some = added[self._passed : self._passed + count - len(victims)]
            self._passed += len(some)
            self._listed -= len(some)
            if self._passed == len(added):
                self._added.popleft()
                self._passed = 0
            some = [block for block in some if turns[block] == turn]
            for block in some:
                turns[block] = 0
            victims += some
        self._counted -= len(victims)
        return victims

    def _tidy(self) -> None:
        """Only what counts is listed."""
        turns = self._turns.of
        counted = ((turn, [block for block in added if turns[block] == turn]) for turn, added in self._added)
        self._added = deque(each for each in counted if each[1])
        self._passed, self._listed = 0, self._counted


@dataclass(frozen=True, slots=True)
class AccountLimits:
    """In blocks; `max` None is the pool. A strict account has `reserved` = `max`."""

    reserved: int = 0
    max: int | None = None
    weight: float = 1.0
    strict: bool = False

    def __post_init__(self) -> None:
        if self.reserved < 0 or not 0 < self.weight < inf or (self.max is not None and self.max < self.reserved):
            raise ValueError(f"no limits of an account: {self}")
        if self.strict and self.max != self.reserved:
            raise ValueError(f"a strict account has reserved = max, not {self.reserved} and {self.max}")


NO_LIMITS = AccountLimits()


class Account:
    """
    Attributes:
        reserved: what of `limits.reserved` is in force.
        held: blocks that requests refer to.
        used: those and the cached ones.
        cached: the others, in the order in which they give way.
        evictions: how many gave way; whoever evicts counts them.
    """

    __slots__ = ("_entry", "_number", "cached", "evictions", "held", "limits", "name", "reserved", "used")

    def __init__(self, name: bytes, cached: Order, number: int) -> None:
        self.name = name
        self.cached = cached
        self.limits = NO_LIMITS
        self.reserved = 0
        self.held = self.used = 0
        self.evictions = 0
        self._number = number
        # How far over its reservation it is at most, as the heap of victims knows it.
        self._entry: float | None = None

    @property
    def over(self) -> float:
        """How far it is over its reservation, by its weight: the greatest gives way."""
        return (self.used - self.reserved) / self.limits.weight

    @property
    def beyond(self) -> int:
        """Held blocks beyond its reservation."""
        return self.held - self.reserved if self.held > self.reserved else 0


class Shares:
    """The pool's blocks, as far as who has how many. It is told of every change before the next question.

    Attributes:
        begun: names of accounts with requests that are being answered, and how many blocks each needs for its end.

    Args:
        total: blocks of the pool.
        make_order: for the cached blocks of an account.
    """

    def __init__(self, total: int, make_order: Callable[[], Order]) -> None:
        self.total = total
        #: Σ of what is reserved and in force.
        self.reserved = 0
        self.begun: Callable[[], Iterable[tuple[bytes, int]]] = tuple
        self._make_order = make_order
        self._accounts: dict[bytes, Account] = {}
        self._number = 0
        self._beyond = 0
        # Blocks that strict accounts have or may have at once, and those that all others have.
        self._partitions = 0
        self._shared = 0
        # Whose reservation is not yet wholly in force, and who has more than it may, until it has not.
        self._growing: dict[Account, None] = {}
        self._lowered: dict[Account, None] = {}
        self._leaving: dict[Account, None] = {}
        self._victims: list[tuple[float, int, Account]] = []

    def account(self, name: bytes) -> Account:
        """The account of that name, new and without limits if there is none."""
        account = self._accounts.get(name)
        if account is None:
            self._number += 1
            account = self._accounts[name] = Account(name, self._make_order(), self._number)
        return account

    def __iter__(self) -> Iterator[Account]:
        return iter(self._accounts.values())

    @property
    def missing(self) -> int:
        """What reservations lack to be wholly in force."""
        return sum(min(account.limits.reserved, self.total) - account.reserved for account in self._growing)

    # --- limits

    def set_limits(self, account: Account, limits: AccountLimits) -> None:
        """From now on; `excess` says what has to go for it."""
        self._change(account, limits, min(account.reserved, limits.reserved))
        if account.reserved < limits.reserved:
            self._growing[account] = None
        self._lowered[account] = None
        self.grow()

    def forget(self, account: Account) -> None:
        """The account is no more, once it has no blocks."""
        self.set_limits(account, NO_LIMITS)
        self._leaving[account] = None
        self._settle(account)

    def _change(self, account: Account, limits: AccountLimits, reserved: int) -> None:
        held, cached = account.held, account.used - account.held
        self._count(account, -held, -cached)
        self.reserved += reserved - account.reserved
        self._partitions += limits.strict * reserved - account.limits.strict * account.reserved
        account.limits, account.reserved = limits, reserved
        self._count(account, held, cached)
        self._enter(account)

    def _count(self, account: Account, held: int, cached: int) -> None:
        """It holds so many more, and so many more of it are cached."""
        reserved, used = account.reserved, account.used
        if held:
            before = account.beyond
            account.held += held
            self._beyond += account.beyond - before
        account.used += held + cached
        if account.limits.strict:
            self._partitions += max(reserved, account.used) - max(reserved, used)
        else:
            self._shared += held + cached

    def grow(self) -> None:
        """Reservations that are not wholly in force come into it as far as they can now; `excess` as above."""
        if self.reserved == self.total:
            return
        begun: dict[bytes, int] = {}
        for name, blocks in self.begun() if self._growing else ():
            begun[name] = max(blocks, begun.get(name, 0))
        for account in list(self._growing):
            room = self.total - self.reserved - self._beyond
            wanted = account.limits.reserved - account.reserved
            more = max(0, min(wanted, account.beyond + room))
            if more:
                # Nor does it take from a request that was begun what that needs for its end.
                others = ((self.account(name), blocks) for name, blocks in begun.items() if name != account.name)
                more = max(0, min([more, *(self._unreserved(other) - blocks for other, blocks in others)]))
                self._change(account, account.limits, account.reserved + more)
            if more == wanted:
                del self._growing[account]

    # --- questions

    def cap(self, account: Account) -> int:
        """The most blocks that it may have now, held and cached together."""
        if account.limits.strict:
            return account.reserved
        return self.total if account.limits.max is None else min(account.limits.max, self.total)

    def most(self, account: Account) -> int:
        """The most blocks that it can ever hold, as things are reserved."""
        unreserved = self._unreserved(account)
        return unreserved if account.limits.max is None else min(unreserved, account.limits.max)

    def _unreserved(self, account: Account) -> int:
        """What nobody else has reserved."""
        return self.total - (self.reserved - account.reserved)

    def above(self, account: Account, blocks: int) -> int:
        """How many blocks of its own it has to let go before it may hold so many more."""
        return max(0, account.held + blocks - self.cap(account))

    def short(self, account: Account, blocks: int) -> int:
        """How many held blocks, whosever, are in the way of its holding so many more: new or its own cached ones."""
        beyond = self._beyond - account.beyond + max(0, account.held + blocks - account.reserved)
        return max(0, beyond - (self.total - self.reserved))

    def to_evict(self, account: Account, blocks: int) -> tuple[int, int]:
        """Before it takes so many new ones, which fit: how many of its own have to go, and how many of anybody's."""
        own = min(account.used - account.held, max(0, account.used + blocks - self.cap(account)))
        used = account.used - own
        if account.limits.strict:
            # More than its partition only where that was made smaller than what it is about to end.
            grown = max(account.reserved, used + blocks) - max(account.reserved, account.used)
        else:
            grown = blocks - own
        return own, max(0, self._shared + self._partitions + grown - self.total)

    def victims(self, account: Account | None, blocks: int) -> Iterator[tuple[Account, int]]:
        """Who gives up how many cached blocks for so many new ones of `account`, None: for nobody.

        Each is to be evicted, and what `account` took to be held, before the next one is asked for.
        """
        while blocks:
            victim, second = self._greatest()
            if victim is None or (victim.over <= 0 and victim is not account):
                assert account is not None
                assert account.used > account.held, "more blocks are wanted than fit"
                victim = account
            count = victim.used - victim.held
            if victim is not account:
                # As if they were taken one by one: until another one is further over.
                steps = (victim.over - second) * victim.limits.weight
                if account is not None and not account.limits.strict:
                    closing = 1 / victim.limits.weight + 1 / account.limits.weight
                    steps = min(steps, (victim.over - account.over) / closing)
                count = min(count, 1 + int(min(max(0.0, steps), count)), max(1, victim.used - victim.reserved))
            count = min(count, blocks)
            blocks -= count
            yield victim, count

    def excess(self) -> Iterator[tuple[Account, int]]:
        """Who has to give up how many cached blocks, now, because of what limits have become. As `victims`."""
        for account in list(self._lowered):
            if (above := min(account.used - self.cap(account), account.used - account.held)) > 0:
                yield account, above
            if account.used <= self.cap(account):
                del self._lowered[account]
        if (above := self._shared - (self.total - self._partitions)) > 0:
            yield from self.victims(None, above)

    def _greatest(self) -> tuple[Account | None, float]:
        """Who is furthest over its reservation and has something cached, and how far the next one is at most."""
        heap = self._victims
        while heap:
            key, number, account = heap[0]
            if account._entry != -key:
                heapq.heappop(heap)
            elif account.limits.strict or account.used == account.held:
                heapq.heappop(heap)
                account._entry = None
            elif (over := account.over) < -key:
                heapq.heapreplace(heap, (-over, number, account))
                account._entry = over
            else:
                return account, max((-each[0] for each in heap[1:3]), default=float("-inf"))
        return None, float("-inf")

    def _enter(self, account: Account) -> None:
        """It has something cached, or may be further over than the heap knows."""
        if account.limits.strict or account.used == account.held:
            return
        if account._entry is None or account.over > account._entry:
            account._entry = account.over
            heapq.heappush(self._victims, (-account.over, account._number, account))
            if len(self._victims) > 2 * len(self._accounts) + 16:
                self._victims = [each for each in self._victims if each[2]._entry == -each[0]]
                heapq.heapify(self._victims)

    # --- what happens

    def hold(self, account: Account, blocks: int) -> None:
        """It holds so many more, which were free and fit."""
        self._count(account, blocks, 0)
        self._enter(account)

    def revive(self, account: Account, blocks: Sequence[int]) -> None:
        """It holds these again, which it had cached."""
        account.cached.remove(blocks)
        self._count(account, len(blocks), -len(blocks))

    def release(self, account: Account, freed: int, cached: Sequence[int]) -> None:
        """It holds so many less that are free now, and less these that are cached, a chain with its tail first."""
        account.cached.add(cached)
        self._count(account, -freed - len(cached), len(cached))
        self._enter(account)
        self._settle(account)

    def evict(self, account: Account, blocks: int) -> list[int]:
        """The so many cached ones of it that give way now, and are free."""
        victims = account.cached.pop(blocks)
        self._count(account, 0, -len(victims))
        return victims

    def discard(self, account: Account, blocks: Sequence[int]) -> None:
        """The names of these are gone: what was cached of them is free."""
        account.cached.forget(blocks)
        self._count(account, 0, account.held + len(account.cached) - account.used)
        self._settle(account)

    def _settle(self, account: Account) -> None:
        """Fewer blocks are held or used than before."""
        if account.used > account.held and account.used > self.cap(account):
            # It went beyond a limit that was lowered, to end what it had begun.
            self._lowered[account] = None
        if self._growing:
            self.grow()
        if self._leaving and account in self._leaving and not account.used:
            for each in (self._leaving, self._growing, self._lowered):
                each.pop(account, None)
            # The heap of victims has no use for it.
            account._entry = None
            del self._accounts[account.name]

    def check(self) -> None:
        """Raise AssertionError unless all counters are what they count. For tests."""
        accounts = list(self)
        assert self.reserved == sum(each.reserved for each in accounts)
        assert self._beyond == sum(each.beyond for each in accounts)
        assert all(each.used == each.held + len(each.cached) for each in accounts)
        strict = [each for each in accounts if each.limits.strict]
        assert self._partitions == sum(max(each.reserved, each.used) for each in strict)
        assert self._shared == sum(each.used for each in accounts if not each.limits.strict)
        assert self._beyond <= self.total - self.reserved, "held beyond what is reserved"
        assert self._shared <= self.total - self._partitions, "more is lent than is unused"
        for each in accounts:
            assert 0 <= each.reserved <= each.limits.reserved
            assert each.reserved == each.limits.reserved or each in self._growing
            assert each.used <= self.cap(each) or not len(each.cached), "cached above what it may have"
            if len(each.cached) and not each.limits.strict:
                assert each._entry is not None
                assert each.over <= each._entry, "a victim that the heap does not know"
