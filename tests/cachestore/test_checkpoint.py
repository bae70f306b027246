"""What a model folder says before torch is imported, and one clear line for each way it can be wrong."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import huggingface_hub.constants
import pytest

from cachestore import model_source
from cachestore.checkpoint import Checkpoint
from cachestore.start_error import ModelError
from tests.cachestore.model_folder import (
    CONFIG,
    tensors,
    write_config,
    write_model_folder,
    write_shards,
    write_tokenizer,
)


def test_a_folder_tells_its_sizes_and_tensors(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_model_folder(tmp_path / "model"))
    assert (checkpoint.layers, checkpoint.hidden_size, checkpoint.query_heads, checkpoint.kv_heads) == (2, 64, 8, 2)
    assert (checkpoint.head_dim, checkpoint.value_dim) == (8, 8)
    assert (checkpoint.vocabulary_tokens, checkpoint.max_position_tokens) == (96, 512)
    assert checkpoint.text_config == checkpoint.config == CONFIG
    assert checkpoint.dtype == "F32"
    elements = sum(array.size for array in tensors().values())
    assert checkpoint.weight_bytes("fp32") == 4 * elements
    assert checkpoint.weight_bytes("bf16") == checkpoint.weight_bytes("fp16") == 2 * elements


def test_offsets_lead_to_each_tensors_bytes_in_one_file_and_in_shards(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model")
    single = Checkpoint.open(folder).tensors
    write_shards(folder)
    sharded = Checkpoint.open(folder).tensors
    assert len({tensor.file for tensor in sharded.values()}) == 2
    for name, array in tensors().items():
        entry = sharded[name]
        assert entry.file.read_bytes()[entry.begin : entry.end] == array.tobytes()
        assert (entry.dtype, entry.dims, entry.size_bytes) == (single[name].dtype, array.shape, array.nbytes)


def test_sizes_that_a_config_leaves_out_follow_from_others_and_those_it_names_win(tmp_path: Path) -> None:
    plain = {key: value for key, value in CONFIG.items() if key != "num_key_value_heads"}
    folder = write_model_folder(tmp_path / "model")
    write_config(folder, plain)
    assert Checkpoint.open(folder).kv_heads == 8
    write_config(folder, plain | {"head_dim": 32})
    assert (Checkpoint.open(folder).head_dim, Checkpoint.open(folder).value_dim) == (32, 32)
    write_config(folder, plain | {"head_dim": 32, "v_head_dim": 16})
    assert (Checkpoint.open(folder).head_dim, Checkpoint.open(folder).value_dim) == (32, 16)


def test_the_language_model_of_a_larger_one_is_read_from_its_own_config(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model")
    write_config(folder, {"model_type": "pictures", "text_config": CONFIG | {"num_hidden_layers": 7}})
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.layers == 7
    assert checkpoint.config["model_type"] == "pictures"


@pytest.mark.parametrize(
    ("rope", "needed"),
    [
        ({}, False),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}, False),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, False),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, False),
        ({"rope_scaling": None}, False),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, True),
        ({"rope_scaling": {"type": "su", "long_factor": [1.0]}}, True),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 32.0}}, True),
        ({"rope_parameters": {"full": {"rope_type": "dynamic"}, "sliding": {"rope_type": "default"}}}, True),
    ],
)
def test_rotary_factors_are_frozen_for_a_context_when_they_depend_on_length(
    tmp_path: Path, rope: dict[str, Any], needed: bool
) -> None:
    assert Checkpoint.open(write_model_folder(tmp_path / "model", **rope)).needs_rope_context is needed


def _without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _with(name: str, content: str | bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return write


def _emptied(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def _removed(folder: Path) -> None:
    _emptied(folder)
    folder.rmdir()


def _cut_short(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def _shard_lost(folder: Path) -> None:
    write_shards(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def _shard_outside(folder: Path) -> None:
    write_shards(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))


def _tensor_lost(folder: Path) -> None:
    write_shards(folder)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.lost"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))


def _header(fields: object) -> bytes:
    text = json.dumps(fields).encode()
    return struct.pack("<Q", len(text)) + text


WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "path missing": (_removed, "does not exist"),
    "empty folder": (_emptied, "is empty: a model folder holds config.json"),
    "no config": (_without("config.json"), "has no config.json"),
    "config not JSON": (_with("config.json", "{'a': 1"), "config.json is not valid JSON"),
    "config not an object": (_with("config.json", "[1]"), "config.json is not a model config"),
    "text_config not an object": (_with("config.json", '{"text_config": 3}'), "config.json is not a model config"),
    "no decoder": (_with("config.json", '{"model_type": "t5"}'), "config.json has no num_attention_heads"),
    "layers a text": (
        lambda folder: write_config(folder, CONFIG | {"num_hidden_layers": "2"}),
        "num_hidden_layers that is not a positive integer",
    ),
    "no heads": (
        lambda folder: write_config(folder, CONFIG | {"num_attention_heads": 0}),
        "num_attention_heads that is not a positive integer",
    ),
    "no tokenizer": (_without("tokenizer.json"), "has no tokenizer.json"),
    "tokenizer not JSON": (_with("tokenizer.json", "\n\x08llama"), "tokenizer.json is not a tokenizer"),
    "tokenizer another JSON": (_with("tokenizer.json", '{"bos_token": "<s>"}'), "tokenizer.json is not a tokenizer"),
    "tokenizer of another model": (
        lambda folder: write_tokenizer(folder, tokens=97),
        "tokenizer.json has 97 tokens and the model only 96",
    ),
    "no weights": (_without("model.safetensors"), "has no model.safetensors"),
    "weights empty": (_with("model.safetensors", b""), "model.safetensors is not a safetensors file"),
    "weights are a pointer": (
        _with("model.safetensors", "version https://git-lfs.github.com/spec/v1\n"),
        "model.safetensors is not a whole safetensors file",
    ),
    "header not JSON": (
        _with("model.safetensors", struct.pack("<Q", 4) + b"abcd"),
        "model.safetensors is not a safetensors file",
    ),
    "header without tensors": (_with("model.safetensors", _header({})), "without a tensor"),
    "header of another shape": (
        _with("model.safetensors", _header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}) + b"abcd"),
        "model.safetensors is not a safetensors file",
    ),
    "weights cut short": (_cut_short, "model.safetensors is cut short"),
    "shard lost": (_shard_lost, "has no model-00002-of-00002.safetensors"),
    "shard outside": (_shard_outside, "names a file outside its folder"),
    "tensor lost": (_tensor_lost, "lacks 1 tensors of its index, such as model.lost"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_b185_a_wrong_model_folder_costs_one_line_with_the_path_and_what_is_missing(tmp_path: Path, wrong: str) -> None:
    folder = write_model_folder(tmp_path / "model")
    Checkpoint.open(folder)
    break_it, message = WRONG[wrong]
    break_it(folder)
    with pytest.raises(ModelError) as raised:
        Checkpoint.open(model_source.resolve(str(folder)))
    line = str(raised.value)
    assert message in line
    assert str(folder) in line
    assert "\n" not in line


def test_b185_a_file_where_a_folder_should_be_is_told(tmp_path: Path) -> None:
    file = write_model_folder(tmp_path / "model") / "model.safetensors"
    with pytest.raises(ModelError, match=r"model\.safetensors is not a folder"):
        Checkpoint.open(model_source.resolve(str(file)))


def test_b185_a_path_that_is_not_there_is_told_within_five_seconds_without_torch() -> None:
    script = (
        "import sys\n"
        "from cachestore import model_source\n"
        "from cachestore.checkpoint import Checkpoint\n"
        "from cachestore.start_error import StartError\n"
        "try:\n"
        "    Checkpoint.open(model_source.resolve('/no/such/model'))\n"
        "except StartError as error:\n"
        "    print(error, 'torch' in sys.modules, sep='|')\n"
    )
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert time.perf_counter() - begin < 5
    assert done.stdout.startswith("/no/such/model does not exist: ")
    assert done.stdout.endswith("|False\n")


def test_b185_only_a_hub_id_is_looked_up_in_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def no_network(*address: object, **_: object) -> NoReturn:
        asked.append(address)
        raise socket.gaierror("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    write_model_folder(tmp_path / "here")
    assert model_source.resolve(str(tmp_path / "here")) == model_source.resolve("here") == tmp_path / "here"
    for path in (str(tmp_path / "gone"), "./gone", "../gone", "~/gone/model", "models/of/mine", "a model"):
        with pytest.raises(ModelError, match="does not exist"):
            model_source.resolve(path)
    assert asked == []

    with pytest.raises(ModelError, match="example/gone is no folder here, and the hub could not be asked") as raised:
        model_source.resolve("example/gone")
    assert asked
    assert "\n" not in str(raised.value)


def test_a_missing_read_permission_or_device_error_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model_folder(tmp_path / "model")

    def broken(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", broken)
    with pytest.raises(ModelError, match=r"config\.json can't be read: Permission denied"):
        Checkpoint.open(folder)
