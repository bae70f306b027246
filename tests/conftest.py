"""Fixtures of all tests. Torch computes with one thread: two cores run several test processes and a server."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from cachestore import default_model as default_model_module

# How long an example takes says something of the machine, and nothing of what is tested.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Torch is imported with one thread, here or in a child, and Triton with its interpreter before anything imports it.
import tests.kernels.device  # noqa: E402, F401

pytest_plugins = ["tests.postgres"]


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The folder of the default model, fetched and converted when it isn't there."""
    return default_model_module.ensure()
