"""What runs in a step: admission, chunks, growth and preemption, through the engine that asks for it."""

from __future__ import annotations

import pytest

from cachestore.blocks import BlockPool
from cachestore.index import PrefixIndex
from cachestore.scheduler import Scheduler
from tests.cachestore.support import ALICE, BOB, Answer, Harness, expected_answer, pool_state


def last_step(harness: Harness) -> list[tuple[int, int, int]]:
    return harness.remembering.steps[-1]


def prompt(word: int, count: int) -> list[int]:
    return [word] * count


def preemptions(answer: Answer) -> int:
    assert answer.finished
    return answer.finished.counts.preemptions


def test_b026_blocks_to_be_reused_are_no_room_for_new_ones() -> None:
    harness = Harness(blocks=10, block_tokens=4)
    prefix = prompt(1, 32)
    harness.complete(prefix, max_tokens=1)
    assert (harness.engine.pool.cached, harness.engine.pool.held) == (8, 0)
    before = pool_state(harness.engine.pool)
    # 8 to reuse and 3 new of 10 never fit, so it is told at once; that it may wait is the next test.
    three_new = harness.submit(prefix + prompt(2, 11), max_tokens=1)
    assert three_new.rejected
    assert three_new.rejected.code == "over_capacity"
    assert pool_state(harness.engine.pool) == before
    two_new = harness.submit(prefix + prompt(2, 7), max_tokens=1)
    harness.step()
    assert two_new.cached_tokens == 32


def test_a_refused_admission_changes_nothing_recency_included() -> None:
    harness = Harness(blocks=12, block_tokens=4, step_tokens=64)
    harness.complete(prompt(1, 16), max_tokens=1)
    harness.complete(prompt(2, 12), max_tokens=1)
    runs = harness.submit(prompt(3, 7), max_tokens=20)
    harness.step()
    before = pool_state(harness.engine.pool)
    # Hits 4 cached blocks and needs 7 more; 10 are usable, 4 of those are the ones it hits.
    waits = harness.submit(prompt(1, 16) + prompt(4, 27), max_tokens=1)
    for _ in range(3):
        assert not harness.engine.scheduler._admit_next(ALICE)
        assert pool_state(harness.engine.pool) == before
    assert not waits.started
    harness.abort(runs)
    harness.step()
    assert waits.cached_tokens == 16


def test_a_prompt_is_computed_in_chunks_beside_running_decodes() -> None:
    harness = Harness(blocks=32, block_tokens=4, step_tokens=8)
    decodes = [harness.submit(prompt(word, 3), max_tokens=30) for word in (1, 2)]
    harness.step()
    assert all(answer.tokens for answer in decodes)
    long = harness.submit(prompt(3, 20), max_tokens=2)
    for start, count in ((0, 6), (6, 6), (12, 6), (18, 2)):
        assert not long.tokens
        harness.step()
        assert last_step(harness)[2] == (long.request, start, count)
        assert [row[2] for row in last_step(harness)[:2]] == [1, 1]
    assert [len(answer.tokens) for answer in (*decodes, long)] == [5, 5, 1]
    harness.run(*decodes, long)
    for answer in (*decodes, long):
        assert answer.tokens == expected_answer(answer.prompt, len(answer.tokens))


def test_a_step_never_computes_more_than_its_budget() -> None:
    harness = Harness(blocks=64, block_tokens=4, step_tokens=10, max_running=6)
    answers = [harness.submit(prompt(word, 5 * word), max_tokens=6) for word in range(1, 8)]
    harness.run(*answers)
    assert max(sum(count for *_, count in step) for step in harness.remembering.steps) == 10


def test_no_more_than_max_running_run_and_the_rest_wait_in_order() -> None:
    harness = Harness(blocks=32, block_tokens=4, max_running=2)
    answers = [harness.submit(prompt(word, 3), max_tokens=2) for word in (1, 2, 3)]
    harness.step()
    assert [bool(answer.started) for answer in answers] == [True, True, False]
    harness.step(2)
    assert answers[2].started


def test_the_queue_is_not_overtaken() -> None:
    """A short request that would fit does not pass a long one that waits: order alone decides."""
    harness = Harness(blocks=8, block_tokens=4)
    first = harness.submit(prompt(1, 15), max_tokens=8)
    harness.step()
    long = harness.submit(prompt(2, 23), max_tokens=1)
    short = harness.submit(prompt(3, 2), max_tokens=1)
    harness.step()
    assert not long.started
    assert not short.started
    harness.run(first, long, short)
    assert long.started
    assert short.started
    assert long.started.stamps.started_ns <= short.started.stamps.started_ns


def test_a_preempted_request_resumes_to_the_same_tokens_and_keeps_its_names() -> None:
    harness = Harness(blocks=9, block_tokens=4)
    first = harness.submit(prompt(1, 8), max_tokens=16)
    second = harness.submit(prompt(2, 8), max_tokens=16)
    harness.step(5)
    harness.seal(second, last=False)
    named = second.named_blocks
    assert named == 3
    while not harness.engine.scheduler.preemptions:
        harness.step()
    sequence = harness.sequence(second)
    assert sequence.table == []
    assert len(sequence.keys) == named
    harness.run(first, second)
    assert preemptions(first) == 0
    assert preemptions(second) == 1
    for answer in (first, second):
        assert answer.tokens == expected_answer(answer.prompt, 16)
        assert answer.reason == "length"
    harness.seal(second)
    # What was named before the preemption and after it is all found by the next turn.
    turn = harness.complete(second.prompt + second.tokens, max_tokens=1)
    assert turn.cached_tokens == 20


def test_a_preempted_request_is_admitted_before_those_who_wait() -> None:
    harness = Harness(blocks=9, block_tokens=4, max_running=2)
    first = harness.submit(prompt(1, 8), max_tokens=16)
    second = harness.submit(prompt(2, 8), max_tokens=16)
    third = harness.submit(prompt(3, 8), max_tokens=16)
    while not harness.engine.scheduler.preemptions:
        harness.step()
    assert list(harness.engine.scheduler.waiting) == [harness.sequence(second), harness.sequence(third)]
    harness.run(second)
    assert first.over
    assert not third.over
    harness.run(third)


def test_a_resumed_request_reads_its_published_blocks_again_instead_of_computing_them() -> None:
    harness = Harness(blocks=9, block_tokens=4)
    first = harness.submit(prompt(1, 16), max_tokens=8)
    second = harness.submit(prompt(2, 12), max_tokens=8)
    harness.run(first, second)
    assert preemptions(second) == 1
    assert second.finished
    assert second.finished.counts.computed_tokens < 2 * len(second.prompt)
    # Counted once, whatever was computed again.
    assert second.finished.counts.written_blocks == 3


def test_the_earliest_is_never_the_victim_and_everybody_ends() -> None:
    harness = Harness(blocks=9, block_tokens=4, max_running=8)
    answers = [harness.submit(prompt(word, 4), max_tokens=24) for word in range(1, 8)]
    preempted = 0
    while not all(answer.over for answer in answers):
        running = list(harness.engine.scheduler.running)
        before = [sequence.preemptions for sequence in running]
        harness.step()
        victims = [now.preemptions > then for now, then in zip(running, before, strict=True)]
        assert not any(victims[:1])
        preempted += sum(victims)
    assert preempted > 3
    for answer in answers:
        assert answer.tokens == expected_answer(answer.prompt, 24)


def test_blocks_of_ended_requests_are_reclaimed_before_anybody_is_preempted() -> None:
    harness = Harness(blocks=8, block_tokens=4)
    runs = harness.submit(prompt(1, 4), max_tokens=20)
    ends = harness.submit(prompt(2, 8), max_tokens=8)
    harness.run(ends)
    # Its prompt is published, its answer is not: that block is held for the name it still may get.
    ended = harness.sequence(ends)
    assert len(ended.table) == 3
    harness.run(runs)
    assert ended.table == []
    assert harness.engine.scheduler.preemptions == 0
    assert runs.tokens == expected_answer(runs.prompt, 20)
    # The late names are for nobody; the pool is as it was.
    harness.seal(ends)


def test_blocks_of_ended_requests_are_reclaimed_before_anybody_is_refused() -> None:
    harness = Harness(blocks=8, block_tokens=4)
    ends = harness.complete_unsealed(prompt(1, 8), max_tokens=8)
    assert harness.engine.pool.held == 3
    needs_all = harness.submit(prompt(2, 31), max_tokens=2)
    harness.step()
    assert needs_all.started
    assert harness.engine.stats(pushed=False).ended == 0
    assert ends.reason == "length"


def test_ended_requests_keep_their_blocks_while_there_is_room() -> None:
    harness = Harness(blocks=32, block_tokens=4)
    ends = harness.complete_unsealed(prompt(1, 8), max_tokens=8)
    harness.complete(prompt(2, 8), account=BOB)
    harness.seal(ends)
    assert harness.complete(ends.prompt + ends.tokens, max_tokens=1).cached_tokens == 12


def test_a_request_that_adopts_takes_only_the_rest() -> None:
    harness = Harness(blocks=10, block_tokens=4)
    warm = harness.submit(prompt(1, 24), max_tokens=12)
    harness.step()
    same = harness.submit(prompt(1, 24), max_tokens=4)
    harness.step()
    assert same.cached_tokens == 20
    # Its copy of the sixth block gave way to the published one: only the block of its answer is its own.
    assert harness.engine.pool.held == 8
    harness.run(warm, same)
    assert warm.account == same.account == ALICE


def test_a_step_must_have_room_for_all_decodes() -> None:
    pool = BlockPool(4, PrefixIndex())

    def make(max_running: int) -> Scheduler:
        return Scheduler(
            pool, block_tokens=4, step_tokens=8, max_running=max_running, reclaim=lambda account, blocks, own: False
        )

    with pytest.raises(ValueError, match="9 is above step_tokens 8"):
        make(9)
    assert make(8).max_running == 8
