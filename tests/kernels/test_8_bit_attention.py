"""`paged_attention` over 8-bit blocks, and over blocks of another float dtype than the queries."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch

from kernels.quantise import LARGEST
from kernels.torch_backend import paged_attention, write_kv
from tests.kernels.scene import TOLERANCE, Scene, assert_close


@dataclass(slots=True)
class Stored:
    """A scene whose keys and values were written into blocks of another dtype; its reference is what was stored."""

    scene: Scene
    change: dict[str, Any]

    def arguments(self) -> dict[str, Any]:
        return self.scene.arguments() | self.change

    def only(self, sequence: int) -> dict[str, Any]:
        return self.scene.only(sequence) | self.change


def stored(scene: Scene, dtype: torch.dtype) -> Stored:
    narrow = dtype in LARGEST
    new: dict[str, list[torch.Tensor]] = {"k": scene.k, "v": scene.v}
    change: dict[str, Any] = {}
    for name, blocks in (("k", scene.k_blocks), ("v", scene.v_blocks)):
        count, block_tokens, kv_heads, dim = blocks.shape
        free = 113 if dtype == torch.int8 else torch.nan
        change[f"{name}_blocks"] = torch.full((count, kv_heads, block_tokens, -(-dim // 16) * 16), free).to(dtype)
        change[f"{name}_blocks"] = change[f"{name}_blocks"].transpose(1, 2)[..., :dim]
        change[f"{name}_scales"] = torch.full((count, 2, kv_heads, block_tokens), torch.nan)[:, 1].transpose(1, 2)
        if not narrow:
            change[f"{name}_scales"] = None
    for sequence, (_, context) in enumerate(scene.lengths):
        tokens = torch.arange(context)
        table = scene.tables[sequence].long()
        slots = table[tokens // scene.block_tokens] * scene.block_tokens + tokens % scene.block_tokens
        write_kv(scene.k[sequence], scene.v[sequence], slots=slots, **change)
        where = slots // scene.block_tokens, slots % scene.block_tokens
        for name, tensors in new.items():
            back = change[f"{name}_blocks"][where].float()
            tensors[sequence] = back * change[f"{name}_scales"][where][..., None] if narrow else back
    return Stored(scene, change)


LENGTHS = [(1, 37), (5, 5), (3, 19), (1, 1), (0, 4), (1, 200)]


@pytest.mark.parametrize("dtype", [*LARGEST, torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("of", list(TOLERANCE))
@pytest.mark.parametrize(("heads", "dims"), [((9, 3), (64, 64)), ((4, 1), (40, 24)), ((4, 2), (8, 136))])
def test_attention_is_that_over_what_was_stored(
    dtype: torch.dtype, of: torch.dtype, heads: tuple[int, int], dims: tuple[int, int]
) -> None:
    scene = stored(Scene(LENGTHS, heads=heads, dims=dims, dtype=of, padding_rows=1), dtype)
    expected, expected_lse = scene.scene.reference()
    out = paged_attention(**scene.arguments())
    assert out.dtype == of
    assert_close(out, expected, TOLERANCE[of])
    lse = torch.empty(expected_lse.shape)
    assert_close(paged_attention(**scene.arguments(), lse=lse), expected, TOLERANCE[of])
    assert_close(lse, expected_lse, TOLERANCE[of])


@pytest.mark.parametrize("dtype", list(LARGEST))
@pytest.mark.parametrize("options", [{"window": 5}, {"soft_cap": 4.0}, {"sinks": torch.ones(9)}, {"causal": False}])
def test_every_option(dtype: torch.dtype, options: dict[str, Any]) -> None:
    scene = stored(Scene(LENGTHS), dtype)
    assert_close(paged_attention(**scene.arguments(), **options), scene.scene.reference(**options)[0], 1e-5)


@pytest.mark.parametrize("dtype", list(LARGEST))
@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"window": 5}, {"soft_cap": 4.0}])
def test_a_row_does_not_depend_on_its_company(dtype: torch.dtype, of: torch.dtype, options: dict[str, Any]) -> None:
    lengths = [(1, 70), (1, 3), (9, 31), (1, 70), (17, 17), (1, 200), (1, 128), (1, 66)]
    scene = stored(Scene(lengths, heads=(5, 1), dims=(24, 24), dtype=of, padding_rows=1), dtype)
    together = paged_attention(**scene.arguments(), **options)
    for sequence, (first, stop) in enumerate(pairwise(scene.scene.starts)):
        assert torch.equal(together[first:stop], paged_attention(**scene.only(sequence), **options))
    assert not torch.equal(together[0], together[scene.scene.starts[3]])


def test_b053_a_large_value_that_bfloat16_blocks_rounded_up_is_read_as_a_number() -> None:
    scene = Scene([(1, 1)], dtype=torch.float16)
    scene.v[0].fill_(65504)
    out = paged_attention(**stored(scene, torch.bfloat16).arguments())
    assert (out == 65504).all()


@pytest.mark.parametrize("dtype", list(LARGEST))
def test_a_value_is_rounded_once_on_its_way_to_16_bit_queries(dtype: torch.dtype) -> None:
    """The only key of a row has weight one, so the row is that value."""
    scene = stored(Scene([(1, 1)], dtype=torch.bfloat16), dtype)
    out = paged_attention(**scene.arguments())
    assert torch.equal(out[0, ::3], scene.scene.v[0][0].bfloat16())
