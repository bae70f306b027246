"""`write_kv` against writing one token after the other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.quantise import LARGEST, quantise
from kernels.torch_backend import write_kv
from tests.kernels.scene import strided_blocks


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.data())
def test_tokens_land_in_their_slots_and_nowhere_else(data: st.DataObject) -> None:
    block_tokens = data.draw(st.sampled_from([8, 16, 32, 64, 128]))
    dims = (data.draw(st.integers(1, 32)) * 8, data.draw(st.integers(1, 32)) * 8)
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    kv_heads = data.draw(st.integers(1, 8))
    k_blocks, v_blocks = strided_blocks(5, block_tokens, kv_heads, dims, dtype)
    slots = data.draw(st.lists(st.integers(0, 5 * block_tokens - 1), max_size=20, unique=True))
    slots = data.draw(st.permutations(slots + [-1] * data.draw(st.integers(0, 3))))
    k, v = (torch.randn(len(slots), kv_heads, dim).to(dtype) for dim in dims)
    write_kv(k, v, k_blocks, v_blocks, torch.tensor(slots, dtype=torch.int64))
    for new, blocks in ((k, k_blocks), (v, v_blocks)):
        for token, slot in enumerate(slots):
            if slot >= 0:
                assert torch.equal(blocks[slot // block_tokens, slot % block_tokens], new[token])
        written = sum(slot >= 0 for slot in slots)
        assert int(blocks.isfinite().sum()) == written * kv_heads * blocks.shape[-1]


def test_new_tokens_may_be_views_of_one_projection() -> None:
    k_blocks, v_blocks = strided_blocks(2, 8, 3, (16, 16), torch.float32)
    projected = torch.randn(4, 9, 16)
    write_kv(projected[:, 3:6], projected[:, 6:], k_blocks, v_blocks, torch.tensor([8, -1, 2, 15]))
    assert torch.equal(k_blocks[1, 7], projected[3, 3:6])
    assert torch.equal(v_blocks[0, 2], projected[2, 6:])


def test_what_does_not_fit_is_refused_and_writes_nothing() -> None:
    k_blocks, v_blocks = strided_blocks(2, 8, 3, (16, 16), torch.float32)
    good, slots = torch.zeros(2, 3, 16), torch.tensor([0, 1])
    for k, v, where, message in (
        (good.half(), good, slots, r"v must be torch.float16 \[2, 3, 16\]"),
        (good.long(), good.long(), slots, "k must be of one of float32, bfloat16, float16, not torch.int64"),
        (good, good[:, :2], slots, r"v must be torch.float32 \[2, 3, 16\]"),
        (good, good[:1], slots, r"v must be torch.float32 \[2, 3, 16\]"),
        (good, good, slots[:1], r"slots must be torch.int64 \[2\]"),
        (good, good, slots.int(), r"slots must be torch.int64 \[2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            write_kv(k, v, k_blocks, v_blocks, where)
    assert k_blocks.isnan().all()
    write_kv(good, good, k_blocks, v_blocks, slots)
    assert not k_blocks.isnan().all()
    with pytest.raises(IndexError):
        write_kv(good, good, k_blocks, v_blocks, torch.tensor([0, 16]))


@pytest.mark.parametrize(("of", "into"), [(torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16)])
def test_b053_blocks_of_another_16_bit_dtype_hold_the_values_and_not_the_bits(
    of: torch.dtype, into: torch.dtype
) -> None:
    k_blocks, v_blocks = strided_blocks(2, 8, 3, (16, 16), into)
    new = torch.ones(1, 3, 16, dtype=of)
    write_kv(new, -3 * new, k_blocks, v_blocks, torch.tensor([9]))
    assert (k_blocks[1, 1] == 1.0).all()
    assert (v_blocks[1, 1] == -3.0).all()


def test_b053_what_float16_blocks_can_not_hold_becomes_the_largest_that_they_can() -> None:
    k_blocks, v_blocks = strided_blocks(2, 8, 1, (8, 8), torch.float16)
    new = torch.tensor([1e38, -1e38, 65504.0, 65520.0, torch.inf, -torch.inf, torch.nan, 2.0]).view(1, 1, 8)
    for dtype in (torch.float32, torch.bfloat16):
        write_kv(new.to(dtype), new.to(dtype), k_blocks, v_blocks, torch.tensor([3]))
        expected = torch.tensor([65504, -65504, 65504, 65504, 65504, -65504, torch.nan, 2]).half()
        for blocks in (k_blocks, v_blocks):
            torch.testing.assert_close(blocks[0, 3, 0], expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", list(LARGEST))
@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16, torch.float16])
def test_8_bit_blocks_get_values_and_scales_in_the_same_slots_and_nowhere_else(
    dtype: torch.dtype, of: torch.dtype
) -> None:
    k_blocks, v_blocks = (blocks.to(dtype) for blocks in strided_blocks(3, 8, 2, (32, 16), torch.float32))
    before = k_blocks.view(torch.uint8).clone(), v_blocks.view(torch.uint8).clone()
    # As in a cache: scales of keys and values side by side, head by head.
    scales = torch.full((3, 2, 2, 8), torch.nan)
    k_scales, v_scales = scales.transpose(2, 3).unbind(1)
    k, v = torch.randn(4, 2, 32).to(of), torch.randn(4, 2, 16).to(of) * 1000
    slots = [17, -1, 0, 23]
    write_kv(k, v, k_blocks, v_blocks, torch.tensor(slots), k_scales, v_scales)
    for new, blocks, of_blocks, old in ((k, k_blocks, k_scales, before[0]), (v, v_blocks, v_scales, before[1])):
        values, expected = quantise(new, dtype)
        for token, slot in enumerate(slots):
            if slot >= 0:
                where = slot // 8, slot % 8
                assert torch.equal(blocks[where].float(), values[token].float())
                assert torch.equal(of_blocks[where], expected[token])
                blocks.view(torch.uint8)[where] = old[where]
        assert torch.equal(blocks.view(torch.uint8), old)
        assert int(of_blocks.isfinite().sum()) == 3 * 2
