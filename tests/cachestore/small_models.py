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


def unit_model(model_type: str, **config: Any) -> Any:
    """A model as `AutoModelForCausalLM` makes it, in fp32, whose hidden states and logits are of order 1.

    Norms and biases are random, too: where they are 1 and 0, many a mistake changes nothing.
    """
    torch.manual_seed(7)
    sizes = SIZES | config
    scaled = sizes | {"initializer_range": sizes["hidden_size"] ** -0.5}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **scaled), dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    return model.eval()


def layout_of(config: Any, block_tokens: int) -> BlockLayout:
    """The layout of a model with this config in fp32."""
    return BlockLayout(
        layers=config.num_hidden_layers,
        kv_heads=config.num_key_value_heads,
        key_dim=config.head_dim,
        value_dim=config.head_dim,
        block_tokens=block_tokens,
        element_bytes=4,
    )


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
