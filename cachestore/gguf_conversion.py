"""Turn the default model's GGUF file into a Hugging Face folder.

Run as `python -m cachestore.gguf_conversion GGUF FOLDER` in a process of its own: it imports torch and needs
about 1.5 GiB for half a minute, and both are gone when the process ends.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.quantization_config import GgufConfig


def convert(gguf: Path, folder: Path) -> None:
    """Write weights in bf16, config, tokenizer and chat template of `gguf` into `folder`, the same each time.

    The blocks are unpacked in fp32 and rounded once. Digits are split one by one before byte-level merges, as
    SmolLM2 was trained: a GGUF file names its pre-tokenizer only by a word, which the reader drops.
    """
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    # Tied weights are left to the config: a safetensors file holds each storage once.
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.named_parameters()}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})

    config = model.config.to_diff_dict()
    for key in [key for key in config if key.startswith("_")]:
        del config[key]
    _write_json(folder / "config.json", config | {"architectures": [type(model).__name__], "dtype": "bfloat16"})
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    _write_json(folder / "generation_config.json", {key: config[key] for key in special})

    tokenizer = AutoTokenizer.from_pretrained(**source)
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
