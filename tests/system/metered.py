"""A tenant whose limits and books a test reads and sets; time stands still for its quotas unless the test moves it."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
from sqlalchemy import select, update

from cachestore.protocol import Submit
from cachestore.sequence import Sequence
from gateway.tenants.tables import Base, Quota, Reservation
from tests.cachestore.serving import Arrivals
from tests.gateway.tenants.ledger import check_ledger
from tests.system.in_process import Customer, InProcess, in_process, until
from tests.system.scripted import TEXT, ScriptedRunner, Words, byte_ids, idle

TENANTS = "/admin/v1/tenants"
NOON_MS = 1_900_000_000_000 // 86_400_000 * 86_400_000 + 43_200_000

Row = TypeVar("Row", bound=Base)


@dataclass
class Clock:
    now_ms: int = NOON_MS

    def __call__(self) -> int:
        return self.now_ms


def random_prompt(name: str, tokens: int) -> list[int]:
    """The same tokens for the same name, of those that `Words` has without any words."""
    return byte_ids(random.Random(name).randbytes(tokens))


def stop_clock(inside: InProcess) -> Clock:
    """Of quotas on SQLite: nothing drains and no day ends while a test takes its time."""
    clock = Clock()
    inside.gateway.quotas._ledger._clock_ms = clock
    return clock


async def limit(inside: InProcess, scope: str, **limits: object) -> None:
    """Set all limits of a tenant, or of a key: `<tenant>/keys/<key>`."""
    answer = await inside.admin.put(f"{TENANTS}/{scope}/quotas", json=limits)
    assert answer.status_code == 200, answer.text


async def wait_for_nobody(inside: InProcess, tenant_id: str) -> None:
    """Its requests do not wait in the queue at all, which is less than an administrator can set."""
    answer = await inside.admin.patch(f"{TENANTS}/{tenant_id}/quotas", json={"queue_wait_seconds": 1})
    assert answer.json()["queue_wait_seconds"] == 1
    async with inside.gateway.directory.database.write() as session:
        await session.execute(update(Quota).where(Quota.scope == tenant_id).values(queue_wait_seconds=0))


async def rows(inside: InProcess, table: type[Row]) -> list[Row]:
    async with inside.gateway.directory.database.read() as session:
        return list((await session.scalars(select(table))).all())


async def settled(inside: InProcess, running: int = 0) -> None:
    """Wait until all requests but so many have ended and are booked."""
    completions, quotas = inside.gateway.completions, inside.gateway.quotas
    await until(lambda: len(completions._running) == running and not (completions._closing or quotas._unsettled))


async def check_books(inside: InProcess) -> None:
    """Once nothing runs: nothing is reserved, and the books agree."""
    await settled(inside)
    assert await rows(inside, Reservation) == []
    await check_ledger(inside.gateway.directory.database)


@dataclass
class Metered:
    """One tenant of a gateway and its store; prompts are token ids that nobody sent before."""

    inside: InProcess
    runner: ScriptedRunner
    customer: Customer
    clock: Clock
    submitted: list[Submit] = field(init=False)

    def __post_init__(self) -> None:
        self.submitted = Arrivals(self.inside.store).of(Submit)
        self._numbers = itertools.count()

    async def limit(self, **limits: object) -> None:
        await limit(self.inside, self.customer.id, **limits)

    async def ask(self, prompt_tokens: int, max_tokens: int | None, **fields: Any) -> httpx.Response:
        prompt = random_prompt(f"metered {next(self._numbers)}", prompt_tokens)
        body = {"model": self.inside.model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        return await self.inside.http.post(TEXT, json=body | fields, headers=self.customer.headers)

    async def begin(self, prompt_tokens: int, max_tokens: int, **fields: Any) -> asyncio.Task[httpx.Response]:
        """Send a request to a model that is closed, and wait until the store has it."""
        before = len(self.submitted)
        asked = asyncio.create_task(self.ask(prompt_tokens, max_tokens, **fields))
        await until(lambda: len(self.submitted) > before or asked.done())
        assert not asked.done(), (await asked).text
        return asked

    async def generate(self, tokens: int) -> Sequence:
        """Let the only request that runs have so many tokens."""
        await until(lambda: self.runner.waiting)
        (sequence,) = self.inside.engine._sequences.values()
        while sequence.output_tokens < tokens:
            done = len(self.runner.steps)
            self.runner.let()
            await until(lambda done=done: len(self.runner.steps) > done and self.runner.waiting)  # type: ignore[misc]
        return sequence


@asynccontextmanager
async def metered(folder: Path, max_running: int = 256, blocks: int = 4096) -> AsyncIterator[Metered]:
    """In the end nothing is reserved, the books agree, and the store holds nothing."""
    runner = ScriptedRunner()
    model = Words.write(folder / "model").directory
    async with in_process(folder, model, blocks, runner=runner, max_running=max_running) as inside:
        yield Metered(inside, runner, await inside.customer("a"), stop_clock(inside))
        runner.open()
        await idle(inside)
        await check_books(inside)
