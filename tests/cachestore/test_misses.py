"""Why a block is missing, said with `Started` and to a `Probe`."""

from __future__ import annotations

from typing import Any

import pytest

from cachestore.protocol import KEY_BYTES, MissReason, Probe, ProtocolError
from tests.cachestore.support import ALICE, BOB, Harness, pool_state

# How a block went that was wanted for ten seconds, by when it did.
WENT: dict[int, MissReason] = {11: "expired", 1: "evicted"}


def prompt(word: int, length: int) -> list[int]:
    return [word] * length


def assert_misses(
    harness: Harness, tokens: list[int], found_blocks: int, reason: MissReason | None, *, account: bytes = ALICE
) -> None:
    """What a `Probe` says, and then a request of these tokens and one more, so that all its full blocks may be used."""
    block = None if reason is None else found_blocks
    probed = harness.probe(tokens, account=account)
    assert (probed.device_blocks, probed.miss_block, probed.miss_reason) == (found_blocks, block, reason)
    answer = harness.complete([*tokens, 7], account=account, max_tokens=1)
    assert answer.started
    assert answer.cached_tokens == 4 * found_blocks
    assert (answer.started.miss_block, answer.started.miss_reason) == (block, reason)


def fill(harness: Harness, *, account: bytes = ALICE) -> None:
    """A prompt that takes all blocks there are: everything that is cached gives way."""
    harness.complete(prompt(100, 4 * harness.engine.pool.total - 1), account=account, max_tokens=1)


def test_nothing_was_here_before() -> None:
    harness = Harness()
    harness.open()
    assert_misses(harness, prompt(1, 8), 0, "cold")
    assert_misses(harness, prompt(1, 8), 2, None)
    # It goes on where nothing went on before, as the next turn of a conversation does.
    assert_misses(harness, prompt(1, 8) + prompt(2, 8), 2, "cold")
    assert_misses(harness, prompt(1, 8) + prompt(2, 8), 4, None)


def test_another_prompt_went_on_differently_from_here() -> None:
    harness = Harness()
    harness.complete(prompt(1, 8) + prompt(2, 8), max_tokens=1)
    assert_misses(harness, prompt(1, 8) + prompt(3, 8), 2, "diverged")
    assert_misses(harness, prompt(1, 4) + prompt(3, 8), 1, "diverged")
    # From the beginning on: that is another prompt, and no divergence.
    assert_misses(harness, prompt(3, 8), 0, "cold")


def test_a_block_gave_way() -> None:
    harness = Harness(blocks=8)
    harness.complete(prompt(1, 8), max_tokens=1)
    fill(harness)
    assert_misses(harness, prompt(1, 8), 0, "evicted")
    assert_misses(harness, prompt(1, 8), 2, None)


def test_a_block_gave_way_when_its_time_was_over() -> None:
    for wait_seconds, reason in WENT.items():
        harness = Harness(blocks=8)
        harness.complete(prompt(1, 8), max_tokens=1, ttl_seconds=10)
        harness.clock.advance(wait_seconds)
        # By need: a single prompt that takes all blocks there are.
        harness.complete(prompt(2, 31), max_tokens=1)
        assert_misses(harness, prompt(1, 8), 0, reason)


def test_nothing_is_stored_without_the_prefix_cache() -> None:
    harness = Harness(prefix_cache=False)
    harness.open()
    for _ in range(2):
        assert_misses(harness, prompt(1, 8), 0, "not_stored")
    assert harness.engine.pool.cached == 0
    # Two at once compute both: nobody waits for what will not be published.
    pair = [harness.submit(prompt(2, 9), max_tokens=2) for _ in range(2)]
    harness.step()
    assert all(answer.started for answer in pair)
    harness.run(*pair)


def test_nothing_is_stored_of_an_epoch_that_is_over() -> None:
    harness = Harness()
    waiting = harness.submit(prompt(1, 9), max_tokens=1)
    harness.fence(ALICE, 2)
    harness.run(waiting)
    assert waiting.started
    assert (waiting.started.miss_block, waiting.started.miss_reason) == (0, "not_stored")
    probed = harness.probe(prompt(1, 8), epoch=1)
    assert (probed.device_blocks, probed.miss_reason) == (0, "not_stored")
    assert harness.probe(prompt(1, 8), epoch=2).miss_reason == "cold"


def test_an_unknown_account_has_nothing_and_is_not_opened_by_asking() -> None:
    harness = Harness()
    probed = harness.probe(prompt(1, 8), account=BOB, epoch=3)
    assert (probed.device_blocks, probed.miss_block, probed.miss_reason) == (0, 0, "cold")
    assert harness.engine.index.epoch(BOB) is None
    # Nor is a later epoch begun by it.
    harness.open(ALICE, 1)
    assert harness.probe(prompt(1, 8), epoch=2).miss_reason == "cold"
    assert harness.engine.index.epoch(ALICE) == 1


@pytest.mark.parametrize("forget", ["fence", "flush"])
def test_what_an_account_made_unreachable_was_never_here(forget: str) -> None:
    harness = Harness(blocks=8)
    harness.complete(prompt(1, 8), max_tokens=1)
    fill(harness)
    assert harness.probe(prompt(1, 8)).miss_reason == "evicted"
    if forget == "fence":
        # A salt that was rotated names blocks anew; here the old names come again, and say nothing.
        keys = b"".join(harness._keys(ALICE, 1, prompt(1, 8)))
        harness.fence(ALICE, 2)
        harness.engine.probe(1, Probe(account=ALICE, epoch=2, keys=keys))
        assert harness.probed[-1].miss_reason == "cold"
    else:
        harness.flush(ALICE)
        assert harness.probe(prompt(1, 8)).miss_reason == "cold"


def test_nobody_is_told_what_gave_way_of_another() -> None:
    harness = Harness(blocks=8)
    keys = harness._keys(ALICE, 1, prompt(1, 8))
    harness.complete(prompt(1, 8), max_tokens=1)
    fill(harness)
    harness.open(BOB)
    harness.engine.probe(1, Probe(account=BOB, epoch=1, keys=b"".join(keys)))
    assert harness.probed[-1].miss_reason == "cold"
    harness.engine.probe(1, Probe(account=ALICE, epoch=1, keys=b"".join(keys)))
    assert harness.probed[-1].miss_reason == "evicted"


def test_a_strict_account_is_told_the_same_whatever_others_do() -> None:
    def said(is_flooded: bool, **limits: Any) -> list[tuple[MissReason | None, int]]:
        harness = Harness(blocks=24)
        harness.open(ALICE, revision=1, **limits)
        seen = []
        for number in range(60):
            answer = harness.complete(prompt(1 + number * 7 % 9, 9), max_tokens=1)
            assert answer.started
            seen.append((answer.started.miss_reason, answer.cached_tokens))
            for word in range(12 if is_flooded else 0):
                harness.complete([500 + number, word, *prompt(1, 11)], account=BOB, max_tokens=1)
        return seen

    strict: dict[str, Any] = {"reserved_blocks": 10, "max_blocks": 10, "strict": True}
    alone = said(False, **strict)
    assert {reason for reason, _ in alone} >= {"cold", "evicted"}
    assert said(True, **strict) == alone
    # The measure shows a difference where there is one.
    assert said(True) != said(False)


def test_a_probe_is_no_use_of_a_block() -> None:
    for touch, survivor in ((False, 2), (True, 1)):
        harness = Harness(blocks=4)
        harness.complete(prompt(1, 5), max_tokens=1)
        harness.complete(prompt(2, 5), max_tokens=1)
        if touch:
            harness.complete(prompt(1, 5), max_tokens=1)
        else:
            harness.probe(prompt(1, 4))
        harness.complete(prompt(3, 9), max_tokens=1)
        found = {word: harness.probe(prompt(word, 4)).device_blocks for word in (1, 2)}
        assert found == {1: int(survivor == 1), 2: int(survivor == 2)}


def test_a_prompt_shorter_than_a_block_misses_nothing() -> None:
    harness = Harness()
    harness.open()
    assert_misses(harness, prompt(1, 2), 0, None)
    assert harness.probe([]).miss_block is None


def test_half_a_key_costs_the_connection() -> None:
    harness = Harness()
    before = pool_state(harness.engine.pool)
    with pytest.raises(ProtocolError):
        harness.engine.probe(1, Probe(account=ALICE, epoch=1, keys=b"k" * (KEY_BYTES + 1)))
    assert pool_state(harness.engine.pool) == before


def test_a_block_that_is_used_anew_was_never_gone_on_from() -> None:
    """All eight blocks are parents once, and then leaves of other prompts."""
    harness = Harness(blocks=8)
    harness.complete(prompt(1, 31), max_tokens=1)
    for word in range(2, 10):
        harness.complete(prompt(word, 5), max_tokens=1)
    probed = [harness.probe(prompt(word, 4) + prompt(100, 4)) for word in range(2, 10)]
    assert {each.miss_reason for each in probed if each.device_blocks} == {"cold"}
    assert sum(each.device_blocks for each in probed) >= 7
