"""The arithmetic of KV blocks: what a token takes, and where in a block each layer's keys and values lie.

    block │ layer 0: K [kv_heads, block_tokens, key_dim] · V [kv_heads, block_tokens, value_dim] │ layer 1 … │ pad

One block is one run of bytes with all layers in it, so that it moves between tiers as one copy. Nobody else knows
an offset.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BLOCK_TOKENS = (8, 16, 32, 64, 128)
SECTION_ALIGNMENT_BYTES = 128  # a cache line of the device: loads of a section start aligned
BLOCK_ALIGNMENT_BYTES = 512  # a sector: blocks can go to a disk without passing through a buffer


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """One block of a model's KV cache. Raises `ValueError` for sizes that have no layout."""

    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    block_tokens: int
    element_bytes: int

    def __post_init__(self) -> None:
        if self.block_tokens not in BLOCK_TOKENS:
            raise ValueError(f"a block of {self.block_tokens} tokens is not offered: choose from {BLOCK_TOKENS}")
        sizes = (self.layers, self.kv_heads, self.key_dim, self.value_dim, self.element_bytes)
        if min(sizes) < 1:
            raise ValueError(f"layers, heads, dims and element bytes must be positive: {sizes}")

    @property
    def bytes_per_token(self) -> int:
        """What a token's keys and values take in all layers, padding left out."""
        return self.layers * self.kv_heads * (self.key_dim + self.value_dim) * self.element_bytes

    @property
    def block_bytes(self) -> int:
        return _rounded_up(self.layers * self._layer_bytes, BLOCK_ALIGNMENT_BYTES)

    def key_offset(self, layer: int) -> int:
        """Bytes from the start of a block to the keys of `layer`."""
        return layer * self._layer_bytes

    def value_offset(self, layer: int) -> int:
        """Bytes from the start of a block to the values of `layer`."""
        return layer * self._layer_bytes + self._section_bytes(self.key_dim)

    def blocks_in(self, memory_bytes: int) -> int:
        """How many whole blocks fit."""
        return memory_bytes // self.block_bytes

    def views(self, storage: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer in all blocks, as views that share memory with `storage`.

        Args:
            storage: [blocks, block_bytes / element_bytes] in the cache's dtype, contiguous.

        Returns:
            K [blocks, block_tokens, kv_heads, key_dim] and V [blocks, block_tokens, kv_heads, value_dim], strided.

        Raises:
            ValueError: `storage` is not of this layout.
        """
        shape = (storage.shape[0], self.block_bytes // self.element_bytes)
        if tuple(storage.shape) != shape or storage.element_size() != self.element_bytes or not storage.is_contiguous():
            raise ValueError(
                f"storage must be contiguous [blocks, {shape[1]}] of {self.element_bytes} bytes an element, "
                f"not {list(storage.shape)} of {storage.element_size()}"
            )
        return (
            self._view(storage, self.key_offset(layer), self.key_dim),
            self._view(storage, self.value_offset(layer), self.value_dim),
        )

    def _view(self, storage: torch.Tensor, offset_bytes: int, dim: int) -> torch.Tensor:
        return storage.as_strided(
            (storage.shape[0], self.block_tokens, self.kv_heads, dim),
            (storage.stride(0), dim, self.block_tokens * dim, 1),
            storage.storage_offset() + offset_bytes // self.element_bytes,
        )

    @property
    def _layer_bytes(self) -> int:
        return self._section_bytes(self.key_dim) + self._section_bytes(self.value_dim)

    def _section_bytes(self, dim: int) -> int:
        return _rounded_up(self.kv_heads * self.block_tokens * dim * self.element_bytes, SECTION_ALIGNMENT_BYTES)


def _rounded_up(size_bytes: int, multiple_bytes: int) -> int:
    return -(-size_bytes // multiple_bytes) * multiple_bytes
