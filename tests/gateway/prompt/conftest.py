from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.prompt.model_files import read_model_files
from gateway.prompt.template import ChatTemplate
from gateway.prompt.tokens import Tokenizer
from tests.gateway.prompt import tokenizers


@dataclass(frozen=True)
class Model:
    directory: Path
    tokenizer: Tokenizer
    template: ChatTemplate

    def count(self, tokens: list[int], spelling: str) -> int:
        (token_id,) = self.tokenizer.encode(spelling)
        return list(tokens).count(token_id)

    def text(self, tokens: list[int]) -> str:
        return b"".join(map(self.tokenizer.token_bytes, tokens)).decode("utf-8")


def load(directory: Path) -> Model:
    files = read_model_files(directory)
    tokenizer = Tokenizer(files)
    return Model(directory, tokenizer, ChatTemplate(files, tokenizer))


@pytest.fixture(scope="session")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(tokenizers.chatml(tmp_path_factory.mktemp("chatml")))


@pytest.fixture(scope="session")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(tokenizers.with_bos(tmp_path_factory.mktemp("bos")))


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(tokenizers.sentencepiece(tmp_path_factory.mktemp("sp")))


@pytest.fixture(scope="session")
def smollm(default_model: Path) -> Model:
    return load(default_model)
