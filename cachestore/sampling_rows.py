"""What the requests of a step ask of their sampling, as tensors of those rows that ask for it."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cachestore.sequence import Sequence

_WORD = 0xFFFFFFFF

# A row, some of its tokens, a value for each or for all of them.
_Part = tuple[int, npt.ArrayLike, npt.ArrayLike]


@dataclass(frozen=True, slots=True)
class Entries:
    """Single logits of several rows, none of them twice: `rows` and `tokens` int64 [N], `values` float32 [N]."""

    rows: torch.Tensor
    tokens: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, parts: List[_Part], device: torch.device) -> Entries:
        columns: tuple[list[npt.NDArray[np.generic]], ...] = ([], [], [])
        for row, row_tokens, row_values in parts:
            tokens = np.asarray(row_tokens, dtype=np.int64)
            columns[0].append(np.full(len(tokens), row))
            columns[1].append(tokens)
            columns[2].append(np.full(len(tokens), row_values, dtype=np.float32))
        return cls(*(torch.from_numpy(np.concatenate(column)).to(device) for column in columns))


@dataclass(frozen=True, slots=True)
class Draws:
    """The rows that are not greedy, D in number.

    Attributes:
        rows: int64 [D].
        temperature: float64 [D].
        seeds: the 64-bit seeds as pairs of 32-bit words, int64 [D, 2].
        output_index: int64 [D], how many tokens the request has generated before.
        floored: int64 [M], which of the D have a min_p; min_p: float64 [M].
        cut: int64 [F], which of the D have a top-k or top-p; top_k: int64 [F], 0 is off; top_p: float64 [F].
    """

    rows: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    output_index: torch.Tensor
    floored: torch.Tensor
    min_p: torch.Tensor
    cut: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor

    @classmethod
    def of(cls, rows: List[int], sequences: List[Sequence], device: torch.device) -> Draws:
        wanted = [sequence.sampling for sequence in sequences]
        floored = [at for at, sampling in enumerate(wanted) if sampling.min_p > 0]
        cut = [at for at, sampling in enumerate(wanted) if sampling.top_k > 0 or sampling.top_p < 1]

        def tensor(values: List[object], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            rows=tensor(rows, torch.int64),
            temperature=tensor([sampling.temperature for sampling in wanted], torch.float64),
            seeds=tensor([(sampling.seed & _WORD, sampling.seed >> 32) for sampling in wanted], torch.int64),
            output_index=tensor([sequence.output_tokens for sequence in sequences], torch.int64),
            floored=tensor(floored, torch.int64),
            min_p=tensor([wanted[at].min_p for at in floored], torch.float64),
            cut=tensor(cut, torch.int64),
            top_k=tensor([wanted[at].top_k for at in cut], torch.int64),
            top_p=tensor([wanted[at].top_p for at in cut], torch.float64),
        )


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How the rows of a step are sampled.

    Attributes:
        penalties: what logits are divided by, or multiplied where they are not positive.
        offsets: what is added then, one after the other.
        draws: None when all rows are greedy.
        told: (row, how many of the likeliest) of the rows that ask for log probabilities.
    """

    penalties: Entries | None
    offsets: list[Entries]
    draws: Draws | None
    told: list[tuple[int, int]]

    @classmethod
    def of(cls, sequences: List[Sequence], device: torch.device) -> SamplingRows:
        """For the next token of each of these."""
        penalised: list[_Part] = []
        used: list[_Part] = []
        biased: list[_Part] = []
        masked: list[_Part] = []
        for row, sequence in enumerate(sequences):
            sampling = sequence.sampling
            if sampling.repetition_penalty != 1:
                penalised.append((row, np.unique(np.array(sequence.tokens)), sampling.repetition_penalty))
            if sampling.presence_penalty or sampling.frequency_penalty:
                output = np.array(sequence.tokens[sequence.prompt_tokens :])
                tokens, counts = np.unique(output, return_counts=True)
                used.append((row, tokens, -(sampling.presence_penalty + sampling.frequency_penalty * counts)))
            if bias := sampling.logit_bias:
                biased.append((row, [token for token, _ in bias], [value for _, value in bias]))
            if sequence.output_tokens < sampling.min_tokens:
                masked.append((row, list(sequence.stop_token_ids), -np.inf))
        drawn = [row for row, sequence in enumerate(sequences) if sequence.sampling.temperature > 0]
        return cls(
            penalties=Entries.of(penalised, device) if penalised else None,
            offsets=[Entries.of(parts, device) for parts in (used, biased, masked) if parts],
            draws=Draws.of(drawn, [sequences[row] for row in drawn], device) if drawn else None,
            told=[(row, s.sampling.logprobs) for row, s in enumerate(sequences) if s.sampling.logprobs is not None],
        )
