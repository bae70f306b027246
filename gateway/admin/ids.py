"""Ids in paths. One that nothing has, one of somebody else's and one that is no id answer alike."""

from __future__ import annotations

import re

from starlette.requests import Request

from gateway.http.errors import ApiError

_ID = re.compile(r"[a-z]{3}_[0-9a-z]{1,28}")


def id_of(request: Request, name: str) -> str:
    """Raises ApiError: 404."""
    value: str = request.path_params[name]
    if not _ID.fullmatch(value):
        raise not_found()
    return value


def not_found() -> ApiError:
    return ApiError(404, "There is no such tenant or key.", code="not_found")
