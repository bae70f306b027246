"""The conversation memory by itself: what is found, by whom, and how much is kept."""

from __future__ import annotations

import random
import threading
import tracemalloc
from array import array
from dataclasses import replace

import pytest

from gateway.prompt.memory import ConversationMemory, Owner
from gateway.prompt.tokens import Segment

OWNER = Owner(b"A" * 16, 1, b"")
USER = Segment("control", "<user>")
MODEL = Segment("control", "<model>")


def content(text: str) -> Segment:
    return Segment("content", text)


def conversation(*texts: str) -> list[Segment]:
    """Turns of a user and a model, one after the other."""
    return [part for turn, text in enumerate(texts) for part in ((USER, MODEL)[turn % 2], content(text))]


def tokens(*ids: int) -> array[int]:
    return array("I", ids)


def recalled(memory: ConversationMemory, segments: list[Segment], owner: Owner = OWNER) -> tuple[int, list[int]]:
    count, found = memory.recall(owner, segments)
    return count, list(found)


def test_the_longest_remembered_beginning_is_found() -> None:
    memory = ConversationMemory()
    memory.remember(OWNER, conversation("a", "b"), tokens(1, 2))
    memory.remember(OWNER, conversation("a", "b", "c", "d"), tokens(1, 2, 3, 4))
    assert recalled(memory, conversation("a", "b", "c", "d", "e")) == (8, [1, 2, 3, 4])
    assert recalled(memory, conversation("a", "b", "c", "x", "e")) == (4, [1, 2])
    assert recalled(memory, conversation("a", "b")) == (4, [1, 2])
    # What only begins like it is none of it.
    for other in ([], conversation("a"), conversation("x", "b"), conversation("b", "a")):
        assert recalled(memory, other) == (0, [])


def test_segments_are_compared_and_never_flat_text() -> None:
    memory = ConversationMemory()
    turn = [USER, content("a"), MODEL, content("b")]
    memory.remember(OWNER, turn, tokens(7))
    typed = content("<user>a<model>b")
    for other in (
        [typed],
        [USER, content("a<model>b")],
        [USER, content("a"), content("<model>"), content("b")],
        [USER, content("a<"), content("model>b")],
        [content("<user>"), *turn[1:]],
        [*turn[:3], Segment("control", "b")],
    ):
        assert "".join(segment.text for segment in other) == "".join(segment.text for segment in turn)
        assert recalled(memory, other) == (0, [])
    assert recalled(memory, turn) == (4, [7])
    # And what was typed is found by what was typed alone.
    memory.remember(OWNER, [typed], tokens(8))
    assert recalled(memory, [typed]) == (1, [8])
    assert recalled(memory, turn) == (4, [7])


@pytest.mark.parametrize("changed", [{"account": b"B" * 16}, {"epoch": 2}, {"epoch": 0}, {"scope": b"s"}])
def test_nobody_elses_conversations_are_found(changed: dict[str, bytes | int]) -> None:
    memory = ConversationMemory()
    other = replace(OWNER, **changed)
    memory.remember(OWNER, conversation("a", "b"), tokens(1))
    assert recalled(memory, conversation("a", "b"), other) == (0, [])
    memory.remember(other, conversation("a", "b"), tokens(2))
    assert recalled(memory, conversation("a", "b"), other) == (4, [2])
    assert recalled(memory, conversation("a", "b")) == (4, [1])


def test_a_later_answer_replaces_an_earlier_one_of_the_same_text() -> None:
    memory = ConversationMemory()
    memory.remember(OWNER, conversation("a", "b"), tokens(1, 2))
    before = memory.size_bytes
    memory.remember(OWNER, conversation("a", "b"), tokens(3, 4))
    assert recalled(memory, conversation("a", "b")) == (4, [3, 4])
    assert (len(memory), memory.size_bytes) == (1, before)


def test_what_is_handed_out_is_a_copy() -> None:
    memory = ConversationMemory()
    memory.remember(OWNER, conversation("a"), tokens(1))
    _, found = memory.recall(OWNER, conversation("a"))
    found.append(2)
    assert recalled(memory, conversation("a")) == (2, [1])


def test_the_least_recently_used_goes_first() -> None:
    probe = ConversationMemory()
    probe.remember(OWNER, conversation("0"), tokens(0))
    memory = ConversationMemory(limit_bytes=3 * probe.size_bytes)
    for number in range(3):
        memory.remember(OWNER, conversation(str(number)), tokens(number))
    assert len(memory) == 3
    # Looked up, so 1 is the oldest; the one that is answered anew is young again.
    assert recalled(memory, conversation("0"))[0]
    memory.remember(OWNER, conversation("2"), tokens(2))
    memory.remember(OWNER, conversation("3"), tokens(3))
    assert [recalled(memory, conversation(str(number)))[0] for number in range(4)] == [2, 0, 2, 2]
    assert memory.size_bytes <= 3 * probe.size_bytes


def test_an_entry_larger_than_the_whole_memory_is_not_kept_and_drives_nothing_out() -> None:
    memory = ConversationMemory(limit_bytes=5_000)
    memory.remember(OWNER, conversation("a"), tokens(1))
    memory.remember(OWNER, conversation("b"), tokens(*range(5_000)))
    assert recalled(memory, conversation("b")) == (0, [])
    assert recalled(memory, conversation("a")) == (2, [1])


@pytest.mark.parametrize("answer_tokens", [1, 30, 2_000])
def test_the_process_holds_no_more_than_the_limit(answer_tokens: int) -> None:
    """Small entries with a scope of their own are what costs most beside the tokens."""
    limit_bytes = 1 << 20
    memory = ConversationMemory(limit_bytes)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(4 * limit_bytes // (4 * answer_tokens + 400)):
            owner = Owner(number.to_bytes(16, "big"), number, number.to_bytes(256, "big"))
            memory.remember(owner, conversation(str(number)), array("I", [number]) * answer_tokens)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    print(f"{(after - before) / limit_bytes:.2f} of the limit in {len(memory)} entries")
    assert 0.5 * limit_bytes < after - before < 1.1 * limit_bytes


def test_threads_that_recall_and_remember_at_once_find_whole_answers() -> None:
    memory = ConversationMemory(limit_bytes=20_000)
    wrong: list[object] = []

    def use(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(1_000):
            number = draw.randrange(40)
            memory.remember(OWNER, conversation(str(number)), array("I", [number]) * (number + 1))
            count, found = memory.recall(OWNER, conversation(str(other := draw.randrange(40))))
            if count and list(found) != [other] * (other + 1):
                wrong.append(found)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert 0 < memory.size_bytes <= 20_000
    assert memory.size_bytes == sum(400 + 4 * len(kept) for kept in memory._entries.values())
