"""Partial results made one: two parts of a context by `merge_partials`, splits of a decode inside one call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.merge import merge_partials
from tests.kernels.device import DEVICE
from tests.kernels.scene import EIGHT_BITS, Scene, assert_close
from tests.kernels.ways import BY_TABLE, Way, in_tiny_tiles, tiled, tiny_choice


def part_of(scene: Scene, begin: int, end: int) -> Scene:
    """The same queries over some of the keys of the scene's only sequence."""
    part = replace(scene, lengths=[(scene.lengths[0][0], end - begin)], block_tokens=8)
    part.q = scene.q
    part.k, part.v = [scene.k[0][begin:end]], [scene.v[0][begin:end]]
    where = part.slots(0) // 8, part.slots(0) % 8
    part.k_blocks[where] = part.k[0].to(DEVICE, part.cache)
    part.v_blocks[where] = part.v[0].to(DEVICE, part.cache)
    return part


@BY_TABLE
@pytest.mark.parametrize("split", [0, 1, 8, 21, 39, 40])
def test_two_parts_of_a_context_merge_into_the_whole(attend: Way, split: int) -> None:
    scene = Scene([(3, 40)])
    parts = []
    for part in (part_of(scene, 0, split), part_of(scene, split, 40)):
        lse = torch.full((3, 3), torch.nan, device=DEVICE)
        parts += [attend(**part.arguments(), causal=False, lse=lse), lse]
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


@pytest.mark.parametrize("cache", [torch.float32, *EIGHT_BITS])
@pytest.mark.parametrize(
    "options", [{}, {"window": 50}, {"sinks": torch.tensor([-1.0, 9.0, 2.0, 4.0], device=DEVICE)}, {"soft_cap": 2.0}]
)
def test_one_two_and_four_splits_agree(cache: torch.dtype, options: dict[str, Any]) -> None:
    scene = Scene([(1, 64), (1, 61)], heads=(4, 2), dims=(24, 40), cache=cache)
    expected, expected_lse = scene.reference(**options)
    for split_tokens in (64, 32, 16):
        lse = torch.full((2, 4), torch.nan, device=DEVICE)
        out = tiled(tiny_choice(split_tokens), **scene.arguments(), **options, lse=lse)
        assert_close(out, expected, scene.tolerance)
        assert_close(lse, expected_lse, scene.tolerance)


def test_splits_merge_however_far_their_sums_lie_apart() -> None:
    """The first split holds all the weight, then the last: the others' is nothing."""
    for place in (3, 125):
        scene = Scene([(1, 128)], heads=(2, 1))
        scene.q[:] = 1.0
        keys = torch.full((128, 1, 16), -40.0)
        keys[place] = 40.0
        scene.k_blocks[scene.slots(0) // 16, scene.slots(0) % 16] = keys.to(DEVICE)
        scene.k[0] = keys.double()
        expected, expected_lse = scene.reference()
        lse = torch.full((1, 2), torch.nan, device=DEVICE)
        assert_close(in_tiny_tiles(**scene.arguments(), lse=lse), expected, scene.tolerance)
        assert_close(lse, expected_lse, scene.tolerance)
