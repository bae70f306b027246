"""Failures that attention kernels elsewhere have had, each as a statement about these.

B064 and B066, offsets past 2^31, are in `test_offsets.py`, B053 in `test_write_kv.py`, B075 in `test_tiles.py`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.merge import merge_partials
from tests.kernels.device import DEVICE
from tests.kernels.scene import Scene, assert_close
from tests.kernels.ways import Way, agrees, tiled, tiny_choice


def put(scene: Scene, sequence: int, blocks: Tensor, rows: Tensor | float) -> None:
    """Overwrite one sequence's keys or values."""
    where = scene.slots(sequence) // scene.block_tokens, scene.slots(sequence) % scene.block_tokens
    blocks[where] = rows.to(DEVICE) if isinstance(rows, Tensor) else rows


@pytest.mark.parametrize("dims", [(192, 128), (576, 512)])
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b060_head_dims_of_two_parts_in_any_number_of_splits(
    dims: tuple[int, int], kv_heads: int, dtype: torch.dtype
) -> None:
    """70 tokens are 1, 2, 3 and 5 splits of whole key tiles. 576 is more than the public function takes."""
    scene = Scene([(1, 70)], heads=(16, kv_heads), dims=dims, dtype=dtype)
    expected, expected_lse = scene.reference()
    for split_tokens in (80, 48, 32, 16):
        lse = torch.full((1, 16), torch.nan, device=DEVICE)
        assert_close(tiled(tiny_choice(split_tokens), **scene.arguments(), lse=lse), expected, scene.tolerance)
        assert_close(lse, expected_lse, scene.tolerance)


@pytest.mark.parametrize("heads", [(28, 4), (12, 12), (32, 8), (9, 3)])
def test_b062_query_heads_read_their_kv_head(attend: Way, heads: tuple[int, int]) -> None:
    scene = Scene([(1, 19), (3, 5)], heads=heads)
    for sequence in (0, 1):
        put(scene, sequence, scene.v_blocks, torch.arange(1.0, heads[1] + 1)[:, None])
    group = heads[0] // heads[1]
    expected = torch.arange(1.0, heads[1] + 1).double().repeat_interleave(group)
    assert_close(attend(**scene.arguments()), expected[None, :, None].expand(4, -1, 16), 1e-6)


def test_b063_empty_sequences_among_decodes(attend: Way) -> None:
    scene = Scene([(1, 17), (0, 0), (1, 4)], heads=(9, 3))
    together = attend(**scene.arguments())
    assert together.shape == (2, 9, 16)
    for row, sequence in enumerate((0, 2)):
        assert torch.equal(attend(**scene.only(sequence))[0], together[row])
    agrees(attend, scene)


def test_b067_what_lies_after_the_end_has_no_weight_when_not_causal(attend: Way) -> None:
    scene = Scene([(1, context) for context in (1, 15, 16, 17, 255, 256, 257)])
    scene.q.zero_()
    scene.k_blocks.zero_()
    scene.v_blocks.zero_()
    for sequence in range(7):
        put(scene, sequence, scene.v_blocks, 1.0)
    out = attend(**scene.arguments(), causal=False)
    assert_close(out, torch.ones_like(out).cpu().double(), 1e-6)


@pytest.mark.parametrize("new", [1, 2])
def test_b068_no_row_reads_a_neighbour_s_tail(attend: Way, new: int) -> None:
    lengths = [5, 17, 32, 1]
    scene = Scene([(min(new, length), length) for length in lengths])
    expected = torch.ones(scene.q.shape, dtype=torch.float64)
    for sequence in range(4):
        put(scene, sequence, scene.v_blocks, sequence + 1.0)
        expected[scene.starts[sequence] : scene.starts[sequence + 1]] *= sequence + 1
    assert_close(attend(**scene.arguments()), expected, 1e-6)


@pytest.mark.parametrize("new", [1, 2, 32])
def test_b069_a_table_that_already_has_the_next_block(attend: Way, new: int) -> None:
    scene = Scene([(new, 32)])
    free = next(block for block in range(5) if block not in scene.tables[0, :2].tolist())
    scene.k_blocks[free], scene.v_blocks[free] = 1e4, 1e4
    scene.tables[0, 2] = free
    agrees(attend, scene)
    agrees(attend, scene, causal=False)


@pytest.mark.parametrize("what", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("new", [1, 3])
def test_b070_unused_slots_may_hold_what_is_no_number(attend: Way, what: float, new: int) -> None:
    scene = Scene([(new, 20)])
    for blocks in (scene.k_blocks, scene.v_blocks):
        blocks[scene.tables[0, 1].long(), 4:] = what
    agrees(attend, scene)
    agrees(attend, scene, causal=False)


def test_b073_a_soft_cap_of_large_scores_is_a_number(attend: Way) -> None:
    """The log-sum-exp over one key is its score; then the same scores of five keys side by side."""
    scores = torch.tensor([-1e5, -100.0, 0.0, 100.0, 3e4])
    expected = torch.tensor([-30.0, -29.92, 0.0, 29.92, 30.0])
    unit = torch.zeros(1, 1, 16)
    unit[..., 0] = 1
    alone = Scene([(1, 1)] * 5, heads=(1, 1))
    alone.q[:] = unit.to(DEVICE)
    for sequence in range(5):
        put(alone, sequence, alone.k_blocks, unit * scores[sequence])
    lse = torch.full((5, 1), torch.nan, device=DEVICE)
    out = attend(**alone.arguments() | {"scale": 1.0}, soft_cap=30.0, lse=lse)
    assert ((lse[:, 0].cpu() - expected).abs() < 0.01).all()
    assert out.isfinite().all()
    beside = Scene([(1, 5)], heads=(1, 1))
    beside.q[:] = unit[0].to(DEVICE)
    put(beside, 0, beside.k_blocks, scores[:, None, None] * unit)
    put(beside, 0, beside.v_blocks, torch.eye(5, 16)[:, None])
    weights = attend(**beside.arguments() | {"scale": 1.0}, soft_cap=30.0)[0, 0, :5].cpu()
    exact = (30 * torch.tanh(scores.double() / 30)).softmax(0)
    torch.testing.assert_close(weights.double(), exact, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("new", [1, 2])
def test_b077_a_row_without_keys_alone_and_merged_with_one_that_has_some(attend: Way, new: int) -> None:
    """Zero and -inf; and what is merged with that is what it was. NaN is compared with NaN."""
    empty, full = Scene([(new, 0), (1, 1)]), Scene([(new, 20), (1, 1)])
    parts: list[Tensor] = []
    for scene in (empty, full):
        lse = torch.full((new + 1, 3), torch.nan, device=DEVICE)
        parts += [attend(**scene.arguments(), lse=lse), lse]
    assert (parts[0][:new] == 0).all()
    assert (parts[1][:new] == -torch.inf).all()
    for merged in (merge_partials(*parts), merge_partials(*parts[2:], *parts[:2])):
        assert torch.equal(merged[0][:new], parts[2][:new])
        assert torch.equal(merged[1][:new], parts[3][:new])
    both_empty = merge_partials(*parts[:2], *parts[:2])
    assert (both_empty[0][:new] == 0).all()
    assert (both_empty[1][:new] == -torch.inf).all()


def test_b077_a_comparison_sees_nan_and_infinity() -> None:
    nan, inf, one = (torch.tensor([value]) for value in (torch.nan, torch.inf, 1.0))
    for actual, expected in ((nan, one), (one, nan), (nan, inf), (inf, -inf), (inf, one), (-inf, nan)):
        with pytest.raises(AssertionError):
            assert_close(actual, expected.double(), 1.0)
    for same in (nan, inf, one):
        assert_close(same, same.double(), 1e-9)


def test_a_comparison_sees_a_small_row_beside_a_large_one() -> None:
    expected = torch.tensor([3.0, 0.1], dtype=torch.float64).view(2, 1, 1)
    with pytest.raises(AssertionError, match="of token 1"):
        assert_close(torch.tensor([3.0, 0.11]).view(2, 1, 1), expected, 1e-2)
    assert_close(torch.tensor([3.02, 0.1]).view(2, 1, 1), expected, 1e-2)
