"""Fixtures of all tests. Torch computes with one thread: two cores run several test processes and a server."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

from cachestore import default_model as default_model_module

# How long an example takes says something of the machine, and nothing of what is tested.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported, here or in a child

# Triton decides when its functions are made whether they run in its interpreter; after that the variable means that
# `kernels.select` is to choose Triton, which only tests that say so want.
os.environ["TRITON_INTERPRET"] = "1"
import kernels.triton_backend  # noqa: E402, F401

del os.environ["TRITON_INTERPRET"]


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The folder of the default model, fetched and converted when it isn't there."""
    return default_model_module.ensure()
