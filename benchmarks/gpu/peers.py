"""The same step by others. Each takes a step and gives back its call, whose result is [tokens, H, D] after `rows`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.machine import Call
from benchmarks.gpu.plan import FLASHINFER_BUILD_SECONDS, FLEX_SECONDS
from benchmarks.gpu.step import Step
from benchmarks.gpu.suite import run_limited

FLASHINFER_WORKSPACE_BYTES = 256 << 20


class NotMeasured(Exception):
    """Why a peer has no figure in a case."""


class Peer(Protocol):
    """Raises NotMeasured, or whatever the peer raises. `dense` is what `Step.contiguous` gives."""

    def __call__(self, step: Step, dense: Tensor) -> Call: ...


def rows(out: Tensor) -> Tensor:
    """[sequences, H, new tokens, D] as [tokens, H, D]; what is [tokens, H, D] already stays so."""
    return out.transpose(1, 2).flatten(0, 1) if out.ndim == 4 else out


def sdpa(step: Step, dense: Tensor) -> Call:
    """PyTorch's own choice among its implementations, over contiguous keys and values in bfloat16."""
    q, (k, v) = _queries(step), dense
    options: dict[str, Any] = {"scale": step.scale, "enable_gqa": True}
    if step.new_tokens == step.context_tokens:
        options["is_causal"] = True
    elif step.new_tokens > 1:
        options["attn_mask"] = causal_lower_right(step.new_tokens, step.context_tokens)
    return lambda: scaled_dot_product_attention(q, k, v, **options)


@dataclass(slots=True)
class FlexAttention:
    """Compiled anew for each shape, so only in bfloat16 and within `FLEX_SECONDS` in all.

    Attributes:
        compiler: `torch.compile`, or what stands in for it.
    """

    compiler: Callable[..., Any] = torch.compile
    spent_seconds: float = 0.0
    longest_seconds: float = 0.0

    def __call__(self, step: Step, dense: Tensor) -> Call:
        _only_bfloat16(step)
        if self.spent_seconds + self.longest_seconds > FLEX_SECONDS:
            raise NotMeasured(f"the {FLEX_SECONDS:.0f} s for compiling it are spent")
        begun = time.monotonic()
        try:
            return self._compiled(step, dense)
        finally:
            seconds = time.monotonic() - begun
            self.spent_seconds += seconds
            self.longest_seconds = max(self.longest_seconds, seconds)

    def _compiled(self, step: Step, dense: Tensor) -> Call:
        q, (k, v) = _queries(step), dense
        mask = None
        if step.new_tokens > 1:
            first = step.context_tokens - step.new_tokens

            def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                return query + first >= key

            mask = create_block_mask(visible, None, None, step.new_tokens, step.context_tokens, device=step.device)
        # Else the ninth shape would run uncompiled.
        torch.compiler.reset()
        compiled = self.compiler(flex_attention, dynamic=False)

        def call() -> Any:
            return compiled(q, k, v, block_mask=mask, scale=step.scale, enable_gqa=True)

        call()
        return call


@dataclass(slots=True)
class FlashInfer:
    """Its paged decode over the very same blocks; 8-bit caches have one scale for all there, and are left out.

    It may have to build its kernels first, which happens in another process, within `FLASHINFER_BUILD_SECONDS`.
    """

    unavailable: str | None = None
    workspace: Tensor | None = None

    def __call__(self, step: Step, dense: Tensor) -> Call:
        if self.unavailable is not None:
            raise NotMeasured(self.unavailable)
        _only_bfloat16(step)
        if step.new_tokens > 1:
            raise NotMeasured("it is only asked for decode")
        flashinfer = importlib.import_module("flashinfer")

        if self.workspace is None:
            self.workspace = torch.zeros(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=step.device)
        each = step.tables.shape[1]
        last = (step.context_tokens - 1) % step.block_tokens + 1
        heads = step.heads
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(self.workspace, "HND", use_tensor_cores=True)
        wrapper.plan(
            torch.arange(step.sequences + 1, dtype=torch.int32, device=step.device) * each,
            step.tables.flatten(),
            torch.full_like(step.context_lengths, last),
            heads.query_heads,
            heads.kv_heads,
            heads.dim,
            step.block_tokens,
            q_data_type=step.q.dtype,
            kv_data_type=step.cache,
            sm_scale=step.scale,
        )
        return lambda: wrapper.run(step.q, step.pool)


def built_flashinfer() -> FlashInfer:
    """Ready to be asked, or with the reason why not."""
    if importlib.util.find_spec("flashinfer") is None:
        return FlashInfer("it is not installed")
    command = [sys.executable, "-m", "benchmarks.gpu.build_flashinfer"]
    returncode, output = run_limited(command, FLASHINFER_BUILD_SECONDS)
    if returncode is None:
        return FlashInfer(f"it was not built within {FLASHINFER_BUILD_SECONDS:.0f} s")
    if returncode != 0:
        return FlashInfer((output.strip().splitlines() or ["it could not be built"])[-1])
    return FlashInfer()


def _queries(step: Step) -> Tensor:
    """[sequences, H, new tokens, D]."""
    return step.q.view(step.sequences, step.new_tokens, -1, step.heads.dim).transpose(1, 2).contiguous()


def _only_bfloat16(step: Step) -> None:
    if step.cache != torch.bfloat16:
        raise NotMeasured("it is asked for bfloat16 alone")
