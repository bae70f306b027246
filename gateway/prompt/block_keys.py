"""Names for blocks that only the holder of a tenant's salt can produce.

    context   = SHA-256(E("saltern/v1/context", every field of Context in order))
    chain key = HKDF-SHA256(ikm=salt, salt=None, info=E("saltern/v1/chain", context), length=32)
    key[-1]   = HMAC-SHA256(chain key, E("saltern/v1/root"))
    key[i]    = HMAC-SHA256(chain key, key[i-1] ‖ tokens of block i as u32le)

E is `policies.encoding.encode`. Every key binds its parent, so a key names the whole prefix; the salt keys every
link, so a key that somebody saw cannot be extended. Sources: RFC 2104 (HMAC), RFC 5869 (HKDF).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from cachestore.protocol import KEY_BYTES, TOKEN_BYTES, Welcome
from gateway.secret import Secret
from policies.encoding import encode

_ROOT = encode("saltern/v1/root")
_SHA256_BLOCK_BYTES = 64
_INNER = bytes(byte ^ 0x36 for byte in range(256))
_OUTER = bytes(byte ^ 0x5C for byte in range(256))


@dataclass(frozen=True, slots=True)
class Context:
    """What a block's contents depend on beside its tokens; blocks of different contexts never share a name.

    Attributes:
        model_fingerprint, tokenizer_fingerprint: 32 bytes each.
        dtype, kv_dtype: `fp32`, `bf16`, `fp16`; for the cache also `int8`, `fp8`.
        rope_context_tokens: 0 for plain RoPE.
        scope: empty, or the caller's `cache_salt`: it splits a tenant's own cache.
    """

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
    scope: bytes

    @classmethod
    def of_store(cls, store: Welcome, scope: bytes) -> Context:
        geometry = store.geometry
        return cls(
            model_fingerprint=store.model_fingerprint,
            tokenizer_fingerprint=store.tokenizer_fingerprint,
            dtype=store.dtype,
            kv_dtype=geometry.kv_dtype,
            block_tokens=geometry.block_tokens,
            layers=geometry.layers,
            kv_heads=geometry.kv_heads,
            key_dim=geometry.key_dim,
            value_dim=geometry.value_dim,
            layout_version=geometry.layout_version,
            rope_context_tokens=geometry.rope_context_tokens,
            scope=scope,
        )

    def digest(self) -> bytes:
        # Not `astuple`, which copies every value as if it could change: every request asks this.
        values = (getattr(self, name) for name in self.__slots__)
        return hashlib.sha256(encode("saltern/v1/context", *values)).digest()


class ChainKey(Secret):
    """Names the blocks of one salt and context.

    HMAC's two hash states are prepared once and copied for each block: the same bytes at under half the time.

    Attributes:
        block_bytes: of a block's tokens as u32le.
        root: 32 bytes, the parent of every first block.
    """

    __slots__ = ("_inner", "_outer", "block_bytes", "root")

    def __init__(self, salt: Secret, context: Context) -> None:
        info = encode("saltern/v1/chain", context.digest())
        super().__init__(HKDF(algorithm=SHA256(), length=32, salt=None, info=info).derive(salt.reveal()))
        padded = self.reveal().ljust(_SHA256_BLOCK_BYTES, b"\0")
        self._inner = hashlib.sha256(padded.translate(_INNER))
        self._outer = hashlib.sha256(padded.translate(_OUTER))
        self.block_bytes = context.block_tokens * TOKEN_BYTES
        self.root = self._name(_ROOT)

    def extend(self, parent: bytes, tokens: bytes) -> list[bytes]:
        """The keys of the blocks that follow `parent` (a key, or `root`), 32 bytes each.

        Args:
            tokens: u32le each, whole blocks.

        Raises:
            ValueError: the parent is no key, or `tokens` is not whole blocks.
        """
        if len(parent) != KEY_BYTES or len(tokens) % self.block_bytes:
            sizes = f"{len(parent)} and {len(tokens)} bytes"
            raise ValueError(f"a parent of {KEY_BYTES} bytes and blocks of {self.block_bytes} are needed, not {sizes}")
        keys = []
        for start in range(0, len(tokens), self.block_bytes):
            parent = self._name(parent + tokens[start : start + self.block_bytes])
            keys.append(parent)
        return keys

    def _name(self, message: bytes) -> bytes:
        inner = self._inner.copy()
        inner.update(message)
        outer = self._outer.copy()
        outer.update(inner.digest())
        return outer.digest()
