"""Attention over latent blocks, which is still refused by name."""

from __future__ import annotations

import torch

from kernels.errors import Unsupported

_NO_LATENT = "latent attention is not supported yet; serve a model with plain or grouped-query attention"


def write_latent(
    latent: torch.Tensor, rope: torch.Tensor, latent_blocks: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write [T, R] latents and [T, P] rotary keys into blocks [N, B, R + P].

    Raises:
        Unsupported: always.
    """
    raise Unsupported(_NO_LATENT)


def latent_attention(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_blocks: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lengths: torch.Tensor,
    *,
    scale: float,
    causal: bool = True,
    max_query_tokens: int,
    max_context_tokens: int,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention with keys R + P wide whose first R are the values (DeepSeek-V2, arXiv:2405.04434).

    Raises:
        Unsupported: always.
    """
    raise Unsupported(_NO_LATENT)
