"""A model is named by what it holds: the same everywhere, and another with any change that matters."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from cachestore.checkpoint import Checkpoint
from cachestore.fingerprint import model_fingerprint, model_tokenizer_fingerprint
from tests.cachestore.model_folder import CONFIG, tensors, write_config, write_model_folder, write_shards
from tests.gateway import second_naming


def _fingerprint(folder: Path) -> bytes:
    return model_fingerprint(Checkpoint.open(folder))


def _second_fingerprint(folder: Path) -> bytes:
    checkpoint = Checkpoint.open(folder)
    whole = {
        name: (entry.dtype, entry.dims, entry.file.read_bytes()[entry.begin : entry.end])
        for name, entry in checkpoint.tensors.items()
    }
    return second_naming.model_fingerprint(checkpoint.config, whole)


def test_it_is_what_the_second_implementation_computes_from_whole_tensors(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model", comment="größer", rms_norm_eps=1e-5)
    assert _fingerprint(folder) == _second_fingerprint(folder)
    write_shards(folder)
    assert _fingerprint(folder) == _second_fingerprint(folder)


def test_the_same_model_in_another_place_and_in_shards_has_the_same_name(tmp_path: Path) -> None:
    first, second = write_model_folder(tmp_path / "first"), write_model_folder(tmp_path / "second")
    write_shards(second)
    assert _fingerprint(first) == _fingerprint(second)


@pytest.mark.parametrize("key", ["_name_or_path", "transformers_version", "dtype", "torch_dtype"])
def test_what_a_copy_changes_in_the_config_leaves_the_name_alone(tmp_path: Path, key: str) -> None:
    folder = write_model_folder(tmp_path / "model")
    before = _fingerprint(folder)
    write_config(folder, dict(reversed((CONFIG | {key: "other"}).items())))
    assert _fingerprint(folder) == before
    write_config(folder, CONFIG | {"rope_theta": 1e6})
    assert _fingerprint(folder) != before


@pytest.mark.parametrize("element", [0, 1023, 2560, 3583, 5120, 6143])
def test_a_changed_element_in_the_sample_changes_the_name(tmp_path: Path, element: int) -> None:
    folder = write_model_folder(tmp_path / "model")
    before = _fingerprint(folder)
    changed = tensors()
    changed["model.embed_tokens.weight"].reshape(-1)[element] += 1
    save_file(changed, folder / "model.safetensors")
    assert _fingerprint(folder) != before


def test_an_element_outside_the_sample_is_not_read(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model")
    before = _fingerprint(folder)
    changed = tensors()
    changed["model.embed_tokens.weight"].reshape(-1)[1024] += 1
    save_file(changed, folder / "model.safetensors")
    assert _fingerprint(folder) == before


def test_another_name_shape_or_dtype_of_a_tensor_changes_the_name(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model")
    names = {_fingerprint(folder)}
    weights = tensors()
    embedding = weights.pop("model.embed_tokens.weight")
    for change in (
        {"model.embed_tokens.weights": embedding},
        {"model.embed_tokens.weight": embedding.reshape(64, 96)},
        {"model.embed_tokens.weight": embedding.view(np.int32)},
    ):
        save_file(weights | change, folder / "model.safetensors")
        names.add(_fingerprint(folder))
    assert len(names) == 4


def test_a_tensor_of_64_gib_costs_three_small_reads(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model")
    size_bytes = 64 << 30
    field: dict[str, Any] = {"dtype": "BF16", "shape": [size_bytes // 2], "data_offsets": [0, size_bytes]}
    header = json.dumps({"model.large": field}).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size_bytes)  # a hole: it takes no space
    begin = time.perf_counter()
    fingerprint = _fingerprint(folder)
    assert time.perf_counter() - begin < 1
    zeros = ("BF16", (size_bytes // 2,), bytes(3 * 4096))  # the same samples
    assert fingerprint == second_naming.model_fingerprint(CONFIG, {"model.large": zeros})


def test_a_tokenizer_is_named_by_those_of_its_files_that_exist(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model")
    names = [model_tokenizer_fingerprint(folder)]
    files = {"tokenizer.json": (folder / "tokenizer.json").read_bytes()}
    assert names[0] == second_naming.tokenizer_fingerprint(files)
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        files[name] = b"{}"
        (folder / name).write_bytes(b"{}")
        names.append(model_tokenizer_fingerprint(folder))
        assert names[-1] == second_naming.tokenizer_fingerprint(files)
    (folder / "README.md").write_text("about")
    assert model_tokenizer_fingerprint(folder) == names[-1]
    assert len(set(names)) == 4
