"""The models that tests of the store compute with, each loaded once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cachestore.checkpoint import ELEMENT_BYTES
from cachestore.geometry import BlockLayout
from cachestore.model import TORCH_DTYPES, KVCache, Model, ModelRunner
from cachestore.protocol import KVDType
from tests.cachestore.small_models import save_small_model

MakeRunner = Callable[..., ModelRunner]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_runner(default_model: Path) -> MakeRunner:
    """`make_runner(blocks, block_tokens=16, kv_dtype="fp32")`: the default model in fp32 over a fresh cache; all share
    its weights."""
    return _over(Model(default_model, dtype="fp32", device=torch.device("cpu"), max_context_tokens=2048))


@pytest.fixture(scope="session")
def make_small_runner(tmp_path_factory: pytest.TempPathFactory) -> MakeRunner:
    """The same over two random layers of the Llama kind: thousands of steps in seconds."""
    folder = save_small_model(tmp_path_factory.mktemp("small") / "llama", "llama")
    return _over(Model(folder, dtype="fp32", device=torch.device("cpu"), max_context_tokens=512))


@pytest.fixture(scope="session")
def make_windowed_runner(tmp_path_factory: pytest.TempPathFactory) -> MakeRunner:
    """The same where every layer sees 64 tokens back."""
    folder = save_small_model(tmp_path_factory.mktemp("small") / "mistral", "mistral", sliding_window=64)
    return _over(Model(folder, dtype="fp32", device=torch.device("cpu"), max_context_tokens=512))


def _over(model: Model) -> MakeRunner:
    config = model.module.config
    model.fuse()

    def make(blocks: int, block_tokens: int = 16, kv_dtype: KVDType = "fp32") -> ModelRunner:
        layout = BlockLayout(
            layers=config.num_hidden_layers,
            kv_heads=config.num_key_value_heads,
            key_dim=config.head_dim,
            value_dim=config.head_dim,
            block_tokens=block_tokens,
            element_bytes=ELEMENT_BYTES[kv_dtype],
        )
        return ModelRunner(model, KVCache(layout, blocks, TORCH_DTYPES[kv_dtype], model.device), block_tokens)

    return make
