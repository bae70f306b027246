"""The one way a request body becomes typed values: bytes → strict UTF-8 → one JSON pass → a msgspec struct."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Collection
from itertools import accumulate
from typing import Any, NoReturn, TypeVar

import msgspec
from starlette.requests import Request

from gateway.http.errors import CLOSE, JSON, ApiError

MAX_BODY_BYTES = 4 << 20
MAX_DEPTH = 64
# What four mebibytes can hold takes a parser seconds at worst. All this is counted before, a hundred times faster, so
# that whatever a body holds costs less than 50 ms.
MAX_PARTS = 1 << 15
MAX_VALUES = 1 << 17
MAX_SLOW_VALUES = 1 << 14
MAX_BACKSLASHES = 1 << 19
# What takes a few milliseconds at most; larger bodies are parsed in a thread, as the event loop serves everybody.
PARSED_ON_LOOP_BYTES = 128 << 10
MERGE_PATCH = "application/merge-patch+json"

T = TypeVar("T")

_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS = bytes(set(range(256)) - _STEPS.keys())
_BOM = b"\xef\xbb\xbf"
_DIGITS_TO_ZERO = bytes.maketrans(b"123456789", bytes(b"0" * 9))
# Integers of so many digits might not fit.
_LONG_INTEGER = b"0" * 19
_PATH = re.compile(r"(?s)(.*?)(?: - at `(?:\w+` in `)?\$\.?(.*)`)?")
_NAMED_FIELD = re.compile(r"(?:missing required|unknown) field `(\w+)`")
_MESSAGE_LIMIT_CHARACTERS = 200


async def read_struct(request: Request, type: type[T], accepted: Collection[str] = (JSON,)) -> T:
    """The body as a `type`, which must be a struct.

    Raises:
        ApiError: as `read_object` and `convert` do.
    """
    return convert(await read_object(request, accepted), type)


async def read_object(request: Request, accepted: Collection[str] = (JSON,)) -> dict[str, Any]:
    """The body as a JSON object.

    Raises:
        ApiError: 415 for another content type than `accepted`, 413 for more than `MAX_BODY_BYTES` (declared
            or received), 400 for what `parse_object` refuses.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in accepted:
        raise ApiError(415, f"Send the body with content-type {' or '.join(accepted)}.")
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise _too_large()
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise _too_large()
    if len(body) <= PARSED_ON_LOOP_BYTES:
        return parse_object(bytes(body))
    return await asyncio.to_thread(parse_object, bytes(body))


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object that `body` spells (RFC 8259), a leading byte-order mark dropped.

    Raises:
        ApiError: 400 for invalid UTF-8 or JSON, duplicate keys, NaN and Infinity, nesting over `MAX_DEPTH`, more
            than `MAX_PARTS` or `MAX_VALUES`, lone surrogates, integers beyond 64 bits, anything but an object.
    """
    body = body.removeprefix(_BOM)
    outside = _outside_strings(body)
    _limit(_count_parts(outside), MAX_PARTS, "objects, lists and fields")
    if _depth(outside) > MAX_DEPTH:
        raise ApiError(400, f"The body is nested more than {MAX_DEPTH} deep.")
    values = outside.count(b",")
    _limit(values, MAX_VALUES, "values or more")
    _limit(sum(map(outside.count, (b".", b"e", b"E"))), MAX_SLOW_VALUES, "fractions, exponents and booleans")
    parse_int = None
    if _LONG_INTEGER in outside.translate(_DIGITS_TO_ZERO):
        # The hook costs time for every integer, so it runs only where one might not fit.
        _limit(values, MAX_SLOW_VALUES, "values or more, and an integer of 19 digits among them")
        parse_int = _integer
    try:
        text = body.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant, parse_int=parse_int)
        if b"\\u" in body:
            # Only an escape can bring half a surrogate pair into a string that was valid UTF-8.
            msgspec.json.encode(value)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"The body is not UTF-8: invalid at byte {error.start}.") from None
    except UnicodeEncodeError:
        raise ApiError(400, "The body has half a surrogate pair in a string; escape whole characters.") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise ApiError(400, f"The body is not JSON: {error.msg} at {where}.") from None
    if not isinstance(value, dict):
        raise ApiError(400, "The body must be a JSON object.")
    return value


def convert(value: object, type: type[T]) -> T:
    """`value` as a `type`.

    Raises:
        ApiError: 400 whose `param` is the path of the first value that does not fit.
    """
    try:
        return msgspec.convert(value, type)
    except msgspec.ValidationError as error:
        match = _PATH.fullmatch(str(error))
        message, path = match.groups() if match else (str(error), None)
        if named := _NAMED_FIELD.search(message):
            path = f"{path}.{named[1]}" if path else named[1]
        message = message[:_MESSAGE_LIMIT_CHARACTERS]
        raise ApiError(400, f"{message}.", code="unsupported_value", param=path or None) from None


def _limit(count: int, most: int, what: str) -> None:
    if count > most:
        raise ApiError(400, f"The body has {count} {what}; at most {most} are read.")


def _outside_strings(body: bytes) -> bytes:
    """All that is no string's content."""
    backslashes = body.count(b"\\")
    _limit(backslashes, MAX_BACKSLASHES, "backslashes")
    if backslashes:
        # They occur in strings only, so without what they escape every quote begins or ends a string.
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    _limit(body.count(b'"') // 2, MAX_PARTS + MAX_VALUES, "strings")
    return b"".join(body.split(b'"')[::2])


def _count_parts(outside: bytes) -> int:
    """Objects, lists and fields, or at least as many as a parser meets before an error.

    Each is an object that the garbage collector walks, again and again while a parser makes more of them: a million
    in four mebibytes held everything up for two seconds.
    """
    return sum(map(outside.count, (b"[", b"{", b":")))


def _depth(outside: bytes) -> int:
    """How deep lists and objects are nested, or at least as deep as a parser gets before an error."""
    return max(accumulate(map(_STEPS.__getitem__, outside.translate(None, _NO_BRACKETS))), default=0)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ApiError(400, "The body has an object with the same key twice.")
    return value


def _integer(digits: str) -> int:
    if len(digits) > 20 or not -(1 << 63) <= (value := int(digits)) < 1 << 64:
        raise ApiError(400, "The body has an integer of more than 64 bits.")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ApiError(400, f"The body has {name}, which is not JSON.")


def _too_large() -> ApiError:
    # What is left of the body will not be read, so the connection can't be used again.
    message = f"The body is larger than {MAX_BODY_BYTES} bytes."
    return ApiError(413, message, headers=(CLOSE,))
