"""What accounts are promised of the cache: reserved, max, weight and strict, through the engine."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cachestore.protocol import AccountReport, Flushed, OpenAccount
from cachestore.scheduler import Scheduler
from tests.cachestore.support import ALICE, BOB, CAROL, Answer, Harness, expected_answer

BLOCK_TOKENS = 4


def prompt(word: int, count: int) -> list[int]:
    return [word] * count


def unique(number: int, count: int) -> list[int]:
    return [number % 997, number // 997 % 997, *[1] * (count - 2)]


def flood(harness: Harness, account: bytes, blocks: int, first: int = 0) -> None:
    """Prompts of eight blocks that nobody sends again, so many blocks of them."""
    for number in range(first, first + -(-blocks // 8)):
        harness.complete(unique(number, 8 * BLOCK_TOKENS), account=account, max_tokens=1)


def report(harness: Harness, account: bytes) -> AccountReport:
    return harness.engine.account_report(account)


@pytest.mark.parametrize("reserved", [0, 12])
def test_line_24_a_flood_evicts_none_of_the_reserved_blocks(reserved: int) -> None:
    harness = Harness(blocks=40)
    harness.open(ALICE, reserved_blocks=reserved)
    prompts = [prompt(word, 4 * BLOCK_TOKENS + 1) for word in (1, 2, 3)]
    for each in prompts:
        harness.complete(each, max_tokens=1)
    assert report(harness, ALICE).cached_blocks == 12
    for account in (BOB, CAROL, b"D" * 16, b"E" * 16):
        flood(harness, account, 3 * 40)
        assert report(harness, account).evictions > 40
    # The control: without a reservation it has its part like the others.
    cached = [harness.complete(each, max_tokens=1).cached_tokens for each in prompts]
    assert (cached == [16, 16, 16]) == bool(reserved)
    assert (report(harness, ALICE).evictions == 0) == bool(reserved)


def test_what_is_reserved_and_unused_is_lent_to_cached_blocks_and_comes_back_at_once() -> None:
    harness = Harness(blocks=20)
    harness.open(ALICE, reserved_blocks=10)
    flood(harness, BOB, 40)
    assert report(harness, BOB).cached_blocks == 20
    mine = harness.submit(prompt(1, 10 * BLOCK_TOKENS - 1), max_tokens=1)
    harness.step()
    assert mine.started
    assert harness.engine.scheduler.preemptions == 0
    assert report(harness, BOB).cached_blocks == 10


def test_what_is_reserved_is_never_lent_to_held_blocks() -> None:
    harness = Harness(blocks=20)
    harness.open(ALICE, reserved_blocks=8)
    # Twelve are left for all others: a request of thirteen can never run, one of seven has to wait for another.
    never = harness.submit(unique(1, 13 * BLOCK_TOKENS), account=BOB, max_tokens=1)
    assert never.rejected
    assert never.rejected.code == "over_capacity"
    assert "of 48 tokens" in never.rejected.detail
    runs = harness.submit(unique(2, 6 * BLOCK_TOKENS), account=BOB, max_tokens=5)
    waits = harness.submit(unique(3, 6 * BLOCK_TOKENS), account=BOB, max_tokens=5)
    harness.step()
    assert runs.started
    assert not waits.started
    mine = harness.submit(prompt(1, 8 * BLOCK_TOKENS - 4), max_tokens=4)
    harness.step()
    assert mine.started
    assert harness.engine.scheduler.preemptions == 0
    harness.run(runs, waits, mine)


def hits_and_evictions(is_flooded: bool, **limits: Any) -> list[tuple[int, int]]:
    """Of one account's requests, one after another, beside another account that does nothing or all it can."""
    chance = random.Random("strict")
    harness = Harness(blocks=48, max_running=6, step_tokens=32)
    harness.open(ALICE, **limits)
    seen, number = [], 0
    running: list[Answer] = []
    for _ in range(60):
        if is_flooded:
            for _ in range(4):
                number += 1
                running.append(harness.submit(unique(number, 24), account=BOB, max_tokens=9))
        word, length = chance.randrange(1, 6), chance.randrange(5, 40)
        answer = harness.submit(prompt(word, length), max_tokens=chance.randrange(1, 9))
        harness.run(answer)
        harness.seal(answer)
        assert answer.tokens == expected_answer(answer.prompt, len(answer.tokens))
        seen.append((answer.cached_tokens, report(harness, ALICE).evictions))
        for ended in [each for each in running if each.over]:
            running.remove(ended)
            if ended.finished:
                harness.seal(ended)
    return seen


def test_line_25_a_strict_account_finds_the_same_whatever_the_others_do() -> None:
    strict = {"reserved_blocks": 16, "max_blocks": 16, "strict": True}
    alone = hits_and_evictions(False, **strict)
    assert hits_and_evictions(True, **strict) == alone
    assert sum(cached for cached, _ in alone) > 200
    assert alone[-1][1] > 20
    # The control: without limits it does depend on them.
    assert hits_and_evictions(True) != hits_and_evictions(False)


def test_nobody_within_its_reservation_is_preempted_for_another_that_was_preempted_before() -> None:
    harness = Harness(blocks=20, step_tokens=64)
    harness.open(ALICE, reserved_blocks=8, max_blocks=8, strict=True)
    grows = harness.submit(unique(1, 16), account=BOB, max_tokens=20)
    gives_way = harness.submit(unique(2, 16), account=CAROL, max_tokens=20)
    harness.step()
    for _ in range(3):
        harness._call(lambda: harness.engine.scheduler.preempt(harness.sequence(gives_way)))
        harness.step()
    mine = harness.submit(prompt(1, 16), max_tokens=17)
    harness.run(grows, mine, gives_way)
    assert [each.finished.counts.preemptions for each in (grows, mine, gives_way) if each.finished] == [0, 0, 4]


def test_nobody_at_its_reservation_is_preempted_for_another_that_wants_more_than_its_own() -> None:
    harness = Harness(blocks=20, step_tokens=64)
    harness.open(ALICE, reserved_blocks=5, max_blocks=5, strict=True)
    harness.open(BOB, reserved_blocks=5)
    fills = harness.submit(unique(1, 36), account=CAROL, max_tokens=4)
    harness.step()
    wants_more = harness.submit(unique(2, 19), account=BOB, max_tokens=9)
    harness.step()
    mine = harness.submit(prompt(1, 19), max_tokens=2)
    harness.run(fills, wants_more, mine)
    assert mine.finished
    assert mine.finished.counts.preemptions == 0


def test_nobody_takes_from_a_strict_account_what_its_ended_requests_still_hold() -> None:
    harness = Harness(blocks=20)
    harness.open(ALICE, reserved_blocks=8, max_blocks=8, strict=True)
    ends = harness.complete_unsealed(prompt(1, 8), max_tokens=8)
    runs = harness.submit(unique(1, 24), account=BOB, max_tokens=4)
    waits = harness.submit(unique(2, 24), account=BOB, max_tokens=4)
    harness.step()
    assert runs.started
    assert not waits.started
    harness.seal(ends)
    assert harness.complete(ends.prompt + ends.tokens, max_tokens=1).cached_tokens == 12


def test_an_account_gets_its_share_of_a_pool_that_another_one_holds() -> None:
    harness = Harness(blocks=20, max_running=8)
    earliest, middle, newest = (harness.submit(unique(number, 20), account=BOB, max_tokens=4) for number in (1, 2, 3))
    harness.step()
    beyond = harness.submit(unique(4, 20), account=BOB, max_tokens=4)
    harness.step()
    assert harness.engine.scheduler.preemptions == 0
    # Within half of the pool it gets what it asks for, beyond that it waits.
    too_much = harness.submit(unique(5, 42), account=ALICE, max_tokens=1)
    harness.step()
    assert not too_much.started
    harness.abort(too_much)
    mine = harness.submit(unique(6, 20), account=ALICE, max_tokens=4)
    harness.step()
    assert mine.started
    assert harness.engine.scheduler.preemptions == 1
    assert harness.sequence(newest).preemptions == 1
    harness.run(earliest, middle, newest, beyond, mine)
    for answer in (earliest, middle, newest, beyond, mine):
        assert answer.tokens == expected_answer(answer.prompt, 4)


def test_an_account_gets_its_share_of_a_pool_that_requests_with_one_preamble_hold() -> None:
    harness = Harness(blocks=100, step_tokens=512, max_running=16, max_context_tokens=400)
    earliest = harness.submit(unique(1, 4), account=CAROL, max_tokens=40)
    preamble = unique(2, 80 * BLOCK_TOKENS)
    others = [harness.submit([*preamble, word], account=BOB, max_tokens=30) for word in range(5)]
    harness.step(2)
    assert report(harness, BOB).held_blocks == 85
    mine = harness.submit(prompt(1, 20 * BLOCK_TOKENS), max_tokens=4)
    harness.step()
    assert mine.started
    harness.run(earliest, mine, *others)


@pytest.mark.parametrize("max_tokens", [7, 16])
def test_nobody_grows_beyond_its_share_while_another_has_no_room_within_its_own(max_tokens: int) -> None:
    """A request that nobody preempts holds a preamble, which one after the other adopts for a block of its own."""
    harness = Harness(blocks=100, step_tokens=256, max_running=16, max_context_tokens=600)
    preamble = unique(5, 80 * BLOCK_TOKENS)
    others: list[Answer] = []

    def four_run() -> None:
        for other in others:
            if other.over and not other.sealed:
                harness.seal(other)
        while sum(not other.over for other in others) < 4:
            others.append(harness.submit([*preamble, len(others)], account=BOB, max_tokens=max_tokens))
            harness.step()

    four_run()
    mine = harness.submit(unique(9, 20 * BLOCK_TOKENS), max_tokens=4)
    for _ in range(2 * max_tokens):
        harness.step()
        four_run()
    assert mine.started
    # And then they go on.
    before = len(others)
    for _ in range(60):
        harness.step()
        four_run()
    assert len(others) > before + 4


def test_an_account_never_has_more_than_its_max_and_evicts_its_own_first() -> None:
    harness = Harness(blocks=40)
    flood(harness, BOB, 16)
    harness.open(ALICE, max_blocks=8)
    flood(harness, ALICE, 40, first=100)
    assert report(harness, ALICE).cached_blocks <= 8
    assert report(harness, ALICE).evictions > 20
    assert report(harness, BOB).evictions == 0
    too_large = harness.submit(prompt(1, 30), max_tokens=8)
    assert too_large.rejected
    assert too_large.rejected.code == "over_capacity"
    assert too_large.rejected.detail == (
        "30 prompt tokens and at most 8 new ones exceed the account's part of the cache, of 32 tokens"
    )
    # What fits, but not beside what it has running, waits.
    first, second = (harness.submit(prompt(word, 16), max_tokens=8) for word in (2, 3))
    harness.step()
    assert first.started
    assert not second.started
    harness.run(first, second)
    assert second.reason == "length"


def test_a_lowered_max_evicts_at_once_and_lets_what_runs_end() -> None:
    harness = Harness(blocks=40)
    flood(harness, ALICE, 24)
    runs = harness.submit(prompt(1, 20), max_tokens=16)
    beside = harness.submit(prompt(2, 20), max_tokens=16)
    waits = harness.submit(prompt(3, 40), max_tokens=16)
    harness.engine.scheduler.max_running = 2
    harness.step()
    harness.open(max_blocks=6, revision=1)
    assert report(harness, ALICE).cached_blocks == 0
    # Waiting for what can't come any more has no end; running has.
    assert waits.rejected
    assert waits.rejected.code == "over_capacity"
    harness.run(runs, beside)
    for answer in (runs, beside):
        assert answer.reason == "length"
        assert answer.tokens == expected_answer(answer.prompt, len(answer.tokens))
    assert len(runs.tokens) == 16
    harness.seal(runs)
    harness.seal(beside)
    assert report(harness, ALICE).cached_blocks <= 6


def test_accounts_at_their_own_limits_are_in_nobodys_way() -> None:
    harness = Harness(blocks=400, step_tokens=512, max_running=40)
    harness.complete(unique(0, 200), account=BOB, max_tokens=1)
    for number in range(20):
        account = bytes([number]) * 16
        harness.open(account, max_blocks=8, weight=100.0)
        for word in (1, 2):
            harness.submit(prompt(word, 20), account=account, max_tokens=12)
    harness.step(2)
    # Bob was served more than they by their weights, so they are asked before him.
    mine = harness.submit(unique(1, 8), account=BOB, max_tokens=1)
    harness.step()
    assert mine.started


def test_an_account_within_its_reservation_waits_for_nobody_who_waits_for_room() -> None:
    harness = Harness(blocks=40, step_tokens=256)
    harness.open(ALICE, reserved_blocks=8)
    harness.complete(unique(0, 100), account=ALICE, max_tokens=1)
    holds = harness.submit(unique(1, 100), account=BOB, max_tokens=24)
    harness.step()
    wait = [harness.submit(unique(number, 60), account=bytes([number]) * 16) for number in range(20)]
    harness.step()
    mine = harness.submit(unique(2, 8), account=ALICE, max_tokens=1)
    harness.step()
    assert mine.started
    assert not any(each.started for each in wait)
    harness.run(holds, *wait)


def test_a_raised_reservation_comes_into_force_as_blocks_come_free() -> None:
    harness = Harness(blocks=20)
    others = [harness.submit(unique(number, 16), account=BOB, max_tokens=4) for number in (1, 2, 3)]
    harness.step()
    assert report(harness, BOB).held_blocks == 15
    harness.open(ALICE, reserved_blocks=16)
    assert report(harness, ALICE).reserved_blocks == 5
    harness.run(*others)
    for answer in others:
        harness.seal(answer)
    assert harness.engine.scheduler.preemptions == 0
    assert report(harness, ALICE).reserved_blocks == 16


def test_a_reservation_takes_what_comes_free_for_a_request_only_if_that_can_still_end() -> None:
    harness = Harness(blocks=20, step_tokens=64)
    ended = harness.submit(unique(1, 40), account=BOB, max_tokens=1)
    harness.run(ended)
    assert report(harness, BOB).held_blocks == 10
    harness.open(ALICE, reserved_blocks=12)
    assert report(harness, ALICE).reserved_blocks == 10
    # It fits as it comes. To make room for it Bob's blocks are let go, and then Alice gets all that is reserved.
    waits = harness.submit(unique(2, 19), account=CAROL, max_tokens=22)
    harness.run(waits)
    assert report(harness, ALICE).reserved_blocks == 12
    assert waits.rejected
    assert waits.rejected.code == "over_capacity"


def test_reservations_beyond_the_pool_are_in_force_as_far_as_they_fit() -> None:
    harness = Harness(blocks=20)
    harness.open(ALICE, reserved_blocks=15)
    harness.open(BOB, reserved_blocks=15)
    assert [report(harness, account).reserved_blocks for account in (ALICE, BOB)] == [15, 5]
    harness.open(ALICE, reserved_blocks=2, revision=1)
    assert [report(harness, account).reserved_blocks for account in (ALICE, BOB)] == [2, 15]


def test_what_reservations_lack_is_no_more_than_the_pool_for_each() -> None:
    harness = Harness(blocks=20)
    harness.open(ALICE, reserved_blocks=15)
    assert harness.engine.stats(pushed=False).missing_blocks == 0
    harness.open(BOB, reserved_blocks=15)
    assert harness.engine.stats(pushed=False).reserved_blocks == 20
    assert harness.engine.stats(pushed=False).missing_blocks == 10
    # What can't be is not promised: a sum of such would be no number that a message can hold.
    harness.open(CAROL, reserved_blocks=(1 << 63) - 1)
    assert harness.engine.stats(pushed=False).missing_blocks == 10 + 20


def test_no_request_that_takes_all_its_account_may_have_keeps_a_reservation_from_coming_into_force() -> None:
    harness = Harness(blocks=40)
    harness.open(BOB, max_blocks=6)
    runs = harness.submit(prompt(1, 4), account=BOB, max_tokens=6 * BLOCK_TOKENS - 3)
    harness.step(2)
    harness.open(ALICE, reserved_blocks=10)
    assert report(harness, ALICE).reserved_blocks == 10
    harness.open(CAROL, reserved_blocks=10, max_blocks=10, strict=True)
    mine = harness.submit(prompt(2, 8), account=CAROL, max_tokens=1)
    harness.step()
    assert mine.started
    assert not runs.over
    harness.run(runs)


def test_an_account_that_takes_nothing_is_opened_without_a_look_at_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that connects opens thousands, and no step is made meanwhile."""
    harness = Harness(blocks=20)
    harness.submit(prompt(1, 40), account=BOB)
    monkeypatch.setattr(Scheduler, "queued", property(lambda _: pytest.fail("it can't have changed")))
    harness.engine.open_account(OpenAccount(account=CAROL, epoch=1))


def test_a_partition_larger_than_the_pool_costs_no_more_memory_than_the_pool() -> None:
    harness = Harness(blocks=20)
    harness.open(ALICE, reserved_blocks=1 << 50, max_blocks=1 << 50, strict=True)
    assert report(harness, ALICE).reserved_blocks == 20
    harness.complete(prompt(1, 16), max_tokens=1)
    assert harness.complete(prompt(1, 17), max_tokens=1).cached_tokens == 16


def test_epoch_and_revision_each_only_rise() -> None:
    harness = Harness(blocks=20)
    harness.open(ALICE, epoch=2, revision=5, reserved_blocks=5)
    harness.open(ALICE, epoch=3, revision=4, reserved_blocks=4)
    assert (harness.engine.index.epoch(ALICE), report(harness, ALICE).reserved_blocks) == (3, 5)
    harness.open(ALICE, epoch=1, revision=6, reserved_blocks=6)
    assert (harness.engine.index.epoch(ALICE), report(harness, ALICE).reserved_blocks) == (3, 6)
    harness.open(ALICE, epoch=3, revision=6, reserved_blocks=6)
    assert report(harness, ALICE).reserved_blocks == 6


def test_a_dropped_account_leaves_its_reservation() -> None:
    harness = Harness(blocks=20)
    harness.open(ALICE, reserved_blocks=20)
    runs = harness.submit(prompt(1, 16), max_tokens=8)
    harness.step()
    harness.drop(ALICE)
    harness.seal(runs)
    assert report(harness, ALICE) == AccountReport(account=ALICE)
    assert [account.name for account in harness.engine.pool.shares] == []
    assert harness.complete(unique(1, 60), account=BOB).finished


def test_what_a_dropped_account_had_reserved_goes_to_who_waits_for_it() -> None:
    harness = Harness(blocks=20)
    flood(harness, BOB, 40)
    harness.open(ALICE, reserved_blocks=20)
    harness.open(CAROL, reserved_blocks=8, max_blocks=8, strict=True)
    assert report(harness, BOB).cached_blocks == 20
    harness.drop(ALICE)
    assert report(harness, CAROL).reserved_blocks == 8
    assert report(harness, BOB).cached_blocks == 12


def test_nothing_but_its_end_is_known_of_a_dropped_account() -> None:
    harness = Harness(blocks=20)
    harness.complete(prompt(1, 8), account=BOB, max_tokens=1)
    runs = harness.submit(prompt(1, 70), account=BOB, max_tokens=4)
    harness.step()
    harness.submit(prompt(1, 40))
    harness.step()
    harness.drop(ALICE)
    # It ended before it had a block, and the gateway has not said so yet when somebody else is in need of blocks.
    harness.submit(prompt(2, 40), account=CAROL)
    harness.step()
    assert {account.name for account in harness.engine.pool.shares} == {BOB, CAROL}
    assert harness.engine.scheduler.waiting._backlogs.keys() == {BOB, CAROL}
    harness.run(runs)


def test_a_flush_takes_what_is_cached_and_nothing_else() -> None:
    harness = Harness(blocks=40)
    harness.open(ALICE, reserved_blocks=8)
    harness.complete(prompt(1, 17), max_tokens=1)
    harness.complete(prompt(1, 17), account=BOB, max_tokens=1)
    runs = harness.submit(prompt(2, 16), max_tokens=8)
    harness.step(2)
    assert harness.flush(ALICE) == Flushed(account=ALICE, blocks=4, bytes=4 * 512)
    harness.run(runs)
    harness.seal(runs)
    assert runs.tokens == expected_answer(runs.prompt, 8)
    assert harness.complete(prompt(1, 17), account=BOB, max_tokens=1).cached_tokens == 16
    assert harness.complete(prompt(1, 17), max_tokens=1).cached_tokens == 0
    assert report(harness, ALICE).reserved_blocks == 8


def test_a_report_counts_hits_and_misses_of_one_account() -> None:
    harness = Harness(blocks=40)
    for _ in range(2):
        harness.complete(prompt(1, 18), max_tokens=1)
    harness.complete(prompt(1, 18), account=BOB, max_tokens=1)
    expected = AccountReport(account=ALICE, cached_blocks=4, bytes=4 * 512, hit_tokens=16, miss_tokens=20)
    assert report(harness, ALICE) == expected
    assert report(harness, CAROL) == AccountReport(account=CAROL)


# --- requests that wait for blocks being filled


def test_requests_with_one_preamble_compute_it_once() -> None:
    harness = Harness(blocks=200, step_tokens=16, max_running=8)
    preamble = prompt(1, 48)
    answers = [harness.submit([*preamble, word, word], max_tokens=3) for word in range(2, 9)]
    harness.run(*answers)
    assert [answer.cached_tokens for answer in answers] == [0, *[48] * 6]
    assert harness.engine.computed_tokens == 48 + 7 * (2 + 2)
    for answer in answers:
        assert answer.tokens == expected_answer(answer.prompt, 3)


@pytest.mark.parametrize("ending", ["abort", "preempt", "fail", "fence"])
def test_who_waits_for_blocks_goes_on_when_their_filler_does_not(ending: str) -> None:
    harness = Harness(blocks=200, step_tokens=16, max_running=8)
    fills = harness.submit(prompt(1, 64), max_tokens=2)
    waits = harness.submit(prompt(1, 64), max_tokens=2)
    harness.step()
    assert fills.started
    assert not waits.started
    assert harness.engine.stats(pushed=False).waiting == 1
    if ending == "abort":
        harness.abort(fills)
    elif ending == "preempt":
        harness._call(lambda: harness.engine.scheduler.preempt(harness.sequence(fills)))
    elif ending == "fail":
        harness.remembering.fault = RuntimeError("planted")
    else:
        harness.fence(ALICE, 2)
    harness.run(waits)
    assert waits.tokens == expected_answer(waits.prompt, 2)
    harness.run(fills)


def test_who_waits_for_blocks_is_in_nobodys_way_and_leaves_when_it_is_told() -> None:
    harness = Harness(blocks=200, step_tokens=16, max_running=8)
    fills = harness.submit(prompt(1, 64), max_tokens=2)
    waits, leaves = (harness.submit(prompt(1, 64), max_tokens=2, wait_seconds=5) for _ in range(2))
    other = harness.submit(prompt(2, 3), max_tokens=1)
    harness.step(5)
    assert other.over
    harness.abort(leaves)
    assert leaves.reason == "aborted"
    harness.expire(6)
    assert waits.rejected or waits.started
    harness.run(fills)
