"""Rows of 8 bits: how near they are, what saturates, and that no number becomes NaN."""

from __future__ import annotations

import pytest
import torch

from kernels.quantise import LARGEST, convert, quantise, to_float8

FLOAT8 = torch.float8_e4m3fn


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def read_back(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return values.float() * scales[..., None]


def test_b057_a_conversion_to_float8_makes_no_number_nan() -> None:
    given_ = torch.tensor([447, 448, 464, 465, 1e4, -1e4, torch.inf, -torch.inf, torch.nan, 3e38, 0.0, 1e-30])
    expected = torch.tensor([448, 448, 448, 448, 448, -448, 448, -448, torch.nan, 448, 0, 0])
    assert_same(to_float8(given_).float(), expected)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(to_float8(torch.tensor([1e4, -1e4], dtype=dtype)).float(), torch.tensor([448.0, -448.0]))


def test_int8_rounds_half_to_even() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, -127.0]])
    values, scales = quantise(x, torch.int8)
    assert scales.tolist() == [1.0]
    assert values.tolist() == [[127, 0, 2, 2, 0, -2, -126, -127]]


@pytest.mark.parametrize("dtype", list(LARGEST))
def test_rows_of_zeros_and_of_the_smallest_numbers_stay_finite(dtype: torch.dtype) -> None:
    x = torch.zeros(3, 8)
    x[1], x[2] = 1e-42, -1e-38
    back = read_back(*quantise(x, dtype))
    assert (back[0] == 0).all()
    assert (back - x).abs().max() <= 1e-38


@pytest.mark.parametrize("dtype", list(LARGEST))
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_with_what_is_no_number_reads_back_as_nan_and_no_other_row_does(dtype: torch.dtype, bad: float) -> None:
    x = torch.linspace(-1, 1, 32).view(2, 16).clone()
    x[1, 3] = bad
    back = read_back(*quantise(x, dtype))
    assert back[0].isfinite().all()
    assert back[1].isnan().all()


def test_a_number_of_another_float_dtype_stays_a_number() -> None:
    x = torch.tensor([1.0, 65504.0, 1e5, -1e30, torch.inf, torch.nan])
    half = torch.tensor([1, 65504, 65504, -65504, 65504, torch.nan]).half()
    assert_same(convert(x, torch.float16), half)
    assert_same(convert(x.bfloat16(), torch.float16), half)
    assert convert(torch.tensor([torch.inf]).half(), torch.float16).isinf().all()
    assert_same(convert(x, torch.bfloat16), x.bfloat16())


def test_b050_the_scale_is_that_of_the_values_at_hand_and_of_none_before() -> None:
    """A warm-up's keys, then eight times larger ones: no scale is kept, so fewer than 0.1 % saturate (none does)."""
    warm = torch.randn(32, 3, 64, generator=torch.Generator().manual_seed(50))
    for dtype, error in ((FLOAT8, 1 / 27), (torch.int8, 1 / 253)):
        _, before = quantise(warm, dtype)
        values, scales = quantise(8 * warm, dtype)
        assert torch.equal(scales, 8 * before)
        assert ((8 * warm / scales[..., None]).abs() <= LARGEST[dtype] * (1 + 1e-6)).all()
        assert (read_back(values, scales) - 8 * warm).abs().max() <= error * (8 * warm).abs().max()


def test_b052_what_a_short_first_request_wrote_keeps_its_scale_beside_a_long_second_one() -> None:
    """A scale for each row: ten tokens, then six hundred of another size, each within 6.25 % of itself."""
    random = torch.Generator().manual_seed(52)
    first, second = torch.randn(10, 3, 64, generator=random), 20 * torch.randn(600, 3, 64, generator=random)
    together = [quantise(part, FLOAT8) for part in (first, second)]
    for part, (values, scales) in zip((first, second), together, strict=True):
        normal = values.float().abs() >= 2**-6
        assert normal.float().mean() > 0.99
        relative = (read_back(values, scales) - part).abs() / part.abs()
        assert relative[normal].max() <= 0.0625 * 1.0001
