"""What is compiled: at most 60 kernels for each target, each planned by the functions that serve.

    head dims × cache dtypes × prefill and decode, plain, in the head ratios of models that have such heads
    at 128: each option alone, and all together on an 8-bit cache, where a thread has most to hold
    the ends of the tile table: one KV head for many query heads, float32
    the merge of splits, and the write of each cache dtype

A launch is made of tensors on torch's `meta` device, which have shapes and strides and no memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from kernels import tiles
from kernels.report.targets import Target
from kernels.tiles import HeadShape
from kernels.triton_backend.attention import attention_workspace, plan_attention
from kernels.triton_backend.launch import Launch
from kernels.triton_backend.write import plan_write

MOST_VARIANTS = 60
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}

# A step as they come: some prompts and some decodes, contexts of several splits, in a pool of more than 2^31 bytes.
TOKENS = 1024
SEQUENCES = 16
CONTEXT_TOKENS = 32_768
LAYERS = 32
BLOCKS = 16_384


class Variant(Protocol):
    """One kernel with all that the compiler specialises it for."""

    @property
    def name(self) -> str: ...
    @property
    def kernel(self) -> str: ...
    @property
    def cache(self) -> str: ...
    @property
    def matrix_expected(self) -> bool: ...
    def launch(self, target: Target) -> Launch: ...


@dataclass(frozen=True, slots=True)
class Attention:
    """A launch of `paged_attention`.

    Attributes:
        kernel: prefill, decode or merge.
        heads: query heads, KV heads.
        cache, query: keys of DTYPES.
        options: of window, cap, sinks, lse, full (not causal) and short (contexts of one split).
    """

    kernel: str
    key_dim: int
    value_dim: int
    heads: tuple[int, int]
    cache: str
    query: str = "bf16"
    block_tokens: int = 16
    options: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        dims = str(self.key_dim) if self.key_dim == self.value_dim else f"{self.key_dim}/{self.value_dim}"
        words = [self.kernel, dims, f"{self.heads[0]}/{self.heads[1]}", f"{self.query}/{self.cache}"]
        return " ".join([*words, *sorted(self.options)])

    @property
    def matrix_expected(self) -> bool:
        return self.kernel != "merge" and self.query != "fp32"  # float32 products are exact: no TF32

    @property
    def shape(self) -> HeadShape:
        query_bytes, cache_bytes = DTYPES[self.query].itemsize, DTYPES[self.cache].itemsize
        return HeadShape(self.key_dim, self.value_dim, self.heads[0] // self.heads[1], query_bytes, cache_bytes)

    def table_row(self, target: Target) -> tiles.Row:
        """The row of the tile table that this launch takes, or the decode before it."""
        variant: tiles.Variant = "prefill" if self.kernel == "prefill" else "decode"
        return tiles.find_row(self.shape, target.name, variant, target.shared_memory_bytes)

    def launch(self, target: Target) -> Launch:
        query_heads, kv_heads = self.heads
        query, cache = DTYPES[self.query], DTYPES[self.cache]
        q = _meta(TOKENS, query_heads, self.key_dim, dtype=query)
        k_blocks, v_blocks = _pool(kv_heads, self.block_tokens, (self.key_dim, self.value_dim), cache)
        scales = _pool(kv_heads, self.block_tokens, (1, 1), torch.float32) if cache.itemsize == 1 else None
        context_tokens = 64 if "short" in self.options else CONTEXT_TOKENS
        workspace_bytes = attention_workspace(
            tokens=TOKENS, sequences=SEQUENCES, query_heads=query_heads, value_dim=self.value_dim,
            max_context_tokens=context_tokens,
        )  # fmt: skip
        launches = plan_attention(
            q, k_blocks, v_blocks,
            _meta(SEQUENCES, CONTEXT_TOKENS // self.block_tokens, dtype=torch.int32),
            _meta(SEQUENCES + 1, dtype=torch.int32), _meta(SEQUENCES, dtype=torch.int32),
            choice=tiles.choose(self.shape, target.name, target.shared_memory_bytes),
            scale=self.key_dim**-0.5,
            causal="full" not in self.options,
            window=4096 if "window" in self.options else None,
            soft_cap=50.0 if "cap" in self.options else None,
            sinks=_meta(query_heads, dtype=torch.float32) if "sinks" in self.options else None,
            k_scales=scales[0][..., 0] if scales else None,
            v_scales=scales[1][..., 0] if scales else None,
            max_query_tokens=TOKENS,
            max_context_tokens=context_tokens,
            out=_meta(TOKENS, query_heads, self.value_dim, dtype=query),
            lse=_meta(TOKENS, query_heads, dtype=torch.float32) if "lse" in self.options else None,
            workspace=_meta(workspace_bytes, dtype=torch.uint8),
        )  # fmt: skip
        return next(launch for launch in launches if launch.kernel.__name__ == f"{self.kernel}_kernel")


@dataclass(frozen=True, slots=True)
class Write:
    """A launch of `write_kv`, from bfloat16."""

    cache: str
    kernel: str = "write"
    matrix_expected: bool = False

    @property
    def name(self) -> str:
        return f"write 128 8 bf16/{self.cache}"

    def launch(self, target: Target) -> Launch:
        cache = DTYPES[self.cache]
        blocks, _ = _pool(8, 16, (128, 128), cache)
        scales = _pool(8, 16, (1, 1), torch.float32)[0][..., 0] if cache.itemsize == 1 else None
        return plan_write(_meta(TOKENS, 8, 128, dtype=torch.bfloat16), blocks, _meta(TOKENS, dtype=torch.int64), scales)


def _meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _pool(
    kv_heads: int, block_tokens: int, dims: tuple[int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [N, B, G, D] of one layer, in a pool that has all layers of a block beside each other, head by head."""
    sections = [kv_heads * block_tokens * dim for dim in dims]
    storage = _meta(BLOCKS, LAYERS * sum(sections), dtype=dtype)
    k_blocks, v_blocks = (
        storage.as_strided((BLOCKS, block_tokens, kv_heads, dim), (storage.stride(0), dim, block_tokens * dim, 1), at)
        for dim, at in zip(dims, (0, sections[0]), strict=True)
    )
    return k_blocks, v_blocks


def _variants() -> list[Variant]:
    variants: list[Variant] = []
    for kernel in ("prefill", "decode"):
        # Plain, the way models have such heads. Formats of one width share their tiles: float16 differs from bfloat16
        # in the name of the product alone and float8 from int8 in the conversion, so they skip some dims.
        for heads, key_dim, value_dim, block_tokens, caches in (
            ((32, 8), 128, 128, 16, ("bf16", "int8", "fp8")),
            ((9, 3), 64, 64, 16, ("bf16", "int8", "fp8")),
            ((32, 32), 80, 80, 8, ("bf16", "int8")),
            ((32, 32), 96, 96, 32, ("bf16", "int8")),
            ((16, 16), 192, 128, 64, ("bf16", "int8", "fp8")),
            ((16, 8), 256, 256, 128, ("bf16", "int8", "fp8")),
        ):
            variants += [
                Attention(kernel, key_dim, value_dim, heads, cache, block_tokens=block_tokens) for cache in caches
            ]
        variants += [
            Attention(kernel, 128, 128, (28, 4), "fp16", "fp16"),
            Attention(kernel, 128, 128, (28, 4), "int8", "fp16"),
            Attention(kernel, 128, 128, (64, 1), "bf16"),
            Attention(kernel, 256, 256, (16, 8), "fp32", "fp32"),
        ]
        variants += [
            Attention(kernel, 128, 128, (32, 8), "bf16", options=frozenset([option]))
            for option in ("window", "cap", "sinks", "lse", "full" if kernel == "prefill" else "short")
        ]
        everything = frozenset(("window", "cap", "sinks", "lse"))
        variants.append(Attention(kernel, 128, 128, (32, 8), "int8", options=everything))
    variants.append(Attention("prefill", 128, 128, (32, 8), "fp32", "fp32"))
    variants.append(Attention("merge", 128, 128, (32, 8), "bf16", options=frozenset(["lse"])))
    variants += [Write(cache) for cache in ("bf16", "fp16", "int8", "fp8")]
    return variants


VARIANTS = tuple(_variants())
