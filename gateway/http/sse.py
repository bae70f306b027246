"""Server-sent events as OpenAI's clients read them: one `data:` line an event, and nothing but `data:` lines.

JSON escapes line breaks, so an encoded struct never holds a raw one.
Source: HTML Living Standard, section 9.2.6, "Interpreting an event stream".
"""

from __future__ import annotations

import msgspec

from gateway.http.errors import ApiError

HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store", "x-accel-buffering": "no"}
DONE = b"data: [DONE]\n\n"
# A comment, not an event: it keeps proxies from closing a stream that waits.
KEEPALIVE = b": keepalive\n\n"


def event(chunk: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """The last event of a stream that failed after its headers were sent."""
    return b"data: " + error.encode() + b"\n\n"
