"""The proof that a model computes over the paged cache what it computes alone, made at every load.

A model with recurrent layers, with keys shared between layers, or with attention outside the interface loads without
complaint and answers nonsense. So before it serves, its logits over 48 random tokens, chunked and packed beside another
request, are compared with one plain forward, of the model as transformers made it: nothing is fused before that.
"""

from __future__ import annotations

import logging
from array import array

import torch

from cachestore.batch import Batch
from cachestore.geometry import BlockLayout
from cachestore.model import KVCache, Model
from cachestore.protocol import DType, Sampling
from cachestore.scheduler import Row
from cachestore.sequence import Sequence
from cachestore.start_error import StartError

log = logging.getLogger("saltern.store")

PROBE_TOKENS = 48
COMPANION_TOKENS = 21
_UNSUPPORTED = (
    "Recurrent layers, keys shared between layers and attention outside transformers' interface are not supported"
)
CHUNK_ENDS = (19, 40, 47, PROBE_TOKENS)


def prove_binding(model: Model, layout: BlockLayout, dtype: DType, vocabulary_tokens: int, name: str) -> str:
    """Take the model's plain logits, fuse it, and compare the paged path with them.

    Returns:
        How far they were apart, in words for the log.

    Raises:
        StartError: they disagree, or the model does not call its attention through the interface in every layer.
    """
    generator = torch.Generator().manual_seed(48)
    tokens = torch.randint(0, vocabulary_tokens, (PROBE_TOKENS + COMPANION_TOKENS,), generator=generator)
    probe, companion = _sequence(tokens[:PROBE_TOKENS]), _sequence(tokens[PROBE_TOKENS:])
    blocks = [-(-len(sequence.tokens) // layout.block_tokens) for sequence in (probe, companion)]
    # Highest first: a table in ascending order would hide a kernel that ignores it.
    probe.table = list(range(sum(blocks) - 1, blocks[1] - 1, -1))
    companion.table = list(range(blocks[1] - 1, -1, -1))
    cache = KVCache(layout, sum(blocks), model.dtype, model.device)
    try:
        parts = (tokens[:PROBE_TOKENS], tokens[PROBE_TOKENS:])
        plain = torch.cat([model.plain_logits(part.to(model.device)) for part in parts]).float()
        log.info("fused %s", model.fuse())
        paged = torch.cat(_paged(model, cache, layout.block_tokens, probe, companion))
        agrees, difference = _agreement(plain, paged, dtype)
    except Exception as error:
        raise StartError(
            f"{name} can't be served: its attention does not run over the paged cache ({type(error).__name__}: "
            f"{str(error).partition(chr(10))[0]}). {_UNSUPPORTED}"
        ) from error
    if not agrees:
        raise StartError(f"{name} can't be served: over the paged cache {difference}. {_UNSUPPORTED}")
    return difference


def _agreement(plain: torch.Tensor, paged: torch.Tensor, dtype: DType) -> tuple[bool, str]:
    """Whether logits [T, vocabulary] are those of the same model, and how far they are apart.

    In 16 bits two right ways of computing differ by several per cent of the largest logit, and on single tokens by
    more; a wrong one is off by tens of per cent on many. So rows are compared as a whole: half of them within 2 % and
    nine of ten within 10 %.
    """
    if dtype == "fp32":
        most = (plain - paged).abs().max().item()
        # Written so that NaN is refused.
        return most <= 1e-3, f"logits differ from the model's own by at most {most:.2g} (allowed: 1e-3)"
    rows = (plain - paged).norm(dim=-1) / plain.norm(dim=-1)
    median, tail = rows.median().item(), rows.quantile(0.9).item()
    words = f"rows of logits differ from the model's own by {median:.2%} (median) and {tail:.2%} (nine of ten)"
    return median <= 0.02 and tail <= 0.1, f"{words} (allowed in {dtype}: 2 % and 10 %)"


def _sequence(tokens: torch.Tensor) -> Sequence:
    return Sequence(
        connection=0,
        request=0,
        account=b"",
        epoch=0,
        tokens=array("I", tokens.tolist()),
        prompt_tokens=len(tokens),
        keys=[],
        sampling=Sampling(temperature=0),
        stop_token_ids=frozenset(),
        max_tokens=1,
        queue_deadline_ns=0,
        queued_ns=0,
    )


def _paged(
    model: Model, cache: KVCache, block_tokens: int, probe: Sequence, companion: Sequence
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of both sequences, the probe in chunks and the companion whole in the probe's second step."""
    parts: list[torch.Tensor] = []
    beside = torch.empty(0)
    start = 0
    for step, end in enumerate(CHUNK_ENDS):
        rows = [Row(probe, start, end - start, samples=False)]
        if step == 1:
            rows.append(Row(companion, 0, len(companion.tokens), samples=False))
        batch = Batch.from_rows(rows, block_tokens, model.device)
        logits = model.logits(batch, cache, torch.arange(len(batch.token_ids), device=model.device)).float()
        parts.append(logits[: end - start])
        if step == 1:
            beside = logits[end - start :]
        start = end
    return torch.cat(parts), beside
