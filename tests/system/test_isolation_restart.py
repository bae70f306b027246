"""Line 8 of the promise: isolation holds after a restart, which keeps tenants and keys and no block."""

from __future__ import annotations

from pathlib import Path

from tests.system.insider import Insider, block_names
from tests.system.support import Tenant, random_prompt, serving


def test_line_08_after_a_restart_every_tenant_is_cold_and_finds_its_own(tmp_path: Path, default_model: Path) -> None:
    prompt = random_prompt("line 8", 33)
    with serving(tmp_path / "data", "--cache-memory", "64MiB") as first:
        tenants = [first.tenant(), first.tenant()]
        assert [tenant.cached_tokens(prompt) for tenant in tenants] == [0, 0]
        assert [tenant.cached_tokens(prompt) for tenant in tenants] == [32, 32]
        for tenant in tenants:
            tenant.rotate()
        secrets = [Insider(first).secrets(tenant) for tenant in tenants]

    with serving(tmp_path / "data", "--cache-memory", "64MiB") as second:
        again = [Tenant(second, tenant.id, tenant.name, tenant.key) for tenant in tenants]
        insider = Insider(second)
        assert [insider.secrets(tenant) for tenant in again] == secrets
        names = block_names(secrets[0].salt, insider.welcome(), prompt)
        for tenant in again:
            assert [tenant.cached_tokens(prompt), tenant.cached_tokens(prompt)] == [0, 32]
        # The same salt names the same blocks as before, for its account alone.
        assert insider.cached_tokens(secrets[0].account, 2, prompt, names) == 32
        assert insider.cached_tokens(secrets[1].account, 2, prompt, names) == 0
