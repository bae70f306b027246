"""Lines 1, 2, 3, 5, 7 and 9 of the promise, on a whole server: names of blocks and what is reused under them."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from tests.gateway.second_naming import Context
from tests.system.insider import Insider, Secrets, block_names
from tests.system.support import Server, Tenant, cached_tokens, random_prompt

# Two whole blocks, and the token that is always computed.
TWO_BLOCKS = 33


@pytest.fixture
def insider(server: Server) -> Insider:
    return Insider(server)


def test_line_01_the_same_prompt_has_other_names_for_another_tenant_and_after_rotation(
    server: Server, insider: Insider, tenant: Tenant, other: Tenant
) -> None:
    prompt, store = random_prompt("line 1", TWO_BLOCKS), insider.welcome()
    seen: set[bytes] = set()

    def names_in_use(whose: Tenant) -> list[bytes]:
        """Those of the second implementation, under which the store finds what the gateway published."""
        whose.complete(prompt)
        secrets = insider.secrets(whose)
        names = block_names(secrets.salt, store, prompt)
        assert insider.cached_tokens(secrets.account, secrets.epoch, prompt, names) == 32
        return names

    for whose in (tenant, other):
        names = names_in_use(whose)
        assert len(names) == 2
        assert names_in_use(whose) == names
        assert seen.isdisjoint(names)
        seen.update(names)
    tenant.rotate()
    assert seen.isdisjoint(names_in_use(tenant))
    assert names_in_use(other) == names


def test_line_02_a_repetition_hits_on_every_route_and_with_every_key_of_the_tenant(
    server: Server, tenant: Tenant, other: Tenant
) -> None:
    prompt = random_prompt("line 2", TWO_BLOCKS)
    assert tenant.cached_tokens(prompt) == 0
    assert tenant.cached_tokens(prompt) == 32
    created = server.admin.post(f"/admin/v1/tenants/{tenant.id}/keys", json={"name": "second"})
    second_key = {"x-api-key": created.json()["secret"]}
    body = {"model": server.model, "prompt": prompt, "max_tokens": 1}
    assert cached_tokens(server.http.post("/v1/completions", json=body, headers=second_key)) == 32
    streamed = server.http.post(
        "/v1/completions",
        json=body | {"stream": True, "stream_options": {"include_usage": True}},
        headers=tenant.headers,
    )
    assert '"cached_tokens":32' in streamed.text
    assert other.cached_tokens(prompt) == 0

    words = "Salt keeps. " * 10
    cold, warm = cached_tokens(tenant.chat(words)), cached_tokens(tenant.chat(words))
    assert (cold, cached_tokens(other.chat(words))) == (0, 0)
    assert warm >= 32


def test_line_03_a_name_of_any_other_context_is_not_found(server: Server, insider: Insider, tenant: Tenant) -> None:
    prompt, store = random_prompt("line 3", 17), insider.welcome()
    tenant.complete(prompt)
    secrets = insider.secrets(tenant)

    def found(**changed: Any) -> int | str:
        names = block_names(secrets.salt, store, prompt, **changed)[:1]
        return insider.cached_tokens(secrets.account, secrets.epoch, prompt, names)

    other: dict[type, Callable[[Any], Any]] = {
        bytes: lambda value: bytes([value[0] ^ 1]) + value[1:],
        int: lambda value: value + 1,
        str: lambda value: {"fp32": "bf16", "": "scope"}[value],
    }
    assert found() == 16
    as_served: dict[str, Any] = {field.name: getattr(store, field.name, None) for field in fields(Context)}
    as_served |= {name: getattr(store.geometry, name) for name in as_served if hasattr(store.geometry, name)}
    as_served["scope"] = ""
    # A block of fewer tokens is named from fewer of them; all others name the same tokens in another context.
    as_served["block_tokens"] -= 2
    for name, value in as_served.items():
        assert found(**{name: other[type(value)](value)}) == 0, name
    assert found() == 16


HEADERS = (
    "x-tenant",
    "x-tenant-id",
    "x-saltern-tenant",
    "x-saltern-account",
    "x-account",
    "x-epoch",
    "x-salt",
    "x-cache-salt",
    "x-saltern-scope",
    "x-forwarded-user",
    "openai-organization",
    "openai-project",
)
IGNORED = ("salt", "epoch", "account", "tenant", "tenant_id", "scope", "chain_key", "offload_key", "keys", "principal")
NO_EFFECT = ("user", "safety_identifier", "prompt_cache_key")
REFUSED = ("kv_transfer_params", "priority", "request_id", "chat_template")

ABOUT_THE_VICTIM: dict[str, Callable[[Tenant, Secrets], str]] = {
    "id": lambda victim, _: victim.id,
    "name": lambda victim, _: victim.name,
    "account": lambda _, secrets: secrets.account.hex(),
    "salt": lambda _, secrets: secrets.salt.hex(),
    "salt in base64": lambda _, secrets: base64.b64encode(secrets.salt).decode(),
    "epoch": lambda _, secrets: str(secrets.epoch),
}


@pytest.mark.parametrize("what", ABOUT_THE_VICTIM)
def test_line_05_no_header_and_no_body_field_reaches_or_changes_what_names_blocks(
    server: Server, insider: Insider, tenant: Tenant, other: Tenant, what: str
) -> None:
    prompt = random_prompt(f"line 5 {what}", TWO_BLOCKS)
    assert tenant.cached_tokens(prompt) == 0
    told = ABOUT_THE_VICTIM[what](tenant, insider.secrets(tenant))
    body = {"model": server.model, "prompt": prompt, "max_tokens": 1}
    headers = dict.fromkeys(HEADERS, told) | other.headers

    answer = server.http.post(
        "/v1/completions", json=body | dict.fromkeys((*IGNORED, *NO_EFFECT), told), headers=headers
    )
    assert cached_tokens(answer) == 0
    assert answer.headers["x-saltern-ignored-fields"] == ", ".join(IGNORED)
    for field in REFUSED:
        refused = server.http.post("/v1/completions", json=body | {field: told}, headers=headers)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == field

    # It was named as it is without them, and each finds what it computed itself.
    assert other.cached_tokens(prompt) == 32
    assert tenant.cached_tokens(prompt) == 32


def test_line_05_a_cache_salt_narrows_the_callers_own_scope_and_reaches_no_other(
    server: Server, insider: Insider, tenant: Tenant, other: Tenant
) -> None:
    prompt = random_prompt("line 5 scope", 17)
    secrets = insider.secrets(tenant)
    assert tenant.cached_tokens(prompt) == 0
    assert tenant.cached_tokens(prompt, cache_salt="team") == 0
    for scope in ("team", secrets.salt.hex(), secrets.account.hex(), tenant.id, "\0", "saltern/v1/root"):
        assert other.cached_tokens(prompt, cache_salt=scope) == 0
        assert other.cached_tokens(prompt, cache_salt=scope) == 16
    assert other.cached_tokens(prompt) == 0
    assert tenant.cached_tokens(prompt, cache_salt="team") == 16
    assert tenant.cached_tokens(prompt) == 16


def test_line_07_a_key_under_another_account_or_epoch_is_a_miss(server: Server, insider: Insider) -> None:
    account, stranger, prompt = os.urandom(16), os.urandom(16), random_prompt("line 7", TWO_BLOCKS)
    keys = [os.urandom(32), os.urandom(32)]

    def found(account: bytes, epoch: int) -> int | str:
        return insider.cached_tokens(account, epoch, prompt, keys)

    assert found(account, 1) == 0
    assert found(account, 1) == 32
    assert found(stranger, 1) == 0
    assert found(stranger, 1) == 32
    assert found(account, 2) == 0
    assert found(account, 2) == 32
    assert found(account, 1) == "stale_epoch"
    assert found(stranger, 1) == 32


@pytest.mark.parametrize(("differs_at", "shared"), [(0, 0), (15, 0), (16, 16), (40, 32), (63, 48), (64, 64)])
def test_line_09_prompts_that_differ_inside_a_block_share_nothing_of_it(
    server: Server, tenant: Tenant, differs_at: int, shared: int
) -> None:
    prompt = random_prompt("line 9", 65)
    variant = [*prompt[:differs_at], prompt[differs_at] + 1, *prompt[differs_at + 1 :]]

    def cached_and_computed(prompt: list[int]) -> tuple[int, int]:
        """What usage says, and the work that was done, which is what takes time."""
        before = server.wait_until_idle().computed_tokens
        cached = tenant.cached_tokens(prompt)
        return cached, server.wait_until_idle().computed_tokens - before

    assert cached_and_computed(prompt) == (0, 65)
    assert cached_and_computed(prompt) == (64, 1)
    assert cached_and_computed(variant) == (shared, 65 - shared)
    assert cached_and_computed(prompt) == (64, 1)


def test_line_09_a_prompt_shorter_than_a_block_is_never_reused(server: Server, tenant: Tenant) -> None:
    prompt = random_prompt("line 9 short", 17)
    assert [tenant.cached_tokens(prompt[:16]) for _ in range(2)] == [0, 0]
    assert tenant.cached_tokens(prompt) == 16
