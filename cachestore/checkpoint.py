"""A model on disk in Hugging Face format: what it is, told from its config and headers alone.

Nothing here imports torch or looks at a network, so that a wrong path costs a line within a moment instead of
a traceback after half a minute.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from cachestore.safetensors_header import TensorEntry, read_header
from cachestore.start_error import ModelError

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX_FILE = "model.safetensors.index.json"

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "fp8": 1}

# Types of rotary embedding whose factors transformers recomputes from the length of what it is given.
_ROPE_BY_LENGTH = ("dynamic", "longrope", "su")


class _TokenizerModel(msgspec.Struct):
    vocab: dict[str, int] | list[Any]


class _TokenizerFile(msgspec.Struct):
    model: _TokenizerModel


class _WeightsIndex(msgspec.Struct):
    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Config and tensor table of a model folder. `text_config` is the language model's part of `config`."""

    directory: Path
    config: Mapping[str, Any]
    text_config: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]
    layers: int
    hidden_size: int
    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    vocabulary_tokens: int
    max_position_tokens: int

    @staticmethod
    def open(directory: Path) -> Checkpoint:
        """Read and check a model folder.

        Raises:
            ModelError: one line that names the path and what is missing or wrong there.
        """
        try:
            return _open(directory)
        except OSError as error:
            raise ModelError(f"{error.filename or directory} can't be read: {error.strerror or error}") from error

    @property
    def needs_rope_context(self) -> bool:
        """Whether the rotary factors depend on the context length and must be frozen for one."""
        rope = self.text_config.get("rope_parameters") or self.text_config.get("rope_scaling") or {}
        # One set of parameters, or one per type of layer.
        sets = [rope, *(value for value in rope.values() if isinstance(value, dict))]
        types = [str(parameters.get("rope_type") or parameters.get("type") or "") for parameters in sets]
        return any(word in kind for kind in types for word in _ROPE_BY_LENGTH)

    @property
    def dtype(self) -> str:
        """The dtype that most of the weights are stored in, as safetensors names it (`BF16`)."""
        elements: Counter[str] = Counter()
        for tensor in self.tensors.values():
            elements[tensor.dtype] += tensor.elements
        return elements.most_common(1)[0][0]

    def weight_bytes(self, dtype: Literal["fp32", "bf16", "fp16"]) -> int:
        """Memory for all tensors once loaded as `dtype`."""
        return ELEMENT_BYTES[dtype] * sum(tensor.elements for tensor in self.tensors.values())


def _open(directory: Path) -> Checkpoint:
    if not directory.exists():
        raise ModelError(f"{directory} does not exist: name a model folder in Hugging Face format")
    if not directory.is_dir():
        raise ModelError(f"{directory} is not a folder: name a model folder in Hugging Face format")
    if not any(directory.iterdir()):
        raise ModelError(f"{directory} is empty: a model folder holds {CONFIG_FILE}, {TOKENIZER_FILE} and weights")
    config = _read_config(directory)
    text_config: Mapping[str, Any] = config.get("text_config") or config
    number = _Numbers(directory / CONFIG_FILE, text_config)
    query_heads = number.of("num_attention_heads", "n_head")
    hidden_size = number.of("hidden_size", "n_embd", "d_model")
    head_dim = number.or_else(hidden_size // query_heads, "qk_head_dim", "head_dim")
    vocabulary_tokens = number.of("vocab_size")
    _check_tokenizer(directory, vocabulary_tokens)
    return Checkpoint(
        directory=directory,
        config=config,
        text_config=text_config,
        tensors=_read_tensors(directory),
        layers=number.of("num_hidden_layers", "n_layer"),
        hidden_size=hidden_size,
        query_heads=query_heads,
        kv_heads=number.or_else(query_heads, "num_key_value_heads"),
        head_dim=head_dim,
        value_dim=number.or_else(head_dim, "v_head_dim"),
        vocabulary_tokens=vocabulary_tokens,
        max_position_tokens=number.of("max_position_embeddings", "n_positions"),
    )


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Sizes out of a config, under the names that model families give them."""

    file: Path
    config: Mapping[str, Any]

    def of(self, *names: str) -> int:
        value = self.or_else(0, *names)
        if not value:
            raise ModelError(f"{self.file} has no {names[0]}: is this a decoder language model?")
        return value

    def or_else(self, default: int, *names: str) -> int:
        for name in names:
            value = self.config.get(name)
            if value is None:
                continue
            if type(value) is not int or value < 1:
                raise ModelError(f"{self.file} has a {name} that is not a positive integer")
            return value
        return default


def _required(file: Path, remedy: str) -> Path:
    if not file.is_file():
        raise ModelError(f"{file.parent} has no {file.name}: {remedy}")
    return file


def _read_config(directory: Path) -> dict[str, Any]:
    file = _required(directory / CONFIG_FILE, "name a model folder in Hugging Face format")
    try:
        config = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("text_config") or {}, dict):
        raise ModelError(f"{file} is not a model config: a JSON object is expected")
    return config


def _check_tokenizer(directory: Path, vocabulary_tokens: int) -> None:
    file = _required(directory / TOKENIZER_FILE, "save the model's fast tokenizer beside its weights")
    try:
        tokenizer = msgspec.json.decode(file.read_bytes(), type=_TokenizerFile)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not a tokenizer of the tokenizers library: {error}") from error
    if (found := len(tokenizer.model.vocab)) > vocabulary_tokens:
        raise ModelError(
            f"{file} has {found} tokens and the model only {vocabulary_tokens}: it belongs to another model"
        )


def _read_tensors(directory: Path) -> dict[str, TensorEntry]:
    index_file = directory / WEIGHTS_INDEX_FILE
    if (directory / WEIGHTS_FILE).is_file() or not index_file.is_file():
        tensors = read_header(_required(directory / WEIGHTS_FILE, "save the weights as safetensors"))
    else:
        tensors = _read_shards(directory, index_file)
    if not tensors:
        raise ModelError(f"{directory} has weights files without a tensor")
    return tensors


def _read_shards(directory: Path, index_file: Path) -> dict[str, TensorEntry]:
    try:
        weight_map = msgspec.json.decode(index_file.read_bytes(), type=_WeightsIndex).weight_map
    except ValueError as error:
        raise ModelError(f"{index_file} is not an index of weights: {error}") from error
    tensors: dict[str, TensorEntry] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise ModelError(f"{index_file} names a file outside its folder")
        tensors |= read_header(_required(directory / shard, f"{WEIGHTS_INDEX_FILE} names it; fetch it again"))
    if missing := weight_map.keys() - tensors.keys():
        raise ModelError(f"{directory} lacks {len(missing)} tensors of its index, such as {min(missing)}")
    return tensors
