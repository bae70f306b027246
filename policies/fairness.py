"""Whose request is computed next, and whose is preempted. Pure: decides over what it is given.

Between accounts: weighted fair by service, with a virtual token counter for each account (Sheng et al., "Fairness in
Serving Large Language Models", OSDI 2024). The counter is what was computed for the account divided by its weight; the
account that is furthest behind is next. One that had nothing waiting starts at the least counter of those that have, so
that nobody saves up credit. Inside an account: first come, first served.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

# A request that was preempted this often is chosen last, so that nobody starves by bad luck.
PATIENCE_PREEMPTIONS = 3


class Waiting(Protocol):
    """`arrival`: rises with the order in which requests came."""

    @property
    def account(self) -> bytes: ...

    @property
    def arrival(self) -> int: ...


class Preemptible(Protocol):
    @property
    def account(self) -> bytes: ...

    @property
    def preemptions(self) -> int: ...


WaitingT = TypeVar("WaitingT", bound=Waiting)
RunningT = TypeVar("RunningT", bound=Preemptible)


class _Backlog(Generic[WaitingT]):
    """What waits of one account, and its counter."""

    __slots__ = ("account", "is_listed", "number", "requests", "service")

    def __init__(self, account: bytes, number: int) -> None:
        self.account = account
        self.number = number
        self.service = 0.0
        self.requests: list[tuple[int, WaitingT]] = []
        # Whether the heap of accounts has an entry of it, with its counter or less.
        self.is_listed = False


class FairQueue(Generic[WaitingT]):
    """Requests that wait, by account. Every operation is O(log n), but iteration and `remove`."""

    def __init__(self) -> None:
        self._backlogs: dict[bytes, _Backlog[WaitingT]] = {}
        self._heap: list[tuple[float, int, _Backlog[WaitingT]]] = []
        self._set_aside: set[_Backlog[WaitingT]] = set()
        self._numbers = 0
        self._length = 0
        # Who was last to leave the queue without anybody waiting. It may still be served.
        self._last: _Backlog[WaitingT] | None = None

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[WaitingT]:
        for backlog in self._backlogs.values():
            for _, request in sorted(backlog.requests, key=lambda entry: entry[0]):
                yield request

    def push(self, request: WaitingT) -> None:
        """A new request. One whose account had nothing waiting gets no credit for that."""
        backlog = self._backlog(request.account)
        if not backlog.requests:
            first = self.first()
            least = self._last if first is None else self._backlog(first)
            backlog.service = max(backlog.service, least.service if least else 0.0)
        self._add(backlog, request)

    def push_back(self, request: WaitingT) -> None:
        """One that waited before, at its place by arrival."""
        self._add(self._backlog(request.account), request)

    def remove(self, request: WaitingT) -> None:
        """Raises ValueError for a request that does not wait."""
        backlog = self._backlog(request.account)
        if backlog.requests and backlog.requests[0][1] is request:
            heapq.heappop(backlog.requests)
        else:
            backlog.requests.remove((request.arrival, request))
            heapq.heapify(backlog.requests)
        self._length -= 1
        if not self._length:
            self._last = backlog

    def first(self) -> bytes | None:
        """The account that is next: of those with something waiting that were not set aside."""
        while self._heap:
            service, number, backlog = self._heap[0]
            if not backlog.requests or backlog in self._set_aside:
                heapq.heappop(self._heap)
                backlog.is_listed = False
            elif service < backlog.service:
                heapq.heapreplace(self._heap, (backlog.service, number, backlog))
            else:
                return backlog.account
        return None

    def head(self, account: bytes) -> WaitingT | None:
        """The request of the account that came first."""
        backlog = self._backlogs.get(account)
        return backlog.requests[0][1] if backlog and backlog.requests else None

    def set_aside(self, account: bytes) -> None:
        """It can't be served now: the others are asked, until `restore`."""
        self._set_aside.add(self._backlog(account))

    def may_be_next(self, account: bytes) -> bool:
        """Something of it waits, and it was not set aside."""
        backlog = self._backlogs.get(account)
        return backlog is not None and bool(backlog.requests) and backlog not in self._set_aside

    def restore(self) -> None:
        for backlog in self._set_aside:
            self._list(backlog)
        self._set_aside.clear()

    def service(self, account: bytes) -> float:
        return self._backlog(account).service

    def charge(self, account: bytes, tokens: int, weight: float) -> None:
        """So many tokens were computed for the account: of prompts, or new ones."""
        self._backlog(account).service += tokens / weight

    def forget(self, account: bytes) -> None:
        """The account is no more; nothing of it waits."""
        if backlog := self._backlogs.pop(account, None):
            self._set_aside.discard(backlog)

    def _backlog(self, account: bytes) -> _Backlog[WaitingT]:
        backlog = self._backlogs.get(account)
        if backlog is None:
            self._numbers += 1
            backlog = self._backlogs[account] = _Backlog(account, self._numbers)
        return backlog

    def _add(self, backlog: _Backlog[WaitingT], request: WaitingT) -> None:
        heapq.heappush(backlog.requests, (request.arrival, request))
        self._length += 1
        self._list(backlog)

    def _list(self, backlog: _Backlog[WaitingT]) -> None:
        if not backlog.is_listed:
            backlog.is_listed = True
            heapq.heappush(self._heap, (backlog.service, backlog.number, backlog))


def choose_victim(candidates: Sequence[RunningT], measure: Callable[[bytes], float]) -> RunningT | None:
    """Who gives up its blocks: the newest admitted of the account that has most by `measure`.

    Args:
        candidates: in order of admission.
    """
    patient = [request for request in candidates if request.preemptions < PATIENCE_PREEMPTIONS]
    for choice in (patient, candidates):
        if choice:
            most = max(measure(account) for account in {request.account for request in choice})
            return next(request for request in reversed(choice) if measure(request.account) == most)
    return None
