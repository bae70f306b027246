from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.prompt.model_files import ModelFilesError, read_model_files
from gateway.prompt.tokens import Tokenizer
from tests.gateway.prompt import tokenizers
from tests.gateway.prompt.conftest import load


def test_what_is_missing_is_named_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"nowhere: no such directory"):
        read_model_files(tmp_path / "nowhere")
    with pytest.raises(ModelFilesError, match=r"no tokenizer\.json") as caught:
        read_model_files(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", b"{"),
        ("generation_config.json", b"[]"),
        ("generation_config.json", b'{"eos_token_id": "2"}'),
        ("generation_config.json", b'{"eos_token_id": [true]}'),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    tokenizers.chatml(tmp_path)
    read_model_files(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelFilesError, match=name.replace(".", r"\.")):
        read_model_files(tmp_path)


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFilesError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer(read_model_files(tmp_path))


def test_the_fingerprint_names_content_and_nothing_else(tmp_path: Path) -> None:
    one, two = tokenizers.chatml(tmp_path / "one"), tokenizers.chatml(tmp_path / "two")
    for name in ("tokenizer.json", "chat_template.jinja"):
        (two / name).write_bytes((one / name).read_bytes())
    same = read_model_files(one).fingerprint
    assert read_model_files(two).fingerprint == same
    assert len(same) == 32
    (two / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    assert read_model_files(two).fingerprint != same


def test_the_template_file_wins_over_the_one_in_the_configuration(tmp_path: Path) -> None:
    tokenizers.write(tmp_path, tokenizers.byte_level(), template="file", config={"chat_template": "configuration"})
    assert read_model_files(tmp_path).chat_template == "file"
    (tmp_path / "chat_template.jinja").unlink()
    assert read_model_files(tmp_path).chat_template == "configuration"
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]})
    )
    assert read_model_files(tmp_path).chat_template == "d"
    (tmp_path / "tokenizer_config.json").unlink()
    assert read_model_files(tmp_path).chat_template is None


def test_stop_tokens_come_from_the_generation_configuration_else_from_the_eos_token(tmp_path: Path) -> None:
    config: dict[str, object] = {"eos_token": "<|im_end|>"}
    tokenizers.write(tmp_path, tokenizers.byte_level(), template="", config=config, generation={"eos_token_id": [0, 1]})
    assert load(tmp_path).tokenizer.stop_token_ids == (0, 1)
    (tmp_path / "generation_config.json").unlink()
    assert load(tmp_path).tokenizer.stop_token_ids == (2,)
    (tmp_path / "tokenizer_config.json").unlink()
    assert load(tmp_path).tokenizer.stop_token_ids == ()


def test_b092_a_template_with_crlf_or_a_byte_order_mark_is_the_same_template(tmp_path: Path) -> None:
    text = tokenizers.CHATML.replace("{% endfor %}", "{% endfor %}\n") + "   \n"
    saved = {"lf": text, "crlf": text.replace("\n", "\r\n"), "bom": "\ufeff" + text}
    prompts = []
    for name, content in saved.items():
        directory = tokenizers.chatml(tmp_path / name)
        (directory / "chat_template.jinja").write_bytes(content.encode("utf-8"))
        (directory / "tokenizer.json").write_bytes((tmp_path / "lf" / "tokenizer.json").read_bytes())
        model = load(directory)
        prompts.append(model.template.prompt([{"role": "user", "content": "Hello\nworld"}]))
    assert prompts[0] == prompts[1] == prompts[2]
    carriage_return, mark = model.tokenizer.encode("\r"), model.tokenizer.encode("\ufeff")
    assert not set(carriage_return) & set(prompts[0].tokens)
    assert mark[0] not in prompts[0].tokens
