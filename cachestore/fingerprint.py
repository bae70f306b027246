"""Names for a model and its tokenizer by content, so that a changed file changes every block key.

Weights are sampled: 12 KiB of each tensor tell two trainings apart and cost milliseconds instead of a read of
all weights. Whoever alters weights on purpose, elsewhere than in the sample, owns the machine already.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import BinaryIO

from cachestore.checkpoint import Checkpoint
from cachestore.safetensors_header import TensorEntry
from policies.encoding import TOKENIZER_FILES, encode, tokenizer_fingerprint

SAMPLE_BYTES = 4096

# What a copy or a conversion may change without changing an answer; the dtype of the cache has a field of its own.
_CONFIG_KEYS_LEFT_OUT = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype"})


def model_fingerprint(checkpoint: Checkpoint) -> bytes:
    """32 bytes: SHA-256 over the canonical config and, by name, `E(tensor, name, dtype, dims…, samples…)`.

    Raises:
        OSError: a weights file can't be read.
    """
    kept = {key: value for key, value in checkpoint.config.items() if key not in _CONFIG_KEYS_LEFT_OUT}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode())
    files: dict[Path, BinaryIO] = {}
    try:
        for name, tensor in sorted(checkpoint.tensors.items()):
            if tensor.file not in files:
                files[tensor.file] = open(tensor.file, "rb")  # noqa: SIM115  # closed below, all of them
            samples = _samples(files[tensor.file], tensor)
            digest.update(encode("saltern/v1/tensor", name, tensor.dtype, *tensor.dims, *samples))
    finally:
        for file in files.values():
            file.close()
    return digest.digest()


def model_tokenizer_fingerprint(directory: Path) -> bytes:
    """32 bytes that name the tokenizer files in `directory`.

    Raises:
        OSError: one of them can't be read.
    """
    files = {name: directory / name for name in TOKENIZER_FILES}
    return tokenizer_fingerprint({name: file.read_bytes() for name, file in files.items() if file.exists()})


def _samples(file: BinaryIO, tensor: TensorEntry) -> list[bytes]:
    if tensor.size_bytes < 3 * SAMPLE_BYTES:
        return [_read(file, tensor.begin, tensor.size_bytes)]
    middle = tensor.begin + (tensor.size_bytes - SAMPLE_BYTES) // 2
    return [_read(file, begin, SAMPLE_BYTES) for begin in (tensor.begin, middle, tensor.end - SAMPLE_BYTES)]


def _read(file: BinaryIO, begin: int, size_bytes: int) -> bytes:
    file.seek(begin)
    return file.read(size_bytes)
