"""Lines of the isolation promise that the store keeps by itself, named after their numbers."""

from __future__ import annotations

import pytest

from cachestore.protocol import Message
from tests.cachestore.support import ALICE, BOB, Answer, Harness, chain_keys, expected_answer


def prompt(word: int, count: int) -> list[int]:
    return [word] * count


def bobs_view(harness: Harness) -> object:
    """All that the store holds of Bob, and in which order it would give way."""
    pool = harness.engine.pool
    return (
        [(name, block) for name, block in harness.engine.index.names() if name.account == BOB],
        list(pool.shares.account(BOB).cached),
    )


def test_line_07_the_store_misses_under_another_account_or_epoch_though_the_key_is_the_same() -> None:
    """The very keys of Alice's epoch 2 are presented by Bob, and by Alice in another epoch."""
    harness = Harness()
    tokens = prompt(1, 14)
    keys = chain_keys(ALICE, 2, tokens, 4)

    def cached_tokens(account: bytes, epoch: int) -> int:
        return harness.complete(tokens, account=account, epoch=epoch, keys=keys, max_tokens=1).cached_tokens

    assert cached_tokens(ALICE, 2) == 0
    assert cached_tokens(BOB, 2) == 0
    # Positive controls: Alice hits them, and so does Bob what he himself put under these keys.
    assert cached_tokens(ALICE, 2) == 12
    assert cached_tokens(BOB, 2) == 12
    assert cached_tokens(ALICE, 3) == 0
    assert cached_tokens(ALICE, 3) == 12
    # What each read was its own: the runner's double compares every context with who wrote it.
    assert not harness.remembering.mistakes


@pytest.mark.parametrize("command", ["fence", "drop"])
def test_line_10_nothing_older_is_indexed_when_the_answer_is_given(command: str) -> None:
    harness = Harness()
    harness.complete(prompt(1, 14))
    harness.complete(prompt(1, 14), account=BOB)
    assert harness.cached_blocks(ALICE) == 4
    indexed: list[int] = []
    emit = harness.engine._emit

    def watch(connection: int, message: Message) -> None:
        indexed.append(harness.cached_blocks(ALICE))
        emit(connection, message)

    harness.engine._emit = watch
    if command == "fence":
        assert harness.fence(ALICE, 2).blocks == 4
    else:
        assert harness.drop(ALICE).blocks == 4
    assert indexed == [0]
    assert harness.cached_blocks(BOB) == 4


@pytest.mark.parametrize("fenced", [True, False])
@pytest.mark.parametrize("phase", ["waiting", "prefilling", "decoding", "preempted", "ended"])
def test_line_11_a_request_in_flight_before_the_fence_publishes_nothing_afterwards(phase: str, fenced: bool) -> None:
    harness = Harness(blocks=11, block_tokens=4, step_tokens=12)
    answer, others = _bring_to(harness, phase)
    before = harness.cached_blocks(ALICE)
    if fenced:
        assert harness.fence(ALICE, 2).blocks == before
        assert harness.cached_blocks(ALICE) == 0
    harness.run(answer, *others)
    harness.seal(answer)
    # It went on to its end all the same, and what it read was right.
    assert (answer.reason, answer.tokens) == ("length", expected_answer(answer.prompt, 9))
    if fenced:
        assert harness.cached_blocks(ALICE) == 0
        assert harness.complete(answer.prompt + answer.tokens, epoch=2, max_tokens=1).cached_tokens == 0
    else:
        assert harness.cached_blocks(ALICE) > before
        # Of 16 prompt tokens and 9 of the answer, the last of which was never computed.
        assert harness.complete(answer.prompt + answer.tokens, max_tokens=1).cached_tokens == 24
    assert harness.engine.pool.held == 0


def _bring_to(harness: Harness, phase: str) -> tuple[Answer, list[Answer]]:
    """Alice's request of 16 tokens, nine wanted, in that phase, and Bob's requests that brought it there."""
    others: list[Answer] = []
    if phase == "waiting":
        others = [harness.submit(prompt(8, 37), account=BOB, max_tokens=4)]
        harness.step()
    if phase == "preempted":
        others = [harness.submit(prompt(8, 12), account=BOB, max_tokens=20)]
        harness.step()
    answer = harness.submit(prompt(1, 16), max_tokens=9)
    if phase == "prefilling":
        harness.step()
        assert not answer.tokens
    if phase == "decoding":
        harness.step(3)
        harness.seal(answer, last=False)
        assert answer.tokens
    if phase == "preempted":
        while not harness.engine.scheduler.preemptions:
            harness.step()
    if phase == "ended":
        harness.run(answer)
    if phase in ("waiting", "preempted"):
        assert not harness.sequence(answer).table
    return answer, others


def test_line_11_a_waiting_request_of_an_older_epoch_reads_nothing_either() -> None:
    """Before the fence its prompt is cached; admitted afterwards, it computes all of it."""
    for fenced, cached_tokens in ((True, 0), (False, 12)):
        harness = Harness(max_running=1)
        harness.complete(prompt(1, 14))
        runs = harness.submit(prompt(8, 4), account=BOB)
        harness.step()
        waits = harness.submit(prompt(1, 14))
        if fenced:
            harness.fence(ALICE, 2)
        harness.run(runs, waits)
        assert waits.cached_tokens == cached_tokens
        assert waits.tokens == expected_answer(waits.prompt, 4)


def test_line_13_rotating_one_account_changes_nothing_of_another() -> None:
    harness = Harness(blocks=24, block_tokens=4)
    for word in (1, 2):
        harness.complete(prompt(word, 14))
        harness.complete(prompt(word, 14), account=BOB)
    before = bobs_view(harness)
    assert harness.cached_blocks(BOB) == 8
    evictions = harness.engine.pool.evictions
    assert harness.fence(ALICE, 2).blocks == 8
    assert bobs_view(harness) == before
    assert harness.engine.pool.evictions == evictions
    # Bob's own order of eviction is untouched: filling the pool takes his oldest first, from its tail.
    for word in (1, 2):
        assert harness.complete(prompt(word, 14), account=BOB).cached_tokens == 12
    # Positive control: the fence did something.
    for word in (1, 2):
        assert harness.complete(prompt(word, 14), epoch=2).cached_tokens == 0


def test_line_13_dropping_one_account_changes_nothing_of_another() -> None:
    harness = Harness(blocks=24, block_tokens=4)
    harness.complete(prompt(1, 14))
    harness.complete(prompt(1, 14), account=BOB)
    bobs = harness.submit(prompt(2, 14), account=BOB, max_tokens=9)
    alices = harness.submit(prompt(2, 14), max_tokens=9)
    harness.step(2)
    before = bobs_view(harness)
    harness.drop(ALICE)
    assert bobs_view(harness) == before
    assert harness.cached_blocks(ALICE) == 0
    harness.run(bobs, alices)
    assert (bobs.reason, alices.reason) == ("length", "aborted")
    assert bobs.tokens == expected_answer(bobs.prompt, 9)
    assert harness.complete(prompt(1, 14), account=BOB).cached_tokens == 12


def test_a_fence_counts_what_left_the_index_in_blocks_and_bytes() -> None:
    harness = Harness()
    harness.complete(prompt(1, 14))
    fenced = harness.fence(ALICE, 2)
    # Three blocks of the prompt and one that the answer filled.
    assert (fenced.account, fenced.epoch, fenced.blocks, fenced.bytes) == (ALICE, 2, 4, 4 * 512)
    for epoch in (1, 2, 3):
        again = harness.fence(ALICE, epoch)
        assert (again.epoch, again.blocks, again.bytes) == (epoch, 0, 0)
    assert harness.engine.index.epoch(ALICE) == 3
    dropped = harness.drop(ALICE)
    assert (dropped.epoch, dropped.blocks) == (None, 0)


def test_a_fence_leaves_the_blocks_of_running_requests_to_them() -> None:
    harness = Harness(blocks=8, block_tokens=4)
    runs = harness.submit(prompt(1, 12), max_tokens=9)
    harness.step()
    assert harness.fence(ALICE, 2).blocks == 3
    assert harness.engine.pool.held == 4
    # New work of the new epoch takes other blocks meanwhile.
    new = harness.submit(prompt(1, 12), epoch=2, max_tokens=1)
    harness.step()
    assert new.cached_tokens == 0
    harness.run(runs)
    assert runs.tokens == expected_answer(runs.prompt, 9)


# What Bob asks at once: beginnings that he has in common with himself, long and short, decodes and prefills.
BOBS = [(1, 30, 6), (2, 9, 3), (1, 34, 2), (3, 50, 1), (2, 21, 4), (4, 3, 8), (1, 12, 1), (5, 40, 2)]


def served(harness: Harness, bobs: list[Answer]) -> list[list[tuple[int, int, int]]]:
    """Step by step what is computed of Bob's requests: (which of them, from which token on, how many)."""
    steps: list[list[tuple[int, int, int]]] = []
    numbers = {answer.request: number for number, answer in enumerate(bobs)}
    before = len(harness.remembering.steps)
    harness.run(*bobs)
    for step in harness.remembering.steps[before:]:
        steps.append([(numbers[request], start, count) for request, start, count in step if request in numbers])
    return steps


@pytest.mark.parametrize("blocks", [200, 60], ids=["room", "a full pool"])
def test_line_26_the_order_of_bobs_requests_does_not_depend_on_what_alice_has_cached(blocks: int) -> None:
    def order(alices: list[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
        harness = Harness(blocks=blocks, step_tokens=40, max_running=4)
        for _ in range(3):
            for word, count, max_tokens in alices:
                harness.complete(prompt(word, count), max_tokens=max_tokens)
        return served(harness, [harness.submit(prompt(w, n), account=BOB, max_tokens=m) for w, n, m in BOBS])

    nothing = order([])
    assert len(nothing) > 5
    # The very prompts that Bob asks, in both orders; and such as leave nothing free.
    assert order(BOBS) == nothing
    assert order(BOBS[::-1]) == nothing
    assert order([(word, 50, 1) for word in range(100, 120)]) == nothing


def test_line_26_whether_alices_requests_hit_changes_no_order_among_bobs() -> None:
    """Both run at once: what Alice computes takes from Bob's steps, and never puts one of his before another."""

    def started(is_warm: bool) -> tuple[list[int], int]:
        harness = Harness(blocks=200, step_tokens=40, max_running=6)
        alices = [prompt(word, 41) for word in (7, 8, 9)]
        if is_warm:
            for each in alices:
                harness.complete(each, max_tokens=1)
        hers = [harness.submit(each, max_tokens=12) for each in alices]
        bobs = [
            harness.submit(prompt(20 + number, 10 + 7 * number % 23), account=BOB, max_tokens=1 + number % 5)
            for number in range(8)
        ]
        order: list[int] = []
        while not all(answer.over for answer in (*bobs, *hers)):
            harness.step()
            order += [number for number, answer in enumerate(bobs) if answer.started and number not in order]
        return order, sum(answer.cached_tokens for answer in hers)

    cold, nothing = started(False)
    warm, hits = started(True)
    assert (nothing, hits) == (0, 120)
    assert cold == warm == sorted(cold)
