"""`write_kv` of every backend: where rows land, what they become, and that both backends write the same bits."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernels import torch_backend, triton_backend
from kernels.quantise import LARGEST, quantise
from tests.kernels.device import DEVICE
from tests.kernels.scene import EIGHT_BITS, FLOATS, bits, strided_blocks, strided_scales

ON_CPU = DEVICE.type == "cpu"


def int64(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=0, equal_nan=True)


def written(kernels: ModuleType, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Rows [T, G, D] in blocks [T, G, D] of a dtype, with their scales [T, G] where they have some."""
    tokens, kv_heads, dim = rows.shape
    k_blocks, v_blocks = strided_blocks(-(-tokens // 8), 8, kv_heads, (dim, dim), dtype)
    k_scales, v_scales = strided_scales(len(k_blocks), 8, kv_heads) if dtype in EIGHT_BITS else (None, None)
    kernels.write_kv(rows, rows, k_blocks, v_blocks, torch.arange(tokens, device=DEVICE), k_scales, v_scales)
    assert torch.equal(bits(k_blocks), bits(v_blocks))
    blocks = k_blocks.flatten(0, 1)[:tokens]
    if k_scales is None or v_scales is None:
        return blocks, None
    assert torch.equal(bits(k_scales), bits(v_scales))
    return blocks, k_scales.flatten(0, 1)[:tokens]


@pytest.mark.parametrize("dims", [(64, 64), (8, 24), (40, 136), (80, 256)])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kv_heads", [1, 3, 8, 9])
def test_tokens_land_in_their_slots_and_nowhere_else(
    kernels: ModuleType, dims: tuple[int, int], dtype: torch.dtype, kv_heads: int
) -> None:
    for block_tokens in (8, 64):
        k_blocks, v_blocks = strided_blocks(3, block_tokens, kv_heads, dims, dtype)
        slots = [block_tokens - 1, -1, 0, 3 * block_tokens - 1, block_tokens, -1]
        k, v = (randn(len(slots), kv_heads, dim).to(dtype) for dim in dims)
        kernels.write_kv(k, v, k_blocks, v_blocks, int64(*slots))
        for new, blocks in ((k, k_blocks), (v, v_blocks)):
            for token, slot in enumerate(slots):
                if slot >= 0:
                    assert torch.equal(blocks[slot // block_tokens, slot % block_tokens], new[token])
            assert blocks._base is not None
            # What lies between the blocks is still poison too.
            assert int(k_blocks._base.isfinite().sum()) == 4 * kv_heads * sum(dims)


def test_new_tokens_may_be_views_of_one_projection(kernels: ModuleType) -> None:
    k_blocks, v_blocks = strided_blocks(2, 8, 3, (16, 16), torch.float32)
    projected = randn(4, 9, 16)
    kernels.write_kv(projected[:, 3:6], projected[:, 6:], k_blocks, v_blocks, int64(8, -1, 2, 15))
    assert torch.equal(k_blocks[1, 7], projected[3, 3:6])
    assert torch.equal(v_blocks[0, 2], projected[2, 6:])


def test_no_tokens_write_nothing(kernels: ModuleType) -> None:
    k_blocks, v_blocks = strided_blocks(2, 8, 3, (16, 16), torch.float32)
    kernels.write_kv(randn(0, 3, 16), randn(0, 3, 16), k_blocks, v_blocks, int64())
    kernels.write_kv(randn(2, 3, 16), randn(2, 3, 16), k_blocks, v_blocks, int64(-1, -1))
    assert k_blocks.isnan().all()
    assert v_blocks.isnan().all()


@pytest.mark.parametrize(("of", "into"), [(torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16)])
def test_b053_blocks_of_another_16_bit_dtype_hold_the_values_and_not_the_bits(
    kernels: ModuleType, of: torch.dtype, into: torch.dtype
) -> None:
    k_blocks, v_blocks = strided_blocks(2, 8, 3, (16, 16), into)
    new = torch.ones(1, 3, 16, dtype=of, device=DEVICE)
    kernels.write_kv(new, -3 * new, k_blocks, v_blocks, int64(9))
    assert (k_blocks[1, 1] == 1.0).all()
    assert (v_blocks[1, 1] == -3.0).all()


@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16])
def test_b053_what_float16_blocks_can_not_hold_becomes_the_largest_that_they_can(
    kernels: ModuleType, of: torch.dtype
) -> None:
    new = torch.tensor([1e38, -1e38, 65504.0, 65520.0, torch.inf, -torch.inf, torch.nan, 2.0], device=DEVICE)
    expected = torch.tensor([65504, -65504, 65504, 65504, 65504, -65504, torch.nan, 2], device=DEVICE)
    assert_same(written(kernels, new.to(of).view(1, 1, 8), torch.float16)[0][0, 0], expected)


@pytest.mark.parametrize("dtype", EIGHT_BITS)
@pytest.mark.parametrize("of", FLOATS)
def test_8_bit_blocks_get_values_and_scales_in_the_same_slots_and_nowhere_else(
    kernels: ModuleType, dtype: torch.dtype, of: torch.dtype
) -> None:
    k_blocks, v_blocks = strided_blocks(3, 8, 2, (32, 24), dtype)
    k_scales, v_scales = strided_scales(3, 8, 2)
    before = bits(k_blocks).clone(), bits(v_blocks).clone()
    k, v = randn(4, 2, 32).to(of), randn(4, 2, 24, seed=1).to(of) * 1000
    slots = [17, -1, 0, 23]
    kernels.write_kv(k, v, k_blocks, v_blocks, int64(*slots), k_scales, v_scales)
    for new, blocks, scales, old in ((k, k_blocks, k_scales, before[0]), (v, v_blocks, v_scales, before[1])):
        values, expected = quantise(new, dtype)
        now = bits(blocks)
        for token, slot in enumerate(slots):
            if slot >= 0:
                where = slot // 8, slot % 8
                assert torch.equal(now[where], bits(values[token]))
                assert torch.equal(scales[where], expected[token])
                now[where] = old[where]
        assert torch.equal(now, old)
        assert int(scales.isfinite().sum()) == 3 * 2
        assert scales._base is not None
        assert int(scales._base.isfinite().sum()) == 2 * 3 * 2


@pytest.mark.parametrize("dtype", EIGHT_BITS)
@pytest.mark.parametrize("of", FLOATS)
@pytest.mark.parametrize("dim", [64, 24, 256])
def test_both_backends_write_the_same_8_bits_and_scales(dtype: torch.dtype, of: torch.dtype, dim: int) -> None:
    """Rows of every size, of zeros, of the smallest numbers there are, and with what is no number."""
    least, largest = (-4, 4) if of == torch.float16 else (-30, 37)
    power = torch.linspace(least, largest, 24, device=DEVICE)
    rows = (randn(24, 3, dim, seed=dim) * 10 ** power[:, None, None]).to(of)
    rows[3] = 0
    if of == torch.float32 or not ON_CPU:  # the interpreter takes subnormal bfloat16 for something else
        rows[4, 1], rows[4, 2] = 1e-42, -1e-38
    rows[5, 0, 3], rows[6, 1, 0], rows[7, 2, dim - 1] = torch.nan, torch.inf, -torch.inf
    values, scales = written(triton_backend, rows, dtype)
    expected, expected_scales = quantise(rows, dtype)
    bad = ~rows.isfinite().all(-1)
    assert int(bad.sum()) == 3
    assert torch.equal(values[~bad].float(), expected[~bad].float())  # zero may differ in its sign
    assert torch.equal(scales[~bad], expected_scales[~bad])
    for back in ((values.float() * scales[..., None])[bad], (expected.float() * expected_scales[..., None])[bad]):
        assert back.isnan().all()


@pytest.mark.parametrize("of", FLOATS)
@pytest.mark.parametrize("into", FLOATS)
def test_both_backends_convert_floats_alike(of: torch.dtype, into: torch.dtype) -> None:
    """To the same bits on a device; Triton's interpreter truncates, so it may be one unit in the last place below."""
    rows = randn(16, 3, 64).to(of)
    got, expected = written(triton_backend, rows, into)[0], written(torch_backend, rows, into)[0]
    if not ON_CPU or of == into or into == torch.float32:
        assert torch.equal(got, expected)
    else:
        step = torch.finfo(into).eps * expected.double().abs()
        assert ((got.double() - expected.double()).abs() <= step).all()


def test_every_float8_and_what_lies_between_two_of_them_rounds_as_in_pytorch(kernels: ModuleType) -> None:
    """All 254 finite ones, the halfway points, and the next float32 to each side of all these: half to even.

    A row whose largest value is 448 has a scale of exactly one.
    """
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    exact = codes[codes.isfinite()].unique()
    points = torch.cat([exact, (exact[1:] + exact[:-1]) / 2])
    points = torch.cat([points, points.nextafter(torch.tensor(1e9)), points.nextafter(torch.tensor(-1e9))])
    points = points[points.abs() <= 448]
    assert len(points) == 3 * (253 + 252) - 2
    values, scales = written(kernels, rows_with(448.0, points), torch.float8_e4m3fn)
    assert (scales == 1).all()
    got = values[:, 0, 1:].flatten().cpu().float()[: len(points)]
    assert torch.equal(got, points.to(torch.float8_e4m3fn).float())


def test_every_int8_and_what_lies_between_two_of_them_rounds_half_to_even(kernels: ModuleType) -> None:
    points = torch.arange(-254, 255) / 2
    points = torch.cat([points, points.nextafter(torch.tensor(1e9)), points.nextafter(torch.tensor(-1e9))])
    points = points[points.abs() <= 127]
    values, scales = written(kernels, rows_with(127.0, points), torch.int8)
    assert (scales == 1).all()
    assert torch.equal(values[:, 0, 1:].flatten().cpu().float()[: len(points)], points.round())


def rows_with(first: float, points: Tensor) -> Tensor:
    """[rows, 1, 256]: the points in order, each row after a first value."""
    points = torch.nn.functional.pad(points, (0, -len(points) % 255)).view(-1, 255)
    return torch.nn.functional.pad(points, (1, 0), value=first)[:, None].to(DEVICE)


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_the_largest_value_of_a_row_is_met_exactly_so_none_saturates(kernels: ModuleType, dtype: torch.dtype) -> None:
    rows = randn(40, 2, 64) * torch.logspace(-3, 3, 40, device=DEVICE)[:, None, None]
    values, scales = written(kernels, rows, dtype)
    assert scales is not None
    assert (values.float().abs().amax(-1) == LARGEST[dtype]).all()
    torch.testing.assert_close(scales * LARGEST[dtype], rows.abs().amax(-1), rtol=1e-6, atol=0)


def test_what_does_not_fit_is_refused_and_writes_nothing(kernels: ModuleType) -> None:
    k_blocks, v_blocks = strided_blocks(2, 8, 3, (16, 16), torch.float32)
    good, slots = torch.zeros(2, 3, 16, device=DEVICE), int64(0, 1)
    for k, v, where, message in (
        (good.half(), good, slots, r"v must be torch.float16 \[2, 3, 16\]"),
        (good.long(), good.long(), slots, "k must be of one of float32, bfloat16, float16, not torch.int64"),
        (good, good[:, :2], slots, r"v must be torch.float32 \[2, 3, 16\]"),
        (good, good[:1], slots, r"v must be torch.float32 \[2, 3, 16\]"),
        (good, good, slots[:1], r"slots must be torch.int64 \[2\]"),
        (good, good, slots.int(), r"slots must be torch.int64 \[2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            kernels.write_kv(k, v, k_blocks, v_blocks, where)
    assert k_blocks.isnan().all()
    kernels.write_kv(good, good, k_blocks, v_blocks, slots)
    assert not k_blocks.isnan().all()


def test_pytorch_finds_a_slot_past_the_last_block() -> None:
    """Triton doesn't look: that would mean to wait for the device."""
    k_blocks, v_blocks = (blocks.cpu() for blocks in strided_blocks(2, 8, 3, (16, 16), torch.float32))
    good = torch.zeros(2, 3, 16)
    with pytest.raises(IndexError):
        torch_backend.write_kv(good, good, k_blocks, v_blocks, torch.tensor([0, 16]))
