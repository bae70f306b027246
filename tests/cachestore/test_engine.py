"""The engine, command by command: rejections, names, endings, failures."""

from __future__ import annotations

from typing import Any

import pytest

from cachestore.protocol import Abort, Message, OpenAccount, ProtocolError, Sampling, Seal, Submit, Tokens
from cachestore.sequence import Phase
from tests.cachestore.support import (
    ALICE,
    BOB,
    GREEDY,
    VOCABULARY_TOKENS,
    Answer,
    Harness,
    chain_keys,
    expected_answer,
    token_bytes,
)


def prompt(word: int, count: int) -> list[int]:
    return [word] * count


def rejection(answer: Answer) -> str:
    assert answer.rejected
    assert not answer.started
    return answer.rejected.code


def held(harness: Harness) -> int:
    return harness.engine.pool.held


# --- rejections


def test_an_account_must_be_open() -> None:
    harness = Harness()
    keys = chain_keys(ALICE, 1, prompt(1, 5), 4)
    submit = Submit(
        request=1,
        account=ALICE,
        epoch=1,
        tokens=token_bytes(prompt(1, 5)),
        keys=b"".join(keys),
        sampling=GREEDY,
        max_tokens=1,
        queue_deadline_ns=1 << 60,
    )
    harness.answers[1, 1] = unopened = Answer(1, 1, ALICE, 1, prompt(1, 5), 1)
    harness.engine.submit(1, submit)
    assert rejection(unopened) == "unknown_account"
    assert not harness.engine.has_work
    assert harness.complete(prompt(1, 5)).reason == "length"


def test_a_stale_epoch_is_rejected_and_a_newer_one_removes_what_was_older() -> None:
    harness = Harness()
    harness.complete(prompt(1, 8), epoch=2)
    assert harness.cached_blocks(ALICE) == 2
    assert rejection(harness.submit(prompt(1, 8), epoch=1)) == "stale_epoch"
    assert harness.cached_blocks(ALICE) == 2
    newer = harness.submit(prompt(1, 8), epoch=3)
    assert harness.cached_blocks(ALICE) == 0
    harness.run(newer)
    assert newer.cached_tokens == 0
    assert rejection(harness.submit(prompt(1, 8), epoch=2)) == "stale_epoch"


def test_opening_an_account_again_only_raises_its_epoch() -> None:
    harness = Harness()
    harness.complete(prompt(1, 8), epoch=2)
    harness.open(ALICE, 2)
    harness.open(ALICE, 1)
    assert harness.complete(prompt(1, 8), epoch=2).cached_tokens == 4
    harness.open(ALICE, 3)
    assert harness.cached_blocks(ALICE) == 0


@pytest.mark.parametrize(
    "limits",
    [
        {"reserved_blocks": 2, "max_blocks": 1},
        {"strict": True},
        {"reserved_blocks": 1, "max_blocks": 2, "strict": True},
    ],
)
def test_limits_that_contradict_each_other_are_refused(limits: dict[str, Any]) -> None:
    harness = Harness()
    with pytest.raises(ProtocolError, match="reserved"):
        harness.engine.open_account(OpenAccount(account=ALICE, epoch=1, **limits))


def test_what_can_never_fit_is_rejected_at_once_with_the_numbers() -> None:
    harness = Harness(blocks=8, block_tokens=4, max_context_tokens=40)
    too_long = harness.submit(prompt(1, 30), max_tokens=11)
    assert rejection(too_long) == "too_long"
    over = harness.submit(prompt(1, 30), max_tokens=4)
    assert rejection(over) == "over_capacity"
    assert too_long.rejected
    assert over.rejected
    assert too_long.rejected.detail == "30 prompt tokens and at most 11 new ones exceed the context of 40"
    assert over.rejected.detail == "30 prompt tokens and at most 4 new ones exceed the cache of 32 tokens"
    # The last token never needs a place: 30 + 3 - 1 fill the 32 exactly.
    fits = harness.complete(prompt(1, 30), max_tokens=3)
    assert fits.reason == "length"


def test_a_request_of_exactly_the_context_is_served() -> None:
    harness = Harness(blocks=32, block_tokens=4, max_context_tokens=20)
    assert rejection(harness.submit(prompt(1, 16), max_tokens=5)) == "too_long"
    assert len(harness.complete(prompt(1, 16), max_tokens=4).tokens) == 4


def test_a_draining_store_ends_what_runs_and_takes_nothing_new() -> None:
    harness = Harness()
    runs = harness.submit(prompt(1, 8), max_tokens=8)
    harness.step()
    harness.engine.draining = True
    assert rejection(harness.submit(prompt(2, 8))) == "draining"
    harness.run(runs)
    assert runs.reason == "length"
    assert not harness.engine.has_work


def test_a_request_waits_until_its_deadline_and_no_longer() -> None:
    harness = Harness(blocks=8, block_tokens=4)
    runs = harness.submit(prompt(1, 28), max_tokens=4)
    harness.step()
    waits = harness.submit(prompt(2, 28), wait_seconds=2)
    patient = harness.submit(prompt(3, 28), wait_seconds=60)
    harness.expire(1.9)
    assert not waits.over
    harness.expire(0.2)
    assert rejection(waits) == "queue_timeout"
    assert waits.rejected
    assert waits.rejected.detail == "waited 2.1 s for 7 blocks"
    harness.run(runs, patient)
    assert patient.reason == "length"


def test_a_preempted_request_has_no_deadline_any_more() -> None:
    harness = Harness(blocks=9, block_tokens=4)
    first = harness.submit(prompt(1, 8), max_tokens=20)
    second = harness.submit(prompt(2, 8), max_tokens=20, wait_seconds=1)
    while not harness.engine.scheduler.preemptions:
        harness.step()
    assert harness.sequence(second).phase is Phase.WAITING
    harness.expire(5)
    harness.run(first, second)
    assert second.reason == "length"


# --- what breaks the protocol


def test_what_breaks_the_protocol_is_told_apart_from_what_is_rejected() -> None:
    harness = Harness()
    harness.complete(prompt(1, 9))
    good: dict[str, Any] = {
        "request": 7,
        "account": ALICE,
        "epoch": 1,
        "tokens": token_bytes(prompt(1, 9)),
        "keys": b"".join(chain_keys(ALICE, 1, prompt(1, 9), 4)),
        "sampling": GREEDY,
        "max_tokens": 1,
        "queue_deadline_ns": 1 << 60,
    }
    for change in (
        {"tokens": b""},
        {"tokens": bytes(35)},
        {"tokens": token_bytes([*prompt(1, 8), VOCABULARY_TOKENS])},
        {"keys": bytes(64)},
        {"keys": bytes(32)},
        {"keys": bytes(96)},
        {"keys": bytes(63)},
        {"keys": b""},
    ):
        with pytest.raises(ProtocolError):
            harness.engine.submit(1, Submit(**(good | change)))
        assert not harness.engine.has_work
    harness.answers[1, 7] = Answer(1, 7, ALICE, 1, prompt(1, 9), 2)
    harness.engine.submit(1, Submit(**good))
    assert harness.engine.has_work
    with pytest.raises(ProtocolError, match="used twice"):
        harness.engine.submit(1, Submit(**good))
    # Ids are of a connection.
    harness.answers[2, 7] = other = Answer(2, 7, ALICE, 1, prompt(1, 9), 2)
    harness.engine.submit(2, Submit(**good))
    harness.run(other)


def test_an_error_of_the_protocol_names_no_token_and_no_key() -> None:
    harness = Harness()
    harness.open()
    secret_token = 123_456_789
    submit = Submit(
        request=1,
        account=ALICE,
        epoch=1,
        tokens=token_bytes([secret_token]),
        keys=b"",
        sampling=GREEDY,
        max_tokens=1,
        queue_deadline_ns=1 << 60,
    )
    with pytest.raises(ProtocolError, match="outside the vocabulary") as raised:
        harness.engine.submit(1, submit)
    assert str(secret_token) not in str(raised.value)


def test_names_follow_each_other_and_name_only_full_blocks() -> None:
    harness = Harness()
    answer = harness.submit(prompt(1, 6), max_tokens=8)
    harness.step(3)

    def seal(first_block: int, blocks: int, last: bool = False) -> None:
        keys = bytes(32 * blocks)
        harness.engine.seal(1, Seal(request=answer.request, first_block=first_block, keys=keys, last=last))

    for first_block, blocks in ((0, 1), (2, 1), (1, 2)):
        with pytest.raises(ProtocolError, match="Seal"):
            seal(first_block, blocks)
    with pytest.raises(ProtocolError, match="before Finished"):
        seal(1, 0, last=True)
    with pytest.raises(ProtocolError, match="the same key"):
        harness.engine.seal(1, Seal(request=answer.request, first_block=1, keys=harness.sequence(answer).keys[0]))
    with pytest.raises(ProtocolError, match="Seal"):
        harness.engine.seal(1, Seal(request=answer.request, first_block=1, keys=bytes(31)))
    harness.seal(answer, last=False)
    assert answer.named_blocks == 2
    harness.run(answer)
    harness.seal(answer)


def test_a_seal_or_an_abort_for_an_unknown_request_is_ignored() -> None:
    harness = Harness()
    answer = harness.submit(prompt(1, 8), max_tokens=8)
    harness.step()
    for connection, request in ((1, 999), (2, answer.request)):
        harness.engine.seal(connection, Seal(request=request, first_block=5, keys=b"?", last=True))
        harness.engine.abort(connection, Abort(request=request))
    assert not answer.over
    harness.abort(answer)
    assert answer.reason == "aborted"


# --- names


def test_names_publish_only_what_is_computed() -> None:
    """A prompt is aborted after its first chunk: what was named but not computed is not found."""
    harness = Harness(step_tokens=8)
    aborted = harness.submit(prompt(1, 20))
    harness.step()
    harness.abort(aborted)
    harness.seal(aborted)
    assert harness.cached_blocks(ALICE) == 2
    again = harness.complete(prompt(1, 20))
    assert again.cached_tokens == 8
    assert again.tokens == expected_answer(again.prompt, 4)


def test_the_last_sampled_token_has_no_place_in_the_cache() -> None:
    harness = Harness()
    answer = harness.complete(prompt(1, 4), max_tokens=4)
    # Eight tokens, of which the last was never computed.
    assert answer.named_blocks == 2
    assert harness.cached_blocks(ALICE) == 1
    longer = harness.complete(prompt(2, 4), max_tokens=5)
    assert longer.named_blocks == 2
    assert harness.cached_blocks(ALICE) == 3


def test_generated_blocks_are_found_by_the_next_turn_only_when_they_were_named() -> None:
    for sealed, cached_tokens in ((True, 16), (False, 8)):
        harness = Harness()
        first = harness.complete_unsealed(prompt(1, 8), max_tokens=9)
        if sealed:
            harness.seal(first)
        assert harness.complete(first.prompt + first.tokens + [5], max_tokens=1).cached_tokens == cached_tokens


def test_a_duplicate_is_changed_to_the_indexed_block_and_its_copy_is_free() -> None:
    harness = Harness(step_tokens=64)
    first, second = harness.submit(prompt(1, 8), max_tokens=9), harness.submit(prompt(1, 8), max_tokens=9)
    harness.step(2)
    # The second one waited for the first block, and computed the second, as some token has to be computed.
    assert (first.cached_tokens, second.cached_tokens) == (0, 4)
    tables = [harness.sequence(answer).table for answer in (first, second)]
    assert tables[0][:2] == tables[1][:2]
    assert tables[0][2] != tables[1][2]
    assert held(harness) == 4
    harness.run(first, second)
    assert first.finished
    assert second.finished
    assert (first.finished.counts.written_blocks, second.finished.counts.written_blocks) == (2, 0)
    # The same for blocks of the answer, named after the end.
    harness.seal(first)
    harness.seal(second)
    assert harness.cached_blocks(ALICE) == 4
    assert (held(harness), harness.engine.pool.cached) == (0, 4)


def test_written_blocks_are_the_prompts_full_blocks_that_it_published() -> None:
    harness = Harness()
    cold = harness.complete(prompt(1, 18), max_tokens=12)
    warm = harness.complete(prompt(1, 18) + prompt(2, 8), max_tokens=1)
    again = harness.complete(prompt(1, 18) + prompt(2, 8), max_tokens=1)
    counts = [answer.finished.counts for answer in (cold, warm, again) if answer.finished]
    assert [count.written_blocks for count in counts] == [4, 2, 0]
    assert [count.cached_tokens for count in counts] == [0, 16, 24]
    assert [count.computed_tokens for count in counts] == [18 + 11, 10, 2]
    assert [count.prompt_tokens for count in counts] == [18, 26, 26]
    assert [count.output_tokens for count in counts] == [12, 1, 1]
    assert [count.steps for count in counts] == [12, 1, 1]


def test_blocks_of_the_answer_are_not_among_the_written_ones() -> None:
    harness = Harness()
    answer = harness.submit(prompt(1, 8), max_tokens=16)
    harness.step(8)
    harness.seal(answer, last=False)
    harness.run(answer)
    assert harness.cached_blocks(ALICE) == 4
    assert answer.finished
    assert answer.finished.counts.written_blocks == 2


def test_blocks_written_again_after_a_preemption_count_once() -> None:
    """The first request grows into every block, so nothing of the second is left when it resumes."""
    harness = Harness(blocks=9, block_tokens=4)
    first = harness.submit(prompt(1, 16), max_tokens=20)
    second = harness.submit(prompt(2, 12), max_tokens=8)
    harness.run(first)
    assert harness.engine.pool.evictions == 3
    harness.run(second)
    assert second.finished
    counts = second.finished.counts
    assert (counts.preemptions, counts.written_blocks) == (1, 3)
    assert counts.computed_tokens > 2 * len(second.prompt)


def test_all_tokens_of_a_step_are_one_message_to_each_connection() -> None:
    harness = Harness()
    messages: list[tuple[int, Message]] = []
    emit = harness.engine._emit

    def watch(connection: int, message: Message) -> None:
        messages.append((connection, message))
        emit(connection, message)

    harness.engine._emit = watch
    mine = [harness.submit(prompt(word, 5), connection=1) for word in (1, 2)]
    other = harness.submit(prompt(3, 5), connection=2)
    harness.step()
    kinds = [(connection, type(message).__name__) for connection, message in messages]
    assert kinds == [(1, "Started"), (1, "Started"), (2, "Started"), (1, "Tokens"), (2, "Tokens")]
    assert messages[3][1] == Tokens(entries=[(answer.request, answer.tokens, []) for answer in mine])
    assert messages[4][1] == Tokens(entries=[(other.request, other.tokens, [])])


def test_started_says_which_block_was_missed_first() -> None:
    harness = Harness()
    for tokens, cached_tokens, miss_block in (
        (prompt(1, 12), 0, 0),
        (prompt(1, 14), 12, None),
        (prompt(1, 8) + prompt(2, 9), 8, 2),
        (prompt(9, 3), 0, None),
        # All three blocks are there, though one token must be computed, and the third block with it.
        (prompt(1, 12), 8, None),
    ):
        answer = harness.complete(tokens, max_tokens=1)
        assert answer.started
        assert (answer.started.cached_tokens, answer.started.miss_block) == (cached_tokens, miss_block)


# --- endings


def test_stop_tokens_end_an_answer_and_belong_to_it() -> None:
    harness = Harness()
    expected = expected_answer(prompt(1, 8), 12)
    stop = expected[5]
    assert stop not in expected[:5]
    stopped = harness.complete(
        prompt(1, 8), max_tokens=12, sampling=Sampling(temperature=0, stop_token_ids=[stop, VOCABULARY_TOKENS - 1])
    )
    assert (stopped.reason, stopped.tokens) == ("stop", expected[:6])
    unstopped = harness.complete(prompt(1, 8), max_tokens=12)
    assert (unstopped.reason, unstopped.tokens) == ("length", expected)


def test_an_abort_in_each_phase_releases_everything() -> None:
    harness = Harness(blocks=8, block_tokens=4, step_tokens=12)
    prefilling = harness.submit(prompt(1, 20), max_tokens=4)
    waiting = harness.submit(prompt(2, 20), max_tokens=4)
    harness.step()
    assert harness.sequence(prefilling).phase is Phase.RUNNING
    assert harness.sequence(waiting).phase is Phase.WAITING
    harness.abort(waiting)
    harness.abort(prefilling)
    decoding = harness.submit(prompt(3, 4), max_tokens=8)
    harness.step(3)
    harness.abort(decoding)
    ended = harness.complete_unsealed(prompt(4, 4), max_tokens=1)
    # An abort that comes after the end changes nothing, and nothing is said twice.
    harness.abort(ended)
    assert ended.reason == "length"
    aborted = (prefilling, waiting, decoding)
    assert [answer.reason for answer in aborted] == ["aborted"] * 3
    assert waiting.finished
    assert (waiting.started, waiting.finished.stamps.started_ns) == (None, 0)
    for answer in (*aborted, ended):
        harness.seal(answer)
    assert held(harness) == 0
    assert not harness.engine._sequences
    assert not harness.engine.has_work


def test_an_abort_of_a_preempted_request_releases_everything() -> None:
    harness = Harness(blocks=9, block_tokens=4)
    first = harness.submit(prompt(1, 8), max_tokens=20)
    second = harness.submit(prompt(2, 8), max_tokens=20)
    while not harness.engine.scheduler.preemptions:
        harness.step()
    harness.abort(second)
    harness.seal(second)
    harness.run(first)
    assert (first.reason, second.reason) == ("length", "aborted")
    harness.seal(first)
    assert held(harness) == 0


def test_a_disconnect_ends_that_connections_requests_and_no_others() -> None:
    harness = Harness(blocks=16, block_tokens=4, max_running=3)
    mine = [harness.submit(prompt(word, 8), connection=1, max_tokens=8) for word in (1, 2, 3)]
    ended = harness.complete_unsealed(prompt(4, 8), connection=1, max_tokens=1)
    other = harness.submit(prompt(5, 8), connection=2, max_tokens=8)
    harness.step()
    harness.disconnect(1)
    assert held(harness) == len(harness.sequence(other).table) > 0
    assert not [answer for answer in (*mine, ended) if (1, answer.request) in harness.engine._sequences]
    harness.run(other)
    assert other.tokens == expected_answer(other.prompt, 8)
    harness.seal(other)
    assert held(harness) == 0


def test_one_second_without_the_last_seal_frees_the_blocks() -> None:
    harness = Harness()
    late = harness.complete_unsealed(prompt(1, 8), max_tokens=9)
    in_time = harness.complete_unsealed(prompt(2, 8), max_tokens=9)
    assert held(harness) == 8
    assert harness.engine.next_deadline_ns() == harness.clock.ns + 1_000_000_000
    harness.expire(0.9)
    assert held(harness) == 8
    harness.seal(in_time)
    assert harness.cached_blocks(ALICE) == 6
    harness.expire(0.1)
    assert held(harness) == 0
    assert harness.engine.next_deadline_ns() is None
    # Names that come after that are for nobody.
    harness.seal(late)
    assert harness.cached_blocks(ALICE) == 6


def test_an_ended_request_keeps_only_its_full_blocks() -> None:
    harness = Harness()
    answer = harness.complete_unsealed(prompt(1, 6), max_tokens=8)
    # 13 of 14 tokens were computed: three full blocks and one begun.
    assert held(harness) == 3
    harness.seal(answer)
    assert (held(harness), harness.engine.pool.cached) == (0, 3)


def test_a_dropped_accounts_requests_are_aborted_and_it_stays_away() -> None:
    harness = Harness(max_running=2)
    runs = harness.submit(prompt(1, 8), max_tokens=8)
    bobs = harness.submit(prompt(1, 8), account=BOB, max_tokens=8)
    waits = harness.submit(prompt(2, 8), max_tokens=8)
    harness.step()
    assert harness.drop(ALICE).blocks == 2
    assert [answer.reason for answer in (runs, waits)] == ["aborted", "aborted"]
    harness.open(ALICE, 9)
    assert rejection(harness.submit(prompt(1, 8), epoch=9)) == "unknown_account"
    assert harness.fence(ALICE, 10).blocks == 0
    assert rejection(harness.submit(prompt(1, 8), epoch=10)) == "unknown_account"
    for answer in (runs, waits):
        harness.seal(answer)
    harness.run(bobs)
    assert bobs.tokens == expected_answer(bobs.prompt, 8)
    assert harness.complete(prompt(1, 8), account=BOB).cached_tokens == 4


def test_a_failing_step_ends_its_rows_with_error_and_the_engine_goes_on() -> None:
    harness = Harness(step_tokens=8, max_running=8)
    failing = harness.submit(prompt(1, 8), max_tokens=8)
    harness.step()
    waits_for_budget = harness.submit(prompt(2, 16), max_tokens=2)
    harness.step()
    harness.seal(failing, last=False)
    published = harness.cached_blocks(ALICE)
    harness.remembering.fault = RuntimeError("planted")
    harness.step()
    assert [answer.reason for answer in (failing, waits_for_budget)] == ["error", "error"]
    assert held(harness) == 0
    # What was published before stays, and what the failed step wrote is not among it.
    assert harness.cached_blocks(ALICE) == published == 3
    assert harness.engine.steps == 2
    for answer in (failing, waits_for_budget):
        harness.seal(answer)
        again = harness.complete(answer.prompt, max_tokens=2)
        assert again.tokens == expected_answer(answer.prompt, 2)
        assert again.cached_tokens > 0


def test_only_the_rows_of_a_failing_step_end() -> None:
    harness = Harness(step_tokens=8, max_running=2)
    harness.submit(prompt(1, 20), max_tokens=1)
    beside = harness.submit(prompt(2, 4), max_tokens=1)
    harness.step()
    harness.remembering.fault = RuntimeError("planted")
    harness.step()
    assert not beside.over
    harness.run(beside)
    assert beside.tokens == expected_answer(beside.prompt, 1)


def test_the_report_counts_what_is() -> None:
    harness = Harness(blocks=16, block_tokens=4, max_running=1)
    harness.complete(prompt(1, 8), max_tokens=1)
    harness.complete_unsealed(prompt(2, 8), max_tokens=1)
    harness.submit(prompt(3, 9), max_tokens=5)
    harness.submit(prompt(4, 9), max_tokens=5)
    harness.step()
    report = harness.engine.stats(pushed=True)
    assert report.pushed
    assert (report.total_blocks, report.free_blocks, report.held_blocks, report.cached_blocks) == (16, 9, 5, 2)
    assert (report.running, report.waiting, report.ended) == (1, 1, 1)
    assert (report.steps, report.computed_tokens) == (3, 25)
    assert (report.preemptions, report.evictions) == (0, 0)


def test_stamps_are_in_order() -> None:
    harness = Harness()
    answer = harness.submit(prompt(1, 8), max_tokens=3)
    queued = harness.clock.ns
    harness.clock.advance(1)
    harness.step()
    harness.clock.advance(1)
    harness.step(2)
    assert answer.finished
    stamps = answer.finished.stamps
    assert stamps.queued_ns == queued
    assert stamps.started_ns == stamps.first_token_ns == queued + 1_000_000_000
    assert stamps.finished_ns == queued + 2_000_000_000


def test_ended_requests_keep_their_blocks_when_releasing_them_would_not_admit_anybody() -> None:
    harness = Harness(blocks=6, block_tokens=4)
    ended = harness.complete_unsealed(prompt(1, 8), max_tokens=2)
    running = harness.submit(prompt(2, 12), max_tokens=8)
    harness.step()
    waiting = harness.submit(prompt(3, 20), max_tokens=2)
    harness.step()
    assert not waiting.over
    assert harness.sequence(ended).table, "its blocks were given up for a request that still does not fit"
    harness.seal(ended)
    harness.run(running, waiting)
    assert waiting.reason == "length"
