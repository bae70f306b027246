"""Requests that use every sampling parameter, for hypothesis, and an engine's runner with logits of a test's making."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from cachestore.engine import Sampled
from cachestore.protocol import Sampling
from cachestore.sampling import Samples, sample
from cachestore.sampling_rows import SamplingRows
from cachestore.scheduler import Row
from cachestore.sequence import Sequence as StoreSequence
from tests.cachestore.support import make_sequence

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Request:
    """One row: its tokens, of which the first are the prompt, and what it asks for."""

    tokens: list[int]
    prompt_tokens: int
    sampling: Sampling

    @property
    def sequence(self) -> StoreSequence:
        return make_sequence(self.tokens, self.sampling, prompt_tokens=self.prompt_tokens)


def sample_together(logits: torch.Tensor, requests: Sequence[Request]) -> list[Sampled]:
    """Logits [R, vocabulary], one row for each request."""
    return sample(logits, SamplingRows.of([request.sequence for request in requests], CPU)).collect()


def requests(vocabulary_tokens: int) -> st.SearchStrategy[Request]:
    """Some of the first ten ids occur again and again: in the context, biased, and to stop at."""
    token = st.one_of(st.integers(0, 9), st.integers(0, vocabulary_tokens - 1))
    kept = [0, 0, 1, 40, 300, vocabulary_tokens - 1, vocabulary_tokens, 2 * vocabulary_tokens]
    bias = st.tuples(token, st.sampled_from([-100.0, -1.5, 3.0]))
    drawn = {
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        "top_k": st.sampled_from(kept),
        "top_p": st.sampled_from([1.0, 0.9, 0.4, 0.01]),
        "min_p": st.sampled_from([0.0, 0.0, 0.05, 0.6, 1.0]),
        "seed": st.integers(0, (1 << 64) - 1),
        "logprobs": st.sampled_from([None, None, 0, 1, 5, 20]),
    }
    adjusted = {
        "presence_penalty": st.sampled_from([0.0, 1.5, -2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.3, -1.1]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.5]),
        "logit_bias": st.lists(bias, max_size=5, unique_by=lambda entry: entry[0]),
        "stop_token_ids": st.lists(token, max_size=4),
        "min_tokens": st.sampled_from([0, 3, 50]),
    }
    # Half of them leave the logits alone, which one that draws each parameter by itself hardly ever does.
    sampling = st.one_of(st.builds(Sampling, **drawn), st.builds(Sampling, **drawn, **adjusted))
    return st.builds(
        lambda prompt, output, sampling: Request(prompt + output, len(prompt), sampling),
        st.lists(token, min_size=1, max_size=12),
        st.lists(token, max_size=12),
        sampling,
    )


class LogitsRunner:
    """Stands in for the model: the logits of a row are what `logits_of` says of its request."""

    def __init__(self, logits_of: Callable[[StoreSequence], torch.Tensor]) -> None:
        self._logits_of = logits_of

    def launch(self, rows: Sequence[Row]) -> Samples:
        sequences = [row.sequence for row in rows if row.samples]
        logits = [self._logits_of(sequence) for sequence in sequences]
        return sample(torch.stack(logits) if logits else torch.zeros(0, 1), SamplingRows.of(sequences, CPU))

    def collect(self, in_flight: Samples) -> list[Sampled]:
        return in_flight.collect()
