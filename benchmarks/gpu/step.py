"""One step of attention over a cache in blocks: what goes in, and what must come out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.gpu.work import Heads
from kernels import triton_backend

# Scores of the reference that are held at once.
SCORES = 1 << 28

# Greatest error of a row that attention puts out in bfloat16, relative to the greatest value in it.
TOLERANCE = 1e-2

# Relative error of what a cache holds, over all of it.
CACHE_TOLERANCE = {torch.bfloat16: 0.0, torch.int8: 0.02, torch.float8_e4m3fn: 0.05}


@dataclass(slots=True)
class Step:
    """Sequences that are all alike, with new tokens at the end of their contexts, and random blocks.

    K and V of a block lie side by side, each head's tokens together: `pool` is [blocks, 2, G, block tokens, D] of
    `cache`, and so FlashInfer's HND layout. Nothing is in the cache before `fill`.

    Attributes:
        q: bfloat16 [sequences · new tokens, H, D].
        scales: float32 [blocks, 2, G, block tokens], of an 8-bit cache.
        tables: int32 [sequences, blocks of one].
    """

    heads: Heads
    sequences: int
    new_tokens: int
    context_tokens: int
    block_tokens: int
    cache: torch.dtype
    device: torch.device
    q: Tensor = field(init=False)
    pool: Tensor = field(init=False)
    scales: Tensor | None = field(init=False)
    tables: Tensor = field(init=False)
    query_starts: Tensor = field(init=False)
    context_lengths: Tensor = field(init=False)

    def __post_init__(self) -> None:
        each = -(-self.context_tokens // self.block_tokens)
        blocks, heads, device = self.sequences * each, self.heads, self.device
        self.q = self._draw(self.sequences * self.new_tokens, heads.query_heads)
        shape = (blocks, 2, heads.kv_heads, self.block_tokens)
        # Zeros, as a context may end within a block; bytes, as not every operation knows every dtype of 8 bits.
        width = heads.dim * self.cache.itemsize
        self.pool = torch.zeros(*shape, width, dtype=torch.uint8, device=device).view(self.cache)
        self.scales = torch.zeros(shape, device=device) if self.cache.itemsize == 1 else None
        order = torch.randperm(blocks, device=device)
        self.tables = order.view(self.sequences, each).to(torch.int32)
        starts = range(0, len(self.q) + 1, self.new_tokens)
        self.query_starts = torch.tensor(starts, dtype=torch.int32, device=device)
        self.context_lengths = torch.full_like(self.query_starts[1:], self.context_tokens)

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.heads.dim)

    @property
    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        """[blocks, block tokens, G, D] each, as the kernels take them."""
        k, v = self.pool.transpose(2, 3).unbind(1)
        return k, v

    @property
    def both_scales(self) -> tuple[Tensor | None, Tensor | None]:
        """[blocks, block tokens, G] each."""
        if self.scales is None:
            return None, None
        k, v = self.scales.transpose(2, 3).unbind(1)
        return k, v

    def fill(self) -> str | None:
        """Draw keys and values and write them with the kernel under test; say what is wrong with the cache then."""
        tokens = torch.arange(self.context_tokens, device=self.device)
        blocks = self.tables[:, tokens // self.block_tokens].long()
        slots = (blocks * self.block_tokens + tokens % self.block_tokens).view(-1)
        k, v = (self._draw(len(slots), self.heads.kv_heads) for _ in range(2))
        triton_backend.write_kv(k, v, *self.keys_and_values, slots, *self.both_scales)
        tolerance = CACHE_TOLERANCE[self.cache]
        for sequence in range(self.sequences):
            rows = slice(sequence * self.context_tokens, (sequence + 1) * self.context_tokens)
            for name, drawn, held in zip("kv", (k, v), self.held(sequence), strict=True):
                wanted = drawn[rows].transpose(0, 1).double()
                error = float((held - wanted).norm() / wanted.norm())
                if not error <= tolerance:
                    return f"write_kv left {name} of sequence {sequence} with an error of {error:.2g}"
        return None

    def held(self, sequence: int) -> Tensor:
        """What the cache holds of one sequence: float64 [2, G, context tokens, D]."""
        blocks = self.tables[sequence].long()
        content = self.pool.view(torch.uint8)[blocks].view(self.cache).float().double()
        if self.scales is not None:
            content *= self.scales[blocks].double()[..., None]
        return content.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : self.context_tokens]

    def contiguous(self) -> Tensor:
        """The same of all sequences as others take it: bfloat16 [2, sequences, G, context tokens, D]."""
        return torch.stack([self.held(sequence).to(torch.bfloat16) for sequence in range(self.sequences)], 1)

    def expected(self) -> Tensor:
        """Attention over what the cache holds: float64 [sequences · new tokens, H, D]."""
        return torch.cat([self._reference(sequence) for sequence in range(self.sequences)])

    def _draw(self, tokens: int, heads: int) -> Tensor:
        return torch.randn(tokens, heads, self.heads.dim, dtype=torch.bfloat16, device=self.device)

    def _reference(self, sequence: int) -> Tensor:
        """float64 [new tokens, H, D]."""
        kv_heads, dim = self.heads.kv_heads, self.heads.dim
        group = self.heads.query_heads // kv_heads
        k, v = self.held(sequence)
        key = torch.arange(self.context_tokens, device=self.device)
        first = self.context_tokens - self.new_tokens
        begin, end = sequence * self.new_tokens, (sequence + 1) * self.new_tokens
        chunk = max(1, SCORES // (self.heads.query_heads * self.context_tokens))
        parts = []
        for start in range(begin, end, chunk):
            q = self.q[start : min(start + chunk, end)].double()
            rows = len(q)
            q = q.view(rows, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, group * rows, dim)
            position = first + start - begin + torch.arange(rows, device=self.device)
            hidden = (key > position[:, None]).repeat(group, 1)
            scores = (q @ k.mT * self.scale).masked_fill_(hidden, -math.inf)
            out = torch.softmax(scores, -1) @ v
            parts.append(out.view(kv_heads, group, rows, dim).permute(2, 0, 1, 3).reshape(rows, -1, dim))
        return torch.cat(parts)


def error(out: Tensor, expected: Tensor) -> str | None:
    """What is wrong with the rows that came out, [tokens, H, D]; each is held against its own greatest value."""
    if out.shape != expected.shape:
        return f"{list(out.shape)} came out, not {list(expected.shape)}"
    errors = (out.double() - expected).abs().amax((1, 2)) / expected.abs().amax((1, 2))
    right = errors <= TOLERANCE  # which NaN is not
    if right.all():
        return None
    return f"{int((~right).sum())} of {len(right)} tokens differ from float64, the worst by {float(errors.max()):.2g}"
