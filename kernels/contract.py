"""What callers of the kernels must keep to, checked the same way for every backend.

The checks of shapes and dtypes read no tensor's content, so they cost no host sync.
"""

from __future__ import annotations

from itertools import pairwise

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
EIGHT_BITS = (torch.int8, torch.float8_e4m3fn)
# A load of a row takes 16 bytes at a time.
ROW_ALIGNMENT_BYTES = 16
LARGEST_DIM = 256
# A score is capped by 1 - exp(-2 · score / cap), of which float32 keeps too little where a cap is far above a score.
LEAST_SOFT_CAP, LARGEST_SOFT_CAP = 1e-3, 1e3


def check_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_blocks: torch.Tensor,
    v_blocks: torch.Tensor,
    slots: torch.Tensor,
    k_scales: torch.Tensor | None,
    v_scales: torch.Tensor | None,
) -> None:
    """Raises:
    ValueError: blocks that no kernel takes, new keys and values that do not fit them, or slots that do not fit those.
    """
    _check_blocks(k_blocks, v_blocks, k_scales, v_scales)
    _check_float("k", k)
    _check("k", k, (len(k), *k_blocks.shape[2:]), k.dtype)
    _check("v", v, (len(k), *v_blocks.shape[2:]), k.dtype)
    _check("slots", slots, (len(k),), torch.int64)
    for name, tensor in (("k", k), ("v", v), ("slots", slots)):
        _check_dense(name, tensor)


def check_attention(
    q: torch.Tensor,
    k_blocks: torch.Tensor,
    v_blocks: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lengths: torch.Tensor,
    *,
    causal: bool,
    window: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    k_scales: torch.Tensor | None,
    v_scales: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Raises:
    ValueError: shapes, dtypes or options that do not fit together.
    """
    _check_blocks(k_blocks, v_blocks, k_scales, v_scales)
    _check_float("q", q)
    tokens, query_heads, _ = q.shape
    sequences, entries = block_tables.shape
    kv_heads, key_dim = k_blocks.shape[2:]
    if query_heads % kv_heads:
        raise ValueError(f"{query_heads} query heads are no multiple of {kv_heads} kv heads")
    _check("q", q, (tokens, query_heads, key_dim), q.dtype)
    _check("out", out, (tokens, query_heads, v_blocks.shape[3]), q.dtype)
    _check("block_tables", block_tables, (sequences, entries), torch.int32)
    _check("query_starts", query_starts, (sequences + 1,), torch.int32)
    _check("context_lengths", context_lengths, (sequences,), torch.int32)
    for name, tensor in (
        ("q", q), ("out", out), ("block_tables", block_tables), ("query_starts", query_starts),
        ("context_lengths", context_lengths),
    ):  # fmt: skip
        _check_dense(name, tensor)
    if lse is not None:
        _check("lse", lse, (tokens, query_heads), torch.float32)
    if sinks is not None:
        _check("sinks", sinks, (query_heads,), torch.float32)
        _check_dense("sinks", sinks)
    if window is not None and not causal:
        raise ValueError(f"a window ({window} tokens) needs causal attention; pass window=None")
    if window is not None and window < 1:
        raise ValueError(f"a window of {window} tokens shows a query not even itself; pass at least 1")
    if soft_cap is not None and not LEAST_SOFT_CAP <= soft_cap <= LARGEST_SOFT_CAP:
        raise ValueError(
            f"soft_cap is {soft_cap}; pass one from {LEAST_SOFT_CAP:g} to {LARGEST_SOFT_CAP:g} or None"
        )


def check_lengths(
    starts: list[int], contexts: list[int], *, tokens: int, max_query_tokens: int, max_context_tokens: int
) -> None:
    """The content of `query_starts` and `context_lengths`, for a backend that has it on the host.

    Args:
        tokens: rows of q.
        max_context_tokens: the caller's bound, or what a block table holds if that is less.

    Raises:
        ValueError: sequences that overlap, end past `tokens` or are over a bound.
    """
    counts = [stop - first for first, stop in pairwise(starts)]
    if starts[0] != 0 or starts[-1] > tokens or min(counts, default=0) < 0:
        raise ValueError(f"query_starts must rise from 0 to at most {tokens}, the rows of q")
    if max(counts, default=0) > max_query_tokens:
        raise ValueError(f"{max(counts)} query tokens of one sequence, over the bound of {max_query_tokens}")
    if contexts and not 0 <= min(contexts) <= max(contexts) <= max_context_tokens:
        raise ValueError(
            f"context_lengths {min(contexts)} .. {max(contexts)} are outside 0 .. {max_context_tokens} tokens, "
            "the lesser of max_context_tokens and a block table's reach"
        )


def _check_blocks(
    k_blocks: torch.Tensor, v_blocks: torch.Tensor, k_scales: torch.Tensor | None, v_scales: torch.Tensor | None
) -> None:
    if k_blocks.ndim != 4:
        raise ValueError(f"blocks must be [blocks, tokens, kv heads, dim], not {list(k_blocks.shape)}")
    _check("v_blocks", v_blocks, (*k_blocks.shape[:3], v_blocks.shape[-1]), k_blocks.dtype)
    for name, blocks, scales in (("k", k_blocks, k_scales), ("v", v_blocks, v_scales)):
        _check_rows(f"{name}_blocks", blocks)
        if blocks.dtype in FLOATS:
            if scales is not None:
                raise ValueError(f"{blocks.dtype} blocks have no scales: leave {name}_scales out")
        elif blocks.dtype in EIGHT_BITS:
            shape = tuple(blocks.shape[:3])
            if scales is None:
                raise ValueError(f"{blocks.dtype} blocks need scales: pass {name}_scales, torch.float32 {list(shape)}")
            _check(f"{name}_scales", scales, shape, torch.float32)
        else:
            raise ValueError(f"blocks must be of one of {_names(FLOATS + EIGHT_BITS)}, not {blocks.dtype}")


def _check_rows(name: str, blocks: torch.Tensor) -> None:
    dim = blocks.shape[3]
    if dim % 8 or not 8 <= dim <= LARGEST_DIM:
        raise ValueError(f"{name} has a head dim of {dim}: no multiple of 8 from 8 to {LARGEST_DIM}")
    block, token, head, element = blocks.stride()
    size = blocks.element_size()
    if element == 1 and not (blocks.data_ptr() | (block | token | head) * size) % ROW_ALIGNMENT_BYTES:
        return  # nearly always, and asked in every layer
    _check_dense(name, blocks)
    # Where there is one of something, its stride leads nowhere.
    strides = [stride * size for stride, count in zip((block, token, head), blocks.shape, strict=False) if count > 1]
    if any(offset % ROW_ALIGNMENT_BYTES for offset in (blocks.data_ptr(), *strides)):
        raise ValueError(
            f"rows of {name} must begin on {ROW_ALIGNMENT_BYTES} bytes, and it begins at {blocks.data_ptr():#x} "
            f"with strides of {strides} bytes: pad each row to a multiple of {ROW_ALIGNMENT_BYTES} bytes"
        )


def _check_float(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in FLOATS:
        raise ValueError(f"{name} must be of one of {_names(FLOATS)}, not {tensor.dtype}")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _check_dense(name: str, tensor: torch.Tensor) -> None:
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(f"{name} must be contiguous in its last dim, not have a stride of {tensor.stride(-1)} there")


def _check(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype} {list(shape)}, not {tensor.dtype} {list(tensor.shape)}")
