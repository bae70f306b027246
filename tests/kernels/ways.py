"""The ways in which attention is called: PyTorch, Triton with its table's tiles, and Triton in tiny tiles.

In tiny tiles short contexts already have several tiles and several splits, and edges of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import torch_backend, triton_backend
from kernels.tiles import Choice, HeadShape, choose
from kernels.triton_backend.attention import plan_attention, split_workspace
from kernels.triton_backend.target import on, target
from tests.kernels.device import DEVICE
from tests.kernels.scene import Scene, assert_close

Way = Callable[..., Tensor]
TINY_TILE, TINY_SPLIT_TOKENS = 16, 32


def table_choice(scene: Scene) -> Choice:
    """The tiles of the public function."""
    return choose(
        HeadShape(
            *scene.dims, scene.heads[0] // scene.heads[1], scene.q.element_size(), scene.k_blocks.element_size()
        ),
        *target(DEVICE),
    )  # fmt: skip


def tiled(
    choice: Choice,
    *,
    q: Tensor,
    v_blocks: Tensor,
    context_lengths: Tensor,
    max_context_tokens: int,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    **arguments: Any,
) -> Tensor:
    """`paged_attention` of the Triton backend with the tiles that are given; out and workspace hold NaN before."""
    if out is None:
        out = q.new_full((*q.shape[:2], v_blocks.shape[3]), torch.nan)
    workspace_bytes = split_workspace(
        len(context_lengths), q.shape[1], v_blocks.shape[3], max_context_tokens, choice.split_tokens
    )
    workspace = torch.full((workspace_bytes // 4,), torch.nan, device=DEVICE).view(torch.uint8)
    options = {"causal": True, "window": None, "soft_cap": None, "sinks": None, "k_scales": None, "v_scales": None}
    launches = plan_attention(
        q=q, v_blocks=v_blocks, context_lengths=context_lengths, max_context_tokens=max_context_tokens,
        choice=choice, out=out, lse=lse, workspace=workspace, **(options | arguments),
    )  # fmt: skip
    with on(DEVICE):
        for launch in launches:
            launch.run()
    return out


def tiny_choice(split_tokens: int = TINY_SPLIT_TOKENS) -> Choice:
    some = choose(HeadShape(16, 16, 1, 4, 4), *target(DEVICE))
    tiles = {"row_tile": TINY_TILE, "key_tile": TINY_TILE}
    return replace(
        some, prefill=replace(some.prefill, **tiles), decode=replace(some.decode, **tiles), split_tokens=split_tokens
    )


def in_tiny_tiles(**arguments: Any) -> Tensor:
    return tiled(tiny_choice(), **arguments)


def triton(*, out: Tensor | None = None, **arguments: Any) -> Tensor:
    """The public function of the Triton backend, with a workspace of the size it names and NaN in it and in out."""
    q, value_dim = arguments["q"], arguments["v_blocks"].shape[3]
    if out is None:
        out = q.new_full((*q.shape[:2], value_dim), torch.nan)
    workspace_bytes = triton_backend.attention_workspace(
        tokens=len(q), sequences=len(arguments["context_lengths"]), query_heads=q.shape[1], value_dim=value_dim,
        max_context_tokens=arguments["max_context_tokens"],
    )  # fmt: skip
    workspace = torch.full((workspace_bytes // 4,), torch.nan, device=DEVICE).view(torch.uint8)
    return triton_backend.paged_attention(**arguments, out=out, workspace=workspace)


# For what tiny tiles would show nothing new about.
BY_TABLE = pytest.mark.parametrize("attend", ["torch", "triton"], indirect=True)
WAYS: dict[str, Way] = {"torch": torch_backend.paged_attention, "triton": triton, "tiny": in_tiny_tiles}


def agrees(attend: Way, scene: Scene, **options: Any) -> None:
    """Out and lse are what the reference gives."""
    expected, expected_lse = scene.reference(**options)
    lse = torch.full(scene.q.shape[:2], torch.nan, device=DEVICE)
    assert_close(attend(**scene.arguments(), **options, lse=lse), expected, scene.tolerance)
    assert_close(lse, expected_lse, scene.tolerance)
    if attend is torch_backend.paged_attention:  # PyTorch computes in another way where no lse is asked for
        assert_close(attend(**scene.arguments(), **options), expected, scene.tolerance)
