"""Fused modules: the same logits as before, and the original stays where they would differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cachestore import fuse as fusing
from cachestore.fuse import (
    FusedAttention,
    LinearPart,
    MergedLinear,
    RMSNorm,
    RotaryFactors,
    RotaryTable,
    fuse,
)
from tests.cachestore.small_models import SIZES

CONTEXT_TOKENS = 128
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}

MERGED = "2 of 2 q/k/v, 2 of 2 gate/up"
FUSED = "2 of 2 attentions, 2 of 2 MLPs"

# What is fused of two layers of each architecture.
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "llama": ({}, f"5 of 5 norms, 1 of 1 rotary tables, {MERGED}, {FUSED}, 9 of 9 matrices"),
    # Biases on q, k and v.
    "qwen2": ({}, f"5 of 5 norms, 1 of 1 rotary tables, {MERGED}, {FUSED}, 9 of 9 matrices"),
    # Norms on q and k, each head by itself.
    "qwen3": ({}, f"9 of 9 norms, 1 of 1 rotary tables, {MERGED}, {FUSED}, 9 of 9 matrices"),
    # Weights of 1 + w in its norms, a soft cap and windows.
    "gemma2": (
        LAYERS | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 3.0},
        f"0 of 9 norms, 1 of 1 rotary tables, {MERGED}, {FUSED}, 9 of 9 matrices",
    ),
    # Two kinds of rotary factors.
    "gemma3_text": (
        LAYERS | {"query_pre_attn_scalar": 16},
        f"0 of 13 norms, 1 of 1 rotary tables, {MERGED}, {FUSED}, 9 of 9 matrices",
    ),
    # Merged by its maker.
    "phi3": ({"pad_token_id": 0}, "5 of 5 norms, 1 of 1 rotary tables, 9 of 9 matrices"),
    # Layer norms, and rotary factors for a part of a head.
    "gpt_neox": ({"rotary_pct": 0.25}, "1 of 1 rotary tables, 9 of 9 matrices"),
    "stablelm": ({"partial_rotary_factor": 0.5}, f"1 of 1 rotary tables, {MERGED}, 2 of 2 MLPs, 9 of 9 matrices"),
    # Rotates neighbours, not halves.
    "cohere": ({}, f"0 of 3 norms, 1 of 1 rotary tables, {MERGED}, 0 of 2 attentions, 2 of 2 MLPs, 9 of 9 matrices"),
    # Norms on q and k, all heads together; weighs before it rounds.
    "olmo2": (
        {},
        f"9 of 9 norms, 1 of 1 rotary tables, {MERGED}, 0 of 2 attentions, 2 of 2 MLPs, 9 of 9 matrices",
    ),
    "starcoder2": (
        {"use_bias": True},
        "1 of 1 rotary tables, 2 of 2 q/k/v, 2 of 2 attentions, 9 of 9 matrices",
    ),
    "mixtral": (
        {"num_local_experts": 4},
        "5 of 5 norms, 1 of 1 rotary tables, 2 of 2 q/k/v, 2 of 2 attentions, 5 of 5 matrices",
    ),
    "qwen2_moe": (
        {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
        f"5 of 5 norms, 1 of 1 rotary tables, {MERGED}, {FUSED}, 11 of 11 matrices",
    ),
    "opt": ({"word_embed_proj_dim": 64, "ffn_dim": 96}, "2 of 2 q/k/v, 9 of 9 matrices"),
}


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Plain attention that reads nothing of the module, like the store's."""
    group, tokens = query.shape[1] // key.shape[1], query.shape[2]
    scores = scaling * query @ key.repeat_interleave(group, 1).transpose(2, 3)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    scores = scores.masked_fill((distance < 0) | (distance >= (sliding_window or tokens)), -torch.inf)
    return (scores.softmax(-1) @ value.repeat_interleave(group, 1)).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register("plain_for_tests", _attention)


def small_model(model_type: str = "llama", dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    """Norms and biases are random, too: where they are 1 and 0, many a mistake changes nothing."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **(SIZES | config)), dtype=dtype, attn_implementation="plain_for_tests"
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    return model


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    tokens = torch.randint(0, SIZES["vocab_size"], (1, 69), generator=torch.Generator().manual_seed(1))
    result: torch.Tensor = model(input_ids=tokens, use_cache=False).logits[0].float()
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", MODELS)
def test_a_fused_model_computes_what_it_computed_before(model_type: str, dtype: torch.dtype) -> None:
    config, expected = MODELS[model_type]
    model = small_model(model_type, dtype, **config)
    before = logits(model)
    assert fuse(model, CONTEXT_TOKENS) == expected
    # In bf16, too: one rounding more or less in a norm moves logits by per cents.
    assert (logits(model) - before).norm() <= 1e-5 * before.norm()


class OffByEps(RMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, 1.1 * self.eps)


class OnePlusWeight(RMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(hidden_states, self.weight.shape, 1 + self.weight, self.eps)


class AddsALittle(RMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) + 1e-3


class SubtractsTheMean(RMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))


class NotANumber(RMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) * torch.nan


@pytest.mark.parametrize("kind", [OffByEps, OnePlusWeight, AddsALittle, SubtractsTheMean, NotANumber])
def test_a_norm_that_differs_stays(kind: type[RMSNorm]) -> None:
    model = small_model()
    other = model.model.layers[1].input_layernorm
    model.model.layers[1].input_layernorm = kind(other.weight, other.variance_epsilon)
    before = logits(model)
    assert fuse(model, CONTEXT_TOKENS).startswith("4 of 5 norms")
    assert type(model.model.layers[1].input_layernorm) is kind
    assert torch.allclose(logits(model), before, atol=1e-4, equal_nan=True)


class Doubled(nn.Linear):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(rows)


def test_a_linear_layer_of_another_kind_is_neither_merged_nor_packed() -> None:
    model = small_model()
    attention = model.model.layers[0].self_attn
    attention.k_proj.__class__ = Doubled
    before = logits(model)
    assert "1 of 1 q/k/v" in fuse(model, CONTEXT_TOKENS)
    assert type(attention.k_proj) is Doubled
    assert torch.allclose(logits(model), before, atol=1e-4)


@pytest.mark.parametrize("broken", ["_linear_pointwise", "_reorder_linear_weight"])
def test_a_product_that_fails_or_differs_keeps_the_original(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    class Failing:
        @staticmethod
        def default(*_: object) -> torch.Tensor:
            raise RuntimeError("not in this build")

    class Wrong:
        def __new__(cls, weight: torch.Tensor, *_: object) -> torch.Tensor:
            return 1.001 * weight

    monkeypatch.setattr(torch.ops.mkldnn, broken, Failing if broken == "_linear_pointwise" else Wrong, raising=False)
    model = small_model()
    before = logits(model)
    assert fuse(model, CONTEXT_TOKENS).endswith("0 of 9 matrices")
    assert torch.allclose(logits(model), before, atol=1e-4)


def test_parts_that_differ_from_the_layers_they_replace_are_not_put_there(monkeypatch: pytest.MonkeyPatch) -> None:
    part = MergedLinear.part
    monkeypatch.setattr(MergedLinear, "part", lambda self, index, rows: part(self, index, rows) * 1.001)
    model = small_model()
    before = logits(model)
    assert "0 of 2 q/k/v, 0 of 2 gate/up" in fuse(model, CONTEXT_TOKENS)
    assert torch.allclose(logits(model), before, atol=1e-4)


@pytest.fixture
def merged() -> tuple[list[nn.Linear], list[LinearPart], list[int]]:
    """Three layers, the three parts that replace them, and the products that were computed."""
    torch.manual_seed(3)
    linears = [nn.Linear(8, 5), nn.Linear(8, 3, bias=False), nn.Linear(8, 4)]
    shared = MergedLinear(linears)
    products: list[int] = []
    shared.linear.register_forward_hook(lambda *_: products.append(1))
    return linears, [LinearPart(shared, index) for index in range(3)], products


@torch.no_grad()
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_parts_share_one_product_in_any_order(
    merged: tuple[list[nn.Linear], list[LinearPart], list[int]], order: tuple[int, ...]
) -> None:
    linears, parts, products = merged
    for round_number in (1, 2):
        rows = torch.randn(1, 6, 8)
        for index in order:
            assert torch.allclose(parts[index](rows), linears[index](rows), atol=1e-6)
        assert len(products) == round_number
    assert parts[0].merged._input is None, "the last input is kept alive"


@torch.no_grad()
def test_a_part_never_answers_for_another_input(
    merged: tuple[list[nn.Linear], list[LinearPart], list[int]],
) -> None:
    linears, parts, _ = merged
    first, second = torch.randn(1, 6, 8), torch.randn(1, 6, 8)
    for index, rows in ((0, first), (1, second), (0, first), (0, first), (2, second), (1, second), (1, first)):
        assert torch.allclose(parts[index](rows), linears[index](rows), atol=1e-6)


def test_a_model_that_looks_into_its_layers_finds_the_weights_there() -> None:
    config = MODELS["olmo2"][0] | {"attention_bias": True}
    before, after = small_model("olmo2", **config), small_model("olmo2", **config)
    fuse(after, CONTEXT_TOKENS)
    for name in ("self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj"):
        theirs, ours = (model.model.layers[1].get_submodule(name) for model in (before, after))
        assert torch.equal(ours.weight, theirs.weight)
        assert (ours.bias is None) if theirs.bias is None else torch.equal(ours.bias, theirs.bias)


class Scaled(nn.Module):
    """Calls an attention module and changes one thing."""

    def __init__(self, attention: Any, what: str) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, getattr(attention, name))
        self.layer_idx, self.head_dim, self.config = attention.layer_idx, attention.head_dim, attention.config
        self.what = what
        self.calls = 0
        self.inner = [attention]  # a list, so that it is no child

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> Any:
        self.calls += 1
        if self.what == "scale of calls":
            self.inner[0].scaling = 1.0 / self.calls
        if self.what == "input":
            hidden_states = 1.001 * hidden_states
        if self.what == "factors":
            cosines, sines = options["position_embeddings"]
            options["position_embeddings"] = cosines, 1.001 * sines
        out, weights = self.inner[0](hidden_states, **options)
        return (1.001 * out if self.what == "output" else out), weights


@pytest.mark.parametrize("what", ["nothing", "scale of calls", "input", "factors", "output"])
def test_an_attention_that_does_something_else_stays(what: str) -> None:
    model = small_model()
    layer = model.model.layers[1]
    layer.self_attn = Scaled(layer.self_attn, what)
    fused = 2 if what == "nothing" else 1
    assert f"{fused} of 2 attentions" in fuse(model, CONTEXT_TOKENS)
    assert (type(layer.self_attn) is FusedAttention) == (what == "nothing")
    assert model.config._attn_implementation == "plain_for_tests"


def test_an_mlp_that_does_something_else_stays() -> None:
    model = small_model()
    mlp = model.model.layers[1].mlp
    mlp.register_forward_hook(lambda module, inputs, output: 1.001 * output)
    assert "1 of 2 MLPs" in fuse(model, CONTEXT_TOKENS)
    assert model.model.layers[1].mlp is mlp


def test_rotary_factors_are_made_once_for_a_step() -> None:
    factors, step, next_step = RotaryFactors(), torch.randn(2, 1, 5, 8).unbind(), torch.randn(2, 1, 5, 8).unbind()
    first = factors.of(step)
    assert factors.of(step) is first
    cosines, sines = factors.of(next_step)
    assert torch.equal(cosines[:, :, 0], next_step[0])
    assert torch.equal(sines[:, :, 0, 4:], next_step[1][..., 4:])
    assert torch.equal(sines[:, :, 0, :4], -next_step[1][..., :4])


def held_bytes(model: nn.Module) -> int:
    """Of all weights, as parameters or packed, each storage once."""
    tensors: list[torch.Tensor] = [
        value
        for module in model.modules()
        for value in (*vars(module).values(), *module._parameters.values())
        if isinstance(value, torch.Tensor) and value.ndim == 2
    ]
    storages = [tensor.untyped_storage() for tensor in tensors if not tensor.is_mkldnn]
    plain = {storage.data_ptr(): storage.nbytes() for storage in storages}
    packed = {id(tensor): tensor.numel() * tensor.element_size() for tensor in tensors if tensor.is_mkldnn}
    return sum(plain.values()) + sum(packed.values())


@pytest.mark.parametrize("tied", [False, True])
def test_no_weight_is_held_twice(tied: bool) -> None:
    model = small_model(tie_word_embeddings=tied)
    before = held_bytes(model)
    fuse(model, CONTEXT_TOKENS)
    assert held_bytes(model) == before
    if tied:
        assert model.lm_head.packed.data_ptr() == model.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_a_rotary_table_says_what_the_rotary_embedding_says(model_type: str) -> None:
    model = small_model(model_type, **MODELS[model_type][0])
    rotary, kinds = model.model.rotary_emb, [("sliding_attention",), ("full_attention",)]
    fuse(model, CONTEXT_TOKENS)
    table, x = model.model.rotary_emb, torch.zeros(1)
    assert type(table) is RotaryTable
    for positions in (torch.tensor([[0]]), torch.tensor([[5, 127, 0, 5]]), torch.arange(CONTEXT_TOKENS)[None]):
        for kind in kinds if model_type == "gemma3_text" else [()]:
            for ours, theirs in zip(table(x, positions, *kind), rotary(x, positions, *kind), strict=True):
                assert torch.equal(ours, theirs)


def test_a_rotary_table_that_would_be_large_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    row_bytes = 2 * 4 * SIZES["head_dim"]
    for table_bytes, made in ((CONTEXT_TOKENS * row_bytes, 1), (CONTEXT_TOKENS * row_bytes - 1, 0)):
        monkeypatch.setattr(fusing, "ROTARY_TABLE_BYTES", table_bytes)
        assert f"{made} of 1 rotary tables" in fuse(small_model(), CONTEXT_TOKENS)
