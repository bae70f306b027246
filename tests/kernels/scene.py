"""Sequences whose keys and values lie scattered over poisoned blocks, and what attention over them must give.

The reference never sees a block: it works in float64 from the keys and values as they were drawn, which for 8-bit
blocks are the drawn bits times the drawn scales. Poisoned is all that must not matter: free blocks and slots, scales of
free slots, what lies between blocks, table entries past a context, and padding rows of q.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.kernels.device import DEVICE

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
EIGHT_BITS = (torch.int8, torch.float8_e4m3fn)
# Largest error against the largest value. Half a step of the dtype, a whole one where a conversion truncates, as
# in Triton's interpreter, and as much again where weights are rounded to the dtype before they meet the values.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """NaN, or 127 where there is none."""
    free = torch.full(shape, 127 if dtype == torch.int8 else torch.nan, device=DEVICE)
    return free.to(dtype)


def bits(x: Tensor) -> Tensor:
    """To compare 8-bit floats and NaNs as they are."""
    return x.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def strided_blocks(
    blocks: int, block_tokens: int, kv_heads: int, dims: tuple[int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """K [blocks, block_tokens, kv_heads, key_dim] and V as views into larger blocks, full of poison.

    As in a cache: a block holds several layers and, inside, each head's tokens side by side, rows on 16 bytes.
    """
    unit = 16 // dtype.itemsize
    pitches = [-(-dim // unit) * unit for dim in dims]
    key_size, value_size = (block_tokens * kv_heads * pitch for pitch in pitches)
    storage = poisoned(blocks, 3, key_size + value_size, dtype=dtype)
    keys = storage[:, 1, :key_size].view(blocks, kv_heads, block_tokens, pitches[0])[..., : dims[0]]
    values = storage[:, 1, key_size:].view(blocks, kv_heads, block_tokens, pitches[1])[..., : dims[1]]
    return keys.transpose(1, 2), values.transpose(1, 2)


def strided_scales(blocks: int, block_tokens: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Scales [blocks, block_tokens, kv_heads] of keys and of values, side by side and head by head, full of NaN."""
    scales = poisoned(blocks, 2, kv_heads, block_tokens, dtype=torch.float32)
    k_scales, v_scales = scales.transpose(2, 3).unbind(1)
    return k_scales, v_scales


@dataclass(slots=True)
class Scene:
    """`lengths`: (new tokens, context tokens) of each sequence. `cache`: dtype of the blocks, q's if not given."""

    lengths: list[tuple[int, int]]
    heads: tuple[int, int] = (3, 1)
    dims: tuple[int, int] = (16, 16)
    block_tokens: int = 16
    dtype: torch.dtype = torch.float32
    cache: torch.dtype | None = None
    padding_rows: int = 0
    seed: int = 0
    q: Tensor = field(init=False)
    k: list[Tensor] = field(init=False)
    v: list[Tensor] = field(init=False)
    k_blocks: Tensor = field(init=False)
    v_blocks: Tensor = field(init=False)
    k_scales: Tensor | None = field(init=False, default=None)
    v_scales: Tensor | None = field(init=False, default=None)
    tables: Tensor = field(init=False)

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)
        self.cache = self.cache or self.dtype
        query_heads, kv_heads = self.heads
        rows = self.starts[-1]
        self.q = torch.full((rows + self.padding_rows, query_heads, self.dims[0]), torch.nan, dtype=self.dtype)
        self.q[:rows] = torch.randn(rows, query_heads, self.dims[0], generator=random)
        self.q = self.q.to(DEVICE)
        needed = [-(-context // self.block_tokens) for _, context in self.lengths]
        total = sum(needed) + 3
        self.k_blocks, self.v_blocks = strided_blocks(total, self.block_tokens, kv_heads, self.dims, self.cache)
        if self.cache in EIGHT_BITS:
            self.k_scales, self.v_scales = strided_scales(total, self.block_tokens, kv_heads)
        free = torch.randperm(total, generator=random).tolist()
        width = max(needed, default=0) + 2
        # Neither of them is a block.
        self.tables = torch.tensor([-1, 2**31 - 1] * width, dtype=torch.int32)[:width].repeat(len(needed), 1)
        for sequence, count in enumerate(needed):
            self.tables[sequence, :count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
        self.tables = self.tables.to(DEVICE)
        self.k, self.v = [], []
        for sequence, (_, context) in enumerate(self.lengths):
            for parts, blocks, scales, dim in (
                (self.k, self.k_blocks, self.k_scales, self.dims[0]),
                (self.v, self.v_blocks, self.v_scales, self.dims[1]),
            ):
                drawn = torch.randn(context, kv_heads, dim, generator=random)
                scale = torch.rand(context, kv_heads, generator=random) + 0.5
                self._store(sequence, parts, drawn, scale, blocks, scales)

    def _store(
        self, sequence: int, parts: list[Tensor], drawn: Tensor, scale: Tensor, blocks: Tensor, scales: Tensor | None
    ) -> None:
        """Put what was drawn into the sequence's slots, and what it reads back as into `parts`."""
        where = self.slots(sequence) // self.block_tokens, self.slots(sequence) % self.block_tokens
        if scales is None:
            held = drawn.to(blocks.dtype)
            parts.append(held.double())
        else:
            held = (drawn * 40).clamp(-127, 127).round().to(blocks.dtype)
            parts.append(held.double() * (scale / 40).double()[..., None])
            scales[where] = (scale / 40).to(DEVICE)
        blocks[where] = held.to(DEVICE)

    def slots(self, sequence: int) -> Tensor:
        """int64 [context tokens] of one sequence."""
        token = torch.arange(self.lengths[sequence][1], device=DEVICE)
        return self.tables[sequence].long()[token // self.block_tokens] * self.block_tokens + token % self.block_tokens

    @property
    def starts(self) -> list[int]:
        starts = [0]
        for new, _ in self.lengths:
            starts.append(starts[-1] + new)
        return starts

    @property
    def tolerance(self) -> float:
        # Only bfloat16 holds both what such blocks read back as and weights times their scales.
        narrow = self.dtype == torch.float16 and self.cache not in (torch.float16, torch.float32)
        return TOLERANCE[torch.bfloat16 if narrow else self.dtype]

    def arguments(self) -> dict[str, Any]:
        """What `paged_attention` takes, with a scale."""
        return {
            "q": self.q,
            "k_blocks": self.k_blocks,
            "v_blocks": self.v_blocks,
            "k_scales": self.k_scales,
            "v_scales": self.v_scales,
            "block_tables": self.tables,
            "query_starts": int32(*self.starts),
            "context_lengths": int32(*(context for _, context in self.lengths)),
            "scale": self.dims[0] ** -0.5,
            "max_query_tokens": max((new for new, _ in self.lengths), default=0),
            "max_context_tokens": max((context for _, context in self.lengths), default=0),
        }

    def only(self, sequence: int) -> dict[str, Any]:
        """The arguments of a call that holds this one sequence and nobody else, and is bounded by it."""
        first, stop = self.starts[sequence : sequence + 2]
        context = self.lengths[sequence][1]
        return self.arguments() | {
            "q": self.q[first:stop].clone(),
            "block_tables": self.tables[sequence : sequence + 1, : -(-context // self.block_tokens)].clone(),
            "query_starts": int32(0, stop - first),
            "context_lengths": int32(context),
            "max_query_tokens": stop - first,
            "max_context_tokens": context,
        }

    def reference(
        self,
        *,
        causal: bool = True,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """float64 out [T, H, Dv] and lse [T, H]."""
        query_heads, kv_heads = self.heads
        out = torch.zeros(len(self.q), query_heads, self.dims[1], dtype=torch.float64)
        lse = torch.full((len(self.q), query_heads), -torch.inf, dtype=torch.float64)
        head = torch.arange(query_heads) // (query_heads // kv_heads)
        for sequence, (new, context) in enumerate(self.lengths):
            rows = slice(self.starts[sequence], self.starts[sequence] + new)
            position, key = torch.arange(context - new, context)[:, None], torch.arange(context)
            visible = (key <= position) if causal else torch.ones(new, context, dtype=torch.bool)
            if window is not None:
                visible = visible & (key > position - window)
            q, k, v = self.q[rows].cpu().double(), self.k[sequence][:, head], self.v[sequence][:, head]
            logits = torch.einsum("thd,nhd->thn", q, k) * self.dims[0] ** -0.5
            if soft_cap is not None:
                logits = soft_cap * torch.tanh(logits / soft_cap)
            logits = logits.masked_fill(~visible[:, None], -torch.inf)
            if sinks is not None:
                logits = torch.cat([logits, sinks.cpu().double().expand(new, -1)[..., None]], 2)
            sees = visible.any(1)
            total = logits.logsumexp(2)
            weights = (logits - total[..., None]).exp()[..., :context]
            out[rows][sees] = torch.einsum("thn,nhd->thd", weights, v)[sees]
            lse[rows][sees] = total[sees]
        return out, lse


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Largest error of each token against its largest value; NaNs and infinities must be in the same places.

    Against the largest of all it would be lost what a row over many keys, whose values are small, gets wrong.
    """
    actual = actual.cpu().double()
    assert actual.shape == expected.shape
    finite = expected.isfinite()
    torch.testing.assert_close(actual[~finite], expected[~finite], rtol=0, atol=0, equal_nan=True)
    assert actual[finite].isfinite().all(), f"{int((~actual[finite].isfinite()).sum())} values are not finite"
    if expected.ndim < 3:  # a sum may be near zero
        actual, expected, finite = actual[None], expected[None], finite[None]
    for token, (errors, values) in enumerate(
        zip((actual - expected).where(finite, 0.0).abs(), expected.where(finite, 0.0).abs(), strict=True)
    ):
        if values.numel():
            error, largest = errors.max(), max(values.max(), torch.tensor(1e-30))
            assert error <= tolerance * largest, f"error {error:.3g} at values up to {largest:.3g} of token {token}"
