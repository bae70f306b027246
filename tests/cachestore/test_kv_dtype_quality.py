"""How near 8-bit keys and values keep the default model to itself, measured, and what that measurement would not pass.

Teacher-forced: the text is what the model writes over a cache in fp32, and every token of it is predicted again, from
keys and values that are read from the cache in question.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from cachestore.batch import Batch
from cachestore.binding import make_sequence
from cachestore.model import ModelRunner
from cachestore.protocol import KVDType
from cachestore.scheduler import Row
from kernels import torch_backend
from tests.cachestore.conftest import MakeRunner
from tests.cachestore.support import Harness
from tests.cachestore.test_golden_tokens import PROMPTS

ANSWER_TOKENS = 64
BLOCKS = 80


@dataclass(frozen=True, slots=True)
class Text:
    """Prompts with what the model wrote, and its logits [answer tokens of all, vocabulary] for that."""

    sequences: list[list[int]]
    logits: torch.Tensor


def predicted(runner: ModelRunner, sequences: list[list[int]]) -> torch.Tensor:
    """Logits of the last `ANSWER_TOKENS` of each, all computed in one step from what that step wrote into the cache."""
    rows, used, ends = [], 0, []
    for tokens in sequences:
        sequence = make_sequence(torch.tensor(tokens))
        needed = -(-len(tokens) // runner.block_tokens)
        sequence.table = list(range(used + needed - 1, used - 1, -1))
        used += needed
        rows.append(Row(sequence, 0, len(tokens), samples=False))
        ends.append(sum(row.count for row in rows) - 1)
    batch = Batch.from_rows(rows, runner.block_tokens, runner.model.device)
    sampled = torch.cat([torch.arange(end - ANSWER_TOKENS, end) for end in ends])
    return runner.model.logits(batch, runner.cache, sampled).float()


@pytest.fixture(scope="module")
def text(make_runner: MakeRunner, default_model: Path) -> Text:
    tokenizer = Tokenizer.from_file(str(default_model / "tokenizer.json"))
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    store = Harness(make_runner(BLOCKS), blocks=BLOCKS, block_tokens=16, step_tokens=1024, vocabulary_tokens=49_152)
    answers = [store.submit(prompt, max_tokens=ANSWER_TOKENS) for prompt in prompts]
    store.run(*answers)
    sequences = [prompt + answer.tokens for prompt, answer in zip(prompts, answers, strict=True)]
    return Text(sequences, predicted(make_runner(BLOCKS), sequences))


def measured(runner: ModelRunner, text: Text) -> tuple[float, float]:
    """At how many positions the best token is the same, and the mean KL divergence from fp32."""
    logits = predicted(runner, text.sequences)
    agreement = (logits.argmax(-1) == text.logits.argmax(-1)).double().mean().item()
    ours, theirs = logits.double().log_softmax(-1), text.logits.double().log_softmax(-1)
    return agreement, (theirs.exp() * (theirs - ours)).sum(-1).mean().item()


@dataclass(frozen=True, slots=True)
class Bound:
    """Measured: int8 97.9 % and 0.0008, fp8 97.7 % and 0.0042."""

    agreement: float
    divergence: float

    def holds(self, measurement: tuple[float, float]) -> bool:
        agreement, divergence = measurement
        return agreement >= self.agreement and divergence <= self.divergence


BOUNDS: dict[KVDType, Bound] = {"int8": Bound(0.97, 0.0015), "fp8": Bound(0.96, 0.006)}


@pytest.mark.parametrize("kv_dtype", BOUNDS)
def test_8_bit_caches_stay_near_the_model(make_runner: MakeRunner, text: Text, kv_dtype: KVDType) -> None:
    measurement = measured(make_runner(BLOCKS, kv_dtype=kv_dtype), text)
    assert BOUNDS[kv_dtype].holds(measurement), measurement


def test_scales_of_keys_that_are_off_by_two_do_not(
    make_runner: MakeRunner, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    working = torch_backend.paged_attention

    def attend(*args: Any, k_scales: torch.Tensor, **options: Any) -> torch.Tensor:
        return working(*args, k_scales=2 * k_scales, **options)

    monkeypatch.setattr(torch_backend, "paged_attention", attend)
    agreement, divergence = measured(make_runner(BLOCKS, kv_dtype="int8"), text)
    loosest = BOUNDS["fp8"]
    assert agreement < loosest.agreement
    assert divergence > loosest.divergence
