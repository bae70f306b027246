"""The proof that a model computes over the paged cache what it computes alone, made at every load.

A model with recurrent layers, with keys shared between layers, or with attention outside the interface loads without
complaint and answers nonsense. So before it serves, its logits over 48 random tokens, chunked and packed beside another
request, are compared with one plain forward, of the model as transformers made it: nothing is fused before that. A
cache of another dtype is then compared with that in the model's own.
"""

from __future__ import annotations

import logging
from array import array
from dataclasses import replace

import torch

from cachestore.batch import Batch
from cachestore.checkpoint import ELEMENT_BYTES
from cachestore.geometry import BlockLayout
from cachestore.model import TORCH_DTYPES, KVCache, Model, ModelRunner
from cachestore.protocol import DType, KVDType, Sampling
from cachestore.scheduler import Row
from cachestore.sequence import Sequence
from cachestore.start_error import StartError

log = logging.getLogger("saltern.store")

PROBE_TOKENS = 48
COMPANION_TOKENS = 21
_UNSUPPORTED = (
    "Recurrent layers, keys shared between layers and attention outside transformers' interface are not supported"
)
# More than twice what one program of any kernel attends to.
WARM_UP_TOKENS = 1280
CHUNK_ENDS = (19, 40, 47, PROBE_TOKENS)
# By how much a cache may move rows of logits, in the median. Measured on the default model and on random ones, in fp32
# and bf16: int8 0.4 to 2.2 %, fp8 1.6 to 9.3 %; with the scales of keys off by two, 11 % and more.
KV_BOUNDS: dict[KVDType, float] = {"fp32": 0.02, "bf16": 0.02, "fp16": 0.02, "int8": 0.05, "fp8": 0.1}


def prove_binding(
    model: Model, layout: BlockLayout, dtype: DType, kv_dtype: KVDType, vocabulary_tokens: int, name: str
) -> str:
    """Take the model's plain logits, fuse it, and compare the paged path with them; then one in `kv_dtype` with that.

    Args:
        layout: of the cache that will serve, in `kv_dtype`.
        dtype: of the model.

    Returns:
        How far they were apart, in words for the log.

    Raises:
        StartError: they disagree, or the model does not call its attention through the interface in every layer.
    """
    generator = torch.Generator().manual_seed(48)
    tokens = torch.randint(0, vocabulary_tokens, (PROBE_TOKENS + COMPANION_TOKENS,), generator=generator)
    probe, companion = make_sequence(tokens[:PROBE_TOKENS]), make_sequence(tokens[PROBE_TOKENS:])
    blocks = [-(-len(sequence.tokens) // layout.block_tokens) for sequence in (probe, companion)]
    # Highest first: a table in ascending order would hide a kernel that ignores it.
    probe.table = list(range(sum(blocks) - 1, blocks[1] - 1, -1))
    companion.table = list(range(blocks[1] - 1, -1, -1))
    cache = KVCache(replace(layout, element_bytes=ELEMENT_BYTES[dtype]), sum(blocks), model.dtype, model.device)
    try:
        parts = (tokens[:PROBE_TOKENS], tokens[PROBE_TOKENS:])
        plain = torch.cat([model.plain_logits(part.to(model.device)) for part in parts]).float()
        log.info("fused %s", model.fuse())
        paged = torch.cat(_paged(model, cache, layout.block_tokens, probe, companion))
        agrees, difference = _agreement(plain, paged, dtype)
        if kv_dtype != dtype:
            narrow = KVCache(layout, sum(blocks), TORCH_DTYPES[kv_dtype], model.device)
            kept = torch.cat(_paged(model, narrow, layout.block_tokens, probe, companion))
    except Exception as error:
        raise StartError(
            f"{name} can't be served: its attention does not run over the paged cache ({type(error).__name__}: "
            f"{str(error).partition(chr(10))[0]}). {_UNSUPPORTED}"
        ) from error
    if not agrees:
        raise StartError(f"{name} can't be served: over the paged cache {difference}. {_UNSUPPORTED}")
    if kv_dtype == dtype:
        return difference
    moved = _row_differences(paged, kept).median().item()
    words = f"a cache in {kv_dtype} moves rows of logits by {moved:.2%} (median)"
    # Written so that NaN is refused.
    if not moved <= KV_BOUNDS[kv_dtype]:
        raise StartError(
            f"{name} can't be served with --kv-dtype {kv_dtype}: {words}, more than {KV_BOUNDS[kv_dtype]:.0%}; "
            f"choose {dtype} or another"
        )
    return f"{difference}; {words}"


def warm_up(runner: ModelRunner, max_context_tokens: int) -> None:
    """Decode one token at the end of a long context, or of the longest there can be.

    The proof has run what short contexts need; a kernel that is compiled for long ones alone would otherwise make the
    first request that has one wait. All of that context is one free block, over and over.
    """
    tokens = min(max_context_tokens, WARM_UP_TOKENS)
    sequence = make_sequence(torch.zeros(tokens, dtype=torch.int64))
    sequence.table = [0] * -(-tokens // runner.block_tokens)
    runner.collect(runner.launch([Row(sequence, tokens - 1, 1, samples=True)]))


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
    rows = _row_differences(plain, paged)
    median, tail = rows.median().item(), rows.quantile(0.9).item()
    words = f"rows of logits differ from the model's own by {median:.2%} (median) and {tail:.2%} (nine of ten)"
    return median <= 0.02 and tail <= 0.1, f"{words} (allowed in {dtype}: 2 % and 10 %)"


def _row_differences(expected: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    return (expected - actual).norm(dim=-1) / expected.norm(dim=-1)


def make_sequence(tokens: torch.Tensor) -> Sequence:
    """A greedy request of these tokens and no blocks yet, that nobody waits for."""
    return Sequence(
        connection=0,
        request=0,
        arrival=0,
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
