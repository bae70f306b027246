"""The one byte encoding that everything hashed, signed or wrapped is written in.

`E(label, f1, …, fn) = label ‖ 0x00 ‖ Σ (u32be(len(fi)) ‖ fi)`: length prefixes make it injective, so that
("org_1", "2345") and ("org_12345", "") differ. Pure; both processes use it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

LABEL_PREFIX = "saltern/v1/"

# The files whose bytes decide how text becomes tokens, in the order they are hashed.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def encode(label: str, *fields: bytes | str | int) -> bytes:
    """`E(label, *fields)`: strings as UTF-8, integers as 8 bytes big-endian (0 ≤ n < 2^64).

    Raises:
        ValueError: the label lacks the prefix or is not ASCII, or an integer does not fit.
    """
    if not label.startswith(LABEL_PREFIX) or not label.isascii() or "\0" in label:
        raise ValueError(f"label must be ASCII and start with {LABEL_PREFIX!r}")
    parts = [label.encode("ascii"), b"\0"]
    for field in fields:
        if isinstance(field, bool):
            raise ValueError("a bool has no encoding: write what it stands for")
        if isinstance(field, int):
            if not 0 <= field < 1 << 64:
                raise ValueError("an integer field must be within 0 .. 2^64 - 1")
            field = field.to_bytes(8, "big")
        elif isinstance(field, str):
            field = field.encode("utf-8")
        parts += (len(field).to_bytes(4, "big"), field)
    return b"".join(parts)


def tokenizer_fingerprint(files: Mapping[str, bytes]) -> bytes:
    """32 bytes that name a tokenizer by content: SHA-256 over `E(file, name, SHA-256)` of each file that exists.

    Args:
        files: content by name; names other than `TOKENIZER_FILES` are an error, missing ones are skipped.
    """
    if unknown := set(files) - set(TOKENIZER_FILES):
        raise ValueError(f"not a tokenizer file: {sorted(unknown)}")
    digest = hashlib.sha256()
    for name in TOKENIZER_FILES:
        if name in files:
            digest.update(encode("saltern/v1/file", name, hashlib.sha256(files[name]).digest()))
    return digest.digest()
