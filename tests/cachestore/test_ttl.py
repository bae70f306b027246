"""A request may say how long its blocks are wanted: that orders its own account's, and takes nothing from anybody."""

from __future__ import annotations

from functools import partial

import pytest

from policies.reuse import LearntReuse
from tests.cachestore.support import ALICE, BOB, Harness


def prompt(word: int, length: int) -> list[int]:
    return [word] * length


def found(harness: Harness, *words: int, account: bytes = ALICE) -> list[int]:
    """Of which of these prompts of one full block it is still there."""
    return [word for word in words if harness.probe(prompt(word, 4), account=account).device_blocks]


@pytest.fixture(params=["lru", "reuse"])
def harness(request: pytest.FixtureRequest) -> Harness:
    if request.param == "lru":
        return Harness(blocks=8)
    return Harness(blocks=8, make_order=partial(LearntReuse, 8))


def test_a_wanted_prompt_outlives_those_that_came_after_it(harness: Harness) -> None:
    harness.complete(prompt(1, 5), max_tokens=1, ttl_seconds=60)
    harness.complete(prompt(2, 5), max_tokens=1)
    for word in range(10, 30):
        harness.complete(prompt(word, 5), max_tokens=1)
    assert found(harness, 1, 2) == [1]


def test_afterwards_it_is_as_any_other(harness: Harness) -> None:
    harness.complete(prompt(1, 5), max_tokens=1, ttl_seconds=60)
    harness.complete(prompt(2, 5), max_tokens=1)
    harness.clock.advance(60)
    for word in range(10, 17):
        harness.complete(prompt(word, 5), max_tokens=1)
    assert found(harness, 1, 2, 10) == [10]


def test_its_time_begins_when_the_request_ends(harness: Harness) -> None:
    answer = harness.submit(prompt(1, 5), max_tokens=3, ttl_seconds=60)
    harness.step(2)
    harness.clock.advance(50)
    harness.run(answer)
    harness.seal(answer)
    harness.clock.advance(50)
    for word in range(10, 30):
        harness.complete(prompt(word, 5), max_tokens=1)
    assert found(harness, 1) == [1]


def test_what_it_was_built_on_is_wanted_as_long(harness: Harness) -> None:
    """The first request wanted nothing, the second one went on from it."""
    harness.complete(prompt(1, 9), max_tokens=1)
    harness.complete(prompt(1, 8) + prompt(2, 5), max_tokens=1, ttl_seconds=60)
    for word in range(10, 30):
        harness.complete(prompt(word, 5), max_tokens=1)
    assert harness.probe(prompt(1, 8) + prompt(2, 4)).device_blocks == 3


def test_the_answer_is_wanted_with_the_prompt(harness: Harness) -> None:
    answer = harness.complete(prompt(1, 5), max_tokens=8, ttl_seconds=60)
    for word in range(10, 30):
        harness.complete(prompt(word, 5), max_tokens=1)
    assert harness.probe(answer.prompt + answer.tokens[:-1]).device_blocks == 3


def test_a_use_without_a_wish_takes_nothing_from_it(harness: Harness) -> None:
    harness.complete(prompt(1, 5), max_tokens=1, ttl_seconds=60)
    harness.clock.advance(30)
    harness.complete(prompt(1, 5), max_tokens=1)
    harness.complete(prompt(1, 5), max_tokens=1, ttl_seconds=10)
    harness.clock.advance(20)
    for word in range(10, 30):
        harness.complete(prompt(word, 5), max_tokens=1)
    assert found(harness, 1) == [1]
    harness.clock.advance(10)
    for word in range(30, 50):
        harness.complete(prompt(word, 5), max_tokens=1)
    assert found(harness, 1) == []


def test_it_gives_way_to_need_of_its_own_account(harness: Harness) -> None:
    harness.complete(prompt(1, 13), max_tokens=1, ttl_seconds=60)
    harness.complete(prompt(2, 31), max_tokens=1)
    assert found(harness, 1) == []


def test_it_gives_way_to_others_as_if_it_was_not_wanted() -> None:
    """Whose blocks give way is decided before which of them do, so a wish is no way to more of the pool."""

    def left(ttl_seconds: int) -> list[tuple[int, int]]:
        harness = Harness(blocks=32)
        for word in range(1, 7):
            harness.complete(prompt(word, 17), max_tokens=1, ttl_seconds=ttl_seconds)
        seen = []
        for word in range(100, 130):
            harness.complete(prompt(word, 5), account=BOB, max_tokens=1)
            seen.append((harness.cached_blocks(ALICE), harness.cached_blocks(BOB)))
        return seen

    assert left(3600) == left(0)
    assert left(0)[-1][1] > 10


def test_it_gives_way_to_a_limit() -> None:
    harness = Harness(blocks=32)
    for word in range(1, 5):
        harness.complete(prompt(word, 9), max_tokens=1, ttl_seconds=3600)
    harness.open(revision=1, max_blocks=3)
    assert harness.cached_blocks(ALICE) == 3
    assert harness.engine.pool.limit_evictions == harness.engine.pool.evictions == 5


def test_a_flush_leaves_nothing_of_it() -> None:
    harness = Harness(blocks=8)
    harness.complete(prompt(1, 9), max_tokens=1, ttl_seconds=3600)
    assert harness.flush(ALICE).blocks == 2
    assert harness.cached_blocks(ALICE) == 0
    assert not len(harness.engine.pool._lifetimes)
    # A block that is used again is not wanted because it once was.
    harness.complete(prompt(1, 9), max_tokens=1)
    for word in range(10, 30):
        harness.complete(prompt(word, 5), max_tokens=1)
    assert found(harness, 1) == []


def test_an_aborted_request_wanted_what_it_had() -> None:
    harness = Harness(blocks=8)
    answer = harness.submit(prompt(1, 5), max_tokens=20, ttl_seconds=60)
    harness.step(2)
    harness.abort(answer)
    harness.seal(answer)
    for word in range(10, 30):
        harness.complete(prompt(word, 5), max_tokens=1)
    assert found(harness, 1) == [1]
