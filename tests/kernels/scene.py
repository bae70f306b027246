"""Sequences whose keys and values lie scattered over poisoned blocks, and what attention over them must give.

The reference never sees a block: it works in float64, row by row, from the keys and values as they were drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def strided_blocks(
    blocks: int, block_tokens: int, kv_heads: int, dims: tuple[int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """K [blocks, block_tokens, kv_heads, key_dim] and V as views into larger blocks, full of NaN.

    As in a cache: a block holds several layers and, inside, each head's tokens side by side.
    """
    key_size, value_size = (block_tokens * kv_heads * dim for dim in dims)
    storage = torch.full((blocks, 3, key_size + value_size), torch.nan, dtype=dtype)
    keys = storage[:, 1, :key_size].view(blocks, kv_heads, block_tokens, dims[0])
    values = storage[:, 1, key_size:].view(blocks, kv_heads, block_tokens, dims[1])
    return keys.transpose(1, 2), values.transpose(1, 2)


@dataclass(slots=True)
class Scene:
    """`lengths`: (new tokens, context tokens) of each sequence."""

    lengths: list[tuple[int, int]]
    heads: tuple[int, int] = (9, 3)
    dims: tuple[int, int] = (64, 64)
    block_tokens: int = 16
    dtype: torch.dtype = torch.float32
    padding_rows: int = 0
    seed: int = 0
    q: Tensor = field(init=False)
    k: list[Tensor] = field(init=False)
    v: list[Tensor] = field(init=False)
    k_blocks: Tensor = field(init=False)
    v_blocks: Tensor = field(init=False)
    tables: Tensor = field(init=False)

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random).to(self.dtype)

        query_heads, kv_heads = self.heads
        rows = sum(new for new, _ in self.lengths) + self.padding_rows
        self.q = draw(rows, query_heads, self.dims[0])
        self.k = [draw(context, kv_heads, self.dims[0]) for _, context in self.lengths]
        self.v = [draw(context, kv_heads, self.dims[1]) for _, context in self.lengths]
        needed = [-(-context // self.block_tokens) for _, context in self.lengths]
        total = sum(needed) + 3
        self.k_blocks, self.v_blocks = strided_blocks(total, self.block_tokens, kv_heads, self.dims, self.dtype)
        free = torch.randperm(total, generator=random).tolist()
        self.tables = torch.full((len(needed), max(needed, default=0) + 2), -1, dtype=torch.int32)
        for sequence, count in enumerate(needed):
            table = [free.pop() for _ in range(count)]
            self.tables[sequence, :count] = torch.tensor(table, dtype=torch.int32)
            for token in range(self.lengths[sequence][1]):
                block, offset = table[token // self.block_tokens], token % self.block_tokens
                self.k_blocks[block, offset] = self.k[sequence][token]
                self.v_blocks[block, offset] = self.v[sequence][token]

    @property
    def starts(self) -> list[int]:
        starts = [0]
        for new, _ in self.lengths:
            starts.append(starts[-1] + new)
        return starts

    def arguments(self) -> dict[str, Any]:
        """What `paged_attention` takes, with a scale."""
        return {
            "q": self.q,
            "k_blocks": self.k_blocks,
            "v_blocks": self.v_blocks,
            "block_tables": self.tables,
            "query_starts": torch.tensor(self.starts, dtype=torch.int32),
            "context_lengths": torch.tensor([context for _, context in self.lengths], dtype=torch.int32),
            "scale": self.dims[0] ** -0.5,
            "max_query_tokens": max((new for new, _ in self.lengths), default=0),
            "max_context_tokens": max((context for _, context in self.lengths), default=0),
        }

    def only(self, sequence: int) -> dict[str, Any]:
        """The arguments of a call that holds this one sequence and nobody else."""
        first, stop = self.starts[sequence : sequence + 2]
        alone = self.arguments()
        alone["q"] = self.q[first:stop].clone()
        alone["block_tables"] = self.tables[sequence : sequence + 1]
        alone["query_starts"] = torch.tensor([0, stop - first], dtype=torch.int32)
        alone["context_lengths"] = alone["context_lengths"][sequence : sequence + 1]
        return alone

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
        row = 0
        for (new, context), k, v in zip(self.lengths, self.k, self.v, strict=True):
            for position in range(context - new, context):
                begin = 0 if window is None else max(0, position - window + 1)
                end = max(0, position + 1) if causal else context
                if begin < end:
                    keys, values = k[begin:end, head].double(), v[begin:end, head].double()
                    logits = torch.einsum("hd,nhd->hn", self.q[row].double(), keys) * self.dims[0] ** -0.5
                    if soft_cap is not None:
                        logits = soft_cap * torch.tanh(logits / soft_cap)
                    if sinks is not None:
                        logits = torch.cat([logits, sinks.double()[:, None]], 1)
                    weights = torch.softmax(logits, 1)[:, : end - begin]
                    out[row] = torch.einsum("hn,nhd->hd", weights, values)
                    lse[row] = torch.logsumexp(logits, 1)
                row += 1
        return out, lse


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Largest error against the largest value; infinities must be in the same places."""
    assert actual.shape == expected.shape
    finite = expected.isfinite()
    assert torch.equal(actual.double()[~finite], expected[~finite])
    assert actual[finite].isfinite().all()
    if finite.any():
        error = (actual.double() - expected)[finite].abs().max()
        largest = max(expected[finite].abs().max(), torch.tensor(1e-30))
        assert error <= tolerance * largest, f"error {error:.3g} at values up to {largest:.3g}"
