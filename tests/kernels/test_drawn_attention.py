"""Attention of drawn shapes and options against float64."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.device import DEVICE
from tests.kernels.scene import EIGHT_BITS, FLOATS, Scene
from tests.kernels.ways import Way, agrees

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies


# Each example compiles its own kernels on a device.
@hypothesis.settings(max_examples=60 if DEVICE.type == "cpu" else 12, deadline=None, derandomize=True)
@hypothesis.given(st.data())
def test_drawn_shapes(attend: Way, data: st.DataObject) -> None:
    kv_heads = data.draw(st.integers(1, 3), label="kv heads")
    length = st.tuples(st.sampled_from([1, 1, *range(20)]), st.integers(0, 100))
    scene = Scene(
        data.draw(st.lists(length, max_size=4), label="new and context tokens"),
        heads=(kv_heads * data.draw(st.integers(1, 20), label="group"), kv_heads),
        dims=(data.draw(st.integers(1, 32)) * 8, data.draw(st.integers(1, 32)) * 8),
        block_tokens=data.draw(st.sampled_from([8, 16, 32, 64, 128])),
        dtype=data.draw(st.sampled_from(FLOATS), label="dtype"),
        cache=data.draw(st.sampled_from(FLOATS + EIGHT_BITS), label="cache"),
        padding_rows=data.draw(st.integers(0, 3)),
        seed=data.draw(st.integers(0, 1000)),
    )
    causal = data.draw(st.booleans(), label="causal")
    sinks = torch.linspace(-2, 5, scene.heads[0], device=DEVICE)
    agrees(
        attend,
        scene,
        causal=causal,
        window=data.draw(st.none() | st.integers(1, 110), label="window") if causal else None,
        soft_cap=data.draw(st.none() | st.floats(0.5, 50), label="soft cap"),
        sinks=sinks if data.draw(st.booleans(), label="sinks") else None,
    )
