"""Whose request is admitted next, and whose is preempted. Pure: decides over what it is given.

First come, first served for now, over all accounts; weights and service counters take its place without a change
of the callers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar

# A request that was preempted this often is chosen last, so that nobody starves by bad luck.
PATIENCE_PREEMPTIONS = 3


class Preemptible(Protocol):
    @property
    def preemptions(self) -> int: ...


Waiting = TypeVar("Waiting")
Running = TypeVar("Running", bound=Preemptible)


class FirstComeFirstServed(Generic[Waiting]):
    """The queue of requests that wait. A preempted request goes back to its head."""

    def __init__(self) -> None:
        self._queue: deque[Waiting] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._queue)

    def push(self, request: Waiting) -> None:
        self._queue.append(request)

    def push_back_to_head(self, request: Waiting) -> None:
        self._queue.appendleft(request)

    def head(self) -> Waiting | None:
        return self._queue[0] if self._queue else None

    def remove(self, request: Waiting) -> None:
        """Raises ValueError for a request that does not wait."""
        self._queue.remove(request)


def choose_victim(running: Sequence[Running]) -> Running | None:
    """Who gives up its blocks: the newest admitted, but never the earliest, which always gets on.

    Args:
        running: in order of admission.
    """
    candidates = running[1:]
    patient = [request for request in candidates if request.preemptions < PATIENCE_PREEMPTIONS]
    for choice in (patient, candidates):
        if choice:
            return choice[-1]
    return None
