"""The tensors of one step."""

from __future__ import annotations

import numpy as np
import torch

from cachestore.batch import Batch, slots
from cachestore.protocol import Sampling
from cachestore.scheduler import Row
from tests.cachestore.support import make_sequence


def test_b033_slots_follow_the_table_and_not_the_first_slot() -> None:
    table = np.array([7, 2, 9], dtype=np.int32)
    assert slots(table, 3, 6, 4).tolist() == [31, 8, 9]
    sequence = make_sequence([1] * 6, prompt_tokens=6, table=[7, 2, 9])
    batch = Batch.from_rows([Row(sequence, 3, 3, samples=True)], 4, torch.device("cpu"))
    assert batch.slots.tolist() == [31, 8, 9]


def test_slots_of_the_largest_pools_do_not_wrap() -> None:
    last_block = (1 << 31) - 1
    assert slots(np.array([last_block], dtype=np.int32), 0, 2, 128).tolist() == [last_block * 128, last_block * 128 + 1]


def test_rows_are_packed_without_padding_between_them() -> None:
    decode = make_sequence(range(10, 17), Sampling(temperature=1, seed=7), prompt_tokens=4, table=[5, 3])
    chunk = make_sequence(range(20, 32), Sampling(temperature=1), prompt_tokens=12, table=[8, 1, 6])
    last_chunk = make_sequence(range(40, 43), Sampling(temperature=2, seed=1 << 40), prompt_tokens=3, table=[2])
    rows = [Row(decode, 6, 1, samples=True), Row(chunk, 4, 5, samples=False), Row(last_chunk, 0, 3, samples=True)]
    batch = Batch.from_rows(rows, 4, torch.device("cpu"))
    assert batch.token_ids.tolist() == [16, 24, 25, 26, 27, 28, 40, 41, 42]
    assert batch.positions.tolist() == [6, 4, 5, 6, 7, 8, 0, 1, 2]
    assert batch.slots.tolist() == [14, 4, 5, 6, 7, 24, 8, 9, 10]
    assert batch.query_starts.tolist() == [0, 1, 6, 9]
    assert batch.context_lengths.tolist() == [7, 9, 3]
    assert batch.block_tables.tolist() == [[5, 3, -1], [8, 1, 6], [2, -1, -1]]
    assert (batch.max_query_tokens, batch.max_context_tokens) == (5, 9)
    assert batch.sample_rows.tolist() == [0, 8]
    assert batch.sampling.draws
    assert batch.sampling.draws.temperature.tolist() == [1, 2]
    # Three tokens of an answer were drawn before this one.
    assert batch.sampling.draws.output_index.tolist() == [3, 0]
    assert batch.sampling.draws.seeds.tolist() == [[7, 0], [0, 256]]
    assert batch.token_ids.dtype == batch.positions.dtype == batch.slots.dtype == torch.int64
    assert batch.block_tables.dtype == batch.query_starts.dtype == batch.context_lengths.dtype == torch.int32
    assert batch.sample_rows.dtype == torch.int64


def test_a_step_of_chunks_alone_samples_nothing() -> None:
    chunk = make_sequence([1] * 12, prompt_tokens=12, table=[0, 1, 2])
    batch = Batch.from_rows([Row(chunk, 0, 5, samples=False)], 4, torch.device("cpu"))
    assert batch.sample_rows.tolist() == []
