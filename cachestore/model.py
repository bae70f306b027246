"""The model: weights from transformers, its attention bound to the paged cache, and the proof that it is.

transformers calls attention through a registry of functions by name. Ours writes the new K and V into the blocks and
attends over the block tables, so every decoder that goes through that registry is served without a module of ours. What
a step needs is passed down as a keyword: there is no current batch outside the call.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as List
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.logging import disable_progress_bar

from cachestore.batch import Batch
from cachestore.engine import Sampled
from cachestore.fuse import fuse
from cachestore.geometry import BlockLayout
from cachestore.protocol import DType, KVDType
from cachestore.sampling import Samples, sample
from cachestore.scheduler import Row
from cachestore.start_error import StartError
from kernels import select

log = logging.getLogger("saltern.store")

TORCH_DTYPES: dict[KVDType, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}

ATTENTION = "saltern_paged"


class KVCache:
    """The KV blocks on the device: one run of bytes per block, seen through strided views per layer.

    Attributes:
        storage: uint8 [blocks, block_bytes].
        layers: keys, values and, in 8 bits, scales of each layer.
    """

    def __init__(self, layout: BlockLayout, blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        self.storage = torch.zeros((blocks, layout.block_bytes), dtype=torch.uint8, device=device)
        self.layers = [layout.views(self.storage.view(dtype), layer) for layer in range(layout.layers)]


@dataclass(frozen=True, slots=True)
class PagedStep:
    """What every layer's attention needs of a step; `called` collects the layers that did call it."""

    batch: Batch
    cache: KVCache
    kernels: ModuleType
    called: set[int]


def _paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float,
    saltern_step: PagedStep,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls: query [1, H, T, D], key and value [1, G, T, D]."""
    batch, kernels = saltern_step.batch, saltern_step.kernels
    blocks = saltern_step.cache.layers[module.layer_idx]
    saltern_step.called.add(module.layer_idx)
    kernels.write_kv(
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        blocks.k,
        blocks.v,
        batch.slots,
        blocks.k_scales,
        blocks.v_scales,
    )
    out = kernels.paged_attention(
        query[0].transpose(0, 1),
        blocks.k,
        blocks.v,
        batch.block_tables,
        batch.query_starts,
        batch.context_lengths,
        scale=scaling,
        window=sliding_window,
        soft_cap=softcap,
        sinks=None if s_aux is None else s_aux.float(),
        k_scales=blocks.k_scales,
        v_scales=blocks.v_scales,
        max_query_tokens=batch.max_query_tokens,
        max_context_tokens=batch.max_context_tokens,
    )
    return out.unsqueeze(0), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _paged_attention)


class Model:
    """A decoder whose attention runs over block tables.

    Args:
        path: a directory in Hugging Face format, weights as safetensors.
        max_context_tokens: the context that rotary factors are frozen for. With `dynamic` or `longrope` scaling they
            would otherwise follow the longest request of a step, and one tenant's request would change everybody's
            keys.
    """

    def __init__(self, path: Path, *, dtype: DType, device: torch.device, max_context_tokens: int) -> None:
        disable_progress_bar()
        try:
            self.module = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=TORCH_DTYPES[dtype],
                attn_implementation=ATTENTION,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
            )
        except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise StartError(f"{path}: transformers can't load this model: {reason}") from error
        self.module.to(device).eval()
        self.device = device
        self.dtype = TORCH_DTYPES[dtype]
        self.kernels = select.backend(device)
        self.max_context_tokens = max_context_tokens
        self.fused = False
        self._freeze_rope(max_context_tokens)

    @torch.inference_mode()
    def _freeze_rope(self, max_context_tokens: int) -> None:
        last = torch.tensor([[max_context_tokens - 1]], device=self.device)
        probe = torch.zeros(1, device=self.device, dtype=self.dtype)
        for rope in self.module.modules():
            kind = getattr(rope, "rope_type", None)
            if isinstance(kind, dict):
                for layer_type in kind:
                    rope(probe, last, layer_type)
                rope.rope_type = dict.fromkeys(kind, "frozen")
            elif isinstance(kind, str):
                rope(probe, last)
                rope.rope_type = "frozen"

    @torch.inference_mode()
    def logits(self, batch: Batch, cache: KVCache, rows: torch.Tensor) -> torch.Tensor:
        """Run one packed step; logits [R, vocabulary] of the given rows of its tokens."""
        step = PagedStep(batch, cache, self.kernels, set())
        output = self.module(
            input_ids=batch.token_ids.unsqueeze(0),
            position_ids=batch.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=rows,
            saltern_step=step,
        )
        if len(step.called) != len(cache.layers):
            raise RuntimeError(f"{len(step.called)} of {len(cache.layers)} layers called the attention interface")
        logits: torch.Tensor = output.logits[0]
        return logits

    def fuse(self) -> str:
        """Replace small operations by equal modules, once and for good; says what, in words for the log."""
        self.fused = True
        fused: str = fuse(self.module, self.max_context_tokens)
        return fused

    @torch.inference_mode()
    def plain_logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The model as transformers runs it, without our attention: int64 [T] → logits [T, vocabulary].

        Raises:
            RuntimeError: the model is fused, and no longer what transformers made.
        """
        if self.fused:
            raise RuntimeError("plain logits are to be taken before the model is fused")
        self.module.set_attn_implementation("eager")
        try:
            logits: torch.Tensor = self.module(input_ids=token_ids.unsqueeze(0), use_cache=False).logits[0]
        finally:
            self.module.set_attn_implementation(ATTENTION)
        return logits


class ModelRunner:
    """Computes steps: packs the rows, runs the model over the cache, samples."""

    def __init__(self, model: Model, cache: KVCache, block_tokens: int) -> None:
        self.model = model
        self.cache = cache
        self.block_tokens = block_tokens

    def launch(self, rows: List[Row]) -> Samples:
        batch = Batch.from_rows(rows, self.block_tokens, self.model.device)
        return sample(self.model.logits(batch, self.cache, batch.sample_rows), batch.sampling)

    def collect(self, in_flight: Samples) -> list[Sampled]:
        return in_flight.collect()
