"""The promise in short: a tenant finds its own prefixes, and nobody else's."""

from __future__ import annotations

from tests.system.support import Server, Tenant, random_prompt


def test_a_repeated_prompt_is_found_by_its_tenant_and_by_nobody_else(server: Server) -> None:
    tenant, other, prompt = server.tenant(), server.tenant(), random_prompt("repeated", 1024)
    assert tenant.cached_tokens(prompt) == 0
    assert tenant.cached_tokens(prompt) == 1008
    assert other.cached_tokens(prompt) == 0
    assert other.cached_tokens(prompt) == 1008
    tenant.rotate()
    assert tenant.cached_tokens(prompt) == 0
    assert tenant.cached_tokens(prompt) == 1008
    assert other.cached_tokens(prompt) == 1008


def test_a_cache_salt_splits_a_tenants_cache_and_reaches_no_others(server: Server) -> None:
    tenant, other, prompt = server.tenant(), server.tenant(), random_prompt("salted", 64)
    assert tenant.cached_tokens(prompt) == 0
    for salt in ("A", tenant.id, tenant.name):
        assert tenant.cached_tokens(prompt, cache_salt=salt) == 0
        assert tenant.cached_tokens(prompt, cache_salt=salt) == 48
        assert other.cached_tokens(prompt, cache_salt=salt) == 0
    assert tenant.cached_tokens(prompt) == 48
    assert other.cached_tokens(prompt) == 0


def test_rotation_reports_what_it_dropped(server: Server) -> None:
    tenant, prompt = server.tenant(), random_prompt("rotated", 80)
    tenant.cached_tokens(prompt)
    answer = tenant.rotate()
    assert answer["epoch"] == 2
    assert answer["dropped"]["blocks"] == 5
    assert answer["dropped"]["bytes"] > 5 * 16


def test_a_continued_prompt_finds_the_blocks_of_the_answer(server: Server, tenant: Tenant) -> None:
    question = "Count from one to forty in words:"
    first = tenant.complete(question, max_tokens=60, ignore_eos=True).json()
    whole = question + first["choices"][0]["text"] + " and"
    second = tenant.complete(whole).json()
    # The last sampled token has no KV yet, and only whole blocks are reused.
    in_cache = (first["usage"]["total_tokens"] - 1) // 16 * 16
    assert in_cache > first["usage"]["prompt_tokens"] + 32
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == in_cache
    server.wait_until_idle()
