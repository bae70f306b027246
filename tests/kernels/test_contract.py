"""What the kernels refuse, and that they say why.

Shapes, dtypes and options both backends look at; what lengths, tables and slots hold PyTorch alone, since Triton would
have to wait for the device.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import torch_backend, triton_backend
from kernels.errors import Unsupported
from kernels.select import backend
from tests.kernels.device import DEVICE
from tests.kernels.scene import Scene, int32


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def arguments_of_a_good_call() -> dict[str, Any]:
    return Scene([(1, 19), (4, 21)], heads=(9, 3), dims=(64, 64)).arguments()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 4, "causal": False}, "needs causal attention"),
        ({"window": 0}, "at least 1"),
        ({"soft_cap": 0.0}, "soft_cap is 0.0"),
        ({"soft_cap": 1e4}, r"soft_cap is 10000.0; pass one from 0.001 to 1000 or None"),
        ({"soft_cap": torch.inf}, "soft_cap is inf"),
        ({"soft_cap": torch.nan}, "soft_cap is nan"),
        ({"sinks": zeros(3)}, r"sinks must be torch.float32 \[9\]"),
        ({"lse": zeros(5, 9).half()}, r"lse must be torch.float32 \[5, 9\]"),
        ({"out": zeros(4, 9, 64)}, r"out must be torch.float32 \[5, 9, 64\]"),
        ({"q": zeros(5, 8, 64)}, "8 query heads are no multiple of 3"),
        ({"q": zeros(5, 9, 32)}, r"q must be .*\[5, 9, 64\], not .*\[5, 9, 32\]"),
        ({"q": zeros(5, 9, 64).double()}, "q must be of one of float32, bfloat16, float16, not torch.float64"),
        ({"k_blocks": zeros(7, 16, 64)}, r"\[blocks, tokens, kv heads, dim\]"),
        ({"v_blocks": zeros(7, 16, 2, 64)}, "v_blocks must be"),
        ({"block_tables": zeros(2, 2, dtype=torch.int64)}, "block_tables must be torch.int32"),
        ({"query_starts": int32(0, 1)}, r"query_starts must be torch.int32 \[3\]"),
        ({"context_lengths": int32(19)}, r"context_lengths must be torch.int32 \[2\]"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(
    kernels: ModuleType, change: dict[str, Any], message: str
) -> None:
    arguments = arguments_of_a_good_call()
    kernels.paged_attention(**arguments)
    with pytest.raises(ValueError, match=message):
        kernels.paged_attention(**{**arguments, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_starts": int32(0, 4, 2)}, "rise from 0"),
        ({"query_starts": int32(1, 2, 5)}, "rise from 0"),
        ({"query_starts": int32(0, 1, 6)}, "at most 5, the rows of q"),
        ({"context_lengths": int32(19, -1)}, "-1 .. 19 are outside 0 .. 21"),
        ({"max_context_tokens": 20}, "19 .. 21 are outside 0 .. 20"),
        ({"max_query_tokens": 3}, "4 query tokens of one sequence, over the bound of 3"),
        ({"block_tables": int32(0, 1).view(2, 1)}, "outside 0 .. 16"),
    ],
)
def test_pytorch_looks_at_lengths_too(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        torch_backend.paged_attention(**arguments_of_a_good_call() | change)


def test_pytorch_finds_a_table_entry_inside_the_context_that_names_no_block() -> None:
    for entry in (-1, 1000):
        scene = Scene([(1, 19)])
        scene.tables[0, 1] = entry
        with pytest.raises(IndexError):
            torch_backend.paged_attention(**scene.arguments())


FITTING = zeros(4, 16, 3, 64)
SCALES = zeros(4, 16, 3) + 1


@pytest.mark.parametrize(
    ("blocks", "scales", "message"),
    [
        (FITTING.double(), None, "float32, bfloat16, float16, int8, float8_e4m3fn, not torch.float64"),
        (FITTING, SCALES, "torch.float32 blocks have no scales: leave k_scales out"),
        (FITTING.to(torch.int8), None, r"int8 blocks need scales: pass k_scales, torch.float32 \[4, 16, 3\]"),
        (FITTING.to(torch.float8_e4m3fn), None, "float8_e4m3fn blocks need scales"),
        (FITTING.to(torch.int8), SCALES.half(), r"k_scales must be torch.float32 \[4, 16, 3\], not torch.float16"),
        (FITTING.to(torch.int8), SCALES[:3], r"k_scales must be .* not torch.float32 \[3, 16, 3\]"),
        (zeros(4, 16, 3, 60), None, "k_blocks has a head dim of 60: no multiple of 8 from 8 to 256"),
        (zeros(4, 16, 3, 264), None, "head dim of 264"),
        (zeros(4, 16, 3, 0), None, "head dim of 0"),
        (zeros(4, 16, 3, 128)[..., ::2], None, "contiguous in its last dim, not have a stride of 2"),
        (zeros(4, 16, 3, 65)[..., :64], None, "rows of k_blocks must begin on 16 bytes"),
        (zeros(4, 16, 3, 68)[..., 1:65], None, "rows of k_blocks must begin on 16 bytes"),
        (zeros(4, 16, 3, 24).to(torch.int8), SCALES, r"strides of \[1152, 72, 24\] bytes: pad each row"),
    ],
)
def test_blocks_that_no_kernel_takes_are_refused(
    kernels: ModuleType, blocks: Tensor, scales: Tensor | None, message: str
) -> None:
    arguments = Scene([(1, 3)], heads=(9, 3), dims=(64, 64)).arguments()
    new, slots = zeros(1, 3, blocks.shape[3]), torch.tensor([0], device=DEVICE)
    change = {"k_blocks": blocks, "v_blocks": blocks, "k_scales": scales, "v_scales": scales}
    with pytest.raises(ValueError, match=message):
        kernels.paged_attention(**{**arguments, **change})
    with pytest.raises(ValueError, match=message):
        kernels.write_kv(new, new, blocks, blocks, slots, scales, scales)


def test_scales_of_values_are_asked_for_too(kernels: ModuleType) -> None:
    blocks, new, slots = FITTING.to(torch.int8), zeros(1, 3, 64), torch.tensor([0], device=DEVICE)
    with pytest.raises(ValueError, match="pass v_scales"):
        kernels.write_kv(new, new, blocks, blocks, slots, SCALES, None)


def test_where_there_is_one_of_something_its_stride_does_not_matter(kernels: ModuleType) -> None:
    blocks = zeros(1, 1, 1, 64)
    for stride in (1, 3, 64):
        one = blocks.as_strided((1, 1, 1, 64), (stride, stride, stride, 1))
        kernels.write_kv(zeros(1, 1, 64) + 1, zeros(1, 1, 64) + 1, one, one, torch.tensor([0], device=DEVICE))
    assert (blocks == 1).all()


def test_latent_attention_is_refused_by_name(kernels: ModuleType) -> None:
    some = zeros(1)
    with pytest.raises(Unsupported, match=r"latent attention.*grouped-query"):
        kernels.write_latent(some, some, some, some)
    with pytest.raises(Unsupported, match=r"latent attention.*grouped-query"):
        kernels.latent_attention(
            some, some, some, some, some, some, scale=1.0, max_query_tokens=1, max_context_tokens=1
        )


def test_a_device_gets_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend("cpu") is backend(torch.device("cpu")) is torch_backend
    assert backend("cuda:0") is triton_backend
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backend("cpu") is triton_backend
    with pytest.raises(RuntimeError):
        backend("abacus")
