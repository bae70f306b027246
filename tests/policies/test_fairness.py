from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.fairness import PATIENCE_PREEMPTIONS, FairQueue, choose_victim

A, B, C = b"a", b"b", b"c"


@dataclass(frozen=True)
class Request:
    arrival: int
    account: bytes = A
    preemptions: int = 0


def running(*preemptions: int) -> list[Request]:
    """Requests of one account in order of admission."""
    return [Request(number, preemptions=count) for number, count in enumerate(preemptions)]


def queue_of(*requests: Request) -> FairQueue[Request]:
    queue: FairQueue[Request] = FairQueue()
    for request in requests:
        queue.push(request)
    return queue


def served(queue: FairQueue[Request], turns: int, weights: dict[bytes, float], tokens: int = 10) -> list[bytes]:
    """Which account is next, when each turn is charged so many tokens."""
    order = []
    for _ in range(turns):
        account = queue.first()
        assert account is not None
        order.append(account)
        queue.charge(account, tokens, weights.get(account, 1.0))
    return order


def test_requests_of_an_account_wait_in_the_order_in_which_they_came() -> None:
    queue = queue_of(Request(1), Request(2), Request(3))
    assert queue.head(A) == Request(1)
    assert list(queue) == [Request(1), Request(2), Request(3)]
    queue.remove(Request(2))
    assert (len(queue), list(queue)) == (2, [Request(1), Request(3)])
    with pytest.raises(ValueError, match="not in list"):
        queue.remove(Request(2))


def test_a_preempted_request_is_back_at_its_place() -> None:
    queue = queue_of(Request(2), Request(3))
    queue.push_back(Request(1))
    assert list(queue) == [Request(1), Request(2), Request(3)]


def test_accounts_take_turns_by_weight() -> None:
    queue = queue_of(Request(1, A), Request(2, B))
    order = served(queue, 40, {B: 3.0})
    assert (order.count(A), order.count(B)) == (10, 30)


def test_who_had_nothing_waiting_begins_where_the_others_are() -> None:
    queue = queue_of(Request(1, A), Request(2, B))
    served(queue, 20, {})
    queue.push(Request(3, C))
    assert queue.service(C) == min(queue.service(A), queue.service(B)) == 100
    # And so it does when nobody waits.
    for request in list(queue):
        queue.remove(request)
    queue.push(Request(4, b"d"))
    assert queue.service(b"d") == 100
    # One that is ahead keeps what it had too much.
    queue.charge(A, 500, 1.0)
    queue.push(Request(5, A))
    assert queue.service(A) == 600


def test_who_comes_while_another_is_served_begins_where_that_one_is_by_then() -> None:
    queue = queue_of(Request(1, A))
    queue.remove(Request(1, A))
    queue.charge(A, 500, 1.0)
    queue.push(Request(2, B))
    assert queue.service(B) == 500


def test_who_is_set_aside_is_not_asked_until_all_are_again() -> None:
    queue = queue_of(Request(1, A), Request(2, B))
    assert queue.first() == A
    queue.set_aside(A)
    assert queue.first() == B
    queue.push(Request(3, A))
    assert queue.first() == B
    queue.set_aside(B)
    assert queue.first() is None
    queue.restore()
    assert queue.first() == A


def test_an_account_without_requests_is_not_asked() -> None:
    queue = queue_of(Request(1, A))
    queue.remove(Request(1, A))
    assert queue.first() is None
    assert queue.head(A) is queue.head(C) is None
    assert len(queue) == 0


def test_the_newest_admitted_is_the_victim() -> None:
    assert choose_victim(running(0, 0, 0), lambda account: 0) == Request(2)


def test_the_account_that_has_most_is_the_victims() -> None:
    requests = [Request(1, A), Request(2, B), Request(3, B), Request(4, A)]
    assert choose_victim(requests, {A: 1, B: 2}.__getitem__) == Request(3, B)
    assert choose_victim(requests, {A: 2, B: 1}.__getitem__) == Request(4, A)
    assert choose_victim(requests, {A: 1, B: 1}.__getitem__) == Request(4, A)


def test_one_preempted_three_times_is_chosen_last() -> None:
    def victim(*preemptions: int) -> Request | None:
        return choose_victim(running(*preemptions), lambda account: 0)

    assert victim(0, 0, PATIENCE_PREEMPTIONS - 1) == Request(2, preemptions=PATIENCE_PREEMPTIONS - 1)
    assert victim(0, 0, PATIENCE_PREEMPTIONS) == Request(1)
    assert victim(PATIENCE_PREEMPTIONS, PATIENCE_PREEMPTIONS + 4) == Request(1, preemptions=PATIENCE_PREEMPTIONS + 4)


def test_there_is_no_victim_where_nobody_is() -> None:
    assert choose_victim([], lambda account: 0) is None


@given(st.lists(st.tuples(st.sampled_from([A, B, C]), st.integers(1, 50)), min_size=5, max_size=60))
def test_nobody_who_waits_falls_behind_by_more_than_two_turns(turns: list[tuple[bytes, int]]) -> None:
    """Virtual counters of accounts that always wait differ by no more than the greatest charge."""
    weights = {A: 1.0, B: 2.0, C: 4.0}
    queue = queue_of(Request(1, A), Request(2, B), Request(3, C))
    for _, tokens in turns:
        account = queue.first()
        assert account is not None
        queue.charge(account, tokens, weights[account])
        services = [queue.service(each) for each in (A, B, C)]
        assert max(services) - min(services) <= 50
