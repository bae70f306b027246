"""What of attention is PyTorch's alone: its tiles, its kept masks, decodes that it computes together, alignment."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.torch_backend import attention_workspace, paged_attention
from kernels.torch_backend.attention import TILE_ROWS
from tests.kernels.device import DEVICE
from tests.kernels.scene import EIGHT_BITS, Scene
from tests.kernels.ways import agrees

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="PyTorch's attention is tested on CPU")


@pytest.mark.parametrize("heads", [(4, 4), (8, 1)])
def test_prefill_around_the_edges_of_a_query_tile(heads: tuple[int, int]) -> None:
    tile_tokens = TILE_ROWS * heads[1] // heads[0]
    for new in (tile_tokens - 1, tile_tokens, tile_tokens + 1):
        for options in ({}, {"window": 7}, {"causal": False}):
            agrees(paged_attention, Scene([(new, new + 5)], heads=heads), **options)


@pytest.mark.parametrize("window", [None, 60, 500])
@pytest.mark.parametrize("block_tokens", [8, 128])
def test_decodes_around_the_lengths_that_they_are_padded_to(block_tokens: int, window: int | None) -> None:
    contexts = [edge + d for edge in (64, 128, 512, 576, 1024) for d in (-1, 0, 1)]
    scene = Scene([(1, context) for context in contexts], heads=(9, 3), block_tokens=block_tokens)
    agrees(paged_attention, scene, window=window)


def test_masks_that_are_kept_belong_to_their_step() -> None:
    """Steps of the same shape, and one that differs in its window or its contexts alone."""
    for lengths in ([(1, 70), (9, 31)], [(1, 70), (9, 32)], [(1, 71), (9, 31)], [(1, 70), (8, 31), (1, 5)]):
        for window in (None, 5, 6):
            agrees(paged_attention, Scene(lengths), window=window)
            agrees(paged_attention, Scene(lengths, seed=1), window=window)


@pytest.mark.parametrize("options", [{}, {"soft_cap": 4.0}])
def test_a_row_does_not_depend_on_where_its_batch_lies_in_memory(options: dict[str, Any]) -> None:
    for heads in ((5, 1), (8, 1), (9, 3)):
        scene = Scene([(1, 70), (1, 257), (3, 3)], heads=heads, dims=(128, 128))
        expected = paged_attention(**scene.arguments(), **options)
        for shift in (1, 2, 4):
            moved = torch.empty(scene.q.numel() + shift)[shift:].view_as(scene.q).copy_(scene.q)
            assert moved.data_ptr() % 64
            assert torch.equal(paged_attention(**{**scene.arguments(), "q": moved}, **options), expected)


@pytest.mark.parametrize("cache", EIGHT_BITS)
def test_what_8_bits_read_back_as_is_rounded_once(cache: torch.dtype) -> None:
    """The only key of a row has weight one, so the row is that value."""
    scene = Scene([(1, 1)], dims=(64, 64), dtype=torch.bfloat16, cache=cache)
    assert torch.equal(paged_attention(**scene.arguments())[0], scene.v[0][0].float().bfloat16().expand(3, -1))


def test_pytorch_needs_no_workspace() -> None:
    shape = {"tokens": 32, "sequences": 32, "query_heads": 9, "value_dim": 64}
    assert attention_workspace(**shape, max_context_tokens=8192) == 0
