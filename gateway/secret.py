"""A secret as a type: bytes that refuse to be printed, formatted, pickled or compared in variable time."""

from __future__ import annotations

import hmac
from typing import NoReturn


class Secret:
    """Bytes that only `reveal()` hands out.

    `repr` names the type and nothing else, so a secret in a traceback, a dataclass or a log record stays
    one. Formatting, pickling and copying raise `TypeError`: whoever needs the bytes says so.
    """

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        self._value = bytes(value)

    def reveal(self) -> bytes:
        return self._value

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    def __str__(self) -> NoReturn:
        raise TypeError("a secret is not printed; call reveal() where the bytes are needed")

    def __format__(self, spec: str) -> NoReturn:
        raise TypeError("a secret is not formatted; call reveal() where the bytes are needed")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a secret is not pickled or copied")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._value, other._value)

    __hash__ = None  # type: ignore[assignment]  # a secret is no dictionary key: look-ups are not constant-time
