"""The tensors of one step: all rows packed into one, without padding between them."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cachestore.blocks import NO_BLOCK
from cachestore.sampling_rows import SamplingRows
from cachestore.scheduler import Row


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of S sequences, R of which sample.

    Attributes:
        token_ids, positions: int64 [T].
        slots: int64 [T], block * block_tokens + offset: where each token's K and V go.
        block_tables: int32 [S, M], unused ends filled with -1.
        query_starts: int32 [S + 1], where each sequence's tokens begin.
        context_lengths: int32 [S], tokens in the cache after this step.
        sample_rows: int64 [R], which of the T tokens are sampled from.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    block_tables: torch.Tensor
    query_starts: torch.Tensor
    context_lengths: torch.Tensor
    max_query_tokens: int
    max_context_tokens: int
    sample_rows: torch.Tensor
    sampling: SamplingRows

    @classmethod
    def from_rows(cls, rows: List[Row], block_tokens: int, device: torch.device) -> Batch:
        counts = np.array([row.count for row in rows])
        starts = np.array([row.start for row in rows])
        query_starts = np.concatenate(([0], np.cumsum(counts)))
        tables = np.full((len(rows), max(len(row.sequence.table) for row in rows)), NO_BLOCK, dtype=np.int32)
        token_ids, positions, row_slots = [], [], []
        for table, row in zip(tables, rows, strict=True):
            table[: len(row.sequence.table)] = row.sequence.table
            end = row.start + row.count
            token_ids.append(np.frombuffer(row.sequence.tokens[row.start : end], dtype=np.uint32))
            positions.append(np.arange(row.start, end))
            row_slots.append(slots(table, row.start, end, block_tokens))
        sample_rows = [end - 1 for end, row in zip(query_starts[1:], rows, strict=True) if row.samples]

        def tensor(values: npt.NDArray[np.generic], dtype: torch.dtype) -> torch.Tensor:
            return torch.from_numpy(values).to(device=device, dtype=dtype)

        return cls(
            token_ids=tensor(np.concatenate(token_ids).astype(np.int64), torch.int64),
            positions=tensor(np.concatenate(positions), torch.int64),
            slots=tensor(np.concatenate(row_slots), torch.int64),
            block_tables=tensor(tables, torch.int32),
            query_starts=tensor(query_starts, torch.int32),
            context_lengths=tensor(starts + counts, torch.int32),
            max_query_tokens=int(counts.max()),
            max_context_tokens=int((starts + counts).max()),
            sample_rows=tensor(np.array(sample_rows, dtype=np.int64), torch.int64),
            sampling=SamplingRows.of([row.sequence for row in rows if row.samples], device),
        )


def slots(table: npt.NDArray[np.int32], start: int, end: int, block_tokens: int) -> npt.NDArray[np.int64]:
    """Cache slots of positions [start, end): table[p // B] * B + p % B. A table's blocks are not contiguous."""
    positions = np.arange(start, end)
    return table[positions // block_tokens].astype(np.int64) * block_tokens + positions % block_tokens
