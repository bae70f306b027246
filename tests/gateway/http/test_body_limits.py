"""Values, slow values and depth, counted before a parser sees them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.http.body import (
    MAX_BACKSLASHES,
    MAX_DEPTH,
    MAX_SLOW_VALUES,
    MAX_VALUES,
    _depth,
    _outside_strings,
    parse_object,
)
from gateway.http.errors import ApiError

TEXT = st.text(st.sampled_from('[]{}:,"\\/ué\n😀'), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=20,
)
LONG = 10**18


def depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth, value), default=0)
    return 0


def listed(value: str, count: int) -> bytes:
    """An object whose one field is a list of `count` times the value."""
    return f'{{"a":[{",".join([value] * count)}]}}'.encode()


@given(value=VALUES, ascii=st.booleans())
@settings(max_examples=300, deadline=None)
def test_depth_is_counted_outside_of_strings(value: Any, ascii: bool) -> None:
    assert _depth(_outside_strings(json.dumps(value, ensure_ascii=ascii).encode())) == depth(value)


def test_as_deep_as_is_allowed_and_no_deeper() -> None:
    inner = MAX_DEPTH - 1
    assert parse_object(b'{"a":' + b"[" * inner + b"]" * inner + b"}")
    assert parse_object(b'{"a":' * MAX_DEPTH + b'"[[{{"' + b"}" * MAX_DEPTH)
    for deeper in (b'{"a":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", b"]" * 99 + b'{"a":' * 99, b"[" * (1 << 22)):
        with pytest.raises(ApiError) as refused:
            parse_object(deeper)
        assert refused.value.status == 400


@pytest.mark.parametrize(
    ("value", "limit"),
    [
        ("1", MAX_VALUES),
        ('","', MAX_VALUES),
        ("null", MAX_VALUES),
        ("1.5", MAX_SLOW_VALUES - 1),
        ("1e5", MAX_SLOW_VALUES - 1),
        ("true", MAX_SLOW_VALUES - 1),
        (str(LONG), MAX_SLOW_VALUES),
    ],
)
def test_as_many_values_as_are_allowed_and_one_more(value: str, limit: int) -> None:
    assert len(parse_object(listed(value, limit + 1))["a"]) == limit + 1
    with pytest.raises(ApiError, match=f"at most {max(limit, MAX_SLOW_VALUES)} are read") as refused:
        parse_object(listed(value, limit + 2))
    assert refused.value.status == 400


def test_strings_are_counted_before_they_are_taken_apart() -> None:
    with pytest.raises(ApiError, match="2097152 strings"):
        parse_object(b'"' * (1 << 22))
    assert parse_object(b'{"a":"' + b'\\"' * MAX_BACKSLASHES + b'"}') == {"a": '"' * MAX_BACKSLASHES}
    with pytest.raises(ApiError, match=f"{MAX_BACKSLASHES + 1} backslashes"):
        parse_object(b'{"a":"' + b'\\"' * (MAX_BACKSLASHES + 1) + b'"}')


@given(st.lists(st.integers(-(1 << 65), 1 << 66) | st.sampled_from([1, LONG - 1, LONG]), max_size=4))
@settings(max_examples=200, deadline=None)
def test_integers_of_64_bits_are_read_and_longer_ones_are_not(integers: list[int]) -> None:
    body = json.dumps({"a": integers}).encode()
    if all(-(1 << 63) <= integer < 1 << 64 for integer in integers):
        assert parse_object(body) == {"a": integers}
    else:
        with pytest.raises(ApiError, match="more than 64 bits"):
            parse_object(body)


@pytest.mark.parametrize("digits", ["9" * 4000, "-" + "9" * 4000, "0." + "1" * 4000, "1" + "0" * 300 + ".5"])
def test_numbers_of_any_length_are_read_or_refused_at_once(digits: str) -> None:
    body = f'{{"a": {digits}}}'.encode()
    if "." in digits:
        assert parse_object(body) == json.loads(body)
    else:
        with pytest.raises(ApiError, match="more than 64 bits"):
            parse_object(body)
