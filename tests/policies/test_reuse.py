from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from benchmarks.replay import read_trace
from policies.reuse import LearntReuse
from tests.policies.made_traces import (
    NO_LIFETIMES,
    Trace,
    blocks,
    chats,
    loop,
    lru_hits,
    ratio,
    recent,
    reuse_hits,
    scan,
    zipf,
)

CONVERSATION = Path(__file__).parents[1] / "traces" / "conversation-1000.jsonl"


class OrderMachine(RuleBasedStateMachine):
    """Requests that overlap, in a pool of as few blocks as they need. `chains`: what each named block stands for."""

    CAPACITY = 8

    def __init__(self) -> None:
        super().__init__()
        self.order = LearntReuse(self.CAPACITY, NO_LIFETIMES)
        self.free = list(range(self.CAPACITY))
        self.chains: dict[int, str] = {}
        self.holders: list[list[int]] = []

    def cached(self) -> set[int]:
        return self.chains.keys() - {block for held in self.holders for block in held}

    # Over two words many chains have a beginning in common, and evicted ones come again.
    @rule(chain=st.text("ab", min_size=1, max_size=6))
    def ask(self, chain: str) -> None:
        named = {path: block for block, path in self.chains.items()}
        prefixes = [chain[:length] for length in range(1, len(chain) + 1)]
        found = [named[path] for path in prefixes if path in named]
        cached = self.cached()
        if len(prefixes) - len(found) > len(self.free) + len(cached - set(found)):
            return
        self.order.remove([block for block in found if block in cached])
        self.holders.append(found)
        new = prefixes[len(found) :]
        self.evict(len(new) - len(self.free))
        made = [self.free.pop() for _ in new]
        self.order.publish(made, [path.encode() for path in new], found[-1] if found else None)
        self.chains.update(zip(made, new, strict=True))
        found += made

    @rule(count=st.integers(1, 3))
    def somebody_else_needs_room(self, count: int) -> None:
        self.evict(count)

    def evict(self, count: int) -> None:
        cached = self.cached()
        victims = self.order.pop(max(0, count))
        assert len(victims) == min(max(0, count), len(cached))
        for victim in victims:
            assert victim in cached
            path = self.chains.pop(victim)
            assert not [other for other in self.chains.values() if other.startswith(path)], "a descendant has a name"
        self.free += victims

    @rule(which=st.integers(0, 7))
    def let_go(self, which: int) -> None:
        if which < len(self.holders):
            blocks = self.holders.pop(which)
            cached = self.cached()
            self.order.add([block for block in reversed(blocks) if block in cached])

    @rule(which=st.integers(0, 7), die=st.integers(0, 9))
    def forget_a_chain(self, which: int, die: int) -> None:
        """Cached blocks with a beginning in common, from the shortest to the longest: the harder way round."""
        cached = sorted(self.cached(), key=lambda block: len(self.chains[block]))
        if die == 0 and which < len(cached):
            beginning = self.chains[cached[which]]
            gone = [block for block in cached if self.chains[block].startswith(beginning)]
            self.order.forget(gone)
            for block in gone:
                del self.chains[block]
            self.free += gone

    @rule(die=st.integers(0, 19))
    def forget_everything(self, die: int) -> None:
        if die == 0:
            self.order.forget(list(self.chains))
            assert not self.order.ghosts
            self.free += self.chains
            self.chains.clear()
            self.holders.clear()

    @invariant()
    def it_has_what_is_cached(self) -> None:
        assert sorted(self.order) == sorted(self.cached())
        assert len(self.order) == len(self.cached())

    @invariant()
    def it_remembers_no_more_than_it_may(self) -> None:
        assert self.order.ghosts <= 4 * len(self.chains)

    def teardown(self) -> None:
        self.evict(self.CAPACITY + 1)
        assert not self.cached()
        assert not len(self.order)


TestOrder = OrderMachine.TestCase
TestOrder.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


def test_before_anything_was_used_again_it_is_the_least_recently_used_that_gives_way() -> None:
    order = LearntReuse(1000, NO_LIFETIMES)
    reuse_hits([[7, 8, 9], [4], [1, 2], *([100 + number] for number in range(200))], 1000, order)
    assert order.pop(206) == [9, 8, 7, 4, 2, 1, *range(100, 300)]


def test_it_remembers_four_evicted_keys_for_each_block_that_it_has() -> None:
    order = LearntReuse(10, NO_LIFETIMES)
    reuse_hits([[number] for number in range(200)], 10, order)
    # Nine stayed when the tenth gave way last.
    assert order.ghosts == 4 * 9
    order.pop(8)
    assert order.ghosts == 4 * 2


def test_an_account_takes_memory_for_what_it_has_and_not_for_what_the_pool_has() -> None:
    tracemalloc.start()
    try:
        orders = [LearntReuse(1_000_000, NO_LIFETIMES) for _ in range(100)]
        assert tracemalloc.get_traced_memory()[0] < 2_000 * len(orders)
    finally:
        tracemalloc.stop()


def test_a_block_gives_way_after_its_last_child_whatever_became_of_that() -> None:
    order = LearntReuse(8, NO_LIFETIMES)
    order.publish([1, 2, 3], [b"1", b"2", b"3"], None)
    order.publish([4, 5], [b"4", b"5"], 1)
    order.add([3, 2])
    # Another one holds 1, 4 and 5.
    assert order.pop(8) == [3, 2]
    order.add([5, 4, 1])
    order.forget([4, 5])
    assert order.pop(8) == [1]


def test_what_is_held_or_unknown_does_not_give_way() -> None:
    order = LearntReuse(4, NO_LIFETIMES)
    order.publish([1], [b"1"], None)
    for call in (lambda: order.remove([1]), lambda: order.remove([2]), lambda: order.add([2])):
        with pytest.raises(KeyError):
            call()
    assert order.pop(1) == []
    assert list(order) == []
    with pytest.raises(ValueError, match="at least one block, not 0"):
        LearntReuse(0, NO_LIFETIMES)


def test_the_same_history_evicts_the_same_blocks() -> None:
    trace = zipf(seed=3, requests=1500)
    assert reuse_hits(trace, 300) == reuse_hits(trace, 300)


@pytest.mark.parametrize(
    ("trace", "capacity", "more"),
    [
        pytest.param(scan(seed=1, requests=4000), 400, 0.2, id="scan"),
        pytest.param(loop(documents=120, requests=3000), 600, 0.45, id="loop"),
        pytest.param(zipf(seed=1, requests=5000), 1000, 0.08, id="zipf"),
        pytest.param(chats(seed=1, requests=3000), 1000, 0.3, id="chats"),
        # Nothing is to be learnt here.
        pytest.param(recent(seed=1, requests=5000), 300, -0.005, id="recent"),
    ],
)
def test_it_finds_more_than_least_recently_used_where_there_is_something_to_learn(
    trace: Trace, capacity: int, more: float
) -> None:
    assert ratio(reuse_hits(trace, capacity), trace) >= ratio(lru_hits(trace, capacity), trace) + more


def test_what_was_learnt_does_not_bind_when_the_rule_changes() -> None:
    after = [[10_000 + each for each in ids] for ids in recent(seed=2, requests=3000)]
    trace = loop(documents=120, requests=3000) + after
    assert sum(reuse_hits(trace, 600)[-1500:]) > 0.985 * sum(lru_hits(trace, 600)[-1500:])


@pytest.mark.parametrize(("capacity", "more"), [(500, -0.005), (1000, 0.005), (2000, 0.01), (10_000, -0.005)])
def test_it_learns_on_a_recorded_hour_within_five_minutes(capacity: int, more: float) -> None:
    trace = [[int.from_bytes(key) for key in request.keys] for request in read_trace(CONVERSATION, tenants=1)]
    assert blocks(trace) > 25_000
    assert ratio(reuse_hits(trace, capacity), trace) >= ratio(lru_hits(trace, capacity), trace) + more
