from __future__ import annotations

import random

import tokenizers as reference

from gateway.prompt.detokenize import Detokenizer
from tests.gateway.prompt.conftest import Model


def token_of(model: Model, piece: bytes) -> int:
    """The token that stands for exactly these bytes."""
    tokenizer = model.tokenizer
    return next(i for i in range(tokenizer.vocabulary_tokens) if tokenizer.token_bytes(i) == piece)


def streamed(model: Model, chunks: list[list[int]]) -> list[str]:
    detokenizer = Detokenizer(model.tokenizer)
    return [*(detokenizer.push(chunk) for chunk in chunks), detokenizer.finish()]


def test_b094_korean_syllables_survive_every_way_of_cutting(smollm: Model) -> None:
    plain = reference.Tokenizer.from_file(str(smollm.directory / "tokenizer.json"))
    for seed in range(100):
        choose = random.Random(seed)
        text = "".join(chr(choose.randrange(0xAC00, 0xD7A4)) for _ in range(200))
        ids = list(smollm.tokenizer.encode(text))
        chunks = []
        while sum(map(len, chunks)) < len(ids):
            start = sum(map(len, chunks))
            chunks.append(ids[start : start + choose.randrange(1, 8)])
        joined = "".join(streamed(smollm, chunks))
        assert joined == text == plain.decode(ids)
        assert "\ufffd" not in joined


def test_b095_a_space_does_not_cut_a_character(chatml: Model) -> None:
    for head in (b"\xe4", b"\xbd", b"\xa0"):
        assert token_of(chatml, head) >= 0
    first, second, third = (token_of(chatml, bytes([byte])) for byte in (0xE4, 0xBD, 0xA0))
    ok = list(chatml.tokenizer.encode(" ok"))
    assert streamed(chatml, [[first, second], [third], ok]) == ["", "\u4f60", " ok", ""]
    assert streamed(chatml, [[first, second], ok]) == ["", "\ufffd ok", ""]
    assert streamed(chatml, [[first, second]]) == ["", "\ufffd"]


def test_invalid_bytes_hold_no_text_back(chatml: Model) -> None:
    bad, lead = token_of(chatml, b"\xff"), token_of(chatml, b"\xf0")
    assert streamed(chatml, [[bad]] * 50) == ["\ufffd"] * 50 + [""]
    # A lead byte waits for its rest; the next one settles it.
    assert streamed(chatml, [[lead]] * 50) == [""] + ["\ufffd"] * 50


def test_any_ids_give_the_text_of_decoding_all_at_once(smollm: Model) -> None:
    plain = reference.Tokenizer.from_file(str(smollm.directory / "tokenizer.json"))
    choose = random.Random(1)
    for _ in range(30):
        ids = [choose.randrange(smollm.tokenizer.vocabulary_tokens) for _ in range(200)]
        assert "".join(streamed(smollm, [[token] for token in ids])) == plain.decode(ids, skip_special_tokens=True)


def test_special_tokens_and_unused_ids_have_no_text(chatml: Model) -> None:
    (end,) = chatml.tokenizer.encode("<|im_end|>")
    hello = list(chatml.tokenizer.encode("hello"))
    assert "".join(streamed(chatml, [[end], hello, [chatml.tokenizer.vocabulary_tokens + 5, end]])) == "hello"


def test_byte_tokens_and_spaces_of_a_sentencepiece_vocabulary(sentencepiece: Model) -> None:
    ids = list(sentencepiece.tokenizer.encode("a\u4f60 b"))
    assert len(ids) == 6
    assert streamed(sentencepiece, [[token] for token in ids]) == [" a", "", "", "\u4f60", " ", "b", ""]
