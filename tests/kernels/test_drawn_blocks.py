"""Writes, quantised rows and copies of drawn shapes."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from kernels.copy import copy_blocks
from kernels.quantise import LARGEST, quantise
from tests.kernels.device import DEVICE
from tests.kernels.scene import EIGHT_BITS, FLOATS, bits, strided_blocks, strided_scales

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(st.data())
def test_tokens_land_in_their_slots_and_nowhere_else(kernels: ModuleType, data: st.DataObject) -> None:
    block_tokens = data.draw(st.sampled_from([8, 16, 32, 64, 128]))
    dims = (data.draw(st.integers(1, 32)) * 8, data.draw(st.integers(1, 32)) * 8)
    dtype = data.draw(st.sampled_from(FLOATS + EIGHT_BITS))
    kv_heads = data.draw(st.integers(1, 12))
    k_blocks, v_blocks = strided_blocks(5, block_tokens, kv_heads, dims, dtype)
    k_scales, v_scales = strided_scales(5, block_tokens, kv_heads) if dtype in EIGHT_BITS else (None, None)
    slots = data.draw(st.lists(st.integers(0, 5 * block_tokens - 1), max_size=10, unique=True))
    slots = data.draw(st.permutations(slots + [-1] * data.draw(st.integers(0, 3))))
    of = torch.float32 if dtype in EIGHT_BITS else dtype
    k, v = (torch.randn(len(slots), kv_heads, dim).to(DEVICE, of) for dim in dims)
    expected = [bits(blocks) for blocks in (k_blocks, v_blocks)]
    kernels.write_kv(
        k, v, k_blocks, v_blocks, torch.tensor(slots, dtype=torch.int64, device=DEVICE), k_scales, v_scales
    )
    for new, blocks, scales, poison in zip((k, v), (k_blocks, v_blocks), (k_scales, v_scales), expected, strict=True):
        written = [slot >= 0 for slot in slots]
        for token, slot in enumerate(slots):
            if slot >= 0:
                where = slot // block_tokens, slot % block_tokens
                if scales is None:
                    poison[where] = bits(new[token])
                else:
                    values, of_values = quantise(new[token], dtype)
                    assert torch.equal(blocks[where].float(), values.float())
                    assert torch.equal(scales[where], of_values)
                    poison[where] = bits(blocks[where])
        assert torch.equal(bits(blocks), poison)
        assert scales is None or int(scales.isfinite().sum()) == sum(written) * kv_heads


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(st.data())
def test_a_row_reads_back_within_half_a_step_whatever_its_size(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(EIGHT_BITS))
    of = data.draw(st.sampled_from(FLOATS))
    power = data.draw(st.integers(-30, 30) if of != torch.float16 else st.integers(-7, 3))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    x = (torch.randn(3, 5, 8 * data.draw(st.integers(1, 32)), generator=random) * 10.0**power).to(of)
    values, scales = quantise(x, dtype)
    assert (values.dtype, scales.dtype) == (dtype, torch.float32)
    assert scales.shape == x.shape[:-1]
    largest = x.float().abs().amax(-1, keepdim=True)
    error = ((values.float() * scales[..., None]) - x.float()).abs()
    if dtype == torch.int8:
        assert (error <= 0.5001 * largest / 127).all()
    else:
        # Three bits after the leading one, and below 2**-6 of steps as wide as there.
        assert (error <= torch.maximum(x.float().abs() / 16, largest / 448 * 2**-10) * 1.0001).all()
    # The largest value of a row is met exactly, so nothing else saturates.
    assert (values.float().abs().amax(-1) == LARGEST[dtype]).all()


@hypothesis.settings(deadline=None, derandomize=True)
@hypothesis.given(st.data())
def test_listed_blocks_are_copied_and_no_others(data: st.DataObject) -> None:
    source, target = (
        torch.randint(0, 256, (12, 512), dtype=torch.uint8),
        torch.randint(0, 256, (9, 512), dtype=torch.uint8),
    )
    target_index = data.draw(st.lists(st.integers(0, 8), unique=True))
    source_index = [data.draw(st.integers(0, 11)) for _ in target_index]
    expected = target.clone()
    for first, onto in zip(source_index, target_index, strict=True):
        expected[onto] = source[first]
    copy_blocks(source, target, source_index, target_index)
    assert torch.equal(target, expected)
