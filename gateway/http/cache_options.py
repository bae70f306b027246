"""`prompt_cache_options` of a request: how long, at least, its caller wants its blocks kept. Source: OpenAI's API."""

from __future__ import annotations

import re
from typing import Annotated, Any

from msgspec import Meta

from cachestore.protocol import MAX_TTL_SECONDS
from gateway.http.errors import bad_value

NAME = "prompt_cache_options"
TTL = r"^([1-9][0-9]{0,4})([smh])$"
_SECONDS = {"s": 1, "m": 60, "h": 3600}

CacheOptions = Annotated[
    dict[str, Any],
    Meta(
        extra_json_schema={
            "properties": {
                "ttl": {"type": ["string", "null"], "pattern": TTL, "description": "From 1s to 24h."},
                "mode": {"enum": [None, "implicit"]},
            },
            "additionalProperties": False,
        }
    ),
]


def read_ttl_seconds(options: dict[str, Any]) -> int:
    """0 for none. Messages repeat nothing of what was sent.

    Raises:
        ApiError: 400 for what is no lifetime, another mode than `implicit`, or anything else in the object.
    """
    if options.keys() - {"ttl", "mode"}:
        raise bad_value(NAME, f"{NAME} has ttl and mode, and nothing else.")
    if options.get("mode") not in (None, "implicit"):
        message = f'The only mode of {NAME} here is "implicit": every whole block is cached, and none can be chosen.'
        raise bad_value(NAME, message)
    if (ttl := options.get("ttl")) is None:
        return 0
    match = re.fullmatch(TTL, ttl) if isinstance(ttl, str) else None
    seconds = int(match[1]) * _SECONDS[match[2]] if match else 0
    if not 0 < seconds <= MAX_TTL_SECONDS:
        raise bad_value(NAME, f'The ttl of {NAME} is a whole number and s, m or h, from 1s to 24h, such as "30m".')
    return seconds
