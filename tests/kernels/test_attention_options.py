"""Attention against float64 with every option, and where there is little or nothing to attend to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.device import DEVICE
from tests.kernels.scene import EIGHT_BITS, Scene
from tests.kernels.ways import Way, agrees

# Decodes, a chunk of a prompt over cached context, a whole prompt, and one token.
LENGTHS = [(1, 40), (12, 30), (20, 20), (1, 1), (1, 75)]


def sinks(heads: int) -> torch.Tensor:
    return torch.linspace(-3, 6, heads, device=DEVICE)


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 32, 33, 50, 100])
def test_windows(attend: Way, window: int) -> None:
    agrees(attend, Scene(LENGTHS, block_tokens=8), window=window)


@pytest.mark.parametrize("window", [60, 64, 65, 130, 200])
def test_windows_that_begin_inside_a_tile_of_keys_or_a_split(attend: Way, window: int) -> None:
    agrees(attend, Scene([(1, 193), (6, 150)], heads=(2, 1)), window=window)


@pytest.mark.parametrize("window", [2**31 - 1, 2**31, 2**63])
def test_a_window_of_any_size_hides_nothing_from_a_shorter_context(attend: Way, window: int) -> None:
    """Some rows sit before the beginning of their context, where a position minus the window is least."""
    scene = Scene([(40, 37), (1, 75), (3, 30), (2, 0)], heads=(2, 1))
    assert torch.equal(attend(**scene.arguments(), window=window), attend(**scene.arguments(), window=100))
    agrees(attend, scene, window=window)
    agrees(attend, Scene([(2, 0), (1, 0)]), window=window)


@pytest.mark.parametrize("window", [9, 29])
def test_blocks_outside_the_window_are_never_read(attend: Way, window: int) -> None:
    """They may be somebody else's by now: their tokens are NaN, then their table entries name no block. Windows begin
    inside a tile of keys, so that some of it is outside."""
    scene = Scene([(1, 72), (4, 72)], heads=(2, 1), block_tokens=8)
    outside = (72 - 4 - window + 1) // 8
    assert outside % 2
    for blocks in (scene.k_blocks, scene.v_blocks):
        blocks[scene.tables[:, :outside].flatten().long()] = torch.nan
    agrees(attend, scene, window=window)
    scene.tables[:, :outside] = -1
    agrees(attend, scene, window=window)


@pytest.mark.parametrize("soft_cap", [1e-3, 0.5, 30.0, 300.0])
def test_soft_caps(attend: Way, soft_cap: float) -> None:
    agrees(attend, Scene(LENGTHS), soft_cap=soft_cap)


def test_sinks(attend: Way) -> None:
    agrees(attend, Scene(LENGTHS, heads=(6, 2)), sinks=sinks(6))


def test_sinks_that_outweigh_all_keys_or_nothing(attend: Way) -> None:
    agrees(attend, Scene(LENGTHS), sinks=torch.tensor([300.0, -300.0, 0.0], device=DEVICE))


def test_all_keys_are_seen_when_not_causal(attend: Way) -> None:
    agrees(attend, Scene([(3, 40), (1, 16), (5, 5), (1, 70), (2, 0), (7, 3)], padding_rows=1), causal=False)


@pytest.mark.parametrize("cache", [torch.float32, *EIGHT_BITS])
@pytest.mark.parametrize("options", [{"window": 21}, {"causal": False}])
def test_all_options_together(attend: Way, cache: torch.dtype, options: dict[str, Any]) -> None:
    scene = Scene([(1, 40), (12, 30), (1, 1), (1, 75)], heads=(4, 2), dims=(24, 40), cache=cache, padding_rows=2)
    agrees(attend, scene, soft_cap=2.0, sinks=sinks(4), **options)


@pytest.mark.parametrize("cache", EIGHT_BITS)
@pytest.mark.parametrize("options", [{"window": 5}, {"soft_cap": 0.5}, {"sinks": 3}, {"causal": False}])
def test_every_option_over_8_bit_blocks(attend: Way, cache: torch.dtype, options: dict[str, Any]) -> None:
    options = {name: sinks(value) if name == "sinks" else value for name, value in options.items()}
    agrees(attend, Scene([(1, 37), (5, 19)], cache=cache), **options)


@pytest.mark.parametrize("sunk", [False, True])
def test_a_row_without_keys_is_zero_and_its_lse_minus_infinity(attend: Way, sunk: bool) -> None:
    scene = Scene([(2, 0), (5, 3), (1, 4), (1, 0)])
    options = {"sinks": sinks(3)} if sunk else {}
    agrees(attend, scene, **options)
    lse = torch.zeros(9, 3, device=DEVICE)
    out = attend(**scene.arguments(), lse=lse, **options)
    blind = torch.tensor([True, True, True, True, False, False, False, False, True])
    assert (out[blind] == 0).all()
    assert (lse[blind] == -torch.inf).all()
    assert lse[~blind].isfinite().all()


def test_a_tile_of_rows_of_which_some_see_nothing(attend: Way) -> None:
    """More new tokens than the context has: the first ones sit before its beginning."""
    agrees(attend, Scene([(40, 37), (33, 1), (20, 3)], heads=(2, 1)), window=5)
    agrees(attend, Scene([(40, 37), (33, 1), (20, 3)], heads=(2, 1)), sinks=sinks(2))


def test_sequences_without_new_tokens_and_batches_without_sequences(attend: Way) -> None:
    agrees(attend, Scene([(0, 12), (3, 12), (0, 0), (1, 5), (0, 0)]))
    agrees(attend, Scene([(0, 12), (1, 12), (0, 0), (1, 5), (0, 0)], padding_rows=2))
    agrees(attend, Scene([], padding_rows=3))
    agrees(attend, Scene([(0, 0)]))
    agrees(attend, Scene([(0, 20)]))


@pytest.mark.parametrize("lengths", [[(1, 9), (4, 9)], [(1, 9), (1, 40)], [(0, 9)], [(6, 6)]])
@pytest.mark.parametrize("padding_rows", [1, 40])
def test_padding_rows_are_written_as_zeros_whatever_they_hold(
    attend: Way, lengths: list[tuple[int, int]], padding_rows: int
) -> None:
    scene = Scene(lengths, padding_rows=padding_rows)
    real = scene.starts[-1]
    out, lse = torch.full_like(scene.q, torch.nan), torch.full(scene.q.shape[:2], torch.nan, device=DEVICE)
    assert attend(**scene.arguments(), out=out, lse=lse) is out
    assert (out[real:] == 0).all()
    assert (lse[real:] == -torch.inf).all()
    assert (out[:real] != 0).all()
    agrees(attend, scene)


def test_lse_is_written_where_it_is_asked_for_and_not_needed_otherwise(attend: Way) -> None:
    scene = Scene([(1, 9), (1, 70), (4, 9)], padding_rows=1)
    lse = torch.full(scene.q.shape[:2], torch.nan, device=DEVICE)
    with_lse = attend(**scene.arguments(), lse=lse)
    torch.testing.assert_close(attend(**scene.arguments()), with_lse, rtol=1e-5, atol=1e-5)


def test_large_scores_neither_overflow_nor_lose_the_answer(attend: Way) -> None:
    scene = Scene([(4, 30), (1, 70)])
    scene.q *= 1000
    agrees(attend, scene)
    agrees(attend, scene, soft_cap=30.0)


def test_bounds_may_be_larger_than_what_there_is(attend: Way) -> None:
    scene = Scene([(1, 40), (3, 30)], padding_rows=2)
    exact = attend(**scene.arguments())
    wide = torch.cat([scene.tables, scene.tables], 1)
    bounds = {"max_query_tokens": 99, "max_context_tokens": 60, "block_tables": wide}
    assert torch.equal(attend(**scene.arguments() | bounds), exact)
    decodes = Scene([(1, 40), (1, 30)], padding_rows=2)
    expected = attend(**decodes.arguments())
    assert torch.equal(attend(**decodes.arguments() | {"max_query_tokens": 7}), expected)


def test_what_free_blocks_and_slots_hold_changes_nothing(attend: Way) -> None:
    scene = Scene([(1, 19), (4, 21)])
    before = attend(**scene.arguments())
    changed = 0
    for blocks in (scene.k_blocks, scene.v_blocks):
        changed += int(blocks.isnan().sum())
        blocks[blocks.isnan()] = torch.inf
    assert changed
    assert torch.equal(before, attend(**scene.arguments()))
    scene.v_blocks[int(scene.tables[0, 1]), 2] += 1
    assert not torch.equal(before, attend(**scene.arguments()))


def test_the_scale_is_any_factor(attend: Way) -> None:
    scene = Scene([(1, 19), (4, 21)], dims=(64, 64))
    expected = attend(**scene.arguments())
    arguments = scene.arguments() | {"q": scene.q / 2, "scale": 2 * 64**-0.5}
    torch.testing.assert_close(attend(**arguments), expected, rtol=1e-5, atol=1e-5)
