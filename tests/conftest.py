"""Fixtures of all tests. Torch computes with one thread: two cores run several test processes and a server."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cachestore import default_model as default_model_module

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported, here or in a child


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The folder of the default model, fetched and converted when it isn't there."""
    return default_model_module.ensure()
