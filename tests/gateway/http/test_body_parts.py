"""Bodies of many parts: what a parser would make of them is counted before it makes it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.http.body import MAX_PARTS, _count_parts, _outside_strings, parse_object
from gateway.http.errors import ApiError

TEXT = st.text(st.sampled_from('[]{}:,"\\/ué\n😀'), max_size=8)
VALUES = st.recursive(
    st.none() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


def parts(value: Any) -> int:
    """Counted in the parsed value."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(parts, value.values()))
    if isinstance(value, list):
        return 1 + sum(map(parts, value))
    return 0


@given(value=VALUES, ascii=st.booleans(), indent=st.sampled_from([None, 1]))
@settings(max_examples=300, deadline=None)
def test_parts_are_counted_outside_of_strings(value: Any, ascii: bool, indent: int | None) -> None:
    body = json.dumps(value, ensure_ascii=ascii, indent=indent).encode()
    assert _count_parts(_outside_strings(body)) == parts(value)


@pytest.mark.parametrize("part", ["[]", "{}", '{"a":1}', '["\\\\",[]]'])
def test_a_body_of_more_parts_than_are_read_is_refused(part: str) -> None:
    allowed = (MAX_PARTS - 3) // parts(json.loads(part))
    assert parse_object(f'{{"a":[{",".join([part] * allowed)}]}}'.encode())
    with pytest.raises(ApiError, match=f"objects, lists and fields; at most {MAX_PARTS}") as refused:
        parse_object(f'{{"a":[{",".join([part] * (allowed + 1))}]}}'.encode())
    assert refused.value.status == 400


def test_a_body_of_more_fields_than_are_read_is_refused() -> None:
    fields = [f'"{number}":1' for number in range(MAX_PARTS)]
    assert len(parse_object(f"{{{','.join(fields[1:])}}}".encode())) == MAX_PARTS - 1
    with pytest.raises(ApiError, match=str(MAX_PARTS + 1)):
        parse_object(f"{{{','.join(fields)}}}".encode())


def test_strings_and_numbers_are_no_parts() -> None:
    body = json.dumps({"brackets": '[{:"\\' * MAX_PARTS, "ids": [1] * (2 * MAX_PARTS), "words": [""] * (2 * MAX_PARTS)})
    assert parse_object(body.encode())["brackets"] == '[{:"\\' * MAX_PARTS
