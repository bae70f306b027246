"""Random models of a few thousand weights, saved as real ones are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cachestore.geometry import BlockLayout

SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    # Large, so that the logits of a random model differ by more than rounding.
    "initializer_range": 0.3,
}


def save_small_model(folder: Path, model_type: str, **config: Any) -> Path:
    """`config` is laid over `SIZES`; the same weights each time."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(SIZES | config)), dtype=torch.float32)
    model.save_pretrained(folder)
    return folder


def small_layout(block_tokens: int = 16) -> BlockLayout:
    """The layout of a model of `SIZES` in fp32."""
    return BlockLayout(
        layers=SIZES["num_hidden_layers"],
        kv_heads=SIZES["num_key_value_heads"],
        key_dim=SIZES["head_dim"],
        value_dim=SIZES["head_dim"],
        block_tokens=block_tokens,
        element_bytes=4,
    )
