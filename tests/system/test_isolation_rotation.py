"""Lines 10, 11, 12, 13 and 15 of the promise: what is gone when a rotation or a deletion has returned."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gateway.secret import Secret
from gateway.tenants.registry import Registry
from tests.system.in_process import Customer, in_process
from tests.system.insider import Insider, block_names
from tests.system.support import Server, Tenant, random_prompt

ONE_BLOCK = 17
TWO_BLOCKS = 33


@pytest.mark.anyio
@pytest.mark.parametrize("probes", [200, pytest.param(10_000, marks=pytest.mark.once)])
async def test_line_10_after_rotate_returns_no_concurrent_probe_finds_an_old_block(
    probes: int, tmp_path: Path, default_model: Path
) -> None:
    async with in_process(tmp_path, default_model, blocks=3 * probes) as saltern:
        customer = await saltern.customer("rotating")
        prompts = [random_prompt(f"probe {number}", ONE_BLOCK) for number in range(probes)]
        over = asyncio.Event()

        async def cached(prompts: list[list[int]]) -> Counter[int]:
            """How many answers had how many cached tokens, all asked at once."""
            return Counter(await asyncio.gather(*(saltern.cached_tokens(customer, prompt) for prompt in prompts)))

        async def cached_in_turns() -> Counter[int]:
            # Two hundred at once is what one tenant's clients may do; more of them take turns.
            found: Counter[int] = Counter()
            for start in range(0, probes, 200):
                found += await cached(prompts[start : start + 200])
            return found

        async def client(prompt: list[int]) -> list[int]:
            """Cached tokens of one prompt, asked again and again across the rotation."""
            found = []
            while not over.is_set():
                found.append(await saltern.cached_tokens(customer, prompt))
            return found

        assert await cached_in_turns() == {0: probes}
        assert await cached_in_turns() == {16: probes}
        own = [random_prompt(f"client {number}", ONE_BLOCK) for number in range(20)]
        assert await cached(own) == {0: 20}
        clients = [asyncio.create_task(client(prompt)) for prompt in own]
        await saltern.rotate(customer)
        assert await cached_in_turns() == {0: probes}

        # Who asks without a pause starts cold once, or twice when caught between the two epochs; one whose turn came
        # late may have asked only once.
        over.set()
        for found in await asyncio.gather(*clients):
            assert set(found) <= {0, 16}
            assert found.count(0) <= 2
        assert await cached_in_turns() == {16: probes}
        assert saltern.blocks(customer.account).keys() == {2}
        await saltern.check()


@pytest.mark.anyio
async def test_line_10_an_epoch_that_moves_while_blocks_are_named_is_the_one_that_counts(
    tmp_path: Path, default_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with in_process(tmp_path, default_model) as saltern:
        customer, prompt = await saltern.customer("rotating"), random_prompt("line 10 race", ONE_BLOCK)
        assert await saltern.cached_tokens(customer, prompt) == 0
        assert await saltern.cached_tokens(customer, prompt) == 16
        assert saltern.blocks(customer.account).keys() == {1}

        directory = saltern.gateway.directory
        elsewhere = Registry(directory.database, directory.keyring)
        read_salt = directory.salt
        asked: list[int] = []

        async def salt_before_a_rotation_elsewhere(tenant_id: str, epoch: int) -> Secret:
            asked.append(epoch)
            salt = await read_salt(tenant_id, epoch)
            if len(asked) == 1:
                # By another gateway whose store is not this one, so no fence comes.
                await elsewhere.rotate(tenant_id)
            return salt

        monkeypatch.setattr(directory, "salt", salt_before_a_rotation_elsewhere)
        assert await saltern.cached_tokens(customer, prompt) == 0
        assert asked == [1, 2]
        assert saltern.blocks(customer.account).keys() == {2}
        assert await saltern.cached_tokens(customer, prompt) == 16
        await saltern.check()


def test_line_10_when_rotate_returns_the_old_names_are_gone_even_for_who_still_knows_them(
    server: Server, tenant: Tenant
) -> None:
    insider, prompt = Insider(server), random_prompt("line 10 stale", TWO_BLOCKS)
    tenant.complete(prompt)
    old = insider.secrets(tenant)
    names = block_names(old.salt, insider.welcome(), prompt)

    def stale_gateway() -> int | str:
        return insider.cached_tokens(old.account, old.epoch, prompt, names)

    assert stale_gateway() == 32
    before = server.wait_until_idle()
    dropped = tenant.rotate()["dropped"]
    after = server.stats()
    assert dropped["blocks"] == before.cached_blocks - after.cached_blocks == 2
    assert stale_gateway() == "stale_epoch"
    # Under the new epoch the old names are nothing, either.
    new = insider.secrets(tenant)
    assert insider.cached_tokens(new.account, new.epoch, prompt, names) == 0


@pytest.mark.parametrize("rotated", [False, True], ids=["without", "across a rotation"])
def test_line_11_a_request_in_flight_before_rotation_publishes_nothing_afterwards(
    server: Server, tenant: Tenant, rotated: bool
) -> None:
    prompt = random_prompt("line 11", TWO_BLOCKS)
    cached_before = server.wait_until_idle().cached_blocks
    body = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": 40,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with server.http.stream("POST", "/v1/completions", json=body, headers=tenant.headers) as stream:
        lines = stream.iter_lines()
        events: list[Any] = [next(data for line in lines if (data := _event(line)))]
        assert server.stats().running == 1
        if rotated:
            assert tenant.rotate()["dropped"]["blocks"] >= 2
        assert server.stats().running == 1
        events += [data for line in lines if (data := _event(line))]
    # It went on to its end, with every token that was asked for.
    assert events[-1]["usage"]["completion_tokens"] == 40
    published = server.wait_until_idle().cached_blocks - cached_before
    # 73 tokens, of which the last has no KV.
    assert published == (0 if rotated else 72 // 16)
    assert tenant.cached_tokens(prompt) == (0 if rotated else 32)
    assert tenant.cached_tokens(prompt) == 32


def _event(line: str) -> Any:
    return json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else None


@pytest.mark.anyio
async def test_line_12_a_fence_that_nobody_heard_is_sent_before_the_first_request(
    tmp_path: Path, default_model: Path
) -> None:
    async with in_process(tmp_path, default_model) as saltern:
        customer, prompt = await saltern.customer("rotating"), random_prompt("line 12", ONE_BLOCK)
        assert await saltern.cached_tokens(customer, prompt) == 0
        assert await saltern.cached_tokens(customer, prompt) == 16

        # Out of reach, but alive with all its blocks: worse than a store that was killed.
        link, socket = saltern.gateway.link, saltern.store.socket_path
        away = socket.rename(socket.with_name("away"))
        link.connection().client.close()
        assert (await saltern.rotate(customer)) == {"epoch": 2, "dropped": None}
        assert saltern.blocks(customer.account).keys() == {1}
        assert (await saltern.complete(customer, prompt)).status_code == 503

        away.rename(socket)
        await link.connected.wait()
        assert saltern.blocks(customer.account) == {}
        assert await saltern.gateway.directory.pending_fences() == []
        assert await saltern.cached_tokens(customer, prompt) == 0
        assert await saltern.cached_tokens(customer, prompt) == 16
        await saltern.check()


def test_line_13_rotating_one_tenant_changes_nothing_of_another(server: Server, tenant: Tenant, other: Tenant) -> None:
    prompts = [random_prompt(f"line 13 {number}", TWO_BLOCKS) for number in range(2)]

    def warm(whose: Tenant) -> list[int]:
        return [whose.cached_tokens(prompt) for prompt in prompts]

    assert warm(tenant) == warm(other) == [0, 0]
    assert warm(tenant) == warm(other) == [32, 32]
    before = server.wait_until_idle()
    dropped = tenant.rotate()["dropped"]["blocks"]
    after = server.stats()
    assert (dropped, before.cached_blocks - after.cached_blocks) == (4, 4)
    assert after.evictions == before.evictions
    assert warm(other) == [32, 32]
    assert warm(tenant) == [0, 0]
    # Rotating the other one does change its hits.
    other.rotate()
    assert warm(other) == [0, 0]


@pytest.mark.anyio
async def test_line_13_in_a_full_pool_the_others_keep_their_blocks_while_the_rotated_tenant_fills_its_own_again(
    tmp_path: Path, default_model: Path
) -> None:
    prompts = [random_prompt(f"line 13 full {number}", TWO_BLOCKS) for number in range(3)]
    # Two times six cached blocks, and one for the token that is computed.
    async with in_process(tmp_path, default_model, blocks=13) as saltern:
        one, two = await saltern.customer("one"), await saltern.customer("two")

        async def found(whose: Customer) -> list[int]:
            return [await saltern.cached_tokens(whose, prompt) for prompt in prompts]

        assert await found(one) == await found(two) == [0, 0, 0]
        blocks = saltern.blocks(two.account)
        assert (await saltern.rotate(one))["dropped"]["blocks"] == 6
        assert saltern.blocks(one.account) == {}
        assert saltern.blocks(two.account) == blocks
        assert await found(one) == [0, 0, 0]
        assert saltern.blocks(two.account) == blocks
        assert await found(two) == [32, 32, 32]
        assert saltern.engine.pool.evictions == 0
        await saltern.check()

        # A third tenant does take blocks, so that eviction would have been seen.
        third = await saltern.customer("third")
        assert await found(third) == [0, 0, 0]
        assert saltern.engine.pool.evictions == 6
        await saltern.check()


def test_line_15_a_tenant_recreated_with_the_same_name_starts_cold_with_fresh_secrets(
    server: Server, tenant: Tenant, other: Tenant
) -> None:
    insider, prompt = Insider(server), random_prompt("line 15", TWO_BLOCKS)
    for whose in (tenant, other):
        assert [whose.cached_tokens(prompt), whose.cached_tokens(prompt)] == [0, 32]
    old = insider.secrets(tenant)
    names = block_names(old.salt, insider.welcome(), prompt)
    before = server.wait_until_idle()
    assert server.admin.delete(f"/admin/v1/tenants/{tenant.id}").status_code == 204
    assert before.cached_blocks - server.stats().cached_blocks == 2
    assert tenant.complete(prompt).status_code == 401

    again = server.tenant(tenant.name)
    new = insider.secrets(again)
    assert again.id != tenant.id
    assert {old.account, old.salt, old.offload_key}.isdisjoint({new.account, new.salt, new.offload_key})
    assert tenant.complete(prompt).status_code == 401
    assert [again.cached_tokens(prompt), again.cached_tokens(prompt)] == [0, 32]
    # The store takes nothing for the account that went, whoever still knows its names.
    assert insider.cached_tokens(old.account, 1, prompt, names) == "unknown_account"
    assert insider.cached_tokens(old.account, 2, prompt, names) == "unknown_account"
    assert other.cached_tokens(prompt) == 32
