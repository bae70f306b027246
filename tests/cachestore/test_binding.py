"""The proof at load: what it lets through answers like the model itself, and what is broken does not pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cachestore import batch, model
from cachestore.binding import WARM_UP_TOKENS, prove_binding, warm_up
from cachestore.checkpoint import ELEMENT_BYTES
from cachestore.fuse import fuse
from cachestore.model import KVCache, Model, ModelRunner
from cachestore.protocol import KVDType
from cachestore.start_error import StartError
from kernels import torch_backend
from kernels.tiles import shortest_split_tokens
from tests.cachestore.small_models import SIZES, save_small_model, small_layout

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 7},
    "gemma2": {
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 20.0,
        "query_pre_attn_scalar": 16,
    },
}


def load(folder: Path, context_tokens: int = 512) -> Model:
    return Model(folder, dtype="fp32", device=torch.device("cpu"), max_context_tokens=context_tokens)


def prove(candidate: Model, block_tokens: int = 16, kv_dtype: KVDType = "fp32") -> str:
    layout = replace(small_layout(block_tokens), element_bytes=ELEMENT_BYTES[kv_dtype])
    return prove_binding(candidate, layout, "fp32", kv_dtype, SIZES["vocab_size"], "the-model")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")

    def folder(model_type: str) -> Path:
        if not (root / model_type).exists():
            save_small_model(root / model_type, model_type, **MODELS[model_type])
        return root / model_type

    return folder


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("block_tokens", [8, 16, 64])
def test_decoders_that_call_the_interface_pass(
    folder_of: Callable[[str], Path], model_type: str, block_tokens: int
) -> None:
    prove(load(folder_of(model_type)), block_tokens)


def _ignore_tables(attention: Callable[..., torch.Tensor], *args: Any, **options: Any) -> torch.Tensor:
    q, k_blocks, v_blocks, tables, *rest = args
    in_order = torch.arange(tables.shape[1], dtype=torch.int32).expand_as(tables)
    return attention(q, k_blocks, v_blocks, in_order.contiguous(), *rest, **options)


def _see_one_key_less(attention: Callable[..., torch.Tensor], *args: Any, **options: Any) -> torch.Tensor:
    *first, context_lengths = args
    return attention(*first, (context_lengths - 1).clamp(min=1), **options)


def _without(option: str) -> Callable[..., torch.Tensor]:
    def attend(attention: Callable[..., torch.Tensor], *args: Any, **options: Any) -> torch.Tensor:
        return attention(*args, **(options | {option: None}))

    return attend


def _unscaled(attention: Callable[..., torch.Tensor], *args: Any, **options: Any) -> torch.Tensor:
    return attention(*args, **(options | {"scale": 1.0}))


def _not_a_number(attention: Callable[..., torch.Tensor], *args: Any, **options: Any) -> torch.Tensor:
    return attention(*args, **options) * torch.nan


@pytest.mark.parametrize(
    ("model_type", "broken"),
    [
        ("llama", _ignore_tables),
        ("llama", _see_one_key_less),
        ("llama", _unscaled),
        ("llama", _not_a_number),
        ("mistral", _without("window")),
        ("gemma2", _without("window")),
        ("gemma2", _without("soft_cap")),
    ],
)
def test_attention_that_is_broken_is_refused(
    folder_of: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    model_type: str,
    broken: Callable[..., torch.Tensor],
) -> None:
    prove(load(folder_of(model_type)))
    candidate = load(folder_of(model_type))
    working = torch_backend.paged_attention
    monkeypatch.setattr(torch_backend, "paged_attention", lambda *args, **options: broken(working, *args, **options))
    with pytest.raises(StartError, match=r"the-model can't be served: .* logits differ .*allowed: 1e-3"):
        prove(candidate)


@pytest.mark.parametrize("model_type", MODELS)
def test_a_cache_of_another_dtype_is_compared_with_the_models_own(
    folder_of: Callable[[str], Path], model_type: str
) -> None:
    for kv_dtype, words in (("bf16", "in bf16 moves"), ("int8", "in int8 moves"), ("fp8", "in fp8 moves")):
        assert words in prove(load(folder_of(model_type)), 8, kv_dtype)
    assert "moves" not in prove(load(folder_of(model_type)))


@pytest.mark.parametrize(("model_type", "factor"), [*((name, 2.0) for name in MODELS), ("llama", torch.nan)])
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_scales_of_keys_that_are_off_by_two_or_no_number_are_refused(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, model_type: str, factor: float, kv_dtype: KVDType
) -> None:
    candidate = load(folder_of(model_type))
    working = torch_backend.paged_attention

    def attend(*args: Any, k_scales: torch.Tensor | None, **options: Any) -> torch.Tensor:
        return working(*args, k_scales=None if k_scales is None else factor * k_scales, **options)

    monkeypatch.setattr(torch_backend, "paged_attention", attend)
    message = rf"with --kv-dtype {kv_dtype}: a cache in {kv_dtype} moves .* more than \d+%; choose fp32 or another"
    with pytest.raises(StartError, match=message):
        prove(candidate, kv_dtype=kv_dtype)


def test_b053_bits_that_are_taken_for_values_are_refused(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    candidate = load(folder_of("llama"))
    working = torch_backend.write_kv

    def write(k: torch.Tensor, v: torch.Tensor, k_blocks: torch.Tensor, v_blocks: torch.Tensor, *rest: Any) -> None:
        if k_blocks.dtype == torch.float16:
            k_blocks, v_blocks = k_blocks.view(torch.bfloat16), v_blocks.view(torch.bfloat16)
        working(k, v, k_blocks, v_blocks, *rest)

    monkeypatch.setattr(torch_backend, "write_kv", write)
    with pytest.raises(StartError, match="with --kv-dtype fp16: a cache in fp16 moves"):
        prove(candidate, kv_dtype="fp16")


@pytest.mark.parametrize("what", ["positions", "slots", "rows of a chunk"])
def test_a_batch_that_is_off_by_one_is_refused(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    prove(load(folder_of("llama")))
    candidate = load(folder_of("llama"))
    working, slots = model.Model.logits, batch.slots

    def logits(self: Model, step: Any, cache: Any, rows: torch.Tensor) -> torch.Tensor:
        if what == "positions":
            # Later chunks only: a shift of all positions alike is none, since rotary positions are relative.
            step.positions.add_((step.positions >= 19).long())
        if what == "rows of a chunk":
            step.positions.sub_(step.positions.min())
        return working(self, step, cache, rows)

    def contiguous(table: Any, start: int, end: int, block_tokens: int) -> Any:
        first = slots(table, start, start + 1, block_tokens)[0]
        return first + slots(table, 0, end - start, block_tokens) - slots(table, 0, 1, block_tokens)

    if what == "slots":
        monkeypatch.setattr(batch, "slots", contiguous)
    else:
        monkeypatch.setattr(model.Model, "logits", logits)
    with pytest.raises(StartError, match="the-model can't be served"):
        prove(candidate)


def test_a_layer_that_does_not_call_the_interface_is_refused(folder_of: Callable[[str], Path]) -> None:
    prove(load(folder_of("llama")))
    candidate = load(folder_of("llama"))
    candidate.module.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(StartError, match="1 of 2 layers called the attention interface"):
        prove(candidate)


def test_what_is_served_is_fused_and_was_compared_with_the_model_as_it_was(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    candidate = load(folder_of("llama"))
    prove(candidate)
    assert candidate.fused
    with pytest.raises(RuntimeError, match="before the model is fused"):
        candidate.plain_logits(torch.arange(4))

    def fuse_wrongly(module: Any, max_context_tokens: int) -> str:
        words = fuse(module, max_context_tokens)
        module.model.layers[1].mlp.down_proj = module.model.layers[0].mlp.down_proj
        return words

    monkeypatch.setattr(model, "fuse", fuse_wrongly)
    with pytest.raises(StartError, match=r"logits differ .*allowed: 1e-3"):
        prove(load(folder_of("llama")))


def test_a_recurrent_model_is_refused_by_name_in_one_line(tmp_path: Path) -> None:
    folder = save_small_model(tmp_path / "recurrent", "mamba", state_size=4, num_hidden_layers=2)
    with pytest.raises(StartError, match=r"^.*recurrent.* can't .*$") as raised:
        prove_binding(load(folder), small_layout(), "fp32", "fp32", SIZES["vocab_size"], "recurrent")
    assert "\n" not in str(raised.value)


LONG_CONTEXT_TOKENS = 128
SCALINGS: dict[str, dict[str, Any]] = {
    "dynamic": {"max_position_embeddings": 32, "rope_parameters": {"factor": 4.0}},
    "longrope": {
        "max_position_embeddings": LONG_CONTEXT_TOKENS,
        "original_max_position_embeddings": 32,
        "rope_parameters": {"factor": 4.0, "long_factor": [4.0] * 8, "short_factor": [1.0] * 8},
    },
}


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_long_request_does_not_change_the_rotary_factors_of_a_short_one_beside_it(
    tmp_path: Path, scaling: str
) -> None:
    config = SCALINGS[scaling]
    parameters = {"rope_type": scaling, "rope_theta": 10_000.0} | config["rope_parameters"]
    folder = save_small_model(tmp_path / "long", "llama", **(config | {"rope_parameters": parameters}))
    prove(load(folder, LONG_CONTEXT_TOKENS))
    rope = load(folder, LONG_CONTEXT_TOKENS).module.model.rotary_emb

    def at_position_5(*beside: int) -> torch.Tensor:
        cosines, _ = rope(torch.zeros(1), torch.tensor([[5, *beside]]))
        first: torch.Tensor = cosines[0, 0].clone()
        return first

    assert torch.equal(at_position_5(), at_position_5(LONG_CONTEXT_TOKENS - 1))
    rope.rope_type = scaling  # as transformers has it
    assert not torch.equal(at_position_5(), at_position_5(LONG_CONTEXT_TOKENS - 1))


@pytest.mark.parametrize("most", [256, 4096])
def test_what_only_long_contexts_need_has_run_before_the_first_request(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    candidate = load(folder_of("llama"), context_tokens=4096)
    runner = ModelRunner(candidate, KVCache(small_layout(16), 3, torch.float32, candidate.device), 16)
    kernels = candidate.kernels
    steps = []

    def attention(*args: Any, **options: Any) -> torch.Tensor:
        steps.append((options["max_query_tokens"], options["max_context_tokens"]))
        return kernels.paged_attention(*args, **options)

    monkeypatch.setattr(candidate, "kernels", SimpleNamespace(write_kv=kernels.write_kv, paged_attention=attention))
    warm_up(runner, most)
    assert set(steps) == {(1, min(most, WARM_UP_TOKENS))}
    assert 2 * shortest_split_tokens() < WARM_UP_TOKENS
