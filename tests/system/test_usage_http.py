"""What requests are charged that a client leaves, and that nothing of it depends on another tenant."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from cachestore.protocol import Abort
from gateway.tenants.ledger import Ask
from gateway.tenants.tables import QuotaState, Usage
from policies.rates import MINUTE_MS, Meter
from tests.system.in_process import Customer, in_process, until
from tests.system.metered import TENANTS, check_books, limit, random_prompt, rows, settled, stop_clock
from tests.system.scene import KINDS, PROMPT_CHARACTERS, Scene, scene
from tests.system.scripted import CHAT, TEXT, Words, byte_ids
from tests.system.wire import streamed, text_of

pytestmark = pytest.mark.anyio

BUDGET = 100_000


@asynccontextmanager
async def metered_scene(folder: Path, max_running: int = 8) -> AsyncIterator[tuple[Scene, str]]:
    """With a tenant, here named by its id, that has limits and a stopped clock; every token has a text."""
    async with scene(folder, max_running=max_running) as s:
        (tenant,) = (await s.inside.admin.get(TENANTS)).json()["data"]
        stop_clock(s.inside)
        await limit(s.inside, tenant["id"], tokens_per_minute=BUDGET, tokens_per_day=BUDGET)
        (letter,) = byte_ids("x")
        s.runner.says = lambda sequence: letter
        yield s, tenant["id"]


def has_aborted(s: Scene, count: int) -> bool:
    """So many submissions, as far as the store was told."""
    return len(s.arrived.of(Abort)) == count


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
        used, left = [], 0
        for output_tokens, n in ((1, 1), (2, 1), (7, 1), (5, 3)):
            client, first = await s.begin(path, stream, n=n)
            while first.output_tokens < output_tokens:
                await s.step()
            sequences = list(s.inside.engine._sequences.values())
            assert len(sequences) == n
            client.leave()
            left += n
            await until(partial(has_aborted, s, left))
            s.runner.open()
            await settled(s.inside)
            s.runner.close()
            generated = sum(sequence.output_tokens for sequence in sequences)
            assert n * (output_tokens - 1) < generated <= n * (output_tokens + 1)
            used.append(("cancelled", first.prompt_tokens, generated, first.prompt_tokens + generated))
            assert sorted(await charged(s)) == sorted(used)
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


# --- and of no other tenant


@dataclass(frozen=True)
class Seen:
    """All that a tenant sees of an answer but its ids and times, and how a stream's text was cut."""

    status: int
    headers: dict[str, str]
    text: str
    last: dict[str, Any]

    @classmethod
    def of(cls, answer: httpx.Response) -> Seen:
        headers = {name: value for name, value in answer.headers.items() if name != "x-request-id"}
        is_stream = headers["content-type"].startswith("text/event-stream")
        text, last = (text_of(streamed(answer)), streamed(answer)[-1]) if is_stream else ("", answer.json())
        return cls(answer.status_code, headers, text, {k: v for k, v in last.items() if k not in ("id", "created")})

    @property
    def result(self) -> int | str:
        """As `SEQUENCE` has it."""
        if self.status != 200:
            return str(self.last["error"]["code"])
        return int(self.last["usage"]["prompt_tokens_details"]["cached_tokens"])


LONG, OTHER = random_prompt("long", 70), random_prompt("other", 50)
MESSAGES = [{"role": "user", "content": "What is the salt for, and who may know it?"}]
TOLD = {"stream": True, "stream_options": {"include_usage": True}}
# What is asked, and cached tokens or the code of a refusal.
SEQUENCE: list[tuple[str, dict[str, Any], int | str]] = [
    (TEXT, {"prompt": LONG}, 0),
    (TEXT, {"prompt": LONG}, 64),
    (TEXT, {"prompt": [*LONG, *OTHER], **TOLD}, 64),
    (TEXT, {"prompt": OTHER, "n": 2}, 0),
    (TEXT, {"prompt": OTHER, "cache_salt": "team"}, 0),
    (TEXT, {"prompt": OTHER, "cache_salt": "team"}, 48),
    (CHAT, {"messages": MESSAGES}, 0),
    (CHAT, {"messages": MESSAGES, **TOLD}, 48),
    (TEXT, {"prompt": LONG, "max_tokens": 1000}, "rate_limit_exceeded"),
    (TEXT, {"prompt": LONG, "min_tokens": 1800}, "unsupported_value"),
    (TEXT, {"prompt": LONG, "max_tokens": 600}, "insufficient_quota"),
    (TEXT, {"prompt": OTHER}, 48),
    (TEXT, {"prompt": OTHER}, "rate_limit_exceeded"),
]
LIMITS = {"tokens_per_day": 900, "tokens_per_minute": 5000, "requests_per_minute": 9, "concurrent_requests": 1}


async def life_beside(neighbour: str, folder: Path) -> Any:
    """All that tenant A is answered and charged for the same requests, beside another tenant."""
    async with in_process(folder, Words.write(folder / "model").directory) as inside:
        a, b = await inside.customer("a"), await inside.customer("b")
        clock = stop_clock(inside)
        await limit(inside, a.id, **LIMITS)
        await limit(inside, b.id, tokens_per_day=1200)

        async def ask(customer: Customer, path: str, fields: dict[str, Any]) -> httpx.Response:
            body = {"model": inside.model, "max_tokens": 6, "temperature": 0, "ignore_eos": True} | fields
            answer = await inside.http.post(path, json=body, headers=customer.headers)
            await settled(inside)
            return answer

        statuses: list[int] = []

        async def meanwhile(path: str, fields: dict[str, Any]) -> None:
            if neighbour == "asks other things":
                path, fields = TEXT, {"prompt": random_prompt(f"{path} {fields}", 60)}
            if neighbour != "idle":
                statuses.append((await ask(b, path, fields)).status_code)

        for path, fields, _ in SEQUENCE[:8]:
            await meanwhile(path, fields)
        if neighbour != "idle":
            key = await inside.gateway.directory.authenticate([(b"x-api-key", b.key.encode())])
            running = Ask("res_running", b.id, key.key_id, 10, 500, 500)
            await inside.gateway.quotas.reserve(running)
        seen = []
        for path, fields, _ in SEQUENCE:
            await meanwhile(path, fields)
            clock.now_ms += 250
            seen.append(Seen.of(await ask(a, path, fields)))
        if neighbour != "idle":
            assert {200, 429} <= set(statuses), (neighbour, statuses)
            await inside.gateway.quotas.settle(running.settlement("finished", 10, 0, 20))
        used = [row for row in await rows(inside, Usage) if row.tenant_id == a.id]
        columns = ("at_ms", "outcome", "input_tokens", "cached_tokens", "output_tokens", "cost")
        booked = sorted(tuple(getattr(row, name) for name in columns) for row in used)
        (meter,) = [row for row in await rows(inside, QuotaState) if row.scope == a.id]
        await check_books(inside)
        return seen, booked, [getattr(meter, name) for name in Meter.__slots__]


async def test_isolation_23_nothing_that_a_tenant_sees_or_pays_depends_on_another(tmp_path: Path) -> None:
    alone = await life_beside("idle", tmp_path / "idle")
    # Its own repetition does hit, and it meets its own limits.
    assert [seen.result for seen in alone[0]] == [expected for _, _, expected in SEQUENCE]
    for neighbour in ("asks the same", "asks other things"):
        beside = await life_beside(neighbour, tmp_path / neighbour)
        for mine, others in zip(alone, beside, strict=True):
            assert mine == others
