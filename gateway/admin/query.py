"""Query parameters: each known, and each given once."""

from __future__ import annotations

import msgspec
from starlette.requests import Request

from gateway.http.errors import ApiError


def query_values(request: Request, known: type[msgspec.Struct]) -> dict[str, str]:
    """
    Args:
        known: its fields are the query parameters that the route knows.

    Raises:
        ApiError: 400 for an unknown or repeated parameter.
    """
    query = request.query_params.multi_items()
    for name, _ in query:
        if name not in known.__struct_fields__:
            raise ApiError(400, f"Unknown query parameter; this list takes {', '.join(known.__struct_fields__)}.")
    if len({name for name, _ in query}) != len(query):
        raise ApiError(400, "A query parameter is given twice.")
    return dict(query)
