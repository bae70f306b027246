"""What must not break in the store under pressure, case by case."""

from __future__ import annotations

import pytest

from cachestore.protocol import Sampling, Seal
from cachestore.sequence import Sequence as StoreSequence
from policies.fairness import PATIENCE_PREEMPTIONS
from tests.cachestore.conftest import MakeRunner
from tests.cachestore.small_models import SIZES
from tests.cachestore.support import ALICE, Harness, expected_answer


def prompt(word: int, count: int) -> list[int]:
    return [word] * count


def test_b013_an_edited_history_reads_nothing_of_what_was_there_before(make_small_runner: MakeRunner) -> None:
    def store() -> Harness:
        runner = make_small_runner(32)
        return Harness(runner, blocks=32, block_tokens=16, step_tokens=64, vocabulary_tokens=SIZES["vocab_size"])

    session, begun = store(), list(range(1, 16))
    generated = session.complete(begun, max_tokens=2).tokens
    assert session.cached_blocks(ALICE) == 1
    edited = [*begun, (generated[0] + 1) % SIZES["vocab_size"], 5]
    kept = [*begun, generated[0], 5]
    for asked, cached_tokens in ((edited, 0), (kept, 16), (edited, 16)):
        warm, cold = session.complete(asked, max_tokens=8), store().complete(asked, max_tokens=8)
        assert (warm.cached_tokens, cold.cached_tokens) == (cached_tokens, 0)
        assert warm.tokens == cold.tokens


def test_b024_too_small_a_pool_evicts_nobody_for_ever() -> None:
    store = Harness(blocks=10, block_tokens=16, step_tokens=256)
    answers = [store.submit(prompt(word, 64), max_tokens=64) for word in range(1, 5)]
    scheduler = store.engine.scheduler
    preempt, victims = scheduler.preempt, 0

    def watched(victim: StoreSequence) -> None:
        nonlocal victims
        victims += 1
        oldest, *others = scheduler.running
        assert victim is not oldest
        if victim.preemptions >= PATIENCE_PREEMPTIONS:
            assert all(other.preemptions >= PATIENCE_PREEMPTIONS for other in others)
        preempt(victim)

    scheduler.preempt = watched  # type: ignore[method-assign]
    store.run(*answers)
    assert [answer.reason for answer in answers] == ["length"] * 4
    for answer in answers:
        assert answer.tokens == expected_answer(answer.prompt, 64)
    counted = [answer.finished.counts.preemptions for answer in answers if answer.finished]
    assert sum(counted) == scheduler.preemptions == victims
    print(f"preemptions {counted} in {store.engine.steps} steps")
    # Each at most once for each block that another grows by.
    assert 0 < victims <= 4 * 4
    for answer in answers:
        store.seal(answer)
    assert store.engine.pool.held == 0


def test_b024_one_that_was_preempted_three_times_is_chosen_last() -> None:
    """Requests that come again and again would always push out the newest."""
    store = Harness(blocks=9, block_tokens=4, step_tokens=64)
    runs = store.submit(prompt(1, 4), max_tokens=28)
    unlucky = store.submit(prompt(2, 4), max_tokens=28)
    store.step()
    store.sequence(unlucky).preemptions = PATIENCE_PREEMPTIONS
    late = store.submit(prompt(3, 4), max_tokens=28)
    store.step()
    assert store.engine.scheduler.running == [store.sequence(answer) for answer in (runs, unlucky, late)]
    while store.engine.scheduler.preemptions == 0:
        store.step()
    assert store.sequence(late).preemptions == 1
    assert store.sequence(unlucky).preemptions == PATIENCE_PREEMPTIONS
    store.run(runs, unlucky, late)
    for answer in (runs, unlucky, late):
        assert answer.tokens == expected_answer(answer.prompt, 28)


def books(store: Harness) -> tuple[int, int, int]:
    """Free, held and cached blocks; `Harness` checks after every call that each block is in one place."""
    pool = store.engine.pool
    assert pool.free + pool.held + pool.cached == pool.total
    return pool.free, pool.held, pool.cached


def test_b027_shared_blocks_are_counted_once() -> None:
    store = Harness(blocks=16, block_tokens=4, step_tokens=64)
    shared = prompt(1, 12)
    store.complete([*shared, 9], max_tokens=1)
    assert books(store) == (13, 0, 3)
    first = store.submit([*shared, 2], max_tokens=3)
    second = store.submit([*shared, 3], max_tokens=3)
    store.step()
    assert (first.cached_tokens, second.cached_tokens) == (12, 12)
    # Three shared ones and one of each.
    assert books(store) == (11, 5, 0)
    while not (first.over and second.over):
        store.step()
        books(store)
    store.seal(first)
    books(store)
    store.seal(second)
    assert books(store) == (13, 0, 3)
    third = store.submit([*shared[:4], 4, 4], max_tokens=20)
    store.step()
    assert third.cached_tokens == 4
    assert books(store) == (12, 2, 2)
    store.abort(third)
    books(store)
    store.seal(third)
    assert books(store) == (13, 0, 3)
    # Idle, over and over: the check finds the same books.
    for _ in range(3):
        store.step()
        store.expire(2)
        assert books(store) == (13, 0, 3)


@pytest.mark.parametrize("prompt_tokens", [3, 10])
@pytest.mark.parametrize("abort_first", [False, True])
def test_b030_an_abort_in_the_step_of_the_end_frees_once(prompt_tokens: int, abort_first: bool) -> None:
    store = Harness(blocks=16, block_tokens=4)
    asked = prompt(1, prompt_tokens)
    *before_end, end = expected_answer(asked, 4)
    assert end not in before_end
    ends = store.submit(asked, max_tokens=9, sampling=Sampling(temperature=0, stop_token_ids=[end]))
    store.step(3)
    free, held, _ = books(store)
    named = prompt_tokens // 4
    # What comes while a step runs is applied when it is over; what comes before it is applied before.
    if abort_first:
        store.abort(ends)
        store.step()
    else:
        store.step()
        store.abort(ends)
    store.abort(ends)
    assert ends.reason == ("aborted" if abort_first else "stop")
    last_seal = Seal(request=ends.request, first_block=named, keys=b"", last=True)
    for _ in range(2):
        store.engine.seal(1, last_seal)
        store.abort(ends)
    # What has a name is cached; all else that it held is free.
    assert books(store) == (free + held - named, 0, named)
    assert not store.engine._sequences
