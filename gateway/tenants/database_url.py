"""The URL of a database as anybody may see it."""

from __future__ import annotations

from urllib.parse import quote

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from gateway.settings import HIDDEN


def without_secrets(url: str) -> str:
    """The URL without its password and the values of its query, where drivers take some; what is no URL is hidden."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        return HIDDEN
    if "@" in (parsed.host or "") or (parsed.host and "@" in (parsed.database or "")):
        # Of a password or a name before it that was not escaped.
        return HIDDEN
    parsed = parsed.set(query=dict.fromkeys(parsed.query, HIDDEN))
    return parsed.render_as_string(hide_password=True).replace(quote(HIDDEN), HIDDEN)
