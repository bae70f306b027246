"""Equal modules for what transformers computes in many small operations.

No model class is named: a module is recognised by what it has, and each replacement is run against the module it
replaces, on random input in the model's dtype, one row and many. One that differs keeps the original.

Weights are held once: a merged or packed matrix takes the place of the parameters it was made of.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# How far a replacement may be from the original, of the largest value: another order of summation in fp32, one rounding
# more or less in 16 bits.
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
PROBE_ROWS = (1, 7, 64)
SIBLINGS = {"q/k/v": ("q_proj", "k_proj", "v_proj"), "gate/up": ("gate_proj", "up_proj")}
ROTARY_TABLE_BYTES = 64 << 20
PROBE = "saltern_probe"
# The proof of binding runs 48 tokens, however small the cache is.
LEAST_TOKENS = 64


class RMSNorm(nn.Module):
    """weight * x / sqrt(mean(x²) + eps) in one call (Zhang and Sennrich, arXiv:1910.07467)."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.eps)


class RoundedRMSNorm(RMSNorm):
    """The same, rounded to the model's dtype before the weight is applied: in 16 bits, most models differ in this."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden_states, self.weight.shape, None, self.eps) * self.weight


class PackedLinear(nn.Module):
    """A linear layer on CPU through oneDNN, its weight in the order that oneDNN reads fastest.

    Args:
        shared: another module reads the weight too, as an embedding does: it stays as it lies.
    """

    def __init__(self, linear: nn.Linear, shared: bool) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.packed = weight if shared else torch.ops.mkldnn._reorder_linear_weight(weight, None)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise.default(rows, self.packed, self.bias, "none", [], "")

    @property
    def weight(self) -> torch.Tensor:
        """[outputs, inputs] for a model that looks into its layers: unpacked each time."""
        return self.packed.to_dense()


class MergedLinear(nn.Module):
    """Linear layers that are called with the same input, as one.

    The first part that is called with an input computes for all; each of the others is handed what waits for it. What
    does not come with the very same tensor, or comes twice, is computed anew.

    Attributes:
        linear: from the input to the outputs of all parts, side by side.
    """

    def __init__(self, linears: list[nn.Linear]) -> None:
        super().__init__()
        weight = torch.cat([linear.weight.detach() for linear in linears])
        self.linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.linear.weight = nn.Parameter(weight, requires_grad=False)
        if any(linear.bias is not None for linear in linears):
            biases = [weight.new_zeros(len(of.weight)) if of.bias is None else of.bias.detach() for of in linears]
            self.linear.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
        self.sizes = [len(linear.weight) for linear in linears]
        self._input: torch.Tensor | None = None
        self._waiting: list[torch.Tensor | None] = []

    def part(self, index: int, rows: torch.Tensor) -> torch.Tensor:
        if rows is not self._input or self._waiting[index] is None:
            self._waiting = list(self.linear(rows).split(self.sizes, dim=-1))
            self._input = rows
        part = self._waiting[index]
        assert part is not None
        self._waiting[index] = None
        if all(waiting is None for waiting in self._waiting):
            self._input = None
        return part


class LinearPart(nn.Module):
    """One of the layers that were merged, in its place."""

    def __init__(self, merged: MergedLinear, index: int) -> None:
        super().__init__()
        self.merged = merged
        self.index = index

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.merged.part(self.index, rows)

    @property
    def weight(self) -> torch.Tensor:
        return self.merged.linear.weight.split(self.merged.sizes)[self.index]

    @property
    def bias(self) -> torch.Tensor | None:
        bias = self.merged.linear.bias
        return None if bias is None else bias.split(self.merged.sizes)[self.index]


class RotaryTable(nn.Module):
    """Cosines and sines of every position, gathered instead of computed.

    Attributes:
        tables: [positions, dim] each; for models with several kinds of layers, by kind.
    """

    def __init__(self, rotary: nn.Module, tokens: int, probe: torch.Tensor) -> None:
        super().__init__()
        positions = torch.arange(tokens, device=probe.device)[None]
        self.tables = {kind: [table[0] for table in rotary(probe, positions, *kind)] for kind in _kinds(rotary)}
        self.dims = {table.shape[-1] for tables in self.tables.values() for table in tables}

    def forward(self, hidden_states: torch.Tensor, position_ids: torch.Tensor, *kind: str) -> tuple[torch.Tensor, ...]:
        return tuple(table[position_ids] for table in self.tables[kind])


class FusedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), gate and up side by side (Shazeer, arXiv:2002.05202)."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.gate_up = mlp.gate_proj.merged
        self.act_fn = mlp.act_fn
        self.down_proj = mlp.down_proj

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up.linear(rows).split(self.gate_up.sizes, dim=-1)
        return self.down_proj(self.act_fn(gate) * up)


class RotaryFactors:
    """Cosines and sines of a step, [1, T, 1, dim], as the layers want them; the layers share one of these."""

    def __init__(self) -> None:
        self._source: tuple[torch.Tensor, ...] | None = None
        self._factors: tuple[torch.Tensor, torch.Tensor] | None = None

    def of(self, position_embeddings: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """The cosines, and the sines with the first half negated."""
        if self._factors is None or position_embeddings is not self._source:
            cosines, sines = position_embeddings
            half = sines.shape[-1] // 2
            signed = torch.cat((-sines[..., :half], sines[..., half:]), dim=-1)
            self._source, self._factors = position_embeddings, (cosines[:, :, None], signed[:, :, None])
        return self._factors


class FusedAttention(nn.Module):
    """Projection, norms of q and k where there are any, rotation of q and k together, attention, projection.

    Rotates halves (Su et al., arXiv:2104.09864, as Llama lays them out) over the whole head.

    Args:
        options: what the attention it replaces hands to the attention function, the same at every call.
    """

    def __init__(self, attention: nn.Module, options: dict[str, Any], factors: RotaryFactors) -> None:
        super().__init__()
        self.qkv = attention.q_proj.merged
        self.o_proj = attention.o_proj
        self.q_norm = getattr(attention, "q_norm", None)
        self.k_norm = getattr(attention, "k_norm", None)
        self.layer_idx = attention.layer_idx
        self.config = attention.config
        self.head_dim = attention.head_dim
        self.heads = [size // self.head_dim for size in self.qkv.sizes]
        self.options = options
        self.factors = factors

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, ...],
        attention_mask: torch.Tensor | None = None,
        **passed_on: Any,
    ) -> tuple[torch.Tensor, None]:
        rows = hidden_states.shape[:-1]
        q_heads, k_heads, v_heads = self.heads
        heads = self.qkv.linear(hidden_states).view(*rows, -1, self.head_dim)
        rotated, v = heads.split((q_heads + k_heads, v_heads), dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = rotated.split((q_heads, k_heads), dim=2)
            rotated = torch.cat((self.q_norm(q), self.k_norm(k)), dim=2)
        cosines, sines = self.factors.of(position_embeddings)
        rotated = (rotated * cosines).add_(rotated.roll(self.head_dim // 2, -1).mul_(sines))
        q, k = rotated.split((q_heads, k_heads), dim=2)
        attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, _ = attend(
            self, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attention_mask, **self.options, **passed_on
        )
        return self.o_proj(out.reshape(*rows, -1)), None


@torch.no_grad()
def fuse(model: nn.Module, max_context_tokens: int) -> str:
    """Replace, in place, what can be computed in fewer or faster operations with the same result.

    Args:
        model: any tree of modules, loaded and in eval mode.
        max_context_tokens: positions that rotary tables are made for.

    Returns:
        How many of each kind were found and fused, in words for the log.
    """
    parameter = next(model.parameters())
    probe = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    uses = Counter(id(weight) for module in model.modules() for weight in module._parameters.values())
    kinds: dict[str, list[bool]] = {}

    def put(kind: str, parent: nn.Module, names: Sequence[str], replacements: Sequence[nn.Module] | None) -> None:
        kinds.setdefault(kind, []).append(replacements is not None)
        for name, replacement in zip(names, replacements or (), strict=replacements is not None):
            setattr(parent, name, replacement)

    for parent, name in _places(model):
        child = getattr(parent, name)
        if _is_norm(child):
            put("norms", parent, [name], _rms_norm(child, probe))
        elif isinstance(getattr(child, "rope_type", None), str | dict):
            put("rotary tables", parent, [name], _rotary_table(child, max(max_context_tokens, LEAST_TOKENS), probe))
    for parent in {id(parent): parent for parent, _ in _places(model)}.values():
        for kind, names in SIBLINGS.items():
            linears: list[Any] = [getattr(parent, name, None) for name in names]
            if all(type(linear) is nn.Linear and uses[id(linear.weight)] == 1 for linear in linears):
                put(kind, parent, names, _merged(linears, probe))
    factors = RotaryFactors()
    rotated_dims = {dim for module in model.modules() if type(module) is RotaryTable for dim in module.dims}
    for parent, name in _places(model):
        child = getattr(parent, name)
        if _parts(child) == {"q_proj", "k_proj", "v_proj", "o_proj"} and rotated_dims == {child.head_dim}:
            put("attentions", parent, [name], _attention(child, factors, probe))
        elif _parts(child) == {"gate_proj", "up_proj", "down_proj", "act_fn"}:
            put("MLPs", parent, [name], _mlp(child, probe))
    if probe.device.type == "cpu":
        for parent, name in _places(model):
            child = getattr(parent, name)
            if type(child) is nn.Linear:
                put("matrices", parent, [name], _packed(child, uses[id(child.weight)] > 1, probe))
    return ", ".join(f"{sum(fused)} of {len(fused)} {kind}" for kind, fused in kinds.items()) or "nothing"


def _places(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """(parent, name) of every module of the tree as it is now; not the modules, whose weights could not be dropped."""
    return [(parent, name) for parent in model.modules() for name, _ in parent.named_children()]


def _is_norm(module: nn.Module) -> bool:
    return isinstance(_eps(module), float) and [name for name, _ in module.named_parameters()] == ["weight"]


def _eps(module: nn.Module) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _rms_norm(norm: nn.Module, probe: torch.Tensor) -> list[RMSNorm] | None:
    # Values near the square root of eps, too: only they tell one eps from another.
    inputs = [x * scale for x in _random_rows(len(norm.weight), probe) for scale in (1.0, _eps(norm) ** 0.5)]
    candidates = [kind(norm.weight, _eps(norm)) for kind in (RMSNorm, RoundedRMSNorm)]
    difference, best = min(
        ((_difference(norm, candidate, inputs), candidate) for candidate in candidates), key=lambda pair: pair[0]
    )
    return [best] if difference <= ALLOWED[probe.dtype] else None


def _rotary_table(rotary: nn.Module, tokens: int, probe: torch.Tensor) -> list[RotaryTable] | None:
    positions = [torch.tensor([[tokens - 1]], device=probe.device), torch.arange(7, 31, device=probe.device)[None]]
    kinds = _kinds(rotary)
    try:
        row = sum(table.nbytes for kind in kinds for table in rotary(probe, positions[0], *kind))
        if row * tokens > ROTARY_TABLE_BYTES:
            return None
        replacement = RotaryTable(rotary, tokens, probe)
        same = all(
            torch.equal(theirs, ours)
            for kind in kinds
            for ids in positions
            for theirs, ours in zip(rotary(probe, ids, *kind), replacement(probe, ids, *kind), strict=True)
        )
    except (RuntimeError, TypeError, ValueError):
        return None
    return [replacement] if same else None


def _kinds(rotary: nn.Module) -> list[tuple[str, ...]]:
    """What a rotary embedding is called with beside the positions: the kinds of layers, where it tells them apart."""
    kind: Any = rotary.rope_type
    return [(layer_type,) for layer_type in kind] if isinstance(kind, dict) else [()]


def _merged(linears: list[Any], probe: torch.Tensor) -> list[LinearPart] | None:
    features = linears[0].weight.shape[1]
    if any(linear.weight.shape[1] != features for linear in linears):
        return None
    merged = MergedLinear(linears)
    parts = [LinearPart(merged, index) for index in range(len(linears))]
    inputs = _random_rows(features, probe)
    difference = max(_difference(linear, part, inputs) for linear, part in zip(linears, parts, strict=True))
    return parts if difference <= ALLOWED[probe.dtype] else None


def _parts(module: nn.Module) -> set[str]:
    """The names of its children if those are layers merged above and what may stand beside them, else none."""
    children = dict(module.named_children())
    merged = {name for name, child in children.items() if type(child) is LinearPart}
    return set(children) - {"q_norm", "k_norm"} if merged else set()


def _probe_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    saltern_seen: list[Any],
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Stands in for attention while an attention module is compared: notes what it is given, answers a mixture."""
    saltern_seen.append((query, key, value, options))
    group = query.shape[1] // key.shape[1]
    mixture = query + key.repeat_interleave(group, dim=1) + value.repeat_interleave(group, dim=1)
    return mixture.transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(PROBE, _probe_attention)


def _attention(attention: Any, factors: RotaryFactors, probe: torch.Tensor) -> list[FusedAttention] | None:
    options: list[dict[str, Any]] = []

    def told(module: Callable[..., Any]) -> Callable[[torch.Tensor], torch.Tensor]:
        def run(rows: torch.Tensor) -> torch.Tensor:
            generator = torch.Generator().manual_seed(rows.shape[1])
            shape = (2, 1, rows.shape[1], attention.head_dim)
            embeddings = tuple(torch.randn(shape, generator=generator).to(probe))
            seen: list[Any] = []
            out, _ = module(rows, position_embeddings=embeddings, attention_mask=None, saltern_seen=seen)
            *states, passed = seen[0]
            options.append(passed)
            return torch.cat([state.flatten() for state in (out, *states)])

        return run

    inputs = _random_rows(attention.q_proj.weight.shape[1], probe)
    function = attention.config._attn_implementation
    attention.config._attn_implementation = PROBE
    try:
        told(attention)(inputs[0])
        replacement = FusedAttention(attention, options[0], factors)
        difference = _difference(told(attention), told(replacement), inputs)
    except Exception:  # whatever a module of another make says to such a call
        return None
    finally:
        attention.config._attn_implementation = function
    return [replacement] if difference <= ALLOWED[probe.dtype] and all(_same(options[0], o) for o in options) else None


def _same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Whether attention is told the same, tensors being the same tensors."""
    return first.keys() == second.keys() and all(
        value is second[key] or (not isinstance(value, torch.Tensor) and value == second[key])
        for key, value in first.items()
    )


def _mlp(mlp: nn.Module, probe: torch.Tensor) -> list[FusedMLP] | None:
    replacement = FusedMLP(mlp)
    inputs = _random_rows(mlp.gate_proj.weight.shape[1], probe)
    return [replacement] if _difference(mlp, replacement, inputs) <= ALLOWED[probe.dtype] else None


def _packed(linear: nn.Linear, shared: bool, probe: torch.Tensor) -> list[PackedLinear] | None:
    try:
        replacement = PackedLinear(linear, shared)
    except (AttributeError, RuntimeError):
        return None
    difference = _difference(linear, replacement, _random_rows(linear.weight.shape[1], probe))
    return [replacement] if difference <= ALLOWED[probe.dtype] else None


def _random_rows(features: int, probe: torch.Tensor) -> list[torch.Tensor]:
    """[1, rows, features] each, the same every time."""
    generator = torch.Generator().manual_seed(features)
    return [torch.randn(1, rows, features, generator=generator).to(probe) for rows in PROBE_ROWS]


def _difference(original: Callable[..., Any], replacement: Callable[..., Any], inputs: list[torch.Tensor]) -> float:
    """How far the two are apart over all inputs, of the largest value; infinite where they can't be compared."""
    most = 0.0
    for rows in inputs:
        theirs = original(rows)
        try:
            ours = replacement(rows)
        except (AttributeError, RuntimeError):  # not in this build of torch, or not for this dtype
            return math.inf
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return math.inf
        theirs, ours = theirs.float(), ours.float()
        difference = ((ours - theirs).abs().max() / theirs.abs().max()).item()
        if math.isnan(difference):
            return math.inf
        most = max(most, difference)
    return most
