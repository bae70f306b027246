"""The arithmetic of KV blocks: what a token takes, and where in a block each layer's keys and values lie.

    block │ layer 0: K [kv_heads, block_tokens, key_dim] · V [kv_heads, block_tokens, value_dim] │ layer 1 … │ pad

One block is one run of bytes with all layers in it, so that it moves between tiers as one copy. A layer whose
elements have one byte ends with scales, float32 [2, kv_heads, block_tokens]: those of K and those of V. Nobody else
knows an offset.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BLOCK_TOKENS = (8, 16, 32, 64, 128)
SECTION_ALIGNMENT_BYTES = 128  # a cache line of the device: loads of a section start aligned
ROW_ALIGNMENT_BYTES = 16  # what the kernels load at once: a token's row of a head is padded to it
SCALE_BYTES = 4
BLOCK_ALIGNMENT_BYTES = 512  # a sector: blocks can go to a disk without passing through a buffer


@dataclass(frozen=True, slots=True)
class LayerBlocks:
    """One layer of all blocks, as views that share memory with the cache, in the shapes that the kernels take.

    Attributes:
        k, v: [blocks, block_tokens, kv_heads, key_dim] and [… value_dim], strided, rows on 16 bytes.
        k_scales, v_scales: float32 [blocks, block_tokens, kv_heads], strided; None unless elements have one byte.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor | None
    v_scales: torch.Tensor | None


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
        """What a token's keys, values and scales take in all layers, padding left out."""
        scale_bytes = 2 * SCALE_BYTES if self.scaled else 0
        return self.layers * self.kv_heads * ((self.key_dim + self.value_dim) * self.element_bytes + scale_bytes)

    @property
    def scaled(self) -> bool:
        """Whether each token has a scale for its keys and one for its values, in every layer and kv head."""
        return self.element_bytes == 1

    @property
    def block_bytes(self) -> int:
        return _rounded_up(self.layers * self._layer_bytes, BLOCK_ALIGNMENT_BYTES)

    def key_offset(self, layer: int) -> int:
        """Bytes from the start of a block to the keys of `layer`."""
        return layer * self._layer_bytes

    def value_offset(self, layer: int) -> int:
        """Bytes from the start of a block to the values of `layer`."""
        return layer * self._layer_bytes + self._section_bytes(self.key_dim)

    def scale_offset(self, layer: int) -> int:
        """Bytes from the start of a block to the scales of `layer`, where there are any."""
        return self.value_offset(layer) + self._section_bytes(self.value_dim)

    def blocks_in(self, memory_bytes: int) -> int:
        """How many whole blocks fit."""
        return memory_bytes // self.block_bytes

    def views(self, storage: torch.Tensor, layer: int) -> LayerBlocks:
        """One layer in all blocks.

        Args:
            storage: [blocks, block_bytes / element_bytes] in the cache's dtype, contiguous.

        Raises:
            ValueError: `storage` is not of this layout.
        """
        shape = (storage.shape[0], self.block_bytes // self.element_bytes)
        if tuple(storage.shape) != shape or storage.element_size() != self.element_bytes or not storage.is_contiguous():
            raise ValueError(
                f"storage must be contiguous [blocks, {shape[1]}] of {self.element_bytes} bytes an element, "
                f"not {list(storage.shape)} of {storage.element_size()}"
            )
        k_scales, v_scales = self._scales(storage, layer) if self.scaled else (None, None)
        return LayerBlocks(
            self._view(storage, self.key_offset(layer), self.key_dim),
            self._view(storage, self.value_offset(layer), self.value_dim),
            k_scales,
            v_scales,
        )

    def _view(self, storage: torch.Tensor, offset_bytes: int, dim: int) -> torch.Tensor:
        row = self._row_bytes(dim) // self.element_bytes
        return storage.as_strided(
            (storage.shape[0], self.block_tokens, self.kv_heads, dim),
            (storage.stride(0), row, self.block_tokens * row, 1),
            storage.storage_offset() + offset_bytes // self.element_bytes,
        )

    def _scales(self, storage: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        floats = storage.view(torch.float32)
        shape = (2, storage.shape[0], self.block_tokens, self.kv_heads)
        strides = (self.kv_heads * self.block_tokens, floats.stride(0), 1, self.block_tokens)
        first = floats.storage_offset() + self.scale_offset(layer) // SCALE_BYTES
        k_scales, v_scales = floats.as_strided(shape, strides, first)
        return k_scales, v_scales

    @property
    def _layer_bytes(self) -> int:
        scale_bytes = 2 * self.kv_heads * self.block_tokens * SCALE_BYTES if self.scaled else 0
        sections = self._section_bytes(self.key_dim) + self._section_bytes(self.value_dim)
        return sections + _rounded_up(scale_bytes, SECTION_ALIGNMENT_BYTES)

    def _section_bytes(self, dim: int) -> int:
        return _rounded_up(self.kv_heads * self.block_tokens * self._row_bytes(dim), SECTION_ALIGNMENT_BYTES)

    def _row_bytes(self, dim: int) -> int:
        return _rounded_up(dim * self.element_bytes, ROW_ALIGNMENT_BYTES)


def _rounded_up(size_bytes: int, multiple_bytes: int) -> int:
    return -(-size_bytes // multiple_bytes) * multiple_bytes
