"""`write_kv` against writing one token after the other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
        (good.half(), good, slots, "k must be torch.float32"),
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
