from __future__ import annotations

from array import array

import pytest
import tokenizers as reference

from gateway.http.errors import ApiError
from tests.gateway.prompt.conftest import Model


def test_b079_one_bos_in_each_case(with_bos: Model) -> None:
    (bos,) = with_bos.tokenizer.encode("<s>")
    spelled = with_bos.tokenizer.completion("<s>Hello world")
    plain = with_bos.tokenizer.completion("Hello world")
    ids = [bos, *with_bos.tokenizer.encode("Hello world")]
    given = with_bos.tokenizer.given(ids)
    for prompt in (spelled, plain, given):
        assert list(prompt.tokens) == ids
        assert list(prompt.tokens).count(bos) == 1
    twice = [bos, bos, *ids]
    assert list(with_bos.tokenizer.given(twice).tokens) == twice


def test_a_completion_prompt_is_parsed_as_the_tokenizer_parses_it(chatml: Model) -> None:
    text = "<|im_start|>user\nhello<|im_end|>"
    tokens = chatml.tokenizer.completion(text).tokens
    expected = reference.Tokenizer.from_file(str(chatml.directory / "tokenizer.json")).encode(text).ids
    assert list(tokens) == expected
    assert chatml.count(tokens, "<|im_end|>") == 1


def test_an_id_beyond_the_vocabulary_is_refused_with_its_place(chatml: Model) -> None:
    highest = chatml.tokenizer.vocabulary_tokens - 1
    assert chatml.tokenizer.given([0, highest]).tokens == array("I", [0, highest])
    with pytest.raises(ApiError, match=str(highest + 1)) as caught:
        chatml.tokenizer.given([0, highest + 1])
    assert (caught.value.status, caught.value.param) == (400, "prompt[1]")


@pytest.mark.parametrize("text", ["Alpha-Beta", " x", "\n\tx  y"])
def test_b097_text_comes_back_byte_for_byte_with_the_reference_ids(smollm: Model, text: str) -> None:
    plain = reference.Tokenizer.from_file(str(smollm.directory / "tokenizer.json"))
    whole = smollm.tokenizer.completion(text).tokens
    assert list(whole) == plain.encode(text).ids
    assert smollm.text(whole) == text
    chat = smollm.template.prompt([{"role": "user", "content": text}])
    rendered = "".join(segment.text for segment in chat.segments)
    assert f"user\n{text}<|im_end|>" in rendered
    assert list(chat.tokens) == plain.encode(rendered, add_special_tokens=False).ids
    assert f"user\n{text}\n" in smollm.text(chat.tokens)


def test_the_default_tokenizer_splits_digits(smollm: Model) -> None:
    assert len(smollm.tokenizer.encode("it's 5pm\n\n10 items")) == 9


@pytest.mark.parametrize("name", ["chatml", "with_bos", "sentencepiece", "smollm"])
def test_no_token_is_longer_than_the_longest(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name).tokenizer
    longest = max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocabulary_tokens))
    assert 0 < longest <= tokenizer.longest_token_bytes


def test_no_memory_of_words_is_shared_between_tenants(chatml: Model) -> None:
    # The switch is not part of the library's documented interface: notice if it goes.
    assert hasattr(reference.models.BPE(), "_resize_cache")


def test_a_prompt_does_not_print_its_tokens(chatml: Model) -> None:
    assert repr(chatml.tokenizer.completion("hello")) in {f"<Prompt of {n} tokens>" for n in range(1, 6)}
