"""API keys as text: what one looks like, how one is made, read and hashed. Pure.

    sk-saltern-        id 12 × [0-9a-z]  -  secret 43 × base62  crc 6 × base62       a tenant's key
    sk-saltern-admin-  id                -  secret              crc                  an admin key

The secret is 32 random bytes as one big-endian number; the crc is CRC-32 (zlib) over everything before it, so
that a typo is refused without a look-up.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from gateway.secret import Secret

Kind = Literal["tenant", "admin"]

PREFIXES: dict[Kind, str] = {"tenant": "sk-saltern-", "admin": "sk-saltern-admin-"}
ID_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"
ID_DIGITS = 12
SECRET_BYTES = 32

_BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_SECRET_DIGITS = 43
_CRC_DIGITS = 6
_TEXT = {
    kind: re.compile(
        f"{prefix}([0-9a-z]{{{ID_DIGITS}}})-([0-9A-Za-z]{{{_SECRET_DIGITS}}})[0-9A-Za-z]{{{_CRC_DIGITS}}}".encode()
    )
    for kind, prefix in PREFIXES.items()
}


@dataclass(frozen=True, slots=True)
class ParsedKey:
    """A well-formed key: `id` as the API shows it, `secret` the digits that are hashed. Not yet known to be valid."""

    id: str
    secret: Secret


def mint(kind: Kind, id_digits: str, secret: bytes) -> Secret:
    """The text of a new key.

    Args:
        id_digits: 12 random digits of `ID_ALPHABET`.
        secret: 32 random bytes.
    """
    if len(id_digits) != ID_DIGITS or len(secret) != SECRET_BYTES:
        raise ValueError(f"a key is made of {ID_DIGITS} id digits and {SECRET_BYTES} secret bytes")
    body = f"{PREFIXES[kind]}{id_digits}-{_base62(int.from_bytes(secret, 'big'), _SECRET_DIGITS)}".encode()
    return Secret(body + _crc(body))


def parse(kind: Kind, text: bytes) -> ParsedKey | None:
    """The key that `text` spells, or None if it is malformed or of another kind."""
    match = _TEXT[kind].fullmatch(text)
    if match is None or not hmac.compare_digest(_crc(text[:-_CRC_DIGITS]), text[-_CRC_DIGITS:]):
        return None
    return ParsedKey("key_" + match[1].decode(), Secret(match[2]))


def digest(pepper: Secret, secret: Secret) -> bytes:
    """The 32 bytes that the database holds of a key: HMAC-SHA256(pepper, secret digits)."""
    return hmac.digest(pepper.reveal(), secret.reveal(), hashlib.sha256)


def credential(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The one credential of a request, from `Authorization: Bearer` or `x-api-key`.

    None where there is none, and where there are two: a proxy and we might not choose the same one.

    Args:
        headers: lower-case names and raw values, as ASGI gives them.
    """
    bearer = [value for name, value in headers if name == b"authorization"]
    direct = [value for name, value in headers if name == b"x-api-key"]
    if len(bearer) > 1 or len(direct) > 1 or not (bearer or direct):
        return None
    for value in bearer:
        scheme, _, token = value.partition(b" ")
        if scheme.lower() != b"bearer" or (direct and not hmac.compare_digest(token, direct[0])):
            return None
        return token
    return direct[0]


def _crc(body: bytes) -> bytes:
    return _base62(zlib.crc32(body), _CRC_DIGITS).encode()


def _base62(number: int, digits: int) -> str:
    text = ""
    for _ in range(digits):
        number, digit = divmod(number, 62)
        text = _BASE62[digit] + text
    return text
