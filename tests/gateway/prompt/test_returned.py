from __future__ import annotations

from typing import Any

import pytest

from gateway.prompt.returned import Part, ReturnedText
from tests.gateway.prompt.conftest import Model

END = 2


def spell(model: Model, *words: str | bytes) -> list[int]:
    """Tokens byte by byte, one for each character of an ASCII word, so that each test sees where they begin."""
    by_bytes = {model.tokenizer.token_bytes(token): token for token in range(model.tokenizer.vocabulary_tokens)}
    pieces = [word.encode() if isinstance(word, str) else word for word in words]
    return [by_bytes[bytes([byte])] for piece in pieces for byte in piece]


def returned(model: Model, tokens: list[int], **options: Any) -> tuple[ReturnedText, list[Part]]:
    text = ReturnedText(model.tokenizer, **options)
    parts = []
    for token in tokens:
        parts.append(text.push(token))
        if text.stopped or text.ended_by is not None:
            break
    return text, [*parts, text.finish()]


def of(parts: list[Part]) -> tuple[str, list[int]]:
    """The whole text, and where its tokens begin."""
    return "".join(part.text for part in parts), [token.offset for part in parts for token in part.tokens]


@pytest.mark.parametrize(
    ("answer", "options", "text", "offsets"),
    [
        ("abc", {}, "abc", [0, 1, 2]),
        ("abc", {"stops": ["c"]}, "ab", [0, 1]),
        ("abc", {"stops": ["bc"]}, "a", [0]),
        ("abc", {"stops": ["bc"], "stop_is_kept": True}, "abc", [0, 1, 2]),
        ("abc", {"stops": ["a"]}, "", []),
        ("abcab", {"stops": ["ab"], "min_tokens": 2}, "abc", [0, 1, 2]),
        ("abcab", {"stops": ["ab"], "min_tokens": 1}, "", []),
        ("abcab", {"stops": ["bc"], "min_tokens": 3}, "abcab", [0, 1, 2, 3, 4]),
    ],
)
def test_tokens_are_those_of_the_returned_text(
    chatml: Model, answer: str, options: Any, text: str, offsets: list[int]
) -> None:
    assert of(returned(chatml, spell(chatml, answer), **options)[1]) == (text, offsets)


def test_the_token_that_ended_the_answer_is_none_of_it(chatml: Model) -> None:
    a, b = spell(chatml, "ab")
    for ends, kept, text, count in (
        ([END], False, "a", 1),
        ([END], True, "a", 1),
        ([END, b], False, "a", 1),
        ([END, b], True, "ab", 2),
        # A special token has no text to keep.
        ([1], True, "a", 1),
    ):
        answer = [a, ends[-1]]
        whole, parts = returned(chatml, answer, end_ids=ends, stop_is_kept=kept)
        assert of(parts) == (text, list(range(count)))
        assert (whole.text, whole.ended_by, whole.returns_end) == (text, ends[-1], count == 2)


def test_tokens_without_text_come_with_the_next_that_has_some_or_at_the_end(chatml: Model) -> None:
    # Special tokens that do not end the answer, and a character of three bytes.
    tokens = [1, *spell(chatml, "a", "\u4f60", "b"), 1]
    _, parts = returned(chatml, tokens)
    assert [(part.text, [token.offset for token in part.tokens]) for part in parts] == [
        ("", []),
        ("a", [0, 0]),
        ("", []),
        ("", []),
        ("\u4f60", [1, 1, 1]),
        ("b", [2]),
        ("", []),
        ("", [3]),
    ]


def test_tokens_of_held_text_wait_with_it(chatml: Model) -> None:
    _, parts = returned(chatml, spell(chatml, "xSTa"), stops=["STOP"])
    assert [(part.text, len(part.tokens)) for part in parts] == [("x", 1), ("", 0), ("", 0), ("STa", 3), ("", 0)]
    # The end of the answer lets go of what was held.
    _, parts = returned(chatml, spell(chatml, "ST"), stops=["STOP"])
    assert [(part.text, len(part.tokens)) for part in parts] == [("", 0), ("", 0), ("ST", 2)]


def test_a_character_that_the_answer_leaves_unfinished_is_one_replacement_of_its_tokens(chatml: Model) -> None:
    _, parts = returned(chatml, spell(chatml, "a", b"\xe4\xbd"))
    assert of(parts) == ("a\ufffd", [0, 1, 1])


def test_what_was_returned_whole_is_told_from_what_was_cut(chatml: Model) -> None:
    by_bytes = {chatml.tokenizer.token_bytes(token): token for token in range(chatml.tokenizer.vocabulary_tokens)}
    word = max(by_bytes, key=len)
    tokens = [*spell(chatml, "a"), by_bytes[word]]
    stop = word.decode()[1:]
    text, _ = returned(chatml, tokens, stops=[stop])
    assert (text.text, text.whole()) == ("a" + word.decode()[0], (1, word.decode()[0]))
    text, _ = returned(chatml, tokens, stops=[stop], stop_is_kept=True)
    assert (text.text, text.whole()) == ("a" + word.decode(), (2, ""))
