"""A new API key: the text that is shown once, and the row that stays."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from datetime import datetime
from typing import TypedDict

from gateway.secret import Secret
from gateway.tenants import api_keys
from gateway.tenants.api_keys import Kind
from gateway.tenants.keyring import PEPPER_VERSION, Keyring


class SecretRow(TypedDict):
    """What a row holds of its key's secret."""

    digest: bytes
    pepper_version: int
    last4: str


class KeyRow(SecretRow):
    """The values of `tables.KeyColumns`."""

    id: str
    name: str | None
    scopes: list[str]
    status: str
    created_at: datetime
    expires_at: datetime | None


@dataclass(frozen=True, slots=True)
class NewKey:
    text: Secret
    row: KeyRow


async def new_key(
    keyring: Keyring,
    kind: Kind,
    scopes: frozenset[str],
    now: datetime,
    name: str | None = None,
    expires_at: datetime | None = None,
) -> NewKey:
    """A random key, not yet in any table.

    Raises:
        SaltUnavailable: the pepper does not open.
    """
    key_id = "key_" + random_id(api_keys.ID_DIGITS)
    text, secret = await new_secret(keyring, kind, key_id)
    row = KeyRow(
        id=key_id,
        name=name,
        scopes=sorted(scopes),
        status="active",
        created_at=now,
        expires_at=expires_at,
        **secret,
    )
    return NewKey(text, row)


async def new_secret(keyring: Keyring, kind: Kind, key_id: str) -> tuple[Secret, SecretRow]:
    """A random secret for a key: the key's text, and what its row then holds. Raises as `new_key`."""
    text = api_keys.mint(kind, key_id.removeprefix("key_"), os.urandom(api_keys.SECRET_BYTES))
    parsed = api_keys.parse(kind, text.reveal())
    if parsed is None or parsed.id != key_id:
        raise RuntimeError("a key that was just made does not parse")
    digest = await keyring.digest(parsed.secret, PEPPER_VERSION)
    last4 = text.reveal()[-4:].decode()
    return text, SecretRow(digest=digest, pepper_version=PEPPER_VERSION, last4=last4)


def random_id(digits: int) -> str:
    return "".join(secrets.choice(api_keys.ID_ALPHABET) for _ in range(digits))
