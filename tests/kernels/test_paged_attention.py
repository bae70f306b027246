"""`paged_attention` against attention in float64, over blocks whose free slots are NaN."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.torch_backend import attention_workspace, merge_partials, paged_attention
from kernels.torch_backend.attention import TILE_ROWS
from tests.kernels.scene import TOLERANCE, Scene, assert_close


def agrees(scene: Scene, **options: Any) -> None:
    """Without lse and with it: the two may be computed in different ways."""
    expected, expected_lse = scene.reference(**options)
    tolerance = TOLERANCE[scene.dtype]
    assert_close(paged_attention(**scene.arguments(), **options), expected, tolerance)
    lse = torch.full(scene.q.shape[:2], torch.nan)
    assert_close(paged_attention(**scene.arguments(), **options, lse=lse), expected, tolerance)
    assert_close(lse, expected_lse, tolerance)


@pytest.mark.parametrize("heads", [(28, 4), (9, 3), (8, 1), (8, 8), (64, 8)])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_every_head_ratio_in_a_mixed_batch(heads: tuple[int, int], dtype: torch.dtype) -> None:
    agrees(Scene([(1, 37), (5, 5), (3, 19), (1, 1)], heads=heads, dtype=dtype))


@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_every_head_dim(dims: tuple[int, int], dtype: torch.dtype) -> None:
    agrees(Scene([(1, 33), (7, 20)], heads=(6, 2), dims=dims, dtype=dtype))


@pytest.mark.parametrize("block_tokens", [8, 16, 32, 64, 128])
def test_contexts_around_the_edges_of_a_block(block_tokens: int) -> None:
    edges = [1, *(block_tokens * n + d for n in (1, 2, 3) for d in (-1, 0, 1))]
    agrees(Scene([(1, context) for context in edges], block_tokens=block_tokens))
    agrees(Scene([(min(3, context), context) for context in edges], block_tokens=block_tokens))


@pytest.mark.parametrize("heads", [(4, 4), (8, 1)])
def test_prefill_around_the_edges_of_a_query_tile(heads: tuple[int, int]) -> None:
    tile_tokens = TILE_ROWS * heads[1] // heads[0]
    for new in (tile_tokens - 1, tile_tokens, tile_tokens + 1):
        agrees(Scene([(new, new + 5)], heads=heads, dims=(16, 16)))
        agrees(Scene([(new, new + 5)], heads=heads, dims=(16, 16)), window=7)
        agrees(Scene([(new, new + 5)], heads=heads, dims=(16, 16)), causal=False)


@pytest.mark.parametrize("window", [None, 60, 500])
@pytest.mark.parametrize("block_tokens", [8, 128])
def test_decodes_around_the_lengths_that_they_are_padded_to(block_tokens: int, window: int | None) -> None:
    contexts = [edge + d for edge in (64, 128, 512, 576, 1024) for d in (-1, 0, 1)]
    agrees(Scene([(1, context) for context in contexts], dims=(16, 16), block_tokens=block_tokens), window=window)


@pytest.mark.parametrize("split", range(1, 21))
def test_prefill_in_two_chunks_gives_what_one_gives(split: int) -> None:
    whole = Scene([(21, 21)], block_tokens=8)
    expected, _ = whole.reference()
    arguments = whole.arguments()
    for first, stop in ((0, split), (split, 21)):
        arguments["q"] = whole.q[first:stop]
        arguments["query_starts"] = torch.tensor([0, stop - first], dtype=torch.int32)
        arguments["context_lengths"] = torch.tensor([stop], dtype=torch.int32)
        assert_close(paged_attention(**arguments), expected[first:stop], 1e-5)


@pytest.mark.parametrize("window", [1, 2, 8, 15, 16, 17, 100])
def test_windows(window: int) -> None:
    agrees(Scene([(1, 40), (12, 30), (20, 20), (1, 1), (2, 33)], block_tokens=8), window=window)


def test_blocks_outside_the_window_are_never_read() -> None:
    scene = Scene([(1, 40), (4, 40)], block_tokens=8)
    seen = paged_attention(**scene.arguments(), window=9)
    scene.tables[:, :3] = -1
    assert torch.equal(paged_attention(**scene.arguments(), window=9), seen)
    with pytest.raises(IndexError):
        paged_attention(**scene.arguments(), window=40)


@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
def test_soft_caps(soft_cap: float) -> None:
    agrees(Scene([(1, 40), (12, 30)]), soft_cap=soft_cap)


def test_sinks() -> None:
    agrees(Scene([(1, 40), (12, 30), (1, 1)]), sinks=torch.linspace(-3, 60, 9))


def test_all_options_together() -> None:
    agrees(
        Scene([(1, 40), (12, 30), (1, 1)], dims=(96, 64), padding_rows=2),
        window=11,
        soft_cap=2.0,
        sinks=torch.linspace(-3, 3, 9),
    )


def test_all_keys_are_seen_when_not_causal() -> None:
    agrees(Scene([(3, 40), (1, 16), (5, 5), (2, 0)], padding_rows=1), causal=False)


def test_a_row_without_keys_is_zero_and_its_lse_minus_infinity() -> None:
    scene = Scene([(2, 0), (5, 3), (1, 4)])
    for sinks in (None, torch.ones(9)):
        agrees(scene, sinks=sinks)
        lse = torch.zeros(8, 9)
        out = paged_attention(**scene.arguments(), lse=lse, sinks=sinks)
        blind = torch.tensor([True, True, True, True, False, False, False, False])
        assert (out[blind] == 0).all()
        assert (lse[blind] == -torch.inf).all()
        assert lse[~blind].isfinite().all()


def test_sequences_without_new_tokens_and_batches_without_sequences() -> None:
    agrees(Scene([(0, 12), (3, 12), (0, 0), (1, 5), (0, 0)]))
    agrees(Scene([], padding_rows=3))
    agrees(Scene([(0, 0)]))


def test_padding_rows_are_written_as_zeros() -> None:
    scene = Scene([(1, 9), (4, 9)], padding_rows=3)
    out, lse = torch.full_like(scene.q, torch.nan), torch.full((8, 9), torch.nan)
    assert paged_attention(**scene.arguments(), out=out, lse=lse) is out
    assert (out[5:] == 0).all()
    assert (lse[5:] == -torch.inf).all()
    assert (out[:5] != 0).all()


def test_queries_and_out_may_be_strided() -> None:
    scene = Scene([(1, 30), (6, 20)])
    expected, _ = scene.reference()
    arguments = scene.arguments()
    arguments["q"] = torch.cat([scene.q, scene.q], 1)[:, :9]
    out = torch.zeros(7, 15, 64)[:, 3:12]
    assert_close(paged_attention(**arguments, out=out), expected, 1e-5)


def test_large_scores_neither_overflow_nor_lose_the_answer() -> None:
    scene = Scene([(4, 30)])
    scene.q *= 1000
    agrees(scene)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dims", [(64, 64), (24, 24), (40, 16)])
@pytest.mark.parametrize("options", [{}, {"window": 5}, {"soft_cap": 4.0}, {"sinks": torch.ones(5)}])
def test_a_row_does_not_depend_on_its_company(
    dtype: torch.dtype, dims: tuple[int, int], options: dict[str, Any]
) -> None:
    # Contexts of 66 .. 128 tokens are computed together, whoever is there.
    lengths = [(1, 70), (1, 3), (9, 31), (1, 70), (17, 17), (1, 200), (2, 2), (1, 128), (1, 66)]
    scene = Scene(lengths, heads=(5, 1), dims=dims, dtype=dtype, padding_rows=1)
    together = paged_attention(**scene.arguments(), **options)
    for sequence, (first, stop) in enumerate(pairwise(scene.starts)):
        assert torch.equal(together[first:stop], paged_attention(**scene.only(sequence), **options))
    assert not torch.equal(together[0], together[scene.starts[3]])


def test_masks_that_are_kept_belong_to_their_step() -> None:
    """Steps of the same shape, and one that differs in its window or its contexts alone."""
    for lengths in ([(1, 70), (9, 31)], [(1, 70), (9, 32)], [(1, 71), (9, 31)], [(1, 70), (8, 31), (1, 5)]):
        for window in (None, 5, 6):
            agrees(Scene(lengths), window=window)
            agrees(Scene(lengths, seed=1), window=window)


@pytest.mark.parametrize("options", [{}, {"soft_cap": 4.0}])
def test_a_row_does_not_depend_on_where_its_batch_lies_in_memory(options: dict[str, Any]) -> None:
    for heads in ((5, 1), (8, 1), (9, 3)):
        scene = Scene([(1, 70), (1, 257), (3, 3)], heads=heads, dims=(128, 128))
        arguments = scene.arguments()
        expected = paged_attention(**arguments, **options)
        for shift in (1, 2, 4):
            moved = torch.empty(scene.q.numel() + shift)[shift:].view_as(scene.q).copy_(scene.q)
            assert moved.data_ptr() % 64
            assert torch.equal(paged_attention(**{**arguments, "q": moved}, **options), expected)


def test_what_free_blocks_and_slots_hold_changes_nothing() -> None:
    scene = Scene([(1, 19), (4, 21)])
    before = paged_attention(**scene.arguments())
    changed = 0
    for blocks in (scene.k_blocks, scene.v_blocks):
        changed += int(blocks.isnan().sum())
        blocks[blocks.isnan()] = torch.inf
    assert changed
    assert torch.equal(before, paged_attention(**scene.arguments()))
    scene.v_blocks[int(scene.tables[0, 1]), 2] += 1
    assert not torch.equal(before, paged_attention(**scene.arguments()))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_drawn_shapes(data: st.DataObject) -> None:
    kv_heads = data.draw(st.integers(1, 4), label="kv heads")
    length = st.tuples(st.integers(0, 20), st.integers(0, 70))
    scene = Scene(
        data.draw(st.lists(length, max_size=5), label="new and context tokens"),
        heads=(kv_heads * data.draw(st.integers(1, 8), label="group"), kv_heads),
        dims=(data.draw(st.integers(1, 32)) * 8, data.draw(st.integers(1, 32)) * 8),
        block_tokens=data.draw(st.sampled_from([8, 16, 32, 64, 128])),
        dtype=data.draw(st.sampled_from(list(TOLERANCE))),
        padding_rows=data.draw(st.integers(0, 3)),
        seed=data.draw(st.integers(0, 1000)),
    )
    causal = data.draw(st.booleans(), label="causal")
    agrees(
        scene,
        causal=causal,
        window=data.draw(st.none() | st.integers(1, 80), label="window") if causal else None,
        soft_cap=data.draw(st.none() | st.floats(0.5, 50), label="soft cap"),
        sinks=data.draw(st.sampled_from([None, torch.linspace(-2, 5, scene.heads[0])]), label="sinks"),
    )


@pytest.mark.parametrize("split", [0, 1, 8, 21, 39, 40])
def test_two_parts_of_a_context_merge_into_the_whole(split: int) -> None:
    scene = Scene([(3, 40)])
    parts = []
    for begin, end in ((0, split), (split, 40)):
        part = Scene([(3, end - begin)], block_tokens=8)
        part.q = scene.q
        part.k, part.v = [scene.k[0][begin:end]], [scene.v[0][begin:end]]
        for token in range(end - begin):
            block, offset = part.tables[0, token // 8], token % 8
            part.k_blocks[block, offset], part.v_blocks[block, offset] = part.k[0][token], part.v[0][token]
        lse = torch.empty(3, 9)
        parts += [paged_attention(**part.arguments(), causal=False, lse=lse), lse]
    out, lse = merge_partials(*parts)
    expected, expected_lse = scene.reference(causal=False)
    assert_close(out, expected, 1e-5)
    assert_close(lse, expected_lse, 1e-5)


def test_two_empty_parts_merge_into_an_empty_one() -> None:
    nothing, no_lse = torch.zeros(2, 3, 8, dtype=torch.bfloat16), torch.full((2, 3), -torch.inf)
    out, lse = merge_partials(nothing, no_lse, nothing, no_lse)
    assert out.dtype == torch.bfloat16
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


def test_parts_merge_however_far_their_sums_lie_apart() -> None:
    out, other = torch.full((1, 1, 2), 1.0), torch.full((1, 1, 2), 3.0)
    for lse, other_lse, expected in ((500.0, -500.0, 1.0), (-500.0, 500.0, 3.0), (-500.0, -500.0, 2.0)):
        merged, total = merge_partials(out, torch.tensor([[lse]]), other, torch.tensor([[other_lse]]))
        assert_close(merged, torch.full((1, 1, 2), expected, dtype=torch.float64), 1e-6)
        assert total.isfinite().all()


def test_pytorch_needs_no_workspace() -> None:
    shape = {"tokens": 32, "sequences": 32, "query_heads": 9, "value_dim": 64}
    assert attention_workspace(**shape, max_context_tokens=8192) == 0
