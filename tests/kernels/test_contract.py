"""What the kernels refuse, and that they say why."""

from typing import Any

import pytest
import torch

from kernels import torch_backend
from kernels.errors import Unsupported
from kernels.select import backend
from kernels.torch_backend import latent_attention, paged_attention, write_kv, write_latent
from tests.kernels.scene import Scene


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 4, "causal": False}, "needs causal attention"),
        ({"window": 0}, "at least 1"),
        ({"soft_cap": 0.0}, "soft_cap is 0.0"),
        ({"sinks": torch.zeros(3)}, r"sinks must be torch.float32 \[9\]"),
        ({"lse": torch.zeros(5, 9).half()}, r"lse must be torch.float32 \[5, 9\]"),
        ({"out": torch.zeros(4, 9, 64)}, r"out must be torch.float32 \[5, 9, 64\]"),
        ({"q": torch.zeros(5, 8, 64)}, "8 query heads are no multiple of 3"),
        ({"q": torch.zeros(5, 9, 32)}, r"q must be .*\[5, 9, 64\], not .*\[5, 9, 32\]"),
        ({"q": torch.zeros(5, 9, 64).half()}, "not torch.float16"),
        ({"k_blocks": torch.zeros(7, 16, 64)}, r"\[blocks, tokens, kv heads, dim\]"),
        ({"v_blocks": torch.zeros(7, 16, 2, 64)}, "v_blocks must be"),
        ({"block_tables": torch.zeros(2, 2, dtype=torch.int64)}, "block_tables must be torch.int32"),
        ({"query_starts": int32(0, 1)}, r"query_starts must be torch.int32 \[3\]"),
        ({"query_starts": int32(0, 4, 2)}, "rise from 0"),
        ({"query_starts": int32(1, 2, 5)}, "rise from 0"),
        ({"query_starts": int32(0, 1, 6)}, "at most 5, the rows of q"),
        ({"context_lengths": int32(19)}, r"context_lengths must be torch.int32 \[2\]"),
        ({"context_lengths": int32(19, -1)}, "-1 .. 19 are outside 0 .. 21"),
        ({"max_context_tokens": 20}, "19 .. 21 are outside 0 .. 20"),
        ({"max_query_tokens": 3}, "4 query tokens of one sequence, over the bound of 3"),
        ({"block_tables": int32(0, 1).view(2, 1)}, "outside 0 .. 16"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(change: dict[str, Any], message: str) -> None:
    arguments = Scene([(1, 19), (4, 21)]).arguments()
    paged_attention(**arguments)
    with pytest.raises(ValueError, match=message):
        paged_attention(**{**arguments, **change})


def test_a_table_entry_inside_the_context_must_name_a_block() -> None:
    for entry in (-1, 1000):
        scene = Scene([(1, 19)])
        scene.tables[0, 1] = entry
        with pytest.raises(IndexError):
            paged_attention(**scene.arguments())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_8bit_blocks_are_refused_by_name(dtype: torch.dtype) -> None:
    scene = Scene([(1, 3)])
    narrow = torch.zeros(4, 16, 3, 64).to(dtype)
    scales = torch.ones(4, 16, 3)
    new, slots = torch.zeros(1, 3, 64), torch.tensor([0])
    for blocks, given in ((narrow, None), (narrow, scales), (scene.k_blocks, scales)):
        change = {"k_blocks": blocks, "v_blocks": blocks, "k_scales": given, "v_scales": given}
        with pytest.raises(Unsupported, match=r"8-bit blocks.*keep the cache in bfloat16"):
            paged_attention(**{**scene.arguments(), **change})
        with pytest.raises(Unsupported, match=r"8-bit blocks.*keep the cache in bfloat16"):
            write_kv(new, new, blocks, blocks, slots, given, given)


def test_latent_attention_is_refused_by_name() -> None:
    some = torch.zeros(1)
    with pytest.raises(Unsupported, match=r"latent attention.*grouped-query"):
        write_latent(some, some, some, some)
    with pytest.raises(Unsupported, match=r"latent attention.*grouped-query"):
        latent_attention(
            some, some, some, some, some, some, scale=1.0, max_query_tokens=1, max_context_tokens=1
        )


def test_every_device_gets_the_pytorch_kernels() -> None:
    for device in ("cpu", "cuda:0", torch.device("cpu")):
        assert backend(device) is torch_backend
    with pytest.raises(RuntimeError):
        backend("abacus")
