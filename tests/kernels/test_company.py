"""A row of attention has the same bits whoever else is in the batch, and whatever the bounds of the call are."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from kernels import torch_backend
from tests.kernels.device import DEVICE
from tests.kernels.scene import EIGHT_BITS, Scene, int32
from tests.kernels.ways import BY_TABLE, TINY_SPLIT_TOKENS, Way, in_tiny_tiles, table_choice, triton

# Decodes of one split and of several, of the same length and of others, in company of chunks and prompts. PyTorch
# computes contexts of 66 .. 128 tokens together.
LENGTHS = [(1, 70), (1, 3), (9, 31), (1, 70), (1, 128), (0, 5), (17, 17), (1, 66)]
OPTIONS: list[dict[str, Any]] = [
    {}, {"window": 37}, {"soft_cap": 4.0}, {"sinks": torch.ones(5, device=DEVICE)}, {"causal": False}
]  # fmt: skip


def check(attend: Way, scene: Scene, **options: Any) -> None:
    """Alone, each within its own bounds; then all in one batch with more padding, wider tables and other bounds."""
    real, shape = scene.starts[-1], scene.q.shape[:2]
    for with_lse in (True, False) if attend is torch_backend.paged_attention else (True,):
        lse = torch.full(shape, torch.nan, device=DEVICE)
        together = attend(**scene.arguments(), **options, lse=lse if with_lse else None)
        for sequence, (first, stop) in enumerate(pairwise(scene.starts)):
            alone_lse = torch.full_like(lse[first:stop], torch.nan)
            alone = attend(**scene.only(sequence), **options, lse=alone_lse if with_lse else None)
            assert torch.equal(alone, together[first:stop])
            assert torch.equal(alone_lse, lse[first:stop]) or not with_lse
        elsewhere = scene.arguments() | {
            "q": torch.cat([scene.q, scene.q[:3] * torch.nan]),
            "block_tables": torch.cat([scene.tables, scene.tables[:, -1:].expand(-1, 20)], 1),
            "max_query_tokens": 40,
            "max_context_tokens": 300,
        }
        other_lse = torch.full((real + scene.padding_rows + 3, shape[1]), torch.nan, device=DEVICE)
        there = attend(**elsewhere, **options, lse=other_lse if with_lse else None)
        assert torch.equal(there[:real], together[:real])


@pytest.mark.parametrize("options", OPTIONS)
def test_a_row_does_not_depend_on_its_company(attend: Way, options: dict[str, Any]) -> None:
    # The table has larger tiles for 16 bits.
    dtype = torch.float16 if attend is triton else torch.float32
    scene = Scene(LENGTHS, heads=(5, 1), dims=(24, 24), dtype=dtype, padding_rows=1)
    check(attend, scene, **options)
    together = attend(**scene.arguments(), **options)
    assert not torch.equal(together[0], together[scene.starts[3]])


@BY_TABLE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cache", [*EIGHT_BITS, torch.bfloat16])
def test_nor_over_blocks_of_another_dtype(attend: Way, dtype: torch.dtype, cache: torch.dtype) -> None:
    lengths = [(1, 70), (9, 31), (1, 200), (1, 1)]
    check(attend, Scene(lengths, heads=(5, 1), dims=(40, 16), dtype=dtype, cache=cache, padding_rows=1))


@BY_TABLE
@pytest.mark.parametrize("cache", [torch.float32, torch.int8])
def test_nor_with_contexts_longer_than_a_split_of_the_table(attend: Way, cache: torch.dtype) -> None:
    """Nor, in PyTorch, than the 512 keys that its attention takes at once."""
    split_tokens = table_choice(Scene([(1, 1)], heads=(2, 1), cache=cache)).split_tokens
    scene = Scene([(1, split_tokens + 70), (1, 90), (3, 65), (1, 37)], heads=(2, 1), cache=cache)
    together = attend(**scene.arguments())
    for sequence, (first, stop) in enumerate(pairwise(scene.starts)):
        assert torch.equal(attend(**scene.only(sequence)), together[first:stop])


def test_nor_on_the_order_of_the_batch(attend: Way) -> None:
    scene = Scene([(1, 70), (9, 31), (1, 100), (4, 4)], heads=(5, 1))
    expected = attend(**scene.arguments())
    order = [2, 3, 0, 1]
    rows = [torch.arange(*scene.starts[sequence : sequence + 2]) for sequence in order]
    starts = [0]
    for part in rows:
        starts.append(starts[-1] + len(part))
    moved = scene.arguments() | {
        "q": scene.q[torch.cat(rows)],
        "block_tables": scene.tables[order],
        "query_starts": int32(*starts),
        "context_lengths": int32(*(scene.lengths[sequence][1] for sequence in order)),
    }
    assert torch.equal(attend(**moved), expected[torch.cat(rows)])


def test_nor_on_how_many_splits_there_may_be() -> None:
    """Twenty of the tiny tiles' splits, more than are merged at once, within bounds that allow up to forty."""
    scene = Scene([(1, 20 * TINY_SPLIT_TOKENS)], heads=(2, 1))
    expected = in_tiny_tiles(**scene.arguments())
    for bound in (21, 31, 40):
        change = {"max_context_tokens": bound * TINY_SPLIT_TOKENS}
        assert torch.equal(in_tiny_tiles(**scene.arguments() | change), expected)
