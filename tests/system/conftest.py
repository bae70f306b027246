from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.support import Server, Tenant, serving


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Server]:
    """One server for all system tests that don't stop it: each test makes tenants of its own. It logs all it can."""
    options = ("--cache-memory", "512MiB", "--log-level", "debug")
    with serving(tmp_path_factory.mktemp("saltern") / "data", *options) as running:
        yield running


@pytest.fixture
def tenant(server: Server) -> Tenant:
    return server.tenant()


@pytest.fixture
def other(server: Server) -> Tenant:
    return server.tenant()
