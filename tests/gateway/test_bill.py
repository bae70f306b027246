"""How many tokens an answer may have, where nothing was asked for and where something was."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.bill import Bounds
from gateway.http.errors import ApiError
from gateway.http.shapes import CompletionRequest
from gateway.prompt.tokens import Prompt
from gateway.tenants.quotas import Allowance

CONTEXT_TOKENS = 2048
MODEL: Any = SimpleNamespace(context_tokens=CONTEXT_TOKENS)


def caps(cache_tokens: int, *prompts_tokens: int, allowance: Allowance | None = None, **wanted: Any) -> tuple[int, ...]:
    prompts = [Prompt(array("I", [1] * tokens)) for tokens in prompts_tokens]
    generation = CompletionRequest(model="m", prompt="x", **wanted).generation()
    return Bounds.of(MODEL, allowance or Allowance(), cache_tokens, prompts, generation).caps


def test_without_a_maximum_an_answer_has_what_the_context_and_the_cache_have_left() -> None:
    assert caps(10_000, 48) == (2000,)
    # The last token needs no place in the cache.
    assert caps(160, 48) == (113,)
    assert caps(160, 48, 160, 1) == (113, 1, 160)
    assert caps(160, 48, allowance=Allowance(max_output_tokens=100)) == (100,)
    assert caps(160, 48, allowance=Allowance(max_context_tokens=64)) == (16,)


def test_where_not_even_the_prompt_fits_in_the_cache_the_store_says_so() -> None:
    assert caps(160, 161) == (CONTEXT_TOKENS - 161,)
    assert caps(0, 1) == (CONTEXT_TOKENS - 1,)


def test_a_maximum_that_was_asked_for_is_not_lowered() -> None:
    assert caps(160, 48, max_tokens=500) == (500,)


def test_a_minimum_beyond_what_the_cache_holds_is_refused_with_the_numbers() -> None:
    assert caps(160, 48, min_tokens=113) == (113,)
    with pytest.raises(ApiError, match="min_tokens is 114 and an answer may have 113"):
        caps(160, 48, min_tokens=114)
