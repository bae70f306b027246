"""Fixtures of the kernels' tests: every backend, and every way in which attention is called."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

# isort: off
from tests.kernels.device import DEVICE  # before anything imports Triton

# isort: on
from kernels import torch_backend, triton_backend
from tests.kernels.ways import WAYS, Way

BACKENDS = {"torch": torch_backend, "triton": triton_backend}


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def _skip_pytorch_on_a_device(param: str) -> None:
    if param == "torch" and DEVICE.type != "cpu":
        pytest.skip("the PyTorch backend is tested on CPU")


@pytest.fixture(scope="session", params=list(BACKENDS))
def kernels(request: pytest.FixtureRequest) -> ModuleType:
    _skip_pytorch_on_a_device(request.param)
    return BACKENDS[request.param]


@pytest.fixture(scope="session", params=list(WAYS))
def attend(request: pytest.FixtureRequest) -> Way:
    _skip_pytorch_on_a_device(request.param)
    return WAYS[request.param]
