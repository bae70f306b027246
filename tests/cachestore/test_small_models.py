"""Random models of each kind of attention, over blocks and in company, answer as transformers computes them alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from cachestore.batch import Batch
from cachestore.model import KVCache, Model, ModelRunner
from cachestore.sampling import Samples
from cachestore.scheduler import Row
from kernels import torch_backend, triton_backend
from tests.cachestore.small_models import SIZES, layout_of, unit_model
from tests.cachestore.support import Harness, make_sequence

# The largest absolute difference of two logits, which are of order 1 (their standard deviation is); measured: 4e-6.
TOLERANCE = 1e-4
BACKENDS = [torch_backend, triton_backend]

# Steps of (sequence, new tokens). Sequence 0 is prefilled in chunks, the second of which crosses a tile of 64 keys; the
# others are prefilled whole beside its chunks and decode beside them. The last step is of decodes alone.
STEPS = [[(0, 30), (1, 11)], [(1, 1), (0, 38), (2, 7)], [(2, 1), (0, 5), (1, 1)], [(1, 1), (0, 1), (2, 1)]]
LENGTHS = [sum(count for step in STEPS for of, count in step if of == sequence) for sequence in range(3)]
GEMMA = {
    "head_dim": 24,
    "query_pre_attn_scalar": 10,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"],
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
    # Else a random model says its last token again.
    "tie_word_embeddings": False,
}

NAMES = ("q", "k_blocks", "v_blocks", "block_tables", "query_starts", "context_lengths")

Break = Callable[[Model], None]


def _attention(change: Callable[..., dict[str, Any]]) -> Break:
    """Attention that is called with something else; `change` is told what it was to be called with."""

    def broken(model: Model) -> None:
        kernels = model.kernels

        def attend(*args: torch.Tensor, **options: Any) -> torch.Tensor:
            named = dict(zip(NAMES, args, strict=True)) | options
            out: torch.Tensor = kernels.paged_attention(**(named | change(**named)))
            return out

        model.kernels = SimpleNamespace(write_kv=kernels.write_kv, paged_attention=attend)  # type: ignore[assignment]

    return broken


def without_norms_of_heads(model: Model) -> None:
    for module in model.module.modules():
        if hasattr(module, "q_norm"):
            module.q_norm = module.k_norm = nn.Identity()


def without_final_soft_cap(model: Model) -> None:
    model.module.config.final_logit_softcapping = None


tables_in_order = _attention(
    lambda block_tables, **_: {
        "block_tables": torch.arange(block_tables.shape[1], dtype=torch.int32).repeat(len(block_tables), 1)
    }
)
heads_of_the_next_group = _attention(
    lambda k_blocks, v_blocks, **_: {"k_blocks": k_blocks.roll(1, dims=2), "v_blocks": v_blocks.roll(1, dims=2)}
)
without_scale = _attention(lambda **_: {"scale": 1.0})
scale_of_head_dim = _attention(lambda q, **_: {"scale": q.shape[-1] ** -0.5})
without_window = _attention(lambda **_: {"window": None})
without_soft_cap = _attention(lambda **_: {"soft_cap": None})


@dataclass(frozen=True)
class Kind:
    """A kind of model, and what must not go unnoticed when it is ignored."""

    model_type: str
    config: dict[str, Any]
    breaks: Sequence[Break]


def _llama(query_heads: int, kv_heads: int, **config: int) -> Kind:
    heads = {"num_attention_heads": query_heads, "num_key_value_heads": kv_heads}
    grouping = [heads_of_the_next_group] if kv_heads > 1 else []
    return Kind("llama", heads | config, [tables_in_order, without_scale, *grouping])


KINDS = {
    "llama 28/4": _llama(28, 4, hidden_size=224),
    "llama 9/3": _llama(9, 3, hidden_size=72, head_dim=64),
    "llama 8/1": _llama(8, 1, head_dim=80),
    "llama 8/8": _llama(8, 8, head_dim=8),
    "qwen3": Kind("qwen3", {}, [without_norms_of_heads]),
    "mistral": Kind("mistral", {"sliding_window": 7}, [without_window]),
    "gemma2": Kind("gemma2", GEMMA, [without_window, without_soft_cap, scale_of_head_dim, without_final_soft_cap]),
}


@dataclass(frozen=True)
class Original:
    """A saved model, three sequences of tokens and the logits [T, vocabulary] of each by transformers."""

    folder: Path
    tokens: list[list[int]]
    logits: list[torch.Tensor]

    def load(self, *, fused: bool) -> Model:
        model = Model(self.folder, dtype="fp32", device=torch.device("cpu"), max_context_tokens=max(LENGTHS))
        if fused:
            model.fuse()
        return model


@pytest.fixture(scope="module")
def original_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Original]:
    made: dict[str, Original] = {}

    @torch.inference_mode()
    def make(kind: Kind) -> Original:
        model = unit_model(kind.model_type, **kind.config)
        folder = tmp_path_factory.mktemp("models") / kind.model_type
        model.save_pretrained(folder)
        tokens = torch.randint(0, SIZES["vocab_size"], (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
        parts = tokens.split(LENGTHS)
        logits = [model(input_ids=part[None], use_cache=False).logits[0] for part in parts]
        assert 0.5 < torch.cat(logits).std() < 2
        return Original(folder, [part.tolist() for part in parts], logits)

    def original(name: str) -> Original:
        if name not in made:
            made[name] = make(KINDS[name])
        return made[name]

    return original


def use(backend: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have models that are loaded from now on compute with it."""
    if backend is triton_backend:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def difference(
    model: Model, original: Original, block_tokens: int, steps: list[list[tuple[int, int]]] = STEPS
) -> float:
    """The largest of all logits of these steps, or NaN; free slots hold NaN, and tables are shuffled."""
    layout = layout_of(model.module.config, block_tokens)
    needed = [-(-length // block_tokens) for length in LENGTHS]
    cache = KVCache(layout, sum(needed) + 3, model.dtype, model.device)
    cache.storage.view(torch.float32).fill_(torch.nan)
    free = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(block_tokens)).tolist()
    sequences = [
        make_sequence(tokens, table=[free.pop() for _ in range(blocks)])
        for tokens, blocks in zip(original.tokens, needed, strict=True)
    ]
    done = [0] * len(sequences)
    differences = []
    for step in steps:
        rows = [Row(sequences[of], done[of], count, samples=False) for of, count in step]
        batch = Batch.from_rows(rows, block_tokens, model.device)
        logits = model.logits(batch, cache, torch.arange(len(batch.token_ids)))
        expected = [original.logits[of][done[of] : done[of] + count] for of, count in step]
        differences.append((logits - torch.cat(expected)).abs().max())
        for of, count in step:
            done[of] += count
    return torch.stack(differences).max().item()


# What is broken on purpose may read free slots, and the interpreter warns of a tile that is NaN altogether.
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", KINDS)
def test_logits_over_blocks_are_those_of_transformers(
    original_of: Callable[[str], Original], monkeypatch: pytest.MonkeyPatch, name: str, backend: ModuleType
) -> None:
    use(backend, monkeypatch)
    original = original_of(name)
    model = original.load(fused=True)
    assert model.kernels is backend
    # Triton's interpreter takes seconds for each of these.
    is_fast = backend is torch_backend
    for block_tokens in (8, 16, 128) if is_fast else (16,):
        assert difference(model, original, block_tokens) <= TOLERANCE
    if is_fast or name == "llama 8/1":
        assert difference(original.load(fused=False), original, 8) <= TOLERANCE
    for broken in KINDS[name].breaks if is_fast else KINDS[name].breaks[:1]:
        candidate = original.load(fused=True)
        broken(candidate)
        # Written so that NaN counts as a difference.
        assert not difference(candidate, original, 8, STEPS[:1]) <= 100 * TOLERANCE


class Counting(ModelRunner):
    """Notes the new tokens of each row, step by step."""

    def __init__(self, model: Model, cache: KVCache, block_tokens: int) -> None:
        super().__init__(model, cache, block_tokens)
        self.steps: list[list[int]] = []

    def launch(self, rows: Sequence[Row]) -> Samples:
        self.steps.append([row.count for row in rows])
        return super().launch(rows)


ANSWER_TOKENS = 12


def generated(original: Original, prompts: list[list[int]]) -> list[list[int]]:
    """What `generate` of transformers answers to each alone, of which it was in no doubt."""
    model = AutoModelForCausalLM.from_pretrained(original.folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    answers = []
    for prompt in prompts:
        output = model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=ANSWER_TOKENS,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.stack(output.logits).topk(2).values
        assert (best[..., 0] - best[..., 1]).min() > 10 * TOLERANCE
        answers.append(output.sequences[0, len(prompt) :].tolist())
    return answers


def test_greedy_answers_of_two_requests_together_are_those_of_generate(
    original_of: Callable[[str], Original], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = original_of("gemma2")
    prompts = [original.tokens[0][:23], original.tokens[0][30:44]]
    expected = generated(original, prompts)
    assert min(len(set(tokens)) for tokens in expected) > ANSWER_TOKENS // 2
    for backend in BACKENDS:
        use(backend, monkeypatch)
        model = original.load(fused=True)
        assert model.kernels is backend
        runner = Counting(model, KVCache(layout_of(model.module.config, 8), 16, model.dtype, model.device), 8)
        store = Harness(runner, blocks=16, block_tokens=8, step_tokens=16, vocabulary_tokens=SIZES["vocab_size"])
        answers = [store.submit(prompt, max_tokens=ANSWER_TOKENS) for prompt in prompts]
        store.run(*answers)
        assert [answer.tokens for answer in answers] == expected
        assert runner.steps.count([1, 1]) > ANSWER_TOKENS // 2
        # One decodes beside a chunk of the other's prompt.
        assert any(len(step) == 2 and min(step) == 1 < max(step) for step in runner.steps)
