"""Small model folders, written by the libraries that real ones are written by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 512,
}


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """One below 12 KiB, one of exactly 12 KiB, one above, one of another dtype."""
    random = np.random.default_rng(seed)
    return {
        "model.norm.weight": random.standard_normal(64, np.float32),
        "model.layers.0.mlp.up_proj.weight": random.standard_normal((48, 64), np.float32),
        "model.embed_tokens.weight": random.standard_normal((96, 64), np.float32),
        "model.scale": random.standard_normal(3, np.float32).astype(np.float16),
    }


def write_model_folder(folder: Path, **config: Any) -> Path:
    """A folder with one weights file; `config` is laid over `CONFIG`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, CONFIG | config)
    write_tokenizer(folder)
    save_file(tensors(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def write_tokenizer(folder: Path, tokens: int = 96) -> None:
    Tokenizer(BPE({chr(0x21 + token): token for token in range(tokens)}, [])).save(str(folder / "tokenizer.json"))


def write_shards(folder: Path) -> None:
    """The same weights in two files with an index, in place of the single file."""
    (folder / "model.safetensors").unlink()
    everything = tensors()
    names = sorted(everything)
    files = {"model-00001-of-00002.safetensors": names[:2], "model-00002-of-00002.safetensors": names[2:]}
    for file, part in files.items():
        save_file({name: everything[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
