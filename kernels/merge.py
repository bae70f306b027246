"""Two attentions over disjoint keys made one: one implementation, whatever the backend."""

from __future__ import annotations

import torch


def merge_partials(
    out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint sets of keys, from the attention over each.

    Args:
        out, other_out: [T, H, Dv].
        lse, other_lse: float32 [T, H], natural logarithm; -inf where a part saw no key.

    Returns:
        [T, H, Dv] in the dtype of `out` and float32 [T, H]; zeros and -inf where both parts are empty.
    """
    peak = torch.maximum(lse, other_lse)
    peak = peak.masked_fill(peak == -torch.inf, 0)
    weight, other_weight = (lse - peak).exp(), (other_lse - peak).exp()
    total = weight + other_weight
    share = total.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    merged = (out * weight[..., None] + other_out * other_weight[..., None]) / share
    return merged.to(out.dtype), peak + total.log()
