from __future__ import annotations

import pytest

from policies.eviction import LeastRecentlyUsed


def test_blocks_give_way_in_the_order_in_which_they_came() -> None:
    order = LeastRecentlyUsed()
    for block in (3, 1, 2):
        order.add(block)
    assert [order.pop_victim() for _ in range(3)] == [3, 1, 2]
    assert len(order) == 0


def test_a_block_that_was_taken_up_and_let_go_again_is_the_newest() -> None:
    order = LeastRecentlyUsed()
    for block in (3, 1, 2):
        order.add(block)
    order.remove(3)
    assert 3 not in order
    order.add(3)
    assert 3 in order
    assert [order.pop_victim() for _ in range(3)] == [1, 2, 3]


def test_what_is_not_there_does_not_give_way() -> None:
    order = LeastRecentlyUsed()
    with pytest.raises(KeyError):
        order.pop_victim()
    with pytest.raises(KeyError):
        order.remove(1)
    order.add(1)
    assert order.pop_victim() == 1
