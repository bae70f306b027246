from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.fairness import PATIENCE_PREEMPTIONS, FirstComeFirstServed, choose_victim


@dataclass(frozen=True)
class Request:
    number: int
    preemptions: int = 0


def running(*preemptions: int) -> list[Request]:
    """Requests in order of admission."""
    return [Request(number, count) for number, count in enumerate(preemptions)]


def test_requests_wait_in_the_order_in_which_they_came() -> None:
    queue: FirstComeFirstServed[int] = FirstComeFirstServed()
    assert queue.head() is None
    for request in (1, 2, 3):
        queue.push(request)
    assert queue.head() == 1
    assert list(queue) == [1, 2, 3]
    queue.remove(2)
    assert (len(queue), list(queue)) == (2, [1, 3])
    with pytest.raises(ValueError, match="not in deque"):
        queue.remove(2)


def test_a_preempted_request_is_the_next_to_be_admitted() -> None:
    queue: FirstComeFirstServed[int] = FirstComeFirstServed()
    queue.push(2)
    queue.push_back_to_head(1)
    assert list(queue) == [1, 2]


def test_the_newest_admitted_is_the_victim() -> None:
    assert choose_victim(running(0, 0, 0)) == Request(2)


def test_one_preempted_three_times_is_chosen_last() -> None:
    assert choose_victim(running(0, 0, PATIENCE_PREEMPTIONS - 1)) == Request(2, PATIENCE_PREEMPTIONS - 1)
    assert choose_victim(running(0, 0, PATIENCE_PREEMPTIONS)) == Request(1)
    assert choose_victim(running(0, PATIENCE_PREEMPTIONS, PATIENCE_PREEMPTIONS + 4)) == Request(
        2, PATIENCE_PREEMPTIONS + 4
    )


def test_there_is_no_victim_where_only_the_earliest_runs() -> None:
    assert choose_victim([]) is None
    assert choose_victim(running(0)) is None
    assert choose_victim(running(0, 0)) == Request(1)


@given(st.lists(st.integers(0, 6), min_size=2))
def test_the_earliest_is_never_the_victim(preemptions: list[int]) -> None:
    victim = choose_victim(running(*preemptions))
    assert victim is not None
    assert victim.number > 0
