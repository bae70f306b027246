"""The files of a model directory that decide how text becomes tokens: JSON and text, never weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies.encoding import TOKENIZER_FILES, tokenizer_fingerprint

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ModelFilesError(Exception):
    """A model directory can't be used: one line with the path, what is wrong, and what belongs there."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What the gateway needs of a model.

    Attributes:
        tokenizer_json: the file as it is.
        chat_template: jinja source with line feeds only and no byte-order mark; None for a model without one.
        special_tokens: spelling by name, such as `bos_token`, as chat templates may use them.
        eos_token_ids: ids that end an answer according to generation_config.json; empty if it names none.
        fingerprint: 32 bytes that name the content of all of them.
    """

    directory: Path
    tokenizer_json: bytes
    chat_template: str | None
    special_tokens: dict[str, str]
    eos_token_ids: tuple[int, ...]
    fingerprint: bytes


def read_model_files(directory: Path) -> ModelFiles:
    """
    Raises:
        ModelFilesError: the directory or tokenizer.json is missing, or a file does not hold what it should.
    """
    if not directory.is_dir():
        raise ModelFilesError(f"{directory}: no such directory; name one in Hugging Face format")
    contents = {name: content for name in TOKENIZER_FILES if (content := _read(directory / name)) is not None}
    if "tokenizer.json" not in contents:
        raise ModelFilesError(f"{directory}: no tokenizer.json; the model needs a fast tokenizer in that format")
    config = _parse(directory, "tokenizer_config.json", contents)
    generation = _parse(directory, "generation_config.json", contents)
    return ModelFiles(
        directory=directory,
        tokenizer_json=contents["tokenizer.json"],
        chat_template=_chat_template(directory, contents, config),
        special_tokens=_special_tokens(config),
        eos_token_ids=_eos_token_ids(directory, generation),
        fingerprint=tokenizer_fingerprint(contents),
    )


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelFilesError(f"{path}: cannot be read ({error.strerror})") from None


def _parse(directory: Path, name: str, contents: dict[str, bytes]) -> dict[str, Any]:
    try:
        value = json.loads(contents.get(name, b"{}"))
    except ValueError:
        raise ModelFilesError(f"{directory / name}: not JSON") from None
    if not isinstance(value, dict):
        raise ModelFilesError(f"{directory / name}: not a JSON object")
    return value


def _chat_template(directory: Path, contents: dict[str, bytes], config: dict[str, Any]) -> str | None:
    source = config.get("chat_template")
    if isinstance(source, list):
        # Older models list several by name.
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if "chat_template.jinja" in contents:
        try:
            source = contents["chat_template.jinja"].decode("utf-8")
        except UnicodeDecodeError:
            raise ModelFilesError(f"{directory / 'chat_template.jinja'}: not UTF-8") from None
    if source is None:
        return None
    if not isinstance(source, str):
        raise ModelFilesError(f"{directory / 'tokenizer_config.json'}: chat_template is not a string")
    return source.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    spellings = {}
    for name in SPECIAL_TOKEN_NAMES:
        token = config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            spellings[name] = token
    return spellings


def _eos_token_ids(directory: Path, generation: dict[str, Any]) -> tuple[int, ...]:
    value = generation.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise ModelFilesError(f"{directory / 'generation_config.json'}: eos_token_id must be token ids, not {value!r}")
    return tuple(ids)
