"""The one way a request body becomes typed values: bytes → strict UTF-8 → one JSON pass → a msgspec struct."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Collection
from typing import Any, NoReturn, TypeVar

import msgspec
from starlette.requests import Request

from gateway.http.errors import CLOSE, JSON, ApiError

MAX_BODY_BYTES = 4 << 20
MAX_DEPTH = 64
MAX_PARTS = 1 << 16
# What takes a few milliseconds at most; larger bodies are parsed in a thread, as the event loop serves everybody.
PARSED_ON_LOOP_BYTES = 128 << 10
MERGE_PATCH = "application/merge-patch+json"

T = TypeVar("T")

# Only an escape can bring half a surrogate pair into a string that was valid UTF-8.
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
# Hooks cost time for every number, so they run only where one might not fit.
_LONG_INTEGER = re.compile(r"[0-9]{19}")
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
            than `MAX_PARTS`, lone surrogates, integers beyond 64 bits, and for anything but an object.
    """
    try:
        text = body.decode("utf-8").removeprefix("\ufeff")
        parts = _count_parts(text)
        if parts > MAX_PARTS:
            raise ApiError(400, f"The body has {parts} objects, lists and fields; at most {MAX_PARTS} are read.")
        parse_int = _integer if _LONG_INTEGER.search(text) else None
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant, parse_int=parse_int)
        if _SURROGATE_ESCAPE.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(400, f"The body is not UTF-8: invalid at byte {error.start}.") from None
    except UnicodeEncodeError:
        raise ApiError(400, "The body has half a surrogate pair in a string; escape whole characters.") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise ApiError(400, f"The body is not JSON: {error.msg} at {where}.") from None
    except RecursionError:
        raise _too_deep() from None
    if not isinstance(value, dict):
        raise ApiError(400, "The body must be a JSON object.")
    # Most bodies have too few parts to be too deep.
    if parts > MAX_DEPTH:
        _check_depth(value)
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


def _count_parts(text: str) -> int:
    """Objects, lists and fields, or at least as many as a parser meets before an error.

    Each is an object that the garbage collector walks, again and again while a parser makes more of them: a million
    in four mebibytes held everything up for two seconds.
    """
    # Backslashes occur in strings only, so without what they escape every quote begins or ends a string.
    outside_strings = "".join(text.replace("\\\\", "").replace('\\"', "").split('"')[::2])
    return sum(map(outside_strings.count, "[{:"))


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


def _check_depth(value: dict[str, Any]) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        nodes = (node.values() if isinstance(node, dict) else node for node in level)
        level = [child for node in nodes for child in node if isinstance(child, (dict, list))]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ApiError:
    return ApiError(400, f"The body is nested more than {MAX_DEPTH} deep.")


def _too_large() -> ApiError:
    # What is left of the body will not be read, so the connection can't be used again.
    message = f"The body is larger than {MAX_BODY_BYTES} bytes."
    return ApiError(413, message, headers=(CLOSE,))
