"""The arithmetic of blocks, and that layers never touch each other's bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cachestore.geometry import BLOCK_TOKENS, BlockLayout

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


@given(LAYOUTS)
def test_sections_begin_aligned_in_order_and_inside_the_block(layout: BlockLayout) -> None:
    assert layout.block_bytes % 512 == 0
    token_bytes = layout.kv_heads * layout.block_tokens * layout.element_bytes
    end = 0
    for layer in range(layout.layers):
        for offset, dim in ((layout.key_offset(layer), layout.key_dim), (layout.value_offset(layer), layout.value_dim)):
            assert offset % 128 == 0
            assert end <= offset < end + 128
            end = offset + token_bytes * dim
    assert end <= layout.block_bytes < end + 128 + 512
    assert layout.bytes_per_token * layout.block_tokens <= layout.block_bytes


@given(LAYOUTS)
def test_each_view_holds_what_was_written_to_it_after_all_others_were_written(layout: BlockLayout) -> None:
    storage = _storage(layout, blocks=2)
    views = [view for layer in range(layout.layers) for view in layout.views(storage, layer)]
    for number, view in enumerate(views, start=1):
        view.fill_(number)
    for number, view in enumerate(views, start=1):
        assert bool((view == number).all())
    written = sum(view.numel() for view in views)
    assert int((storage != 0).sum()) == written
    assert written == 2 * layout.bytes_per_token * layout.block_tokens // layout.element_bytes


def test_a_view_is_indexed_by_block_token_and_head_over_memory_ordered_by_head_and_token() -> None:
    layout = BlockLayout(layers=3, kv_heads=2, key_dim=16, value_dim=8, block_tokens=8, element_bytes=4)
    storage = _storage(layout, blocks=4)
    storage.copy_(torch.arange(storage.numel()).reshape(storage.shape))
    keys, values = layout.views(storage, 2)
    assert keys.shape == (4, 8, 2, 16)
    assert values.shape == (4, 8, 2, 8)
    block, token, head, element = 3, 5, 1, 7
    row = head * 8 + token
    assert keys[block, token, head, element] == storage[block, layout.key_offset(2) // 4 + row * 16 + element]
    assert values[block, token, head, element] == storage[block, layout.value_offset(2) // 4 + row * 8 + element]


def test_one_copy_of_a_blocks_bytes_moves_all_its_layers() -> None:
    layout = BlockLayout(layers=3, kv_heads=2, key_dim=16, value_dim=8, block_tokens=8, element_bytes=2)
    storage = _storage(layout, blocks=2)
    for layer in range(3):
        for view in layout.views(storage, layer):
            view[0] = torch.randn(view.shape[1:]).half()
    storage.view(torch.uint8)[1].copy_(storage.view(torch.uint8)[0])
    for layer in range(3):
        for view in layout.views(storage, layer):
            assert bool((view[0] != 0).any())
            assert torch.equal(view[0], view[1])


def test_offsets_pass_4_gib_without_wrapping() -> None:
    layout = BlockLayout(layers=32, kv_heads=8, key_dim=128, value_dim=128, block_tokens=16, element_bytes=2)
    blocks = (64 << 30) // layout.block_bytes
    storage = torch.empty((blocks, layout.block_bytes // 2), dtype=torch.bfloat16, device="meta")
    keys, values = layout.views(storage, 31)
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
