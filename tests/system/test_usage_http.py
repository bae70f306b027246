"""What requests are charged that a client leaves, and that nothing of it depends on another tenant."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

from gateway.tenants.ledger import Ask
from gateway.tenants.tables import QuotaState, Usage
from policies.rates import MINUTE_MS
from tests.system.in_process import Customer, InProcess, in_process
from tests.system.metered import TENANTS, Clock, check_books, limit, random_prompt, rows, settled, stop_clock
from tests.system.scene import KINDS, PROMPT_CHARACTERS, Client, Scene, scene
from tests.system.scripted import CHAT, TEXT, ScriptedRunner, Words, byte_ids
from tests.system.wire import DONE, events

pytestmark = pytest.mark.anyio

BUDGET = 100_000


@asynccontextmanager
async def metered_scene(folder: Path, **limited: int) -> AsyncIterator[tuple[Scene, str]]:
    """With a tenant, here named by its id, that has limits and a stopped clock; every token has a text."""
    async with scene(folder, **limited) as s:
        (tenant,) = (await s.inside.admin.get(TENANTS)).json()["data"]
        stop_clock(s.inside)
        await limit(s.inside, tenant["id"], tokens_per_minute=BUDGET, tokens_per_day=BUDGET)
        (letter,) = byte_ids("x")
        s.runner.says = lambda sequence: letter
        yield s, tenant["id"]


async def charged(s: Scene) -> list[tuple[str, int, int, int]]:
    """Outcome, input, output tokens and cost of all that ended."""
    return [(row.outcome, row.input_tokens, row.output_tokens, row.cost) for row in await rows(s.inside, Usage)]


async def counted(s: Scene) -> tuple[int, float]:
    """Tokens that the tenant's day, and its minute, have counted."""
    (state,) = await rows(s.inside, QuotaState)
    return state.day_used, state.tokens_level / MINUTE_MS


async def test_b156_a_dropped_stream_is_charged_for_all_that_was_generated(tmp_path: Path) -> None:
    async with metered_scene(tmp_path) as (s, _):
        client, sequence = await s.begin(TEXT, True)
        while sequence.output_tokens < 30:
            before = sequence.output_tokens
            await s.step()
            await client.received(sequence.output_tokens - before)
        s.held.hold()
        for _ in range(3):
            await s.step()
        # The step that runs while the client leaves makes it 34.
        await s.leave(client, sequence)
        assert sequence.output_tokens == 34
        await settled(s.inside)
        assert await charged(s) == [("cancelled", PROMPT_CHARACTERS, 34, PROMPT_CHARACTERS + 34)]
        assert await counted(s) == (PROMPT_CHARACTERS + 34, PROMPT_CHARACTERS + 34)
        await check_books(s.inside)


async def test_b157_nothing_generated_is_nothing_and_no_estimate(tmp_path: Path) -> None:
    async with metered_scene(tmp_path, max_running=1) as (s, _):
        # Begun, and left before its first token: its prompt.
        client, sequence = await s.begin(TEXT, True)
        assert 0 < sequence.computed_tokens < sequence.prompt_tokens
        await s.leave(client, sequence)
        assert sequence.output_tokens == 0
        await settled(s.inside)
        begun = ("cancelled", PROMPT_CHARACTERS, 0, PROMPT_CHARACTERS)
        assert await charged(s) == [begun]
        assert await counted(s) == (PROMPT_CHARACTERS, PROMPT_CHARACTERS)

        # Left before it began: nothing.
        staying, _ = await s.begin(TEXT, False, max_tokens=50)
        waiting, sequence = await s.begin(TEXT, True)
        assert not sequence.started_ns
        await s.leave(waiting, sequence)
        await settled(s.inside, running=1)
        assert sorted(await charged(s)) == sorted([begun, ("cancelled", 0, 0, 0)])
        assert await counted(s) == (PROMPT_CHARACTERS, 2 * PROMPT_CHARACTERS + 50)
        s.runner.open()
        await staying.answer()
        await settled(s.inside)
        assert await counted(s) == (2 * PROMPT_CHARACTERS + 50, 2 * PROMPT_CHARACTERS + 50)
        await check_books(s.inside)


@pytest.mark.parametrize(("path", "stream"), KINDS)
async def test_isolation_44_aborted_requests_are_charged_for_what_they_used(
    path: str, stream: bool, tmp_path: Path
) -> None:
    async with metered_scene(tmp_path) as (s, tenant_id):
        used = []
        for output_tokens, n in ((1, 1), (2, 1), (7, 1), (5, 3)):
            client, first = await s.begin(path, stream, n=n)
            while first.output_tokens < output_tokens:
                await s.step()
            sequences = list(s.inside.engine._sequences.values())
            await leave(s, client)
            generated = sum(sequence.output_tokens for sequence in sequences)
            assert generated >= output_tokens
            used.append(("cancelled", first.prompt_tokens, generated, first.prompt_tokens + generated))
            assert await charged(s) == used
        total = sum(cost for *_, cost in used)
        assert await counted(s) == (total, total)
        # Not one token less or more is left.
        s.runner.open()
        await limit(s.inside, tenant_id, tokens_per_day=total + PROMPT_CHARACTERS + 8)
        for max_tokens, status in ((9, b"429"), (8, b"200"), (1, b"429")):
            client = await s.ask(TEXT, stream, max_tokens=max_tokens)
            assert (await client.answer()).startswith(b"HTTP/1.1 %s " % status)
        await check_books(s.inside)
        await limit(s.inside, tenant_id)


async def leave(s: Scene, client: Client) -> None:
    """The client leaves, and what it asked for ends and is booked."""
    client.leave()
    s.runner.open()
    await settled(s.inside)
    s.runner.close()
