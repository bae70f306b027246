"""Whether a secret is readable in some bytes, however somebody wrote it down."""

from __future__ import annotations

import base64
from collections.abc import Iterator


def spellings(secret: bytes) -> Iterator[bytes]:
    """How somebody might have written it down."""
    yield secret
    yield secret.hex().encode()
    yield secret.hex().upper().encode()
    yield base64.b64encode(secret).rstrip(b"=")
    yield base64.urlsafe_b64encode(secret).rstrip(b"=")
    yield repr(secret)[2:-1].encode()


def found(secret: bytes, text: bytes) -> bool:
    return any(spelling in text for spelling in spellings(secret))
