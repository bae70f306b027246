"""The arithmetic of blocks, and that layers never touch each other's bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cachestore.geometry import BLOCK_TOKENS, BlockLayout, LayerBlocks
from kernels.torch_backend import write_kv

LAYOUTS = st.builds(
    BlockLayout,
    layers=st.integers(1, 5),
    kv_heads=st.integers(1, 9),
    key_dim=st.integers(1, 24).map(lambda eighths: eighths * 8),
    value_dim=st.integers(1, 24).map(lambda eighths: eighths * 8),
    block_tokens=st.sampled_from(BLOCK_TOKENS),
    element_bytes=st.sampled_from([1, 2, 4]),
)

DTYPES = {1: torch.uint8, 2: torch.float16, 4: torch.float32}


def test_llama_2_7b_at_4096_tokens_in_fp16_takes_2_gib() -> None:
    layout = BlockLayout(layers=32, kv_heads=32, key_dim=128, value_dim=128, block_tokens=16, element_bytes=2)
    assert layout.bytes_per_token * 4096 == 2_147_483_648
    assert layout.block_bytes * (4096 // 16) == 2_147_483_648
    assert layout.blocks_in(2_147_483_648) == 256
    assert layout.blocks_in(2_147_483_647) == 255


def test_the_default_model_takes_45_kib_a_token_in_fp32() -> None:
    layout = BlockLayout(layers=30, kv_heads=3, key_dim=64, value_dim=64, block_tokens=16, element_bytes=4)
    assert layout.bytes_per_token == 46_080
    assert layout.block_bytes == 737_280


def row_bytes(layout: BlockLayout, dim: int) -> int:
    """A token's row of a head: on 16 bytes."""
    return -(-dim * layout.element_bytes // 16) * 16


def tensors(blocks: LayerBlocks) -> list[torch.Tensor]:
    return [view for view in (blocks.k, blocks.v, blocks.k_scales, blocks.v_scales) if view is not None]


@pytest.mark.parametrize(("head_dim", "gain"), [(64, 1.88), (128, 1.93)])
@pytest.mark.parametrize(("layers", "kv_heads"), [(30, 3), (32, 8), (28, 4)])
def test_8_bits_hold_nearly_twice_the_blocks_of_16(head_dim: int, gain: float, layers: int, kv_heads: int) -> None:
    wide, narrow = (BlockLayout(layers, kv_heads, head_dim, head_dim, 16, element_bytes) for element_bytes in (2, 1))
    assert narrow.blocks_in(1 << 30) >= gain * wide.blocks_in(1 << 30)
    assert wide.bytes_per_token == layers * kv_heads * 2 * head_dim * 2
    assert narrow.bytes_per_token == layers * kv_heads * (2 * head_dim + 8)


@given(LAYOUTS)
def test_the_kernels_take_the_views_of_every_layout(layout: BlockLayout) -> None:
    dtype = {1: torch.int8, 2: torch.bfloat16, 4: torch.float32}[layout.element_bytes]
    storage = torch.zeros((2, layout.block_bytes), dtype=torch.uint8).view(dtype)
    for layer in range(layout.layers):
        blocks = layout.views(storage, layer)
        new = (torch.ones(1, layout.kv_heads, dim) for dim in (layout.key_dim, layout.value_dim))
        write_kv(*new, blocks.k, blocks.v, torch.tensor([layout.block_tokens]), blocks.k_scales, blocks.v_scales)
        assert all(bool((view[1, 0] > 0).all()) for view in tensors(blocks))


@given(LAYOUTS)
def test_sections_begin_aligned_in_order_and_inside_the_block(layout: BlockLayout) -> None:
    assert layout.block_bytes % 512 == 0
    rows = layout.kv_heads * layout.block_tokens
    end = 0
    for layer in range(layout.layers):
        sections = [
            (layout.key_offset(layer), rows * row_bytes(layout, layout.key_dim)),
            (layout.value_offset(layer), rows * row_bytes(layout, layout.value_dim)),
        ]
        if layout.element_bytes == 1:
            sections.append((layout.scale_offset(layer), 2 * 4 * rows))
        for offset, size in sections:
            assert offset % 128 == 0
            assert end <= offset < end + 128
            end = offset + size
    assert end <= layout.block_bytes < end + 128 + 512
    assert layout.bytes_per_token * layout.block_tokens <= layout.block_bytes


@given(LAYOUTS)
def test_each_view_holds_what_was_written_to_it_after_all_others_were_written(layout: BlockLayout) -> None:
    storage = _storage(layout, blocks=2)
    views = [view for layer in range(layout.layers) for view in tensors(layout.views(storage, layer))]
    for number, view in enumerate(views, start=1):
        view.fill_(number)
    for number, view in enumerate(views, start=1):
        assert bool((view == number).all())
    assert sum(view.nbytes for view in views) == 2 * layout.bytes_per_token * layout.block_tokens


def test_a_view_is_indexed_by_block_token_and_head_over_memory_ordered_by_head_and_token() -> None:
    layout = BlockLayout(layers=3, kv_heads=2, key_dim=16, value_dim=8, block_tokens=8, element_bytes=4)
    storage = _storage(layout, blocks=4)
    storage.copy_(torch.arange(storage.numel()).reshape(storage.shape))
    blocks = layout.views(storage, 2)
    keys, values = blocks.k, blocks.v
    assert blocks.k_scales is blocks.v_scales is None
    assert keys.shape == (4, 8, 2, 16)
    assert values.shape == (4, 8, 2, 8)
    block, token, head, element = 3, 5, 1, 7
    row = head * 8 + token
    assert keys[block, token, head, element] == storage[block, layout.key_offset(2) // 4 + row * 16 + element]
    assert values[block, token, head, element] == storage[block, layout.value_offset(2) // 4 + row * 8 + element]


def test_scales_are_indexed_alike_and_those_of_values_follow_those_of_keys() -> None:
    layout = BlockLayout(layers=3, kv_heads=2, key_dim=16, value_dim=8, block_tokens=8, element_bytes=1)
    storage = _storage(layout, blocks=4)
    floats = storage.view(torch.float32)
    floats.copy_(torch.arange(floats.numel()).reshape(floats.shape))
    blocks = layout.views(storage, 2)
    assert blocks.k_scales is not None
    assert blocks.v_scales is not None
    assert blocks.k_scales.shape == blocks.v_scales.shape == (4, 8, 2)
    block, token, head = 3, 5, 1
    first = layout.scale_offset(2) // 4
    assert blocks.k_scales[block, token, head] == floats[block, first + head * 8 + token]
    assert blocks.v_scales[block, token, head] == floats[block, first + 16 + head * 8 + token]


@pytest.mark.parametrize("element_bytes", [1, 2])
def test_one_copy_of_a_blocks_bytes_moves_all_its_layers(element_bytes: int) -> None:
    layout = BlockLayout(3, kv_heads=2, key_dim=16, value_dim=8, block_tokens=8, element_bytes=element_bytes)
    storage = _storage(layout, blocks=2)
    for layer in range(3):
        for view in tensors(layout.views(storage, layer)):
            view[0] = (100 * torch.rand(view.shape[1:]) + 1).to(view.dtype)
    storage.view(torch.uint8)[1].copy_(storage.view(torch.uint8)[0])
    for layer in range(3):
        for view in tensors(layout.views(storage, layer)):
            assert bool((view[0] != 0).any())
            assert torch.equal(view[0], view[1])


def test_offsets_pass_4_gib_without_wrapping() -> None:
    layout = BlockLayout(layers=32, kv_heads=8, key_dim=128, value_dim=128, block_tokens=16, element_bytes=2)
    blocks = (64 << 30) // layout.block_bytes
    storage = torch.empty((blocks, layout.block_bytes // 2), dtype=torch.bfloat16, device="meta")
    blocks_of_layer = layout.views(storage, 31)
    keys, values = blocks_of_layer.k, blocks_of_layer.v
    last = keys[blocks - 1, 15, 7]
    assert last.storage_offset() * 2 > 1 << 35
    assert keys.stride(0) == values.stride(0) == layout.block_bytes // 2


@pytest.mark.parametrize("block_tokens", [0, 1, 4, 12, 17, 256, -16])
def test_only_the_offered_block_sizes_have_a_layout(block_tokens: int) -> None:
    with pytest.raises(ValueError, match="8, 16, 32, 64, 128"):
        BlockLayout(1, 1, 8, 8, block_tokens, 2)
    assert BlockLayout(1, 1, 8, 8, 128, 2).block_tokens == 128


def test_storage_of_another_layout_is_refused() -> None:
    layout = BlockLayout(layers=1, kv_heads=1, key_dim=8, value_dim=8, block_tokens=8, element_bytes=2)
    elements = layout.block_bytes // 2
    layout.views(torch.zeros((3, elements), dtype=torch.bfloat16), 0)
    for wrong in (
        torch.zeros((3, elements), dtype=torch.float32),
        torch.zeros((3, elements + 1), dtype=torch.bfloat16),
        torch.zeros((3, 2 * elements), dtype=torch.bfloat16)[:, ::2],
    ):
        with pytest.raises(ValueError, match="storage must be contiguous"):
            layout.views(wrong, 0)


def _storage(layout: BlockLayout, blocks: int) -> torch.Tensor:
    return torch.zeros((blocks, layout.block_bytes), dtype=torch.uint8).view(DTYPES[layout.element_bytes])
