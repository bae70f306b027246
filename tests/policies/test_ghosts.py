"""What is remembered of blocks that gave way."""

from __future__ import annotations

import hashlib
import sys

from policies.ghosts import Ghosts

ALICE, BOB = b"A" * 16, b"B" * 16


def names(count: int, first: int = 0) -> list[bytes]:
    return [hashlib.sha256(b"%d" % number).digest() for number in range(first, first + count)]


def test_it_says_how_a_block_went() -> None:
    ghosts = Ghosts(10)
    evicted, expired, never = names(3)
    ghosts.remember(ALICE, [evicted, expired], {expired})
    assert [ghosts.recall(ALICE, name) for name in (evicted, expired, never)] == ["evicted", "expired", None]


def test_what_gave_way_again_went_as_it_did_last() -> None:
    ghosts = Ghosts(10)
    (name,) = names(1)
    ghosts.remember(ALICE, [name], {name})
    ghosts.remember(ALICE, [name], set())
    assert ghosts.recall(ALICE, name) == "evicted"


def test_how_it_went_last_counts_in_the_table_as_well() -> None:
    ghosts = Ghosts(1000)
    told = names(200)
    for first, expired in ((1000, set(told)), (2000, set()), (3000, set(told[:100]))):
        ghosts.remember(ALICE, told, expired)
        ghosts.remember(ALICE, names(1000, first), set())
    assert not any(name in ghosts._shared._latest for name in told)
    assert [ghosts.recall(ALICE, name) for name in told] == ["expired"] * 100 + ["evicted"] * 100


def test_nobody_is_told_of_the_blocks_of_another() -> None:
    ghosts = Ghosts(10)
    (name,) = names(1)
    ghosts.remember(ALICE, [name], set())
    assert ghosts.recall(BOB, name) is None
    assert ghosts.recall(ALICE, name) == "evicted"


def test_what_is_forgotten_of_one_account_is_known_of_the_others() -> None:
    ghosts = Ghosts(100)
    mine, theirs = names(2)
    ghosts.remember(ALICE, [mine], set())
    ghosts.remember(BOB, [theirs], set())
    ghosts.forget(ALICE)
    assert ghosts.recall(ALICE, mine) is None
    assert ghosts.recall(BOB, theirs) == "evicted"
    ghosts.remember(ALICE, [mine], set())
    assert ghosts.recall(ALICE, mine) == "evicted"


def test_most_of_the_last_are_known_and_few_of_those_long_gone() -> None:
    ghosts = Ghosts(1000)
    for first in range(0, 20_000, 100):
        ghosts.remember(ALICE, names(100, first), set())

    def known(first: int) -> int:
        return sum(ghosts.recall(ALICE, name) is not None for name in names(1000, first))

    # 4,000 places in buckets of eight, each for the last that fell to it.
    assert known(19_000) > 990
    assert known(17_000) > 700
    assert known(10_000) < 30
    assert not any(ghosts.recall(ALICE, name) for name in names(10_000, 20_000))


def test_it_takes_four_places_of_eight_bytes_for_each_block() -> None:
    ghosts = Ghosts(1000)
    ghosts.remember(ALICE, names(50_000), set())
    table = ghosts._shared
    assert len(table._places) == 4_000
    assert sys.getsizeof(table._places) + sys.getsizeof(table._oldest) < 36_000


def test_a_flood_of_others_makes_a_separate_account_forget_nothing() -> None:
    for blocks, is_known in ((10, True), (None, False)):
        ghosts = Ghosts(10)
        ghosts.separate(ALICE, blocks)
        (mine,) = names(1)
        ghosts.remember(ALICE, [mine], set())
        ghosts.remember(BOB, names(1000, 1), set())
        assert (ghosts.recall(ALICE, mine) is not None) is is_known


def test_a_table_is_kept_as_long_as_it_has_the_right_size() -> None:
    ghosts = Ghosts(10)
    (mine,) = names(1)
    ghosts.separate(ALICE, 5)
    ghosts.remember(ALICE, [mine], set())
    ghosts.separate(ALICE, 5)
    assert ghosts.recall(ALICE, mine) == "evicted"
    # Nothing old comes back when it shares the pool's again.
    ghosts.separate(ALICE, None)
    assert ghosts.recall(ALICE, mine) is None
    ghosts.remember(ALICE, [mine], set())
    ghosts.separate(ALICE, 5)
    assert ghosts.recall(ALICE, mine) is None
