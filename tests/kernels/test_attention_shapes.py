"""Attention against float64, whatever the heads, head dims, blocks, lengths and dtypes."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.device import DEVICE
from tests.kernels.scene import EIGHT_BITS, FLOATS, Scene, assert_close, int32
from tests.kernels.ways import BY_TABLE, TINY_SPLIT_TOKENS, TINY_TILE, Way, agrees, in_tiny_tiles, table_choice, triton


@pytest.mark.parametrize(
    "heads", [(28, 4), (9, 3), (8, 1), (8, 8), (64, 8), (32, 1), (12, 12), (71, 1), (34, 2), (5, 1)]
)
def test_every_head_ratio_in_a_mixed_batch(attend: Way, heads: tuple[int, int]) -> None:
    agrees(attend, Scene([(1, 37), (5, 19)], heads=heads))


@BY_TABLE
@pytest.mark.parametrize(
    "dims",
    [
        (8, 8), (16, 16), (24, 24), (40, 40), (64, 64), (80, 80), (88, 88), (96, 96), (128, 128), (192, 128),
        (192, 192), (248, 248), (256, 256), (8, 256), (256, 8), (24, 136), (40, 24),
    ],
)  # fmt: skip
@pytest.mark.parametrize("cache", [torch.float32, torch.int8])
def test_every_head_dim(attend: Way, dims: tuple[int, int], cache: torch.dtype) -> None:
    agrees(attend, Scene([(1, 37), (5, 19)], heads=(2, 1), dims=dims, cache=cache))


@BY_TABLE
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("cache", FLOATS + EIGHT_BITS)
def test_every_dtype_of_queries_over_every_dtype_of_blocks(
    attend: Way, dtype: torch.dtype, cache: torch.dtype
) -> None:
    scene = Scene([(1, 37), (5, 69)], heads=(4, 2), dims=(40, 24), dtype=dtype, cache=cache, padding_rows=1)
    assert attend(**scene.arguments()).dtype == dtype
    agrees(attend, scene)


@pytest.mark.parametrize("cache", EIGHT_BITS)
def test_a_value_is_rounded_once_on_its_way_to_16_bit_queries(attend: Way, cache: torch.dtype) -> None:
    """The only key of a row has weight one, so the row is that value: within one step, which a device rounds to."""
    scene = Scene([(1, 1)], dims=(64, 64), dtype=torch.bfloat16, cache=cache)
    out = attend(**scene.arguments()).cpu().double()[0]
    assert ((out - scene.v[0][0]).abs() <= scene.v[0][0].abs() * 2**-7).all()


@BY_TABLE
@pytest.mark.parametrize("block_tokens", [8, 16, 32, 64, 128])
def test_contexts_around_the_edges_of_a_block(attend: Way, block_tokens: int) -> None:
    edges = [1, *(block_tokens * n + d for n in (1, 3) for d in (-1, 0, 1))]
    agrees(attend, Scene([(1, context) for context in edges], block_tokens=block_tokens))
    agrees(attend, Scene([(min(3, context), context) for context in edges], block_tokens=block_tokens))


@pytest.mark.parametrize("block_tokens", [8, 32])
def test_blocks_smaller_and_larger_than_a_tile_of_keys(block_tokens: int) -> None:
    agrees(in_tiny_tiles, Scene([(1, 31), (1, 65), (2, 34), (3, 47)], block_tokens=block_tokens))


@pytest.mark.parametrize(("dtype", "cache"), [(torch.float16, torch.float16), (torch.float16, torch.int8)])
def test_contexts_around_the_edges_of_the_table_s_tiles_and_splits(dtype: torch.dtype, cache: torch.dtype) -> None:
    choice = table_choice(Scene([(1, 1)], heads=(2, 1), dtype=dtype, cache=cache))
    for tiles, new in ((choice.decode, 1), (choice.prefill, 2)):
        edges = [edge + d for edge in (tiles.key_tile, 3 * tiles.key_tile) for d in (-1, 0, 1)]
        agrees(triton, Scene([(new, context) for context in edges], heads=(2, 1), dtype=dtype, cache=cache))
    edges = [edge + d for edge in (choice.split_tokens, 2 * choice.split_tokens) for d in (-1, 0, 1)]
    agrees(triton, Scene([(1, context) for context in edges], heads=(2, 1), dtype=dtype, cache=cache))


def test_contexts_around_the_edges_of_tiny_tiles_and_splits() -> None:
    edges = [edge + d for edge in (TINY_TILE, 2 * TINY_SPLIT_TOKENS, 4 * TINY_SPLIT_TOKENS) for d in (-1, 0, 1)]
    agrees(in_tiny_tiles, Scene([(1, context) for context in edges], heads=(2, 1)))
    agrees(in_tiny_tiles, Scene([(2, context) for context in edges[:6]], heads=(2, 1)))


@pytest.mark.parametrize("context", [511, 512, 513, 641])
def test_more_splits_than_are_merged_at_once(context: int) -> None:
    agrees(in_tiny_tiles, Scene([(1, context), (1, 40)], heads=(2, 1)))


@pytest.mark.parametrize("heads", [(4, 4), (8, 1), (3, 1)])
def test_prefill_around_the_edges_of_a_query_tile(heads: tuple[int, int]) -> None:
    group = heads[0] // heads[1]
    choice = table_choice(Scene([(1, 1)], heads=heads, dtype=torch.float16))
    for attend, rows, dtype in (
        (triton, choice.prefill.row_tile, torch.float16), (in_tiny_tiles, TINY_TILE, torch.float32),
    ):  # fmt: skip
        lengths = [(rows // group + d, rows // group + d + 5) for d in (-1, 0, 1)]
        agrees(attend, Scene(lengths, heads=heads, dtype=dtype))


@pytest.mark.parametrize("split", range(1, 21))
def test_prefill_in_two_chunks_gives_what_one_gives(attend: Way, split: int) -> None:
    whole = Scene([(21, 21)], heads=(2, 1), block_tokens=8)
    expected, _ = whole.reference()
    for first, stop in ((0, split), (split, 21)):
        chunk = {"q": whole.q[first:stop], "query_starts": int32(0, stop - first), "context_lengths": int32(stop)}
        assert_close(attend(**whole.arguments() | chunk), expected[first:stop], whole.tolerance)


def test_where_its_blocks_lie_changes_no_bit_of_a_row(attend: Way) -> None:
    scene = Scene([(1, 70), (9, 40)], cache=torch.int8)
    expected = attend(**scene.arguments())
    blocks = len(scene.k_blocks)
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    moved = {name: getattr(scene, name)[order.argsort()] for name in ("k_blocks", "v_blocks", "k_scales", "v_scales")}
    held = (scene.tables >= 0) & (scene.tables < blocks)
    moved["block_tables"] = torch.where(held, order[scene.tables.clamp(0, blocks - 1).long()].int(), scene.tables)
    assert not torch.equal(moved["block_tables"], scene.tables)
    assert torch.equal(attend(**scene.arguments() | moved), expected)


@pytest.mark.parametrize("cache", [torch.float32, *EIGHT_BITS])
def test_any_strides_will_do(attend: Way, cache: torch.dtype) -> None:
    """Blocks token by token instead of head by head; q and out cut out of something wider; one table among others."""
    scene = Scene([(1, 30), (6, 20)], heads=(6, 2), cache=cache)
    expected, expected_lse = scene.reference()
    change = {"k_blocks": scene.k_blocks.contiguous(), "v_blocks": scene.v_blocks.contiguous()}
    if scene.k_scales is not None and scene.v_scales is not None:
        change |= {"k_scales": scene.k_scales.contiguous(), "v_scales": scene.v_scales.contiguous()}
    change["q"] = torch.cat([scene.q, scene.q * torch.nan], 1)[:, :6]
    change["block_tables"] = torch.cat([scene.tables, scene.tables], 1)[:, : scene.tables.shape[1]]
    out = torch.full((7, 10, 20), 7.0, device=DEVICE)
    lse = torch.full((6, 7), torch.nan, device=DEVICE).T
    attend(**scene.arguments() | change, out=out[:, 3:9, :16], lse=lse)
    assert_close(out[:, 3:9, :16], expected, scene.tolerance)
    assert_close(lse, expected_lse, scene.tolerance)
    out[:, 3:9, :16] = 7
    assert (out == 7).all()
