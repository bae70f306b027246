"""Lists in pages: `?limit=` and an opaque `?cursor=`, which names the row before the page by what it is ordered by."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from starlette.requests import Request

from gateway.admin.query import query_values
from gateway.admin.shapes import DEFAULT_LIMIT, MAX_LIMIT, Page, PageQuery
from gateway.http.errors import ApiError, bad_value

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_POSITION = re.compile(r"([0-9]{1,16})\.([a-z]{3}_[0-9a-z]{1,28})")

Row = TypeVar("Row")
Body = TypeVar("Body")


@dataclass(frozen=True, slots=True)
class Window:
    """Which rows a request asks for. `cursor` is decoded but not yet understood."""

    limit: int
    cursor: str | None


def window(request: Request, known: type[PageQuery] = PageQuery) -> Window:
    """
    Args:
        known: its fields are the query parameters that the route knows.

    Raises:
        ApiError: 400 for an unknown or repeated parameter, and for one out of range.
    """
    values = query_values(request, known)
    limit = values.get("limit", str(DEFAULT_LIMIT))
    if not re.fullmatch(r"[0-9]{1,4}", limit) or not 1 <= int(limit) <= MAX_LIMIT:
        raise bad_value("limit", f"limit must be a number from 1 to {MAX_LIMIT}.")
    cursor = values.get("cursor")
    try:
        decoded = None if cursor is None else base64.b64decode(cursor, b"-_", validate=True).decode("ascii")
    except ValueError:
        raise _bad_cursor() from None
    return Window(int(limit), decoded)


def after_row(asked: Window) -> tuple[datetime, str] | None:
    """The cursor of a list ordered by time made and id."""
    if asked.cursor is None:
        return None
    match = _POSITION.fullmatch(asked.cursor)
    if match is None:
        raise _bad_cursor()
    return _EPOCH + timedelta(microseconds=int(match[1])), match[2]


def after_number(asked: Window) -> int:
    """The cursor of a list ordered by a number from 1 up."""
    if asked.cursor is None:
        return 0
    if not re.fullmatch(r"[0-9]{1,18}", asked.cursor):
        raise _bad_cursor()
    return int(asked.cursor)


def row_position(created_at: datetime, row_id: str) -> str:
    return f"{(created_at - _EPOCH) // timedelta(microseconds=1)}.{row_id}"


def page(rows: Sequence[Row], limit: int, body: Callable[[Row], Body], position: Callable[[Row], str]) -> Page[Body]:
    """
    Args:
        rows: what was found, asked for with one more than `limit`: whether there is more.
    """
    more = len(rows) > limit
    cursor = base64.urlsafe_b64encode(position(rows[limit - 1]).encode("ascii")).decode() if more else None
    return Page([body(row) for row in rows[:limit]], cursor)


def _bad_cursor() -> ApiError:
    return bad_value("cursor", "cursor must be a next_cursor of this list.")
