"""From names to blocks: account, epoch and key must all match."""

from __future__ import annotations

import pytest

from cachestore.index import BlockName, PrefixIndex
from tests.cachestore.support import ALICE, BOB, name_of

KEYS = [name_of(ALICE, 1, word).key for word in range(4)]


def make_index() -> PrefixIndex:
    index = PrefixIndex()
    index.raise_epoch(ALICE, 5)
    assert index.add(ALICE, 5, KEYS, range(len(KEYS))) == {}
    return index


def test_line_07_a_key_is_missed_under_another_account_or_epoch() -> None:
    index = make_index()
    index.raise_epoch(BOB, 5)
    for account, epoch in ((BOB, 5), (ALICE, 4), (ALICE, 6), (b"C" * 16, 5)):
        assert index.match(account, epoch, KEYS) == []
        assert index.get(BlockName(account, epoch, KEYS[0])) is None
    assert index.match(ALICE, 5, KEYS) == [0, 1, 2, 3]
    assert index.get(BlockName(ALICE, 5, KEYS[0])) == 0


def test_a_match_ends_at_the_first_missing_key() -> None:
    index = make_index()
    index.remove(ALICE, [KEYS[2]])
    assert index.match(ALICE, 5, KEYS) == [0, 1]
    assert index.match(ALICE, 5, KEYS[3:]) == [3]
    assert index.match(ALICE, 5, []) == []


def test_epochs_only_rise() -> None:
    index = make_index()
    for epoch in (3, 5):
        assert index.raise_epoch(ALICE, epoch) == []
        assert index.epoch(ALICE) == 5
    assert sorted(index.raise_epoch(ALICE, 6)) == [0, 1, 2, 3]
    assert len(index) == 0
    assert not index.is_open(ALICE, 5)
    assert index.is_open(ALICE, 6)


def test_a_dropped_account_never_comes_back() -> None:
    index = make_index()
    assert sorted(index.drop(ALICE)) == [0, 1, 2, 3]
    for epoch in (5, 6):
        assert index.raise_epoch(ALICE, epoch) == []
        assert index.epoch(ALICE) is None
        with pytest.raises(ValueError, match="not open"):
            index.add(ALICE, epoch, KEYS[:1], [0])
    index.raise_epoch(BOB, 1)
    assert index.epoch(BOB) == 1


def test_an_account_dropped_before_it_was_seen_is_dropped_too() -> None:
    index = PrefixIndex()
    assert index.drop(ALICE) == []
    index.raise_epoch(ALICE, 1)
    assert index.epoch(ALICE) is None


def test_a_name_is_given_once_and_only_in_an_open_epoch() -> None:
    index = make_index()
    assert index.add(ALICE, 5, [KEYS[0], KEYS[1]], [9, 1]) == {9: 0}
    for account, epoch in ((ALICE, 4), (ALICE, 6), (BOB, 5)):
        with pytest.raises(ValueError, match="not open"):
            index.add(account, epoch, [b"k" * 32], [9])
    assert index.add(ALICE, 5, [b"k" * 32, KEYS[0]], [9, 8]) == {8: 0}
    assert dict(index.names())[BlockName(ALICE, 5, b"k" * 32)] == 9
    assert len(index) == 5
