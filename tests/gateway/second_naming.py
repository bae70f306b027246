"""A second implementation of block naming and the encodings around it, to cross-check the gateway's own.

Written from the specification alone, on the standard library's `hashlib`, `hmac` and `zlib`, by somebody who
had not seen the first. It is slow and plain on purpose and imports nothing of ours: two programs that share
a line share its bug.
"""

import hashlib
import hmac
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

KEY_BYTES = 32
SAMPLE_BYTES = 4096
WHOLE_BELOW_BYTES = 12 * 1024
BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
CONFIG_KEYS_LEFT_OUT = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")

Tensor = tuple[str, Sequence[int], bytes]


@dataclass(frozen=True, slots=True)
class Context:
    """What a block's numbers depend on besides its tokens, in the order in which it is hashed."""

    model_fingerprint: bytes
    tokenizer_fingerprint: bytes
    dtype: str
    kv_dtype: str
    block_tokens: int
    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    layout_version: int
    rope_context_tokens: int
    scope: str


def E(label: str, *fields: bytes | str | int) -> bytes:
    """label ‖ 0x00 ‖ Σ (u32be(len) ‖ field); integers are 8 bytes big-endian, strings UTF-8.

    Raises ValueError for a label that is not ASCII, has a NUL or lacks the prefix, OverflowError for an
    integer outside 0 … 2⁶⁴ − 1 or a field of 2³² bytes and more.
    """
    if not label.startswith("saltern/v1/") or not label.isascii() or "\0" in label:
        raise ValueError(f"label {label!r} must be ASCII without NUL and start with saltern/v1/")
    encoded = label.encode("ascii") + b"\0"
    for field in fields:
        if isinstance(field, int):
            field = field.to_bytes(8, "big")
        elif isinstance(field, str):
            field = field.encode("utf-8")
        encoded += len(field).to_bytes(4, "big") + field
    return encoded


def hkdf_extract(salt: bytes, ikm: bytes) -> bytes:
    """RFC 5869 section 2.2 with SHA-256; an absent salt is 32 zero bytes."""
    return hmac.digest(salt or bytes(32), ikm, "sha256")


def hkdf_expand(prk: bytes, info: bytes, length_bytes: int) -> bytes:
    """RFC 5869 section 2.3 with SHA-256; raises ValueError beyond 255 · 32 bytes."""
    if length_bytes > 255 * 32:
        raise ValueError(f"HKDF-SHA256 yields at most {255 * 32} bytes, not {length_bytes}")
    okm, block, counter = b"", b"", 0
    while len(okm) < length_bytes:
        counter += 1
        block = hmac.digest(prk, block + info + bytes([counter]), "sha256")
        okm += block
    return okm[:length_bytes]


def kdf(secret: bytes, info: bytes) -> bytes:
    """HKDF-SHA256 without salt, 32 bytes."""
    return hkdf_expand(hkdf_extract(b"", secret), info, KEY_BYTES)


def context_digest(context: Context) -> bytes:
    """SHA-256 of the encoded context; raises ValueError unless both fingerprints are 32 raw bytes."""
    if not len(context.model_fingerprint) == len(context.tokenizer_fingerprint) == 32:
        raise ValueError(
            f"fingerprints are 32 raw bytes each, not {len(context.model_fingerprint)}"
            f" and {len(context.tokenizer_fingerprint)}"
        )
    encoded = E(
        "saltern/v1/context",
        context.model_fingerprint,
        context.tokenizer_fingerprint,
        context.dtype,
        context.kv_dtype,
        context.block_tokens,
        context.layers,
        context.kv_heads,
        context.key_dim,
        context.value_dim,
        context.layout_version,
        context.rope_context_tokens,
        context.scope,
    )
    return hashlib.sha256(encoded).digest()


def chain_key(salt: bytes, digest: bytes) -> bytes:
    """The HMAC key of every link of one tenant, epoch and context; `digest` is `context_digest`'s."""
    return kdf(salt, E("saltern/v1/chain", digest))


def root(chain: bytes) -> bytes:
    """key[-1], the parent of every first block under one chain key."""
    return hmac.digest(chain, E("saltern/v1/root"), "sha256")


def block_keys(chain: bytes, tokens: Sequence[int], block_tokens: int) -> list[bytes]:
    """The keys of the full blocks of `tokens`, 32 bytes each; a partial last block has none.

    Raises OverflowError for a token id outside 0 … 2³² − 1.
    """
    keys: list[bytes] = []
    parent = root(chain)
    for end in range(block_tokens, len(tokens) + 1, block_tokens):
        message = parent
        for token in tokens[end - block_tokens : end]:
            message += token.to_bytes(4, "little")
        parent = hmac.digest(chain, message, "sha256")
        keys.append(parent)
    return keys


def tokenizer_fingerprint(files: Mapping[str, bytes]) -> bytes:
    """SHA-256 over the named digests of those four tokenizer files that exist, in the order listed above."""
    joined = b""
    for name in TOKENIZER_FILES:
        if name in files:
            joined += E("saltern/v1/file", name, hashlib.sha256(files[name]).digest())
    return hashlib.sha256(joined).digest()


def model_fingerprint(config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> bytes:
    """SHA-256 over the canonical config and, per tensor sorted by name, its (dtype, dims, sampled bytes)."""
    kept = {key: value for key, value in config.items() if key not in CONFIG_KEYS_LEFT_OUT}
    canonical = json.dumps(kept, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    joined = canonical.encode("utf-8")
    for name in sorted(tensors):
        dtype, dims, data = tensors[name]
        if len(data) < WHOLE_BELOW_BYTES:
            samples = [data]
        else:
            middle = (len(data) - SAMPLE_BYTES) // 2
            samples = [data[:SAMPLE_BYTES], data[middle : middle + SAMPLE_BYTES], data[-SAMPLE_BYTES:]]
        joined += E("saltern/v1/tensor", name, dtype, *dims, *samples)
    return hashlib.sha256(joined).digest()


def wrap_aad(purpose: str, tenant_id: str, epoch: int, wrapping_kek_id: str) -> bytes:
    """What AES-256-GCM authenticates beside a wrapped secret."""
    return E("saltern/v1/wrap", purpose, tenant_id, epoch, wrapping_kek_id)


def kek_id(key: bytes) -> str:
    """The 16 hex digits by which a key-encryption key is called."""
    return hashlib.sha256(E("saltern/v1/kek-id", key)).hexdigest()[:16]


def base62(number: int, digits: int) -> str:
    """`number` with leading zeros, most significant digit first; raises ValueError when it does not fit."""
    if not 0 <= number < 62**digits:
        raise ValueError(f"does not fit {digits} base62 digits")
    text = ""
    for _ in range(digits):
        number, digit = divmod(number, 62)
        text = BASE62[digit] + text
    return text


def api_key_crc(text: str) -> str:
    """The last six characters of an API key, from all before them."""
    return base62(zlib.crc32(text.encode("ascii")), 6)


def api_key(key_id: str, secret: bytes) -> str:
    """A tenant's API key; `key_id` is 12 of [0-9a-z], `secret` 32 bytes."""
    text = f"sk-saltern-{key_id}-{base62(int.from_bytes(secret, 'big'), 43)}"
    return text + api_key_crc(text)


def admin_api_key(key_id: str, secret: bytes) -> str:
    """An administrator's API key, same parts."""
    text = f"sk-saltern-admin-{key_id}-{base62(int.from_bytes(secret, 'big'), 43)}"
    return text + api_key_crc(text)
