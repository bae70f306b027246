"""From tensors to launches: what tiles, which grid, and no word with the device."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kernels.contract import check_attention
from kernels.tiles import Choice, HeadShape, Tiles, choose, shortest_split_tokens
from kernels.triton_backend.attention_kernels import decode_kernel, prefill_kernel
from kernels.triton_backend.launch import Launch
from kernels.triton_backend.shape import Shape, parts
from kernels.triton_backend.splits import merge_kernel
from kernels.triton_backend.target import INTERPRETED, on, target

LOG2E = math.log2(math.e)


def paged_attention(
    q: torch.Tensor,
    k_blocks: torch.Tensor,
    v_blocks: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lengths: torch.Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    max_query_tokens: int,
    max_context_tokens: int,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention over block tables; `kernels.torch_backend.paged_attention` says what of.

    Args:
        workspace: uint8, of at least `attention_workspace` bytes, contiguous and on 16 bytes; its content is lost. With
            it and `out` given nothing is allocated.

    Raises:
        ValueError: shapes, dtypes or options that do not fit together, a second dim that reaches past 32 bits, or a
            workspace that is too small. What the lengths and tables hold is not looked at: that would mean to wait
            for the device.
    """
    tokens, query_heads, key_dim = q.shape
    kv_heads, value_dim = v_blocks.shape[2:]
    if out is None:
        out = q.new_empty(tokens, query_heads, value_dim)
    check_attention(
        q, k_blocks, v_blocks, block_tables, query_starts, context_lengths,
        causal=causal, window=window, soft_cap=soft_cap, sinks=sinks, k_scales=k_scales, v_scales=v_scales,
        out=out, lse=lse,
    )  # fmt: skip
    for name, tensor, unit in (
        ("k_blocks", k_blocks, 16 // k_blocks.element_size()), ("v_blocks", v_blocks, 16 // v_blocks.element_size()),
        ("k_scales", k_scales, 1), ("v_scales", v_scales, 1), ("q", q, 1), ("out", out, 1), ("lse", lse, 1),
    ):  # fmt: skip
        # Blocks and rows may be any distance apart.
        if tensor is not None and (tensor.shape[1] - 1) * tensor.stride(1) // unit >= 2**31:
            raise ValueError(
                f"{name} has a stride of {tensor.stride(1)} in its second dim of {tensor.shape[1]}: they must lie "
                f"within {2**31 * unit} elements; put that dim inside the first"
            )
    workspace_bytes = attention_workspace(
        tokens=tokens, sequences=len(context_lengths), query_heads=query_heads, value_dim=value_dim,
        max_context_tokens=max_context_tokens,
    )  # fmt: skip
    if workspace is None:
        workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=q.device)
    elif workspace.dtype != torch.uint8 or workspace.nbytes < workspace_bytes or not workspace.is_contiguous():
        raise ValueError(
            f"workspace must be contiguous uint8 of at least {workspace_bytes} bytes, "
            f"not {workspace.dtype} of {workspace.nbytes}"
        )
    shape = HeadShape(key_dim, value_dim, query_heads // kv_heads, q.element_size(), k_blocks.element_size())
    launches = plan_attention(
        q, k_blocks, v_blocks, block_tables, query_starts, context_lengths,
        choice=choose(shape, *target(q.device)),
        scale=scale, causal=causal, window=window, soft_cap=soft_cap, sinks=sinks, k_scales=k_scales,
        v_scales=v_scales, max_query_tokens=max_query_tokens, max_context_tokens=max_context_tokens,
        out=out, lse=lse, workspace=workspace.view(-1)[:workspace_bytes],
    )  # fmt: skip
    with on(q.device):
        for launch in launches:
            launch.run()
    return out


def attention_workspace(
    *, tokens: int, sequences: int, query_heads: int, value_dim: int, max_context_tokens: int
) -> int:
    """Bytes of workspace that `paged_attention` wants at most for such a step: the partial results of its splits."""
    return split_workspace(sequences, query_heads, value_dim, max_context_tokens, shortest_split_tokens())


def split_workspace(
    sequences: int, query_heads: int, value_dim: int, max_context_tokens: int, split_tokens: int
) -> int:
    """Bytes of workspace for contexts in splits of `split_tokens`: float32 out and lse of each; none for one split."""
    splits = triton.cdiv(max_context_tokens, split_tokens)
    return sequences * query_heads * splits * (value_dim + 1) * 4 if splits > 1 else 0


def plan_attention(
    q: torch.Tensor,
    k_blocks: torch.Tensor,
    v_blocks: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lengths: torch.Tensor,
    *,
    choice: Choice,
    scale: float,
    causal: bool,
    window: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    k_scales: torch.Tensor | None,
    v_scales: torch.Tensor | None,
    max_query_tokens: int,
    max_context_tokens: int,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    workspace: torch.Tensor,
) -> list[Launch]:
    """The launches of one call of `paged_attention`, in order, with the tiles that are given.

    Args:
        workspace: uint8, of `split_workspace` bytes at least.
    """
    tokens, query_heads, key_dim = q.shape
    _, block_tokens, kv_heads, value_dim = v_blocks.shape
    sequences = len(context_lengths)
    group = query_heads // kv_heads
    score_dot, value_dot = _operands(q.dtype, k_blocks.dtype)

    def shape(tiles: Tiles) -> Shape:
        head_tile = min(group, tiles.row_tile)
        return Shape(
            tiles.row_tile, tiles.key_tile, choice.split_tokens, block_tokens,
            group, head_tile, triton.cdiv(group, head_tile),
            key_dim, *parts(key_dim), value_dim, *parts(value_dim), 16 // k_blocks.element_size(),
            score_dot, value_dot, causal, window is not None, soft_cap is not None, sinks is not None,
            k_scales is not None,
        )  # fmt: skip

    arguments = {
        "q": q, "q_token_stride": q.stride(0), "q_head_stride": q.stride(1),
        **_blocks("k", k_blocks), **_blocks("v", v_blocks), **_scales("k", k_scales), **_scales("v", v_scales),
        "block_tables": block_tables, "table_stride": block_tables.stride(0),
        "query_starts": query_starts, "context_lengths": context_lengths, "sinks": sinks,
        "out": out, "out_token_stride": out.stride(0), "out_head_stride": out.stride(1),
        "lse": lse, "lse_token_stride": lse.stride(0) if lse is not None else 0,
        "lse_head_stride": lse.stride(1) if lse is not None else 0,
        "score_scale": scale * LOG2E, "soft_cap": (soft_cap or 0.0) * LOG2E,
        # One as long as the longest context hides nothing, and positions minus it stay within 32 bits.
        "window": min(window, max_context_tokens) if window is not None else 0,
        "tokens": tokens, "sequences": sequences,
    }  # fmt: skip
    launches = []
    decode = shape(choice.decode)
    rows = sequences
    if max_query_tokens > 1:
        prefill = shape(choice.prefill)
        tiles = tokens // (prefill.row_tile // prefill.head_tile) + sequences + 1
        grid = (tiles, kv_heads * prefill.head_tiles)
        named = {**arguments, "S": prefill}
        launches.append(Launch(prefill_kernel, grid, named, choice.prefill.num_warps, choice.prefill.num_stages))
        arguments["tokens"] = 0
    else:
        rows = max(sequences, tokens)
    splits = triton.cdiv(max_context_tokens, choice.split_tokens)
    if window is not None:
        splits = min(splits, (window - 1) // choice.split_tokens + 2)
    splits = max(1, splits)
    partial = workspace.view(torch.float32)
    at = sequences * query_heads * splits * value_dim
    partial_out, partial_lse = partial[:at], partial[at:]
    launches.append(
        Launch(
            decode_kernel,
            (rows, kv_heads * decode.head_tiles, splits),
            {**arguments, "partial_out": partial_out, "partial_lse": partial_lse, "splits": splits, "S": decode},
            choice.decode.num_warps,
            choice.decode.num_stages,
        )
    )
    if splits > 1:
        names = (
            "query_starts", "context_lengths", "out", "out_token_stride", "out_head_stride",
            "lse", "lse_token_stride", "lse_head_stride", "window",
        )  # fmt: skip
        merge = {
            "partial_out": partial_out, "partial_lse": partial_lse, "splits": splits,
            **{name: arguments[name] for name in names}, "S": decode, "COLUMNS": triton.next_power_of_2(value_dim),
        }  # fmt: skip
        launches.append(Launch(merge_kernel, (sequences, query_heads), merge, 4, 1))
    return launches


def _operands(query: torch.dtype, cache: torch.dtype) -> tuple[tl.dtype, tl.dtype]:
    """What q·k and weights·v multiply: q's dtype, unless float16 could not hold what the cache holds."""
    if query == torch.float32 or INTERPRETED:  # the interpreter would multiply the bits of bfloat16
        return tl.float32, tl.float32
    if query == torch.bfloat16 or cache == torch.bfloat16:
        return tl.bfloat16, tl.bfloat16
    # Weights times the scales of values are too small for float16.
    return tl.float16, tl.float16 if cache.itemsize > 1 else tl.bfloat16


def _blocks(name: str, blocks: torch.Tensor) -> dict[str, object]:
    unit = 16 // blocks.element_size()
    block, token, head, _ = blocks.stride()
    return {
        f"{name}_blocks": blocks,
        f"{name}_block_stride": block // unit,
        f"{name}_token_stride": token // unit,
        f"{name}_head_stride": head // unit,
    }


def _scales(name: str, scales: torch.Tensor | None) -> dict[str, object]:
    block, token, head = scales.stride() if scales is not None else (0, 0, 0)
    return {
        f"{name}_scales": scales,
        f"{name}_scale_block_stride": block,
        f"{name}_scale_token_stride": token,
        f"{name}_scale_head_stride": head,
    }
