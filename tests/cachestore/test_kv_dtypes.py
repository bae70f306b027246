"""A cache of another dtype than the model: what is chosen, said and refused, and that reuse works over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from cachestore import cli
from cachestore.model import TORCH_DTYPES, ModelRunner
from cachestore.protocol import DType, KVDType, Welcome
from cachestore.start_error import StartError
from tests.cachestore.conftest import MakeRunner
from tests.cachestore.model_folder import write_tokenizer
from tests.cachestore.small_models import SIZES, save_small_model
from tests.cachestore.support import Harness
from tests.cachestore.test_golden_tokens import PREAMBLE
from tests.cachestore.test_prefix_reuse import random_prompt

VOCABULARY_TOKENS = 49_152


def store_over(make_runner: MakeRunner, kv_dtype: KVDType) -> Harness:
    runner = make_runner(32, kv_dtype=kv_dtype)
    return Harness(runner, blocks=32, block_tokens=16, step_tokens=256, vocabulary_tokens=VOCABULARY_TOKENS)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_b054_a_prompt_is_found_again_in_8_bits_and_answered_alike(
    make_runner: MakeRunner, default_model: Path, kv_dtype: KVDType
) -> None:
    store = store_over(make_runner, kv_dtype)
    prompt = Tokenizer.from_file(str(default_model / "tokenizer.json")).encode(PREAMBLE * 2).ids[:100]
    assert len(prompt) == 100
    first, second = (store.complete(prompt, max_tokens=16) for _ in range(2))
    assert (first.cached_tokens, second.cached_tokens) == (0, 96)
    assert len(first.tokens) == 16
    assert second.tokens == first.tokens


def test_b050_what_was_computed_before_does_not_set_the_scale(make_runner: MakeRunner) -> None:
    """A warm-up of the same token again and again, then a prompt: as over bf16, and as without the warm-up."""
    prompt = random_prompt(50, 40, VOCABULARY_TOKENS)
    warm, cold, wide = (store_over(make_runner, kv_dtype) for kv_dtype in ("fp8", "fp8", "bf16"))
    warm.complete([1] * 10, max_tokens=1)
    answers = [store.complete(prompt, max_tokens=4).tokens for store in (warm, cold, wide)]
    assert answers[0] == answers[1]
    assert answers[0][0] == answers[2][0]


def started(monkeypatch: pytest.MonkeyPatch, folder: Path, **chosen: Any) -> tuple[Welcome, ModelRunner]:
    """What a store of a small model says of itself and computes with."""
    kept: list[Any] = []

    async def serve(_: cli.StoreOptions, welcome: Welcome, runner: ModelRunner, layout: object) -> None:
        kept.extend((welcome, runner))

    monkeypatch.setattr(cli, "_serve", serve)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    save_small_model(folder, "llama")
    write_tokenizer(folder)
    options = cli.StoreOptions(
        model=str(folder),
        socket=folder.parent / "store.sock",
        device="cpu",
        cache_memory_bytes=1 << 20,
        threads=1,
        **chosen,
    )
    assert cli.run_store(options, "1.2.3") == 0
    welcome, runner = kept
    return welcome, runner


@pytest.mark.parametrize(
    ("dtype", "asked", "kv_dtype"),
    [
        ("fp32", "auto", "fp32"),
        ("bf16", "auto", "bf16"),
        ("fp32", "int8", "int8"),
        ("bf16", "fp8", "fp8"),
        ("bf16", "fp16", "fp16"),
        ("fp16", "bf16", "bf16"),
    ],
)
def test_b053_a_store_says_what_its_cache_holds_and_finds_in_it_what_it_has_computed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: DType, asked: str, kv_dtype: KVDType
) -> None:
    welcome, runner = started(monkeypatch, tmp_path / "model", dtype=dtype, kv_dtype=asked)
    assert (welcome.dtype, welcome.geometry.kv_dtype) == (dtype, kv_dtype)
    token_bytes = {"fp32": 16 * 4, "bf16": 16 * 2, "fp16": 16 * 2, "int8": 16 + 4, "fp8": 16 + 4}[kv_dtype]
    assert welcome.geometry.bytes_per_token == 2 * 2 * 2 * token_bytes
    assert runner.cache.layers[0].k.dtype == TORCH_DTYPES[kv_dtype]
    store = Harness(
        runner, blocks=welcome.limits.blocks, block_tokens=16, step_tokens=64, vocabulary_tokens=SIZES["vocab_size"]
    )
    prompt = random_prompt(53, 40)
    first, second = (store.complete(prompt, max_tokens=8) for _ in range(2))
    assert (first.cached_tokens, second.cached_tokens) == (0, 32)
    if dtype == "fp32":  # in 16 bits a prompt in other chunks may be rounded to another answer
        assert first.tokens == second.tokens
    written = torch.cat([runner.cache.layers[0].k.float().flatten(), runner.cache.layers[1].v.float().flatten()])
    assert written.isfinite().all()
    assert (written != 0).any()


def test_fp8_is_refused_where_a_device_has_no_such_numbers() -> None:
    for capability in ((8, 9), (9, 0), (10, 0), (12, 0)):
        cli.require_float8("fp8", capability)
    for capability, numbers in (((7, 5), r"7\.5"), ((8, 0), r"8\.0"), ((8, 6), r"8\.6")):
        with pytest.raises(StartError, match=rf"8\.9 or above, and this one has {numbers}: use --kv-dtype int8"):
            cli.require_float8("fp8", capability)
        cli.require_float8("int8", capability)
