"""Offsets past 2^31 elements, in memory that is there in name only.

The one file whose pools are not full of poison: to fill them would take more memory than there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.copy import copy_blocks
from kernels.triton_backend.attention import plan_attention
from kernels.triton_backend.target import on
from tests.kernels.device import DEVICE
from tests.kernels.memory import resident_bytes, untouched
from tests.kernels.scene import Scene, assert_close
from tests.kernels.ways import Way, tiny_choice, triton

# Blocks of 36,864 elements on both sides of 2^31 elements.
BLOCK, FIRST = 36_864, 58_253
assert (FIRST - 1) * BLOCK < 2**31 - BLOCK < 2**31 < (FIRST + 3) * BLOCK
FAR = 2**30  # a stride that takes the third of something to 2^31 elements


@pytest.fixture(autouse=True)
def _memory_stays_untouched() -> Iterator[None]:
    before = resident_bytes()
    yield
    assert resident_bytes() - before < 200e6


def far_blocks(near: Tensor, dtype: torch.dtype) -> Tensor:
    """The first four blocks of a pool again as blocks 58,253 .. 58,256 of a larger one, each of 36,864 elements."""
    _, *shape = near.shape
    strides = near[0].contiguous().stride()
    pool = untouched((FIRST + 4) * BLOCK, dtype).as_strided((FIRST + 4, *shape), (BLOCK, *strides))
    pool[FIRST:] = near[:4]
    return pool


def scene_of_four_blocks(lengths: list[tuple[int, int]], **options: Any) -> Scene:
    """B064's: one sequence of 200 tokens in blocks of 64, at the front of its pool."""
    scene = Scene(lengths, block_tokens=64, **options)
    order = scene.tables[0, :4].long()
    for name in ("k_blocks", "v_blocks", "k_scales", "v_scales"):
        pool = getattr(scene, name)
        if pool is not None:
            setattr(scene, name, pool[order])
    scene.tables[0, :4] = torch.arange(4)
    return scene


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.int8])
def test_b064_attention_over_blocks_on_both_sides_of_2_31_elements(attend: Way, new: int, cache: torch.dtype) -> None:
    scene = scene_of_four_blocks([(new, 200)], heads=(2, 1), dims=(256, 256), cache=cache)
    expected = attend(**scene.arguments())
    tables = torch.where(scene.tables < 0, scene.tables, scene.tables + FIRST)
    tables[0, 4:] = -1
    change: dict[str, Any] = {"block_tables": tables}
    for name in ("k_blocks", "v_blocks", "k_scales", "v_scales"):
        pool = getattr(scene, name)
        if pool is not None:
            change[name] = far_blocks(pool, pool.dtype)
    assert torch.equal(attend(**scene.arguments() | change), expected)


@pytest.mark.parametrize("lengths", [[(1, 20), (1, 33), (1, 40)], [(2, 20), (1, 33), (2, 40)]])
def test_rows_and_tables_on_both_sides_of_2_31_elements(attend: Way, lengths: list[tuple[int, int]]) -> None:
    scene = Scene(lengths, heads=(2, 1), dtype=torch.bfloat16, padding_rows=1)
    lse = torch.full(scene.q.shape[:2], torch.nan, device=DEVICE)
    expected = attend(**scene.arguments(), lse=lse)

    def far(tensor: Tensor, stride: int) -> Tensor:
        """A copy with another stride of its first dim."""
        held = untouched((len(tensor) - 1) * stride + tensor[0].numel(), tensor.dtype)
        return held.as_strided(tensor.shape, (stride, *tensor[0].contiguous().stride())).copy_(tensor)

    stride = FAR if lengths[0][0] == 1 else FAR // 2
    change = {"q": far(scene.q, stride), "block_tables": far(scene.tables, FAR)}
    out, far_lse = far(torch.full_like(expected, 7.0), stride), far(torch.full_like(lse, 7.0), stride)
    attend(**scene.arguments() | change, out=out, lse=far_lse)
    assert torch.equal(out, expected)
    assert torch.equal(far_lse, lse)


@pytest.mark.parametrize("name", ["k_blocks", "v_scales", "q"])
def test_triton_refuses_tokens_of_a_block_or_heads_too_far_apart(name: str) -> None:
    scene = Scene([(1, 40)], heads=(17, 1), block_tokens=32, dtype=torch.bfloat16, cache=torch.int8)
    near = scene.arguments()[name]
    stride = 2**31 // (near.shape[1] - 1) * (16 if name == "k_blocks" else 1) + 16
    strides = (near[0, 0].numel(), stride, *near[0, 0].contiguous().stride())
    reach = (near.shape[1] - 1) * stride + len(near) * near[0, 0].numel()
    far = untouched(reach, near.dtype).as_strided(near.shape, strides)
    with pytest.raises(ValueError, match=rf"{name} has a stride of {stride} in its second dim of {near.shape[1]}"):
        triton(**scene.arguments() | {name: far})


def test_partial_results_on_both_sides_of_2_31_elements() -> None:
    """As if there could be 2^26 splits, of which the grid has those that there are."""
    scene = Scene([(1, 70), (1, 64)], heads=(2, 1))
    lse = torch.full((2, 2), torch.nan, device=DEVICE)
    options = {"causal": True, "window": None, "soft_cap": None, "sinks": None, "lse": lse}
    out = torch.full_like(scene.q, torch.nan)
    workspace = torch.zeros(4 * 3 * 17 * 4, dtype=torch.uint8, device=DEVICE)
    launches = plan_attention(**scene.arguments(), **options, choice=tiny_choice(), out=out, workspace=workspace)
    splits = 2**26
    far = {"splits": splits, "partial_out": untouched(4 * splits * 16, torch.float32)}
    far["partial_lse"] = untouched(4 * splits, torch.float32)
    assert len(launches) == 2
    for launch in launches:
        with on(DEVICE):
            replace(launch, arguments=launch.arguments | far).run()
    expected, expected_lse = scene.reference()
    assert_close(out, expected, scene.tolerance)
    assert_close(lse, expected_lse, scene.tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_b066_a_row_in_slot_2_200_000_is_read_back_and_low_slots_stay(kernels: ModuleType, dtype: torch.dtype) -> None:
    """Rows of 1,024 elements, so the slot begins past 2^31 elements; scales lie as far apart as their blocks."""
    slot, block_tokens = 2_200_000, 16
    count = slot // block_tokens + 1
    blocks = [untouched(count * block_tokens * 1024, dtype).view(count, block_tokens, 4, 256) for _ in range(2)]
    scales: list[Tensor | None] = [None, None]
    if dtype != torch.bfloat16:
        size = block_tokens * 1024
        scales = [
            untouched(count * size, torch.float32).as_strided((count, block_tokens, 4), (size, 4, 1)) for _ in range(2)
        ]
    new = torch.randn(2, 4, 256, device=DEVICE).bfloat16()
    slots = torch.tensor([slot, slot - 1], device=DEVICE)
    low = [pool[:2].clone() for pool in blocks]
    kernels.write_kv(new, new + 1, *blocks, slots, *scales)
    for rows, pool, scale, before in zip((new, new + 1), blocks, scales, low, strict=True):
        for row, at in zip(rows, (slot, slot - 1), strict=True):
            where = at // block_tokens, at % block_tokens
            back = pool[where].float()
            if scale is None:
                assert torch.equal(back, row.float())
            else:
                back *= scale[where][:, None]
                assert (back - row).abs().max() <= 0.04 * row.abs().max()
        assert torch.equal(pool[:2].view(torch.uint8), before.view(torch.uint8))


def test_new_rows_and_slots_on_both_sides_of_2_31_elements(kernels: ModuleType) -> None:
    new = untouched(2 * FAR + 16, torch.bfloat16).as_strided((3, 1, 16), (FAR, 16, 1))
    new.copy_(torch.randn(3, 1, 16))
    blocks = torch.full((2, 8, 1, 16), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    kernels.write_kv(new, new, blocks, blocks, torch.tensor([9, 0, 3], device=DEVICE))
    assert torch.equal(torch.stack([blocks[1, 1], blocks[0, 0], blocks[0, 3]]), new)


def test_blocks_past_2_31_bytes_are_copied() -> None:
    source, target = (untouched(3 * 2**30, torch.uint8).view(-1, 2**14) for _ in range(2))
    last = len(source) - 1
    source[last], target[0] = 7, 3
    copy_blocks(source, target, [last, 0], [last, 1])
    assert (target[last] == 7).all()
    assert (target[0] == 3).all()
    assert (target[1] == 0).all()
