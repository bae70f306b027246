"""Accounts that compete, over the real socket; steps are the clock.

The model answers at once; what is promised of weights, floods and strict accounts is also seen once over the default
model.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cachestore.client import StoreClient
from cachestore.engine import Runner, Sampled
from cachestore.protocol import Finished, OpenAccount, Submit
from cachestore.scheduler import Row
from cachestore.sequence import Phase
from cachestore.server import StoreServer
from tests.cachestore import serving
from tests.cachestore.serving import Arrivals, GatedRunner, connected, submissions
from tests.cachestore.support import ALICE, BOB, CAROL

pytestmark = pytest.mark.anyio

STEP_TOKENS = 256
MAX_RUNNING = 16
# Of service that is compared; the default model serves fewer where it needs longer than that.
SERVED_TOKENS, LEAST_SERVED_TOKENS, SERVED_SECONDS = 50_000, 10_000, 540


class CountingRunner(GatedRunner):
    """Notes what each account was served, and in which step a request had its first token.

    Args:
        model: computes; else nobody does.
    """

    def __init__(self, model: Runner | None = None) -> None:
        super().__init__()
        self.model = model
        self.service: Counter[bytes] = Counter()
        self.steps_done = 0
        self.first_token: dict[int, int] = {}

    def launch(self, rows: Sequence[Row]) -> list[Sampled]:
        answer = super().launch(rows)
        if self.model is not None:
            answer = self.model.collect(self.model.launch(list(rows)))
        for row in rows:
            sequence = row.sequence
            prompt_tokens = max(0, min(row.start + row.count, sequence.prompt_tokens) - row.start)
            self.service[sequence.account] += prompt_tokens + row.samples
            if row.samples:
                self.first_token.setdefault(sequence.request, self.steps_done + 1)
        self.steps_done += 1
        return answer

    def _compute(self, rows: Sequence[Row]) -> list[int | None]:
        # What the double of other tests reads back through every table takes too long here.
        return [1 for row in rows if row.samples]


async def until(condition: Callable[[], bool]) -> None:
    """`serving` bounds the time."""
    turns = 0
    while not condition():
        # Not for ever: a model that computes needs the interpreter, too.
        await asyncio.sleep(0 if turns < 500 else 0.001)
        turns += 1


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = replace(serving.WELCOME.limits, blocks=4096, step_tokens=STEP_TOKENS, max_running=MAX_RUNNING)
    monkeypatch.setattr(serving, "WELCOME", replace(serving.WELCOME, limits=chosen))


@pytest.fixture(params=["double", pytest.param("default model", marks=pytest.mark.once)])
def counting(
    request: pytest.FixtureRequest, limits: None, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], CountingRunner]:
    """Makes a runner, over a cache of its own."""
    if request.param == "double":
        return CountingRunner
    monkeypatch.setattr(serving, "PATIENCE_SECONDS", 2 * SERVED_SECONDS)
    # The smallest block that is offered; as many tokens.
    blocks = serving.WELCOME.limits.blocks * serving.BLOCK_TOKENS // 8
    monkeypatch.setattr(serving, "BLOCK_TOKENS", 8)
    limits = replace(serving.WELCOME.limits, blocks=blocks)
    monkeypatch.setattr(serving, "WELCOME", replace(serving.WELCOME, limits=limits))
    make_runner = request.getfixturevalue("make_runner")
    return lambda: CountingRunner(make_runner(blocks, 8))


@dataclass(frozen=True)
class Ran:
    """`first_token`: the number of the step that sampled it."""

    cached_tokens: int
    first_token: int


class Arena:
    """Clients of accounts that always have so many requests under way; each step waits until the store knows of all."""

    def __init__(self, server: StoreServer, client: StoreClient, runner: CountingRunner) -> None:
        self.runner = runner
        self.server = server
        self._client = client
        self._numbers = itertools.count()
        self._wanted = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._arrived, self._taken = Arrivals(server).of(Submit), submissions(server.engine)

    def open(self, account: bytes, **limits: Any) -> None:
        self._client.open_account(OpenAccount(account=account, epoch=1, revision=1, **limits))

    def backlog(self, account: bytes, requests: int, prompt_tokens: int, max_tokens: int) -> None:
        async def ask_again() -> None:
            while True:
                await self.run(account, prompt_tokens, max_tokens)

        self._wanted += requests
        self._tasks += [asyncio.create_task(ask_again()) for _ in range(requests)]

    async def in_a_step(self) -> None:
        """The engine is in a step until one is let through, for somebody else: who comes until then comes at once."""

        def ended(_: asyncio.Task[Ran]) -> None:
            self._wanted -= 1

        self._wanted += 1
        self._first = asyncio.create_task(self.run(CAROL, 8, 1))
        self._first.add_done_callback(ended)
        await until(lambda: bool(self.server.engine.scheduler.running))

    async def run(self, account: bytes, prompt_tokens: int, max_tokens: int) -> Ran:
        """A request with a prompt that nobody sends again."""
        number = next(self._numbers)
        return await self.ask(account, [number % 997, number // 997 % 997, *[2] * (prompt_tokens - 2)], max_tokens)

    async def ask(self, account: bytes, prompt: list[int], max_tokens: int) -> Ran:
        request = serving.submit(self._client, prompt, account=account, max_tokens=max_tokens)
        started, _, end = await serving.answer(request)
        assert started is not None
        assert isinstance(end, Finished)
        request.seal([], last=True)
        return Ran(started.cached_tokens, self.runner.first_token[request._request])

    async def stepped(self, asked: Coroutine[None, None, Ran]) -> Ran:
        """The end of a request, with a step whenever it has not ended."""
        self._wanted += 1
        task = asyncio.create_task(asked)
        task.add_done_callback(lambda _: None)
        while not task.done():
            await self.step(lambda: task.done())
        self._wanted -= 1
        return await task

    async def step(self, unless: Callable[[], bool] = lambda: False) -> None:
        done = self.runner.steps_done
        await until(lambda: self._under_way() >= self._wanted or unless() or self._failed())
        if unless():
            return
        self.runner.let(1)
        # What seemed to be under way may have ended with the step before.
        await until(lambda: self.runner.steps_done > done or unless() or self._failed())
        if self.runner.steps_done == done:
            self.runner.take_back()

    def _failed(self) -> bool:
        return any(task.done() for task in self._tasks)

    def _under_way(self) -> int:
        """Requests that the engine knows, or will before its next step."""
        known = sum(each.phase is not Phase.ENDED for each in list(self.server.engine._sequences.values()))
        return known + len(self._arrived) - len(self._taken)

    async def end(self) -> None:
        """What is under way ends with the connection."""
        for task in self._tasks:
            if not self._failed():
                task.cancel()
        self.runner.open()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._tasks)


@asynccontextmanager
async def arena(folder: Path, make_runner: Callable[[], CountingRunner] = CountingRunner) -> AsyncIterator[Arena]:
    runner = make_runner()
    async with serving.serving(folder, runner) as server, connected(server) as client:
        made = Arena(server, client, runner)
        try:
            yield made
        finally:
            await made.end()


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "backlog"), [(700, 4, 12), (8, 256, 32)], ids=["long prompts", "long answers"]
)
async def test_service_follows_the_weights(
    prompt_tokens: int, max_tokens: int, backlog: int, tmp_path: Path, counting: Callable[[], CountingRunner]
) -> None:
    ends_at = time.monotonic() + SERVED_SECONDS
    async with arena(tmp_path, counting) as a:
        # Or whoever is first takes all places, until it has its answers.
        await a.in_a_step()
        for account, weight in ((ALICE, 1.0), (BOB, 3.0)):
            a.open(account, weight=weight)
            a.backlog(account, backlog, prompt_tokens, max_tokens)
        service, worst = a.runner.service, 0.0
        while (served := service[ALICE] + service[BOB]) < SERVED_TOKENS and time.monotonic() < ends_at:
            await a.step()
            worst = max(worst, abs(service[ALICE] - service[BOB] / 3))
        mine, theirs = service[ALICE], service[BOB]
    ratio = theirs / mine
    bound = 2 * (STEP_TOKENS + MAX_RUNNING * max_tokens)
    print(f"{served} tokens: {mine} and {theirs}, worst {worst:.0f} of {bound}, ratio {ratio:.3f}")
    assert served >= LEAST_SERVED_TOKENS
    assert worst <= bound
    assert 3 * 0.95 <= ratio <= 3 * 1.05


async def test_an_account_that_was_idle_gets_no_credit(tmp_path: Path, limits: None) -> None:
    async with arena(tmp_path) as a:
        service = a.runner.service
        await a.stepped(a.run(BOB, 100, 1))
        a.backlog(ALICE, 12, 700, 4)
        while service[ALICE] < 20_000:
            await a.step()
        before, worst = Counter(service), 0
        a.backlog(BOB, 12, 700, 4)
        while service[ALICE] < 40_000:
            await a.step()
            worst = max(worst, (service[BOB] - before[BOB]) - (service[ALICE] - before[ALICE]))
    assert worst <= 2 * (STEP_TOKENS + MAX_RUNNING * 4)


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens"), [(700, 300), (40, 2000), (3000, 4)], ids=["both long", "decodes", "prefills"]
)
async def test_a_light_account_waits_at_most_three_steps_longer_under_a_flood(
    prompt_tokens: int, max_tokens: int, tmp_path: Path, limits: None
) -> None:
    async with arena(tmp_path) as a:
        alone = await a.stepped(a.run(ALICE, 200, 4))
        assert alone.first_token == 1
        a.backlog(BOB, 2 * MAX_RUNNING, prompt_tokens, max_tokens)
        for _ in range(60):
            await a.step()
        scheduler = a.server.engine.scheduler
        if max_tokens > 4:
            assert len(scheduler.running) == MAX_RUNNING or scheduler.pool.free + scheduler.pool.cached < 200
        for _ in range(5):
            await a.step()
            before = a.runner.steps_done
            first = await a.stepped(a.run(ALICE, 200, 4))
            assert first.first_token - before <= 1 + 3


async def test_line_24_a_flood_over_the_socket_evicts_nothing_reserved(
    tmp_path: Path, counting: Callable[[], CountingRunner]
) -> None:
    async with arena(tmp_path, counting) as a:
        reserved = 1200 // serving.BLOCK_TOKENS
        a.open(ALICE, reserved_blocks=reserved)
        prompts = [[word] * 241 for word in (3, 4, 5, 6, 7)]
        for each in prompts:
            await a.stepped(a.ask(ALICE, each, 1))
        a.backlog(BOB, 2 * MAX_RUNNING, 700, 4)
        pool = a.server.engine.pool
        while a.runner.service[BOB] < 3 * pool.total * serving.BLOCK_TOKENS:
            await a.step()
        assert pool.shares.account(BOB).evictions > pool.total
        assert pool.shares.account(ALICE).evictions == 0
        found = [await a.stepped(a.ask(ALICE, each, 1)) for each in prompts]
        assert [each.cached_tokens for each in found] == [240] * 5
    print(f"{pool.shares.account(BOB).evictions} of the flood's blocks evicted, 0 of {reserved} reserved")


async def test_line_25_a_strict_account_finds_the_same_over_the_socket(
    tmp_path: Path, counting: Callable[[], CountingRunner]
) -> None:
    blocks = 1600 // serving.BLOCK_TOKENS

    async def seen(folder: Path, is_flooded: bool) -> list[tuple[int, int]]:
        chance = random.Random("strict")
        async with arena(folder, counting) as a:
            a.open(ALICE, reserved_blocks=blocks, max_blocks=blocks, strict=True)
            if is_flooded:
                a.backlog(BOB, 2 * MAX_RUNNING, 700, 4)
                for _ in range(20):
                    await a.step()
            found = []
            for _ in range(60):
                prompt = [chance.randrange(3, 12)] * chance.randrange(100, 900)
                ran = await a.stepped(a.ask(ALICE, prompt, 1))
                found.append((ran.cached_tokens, a.server.engine.account_report(ALICE).evictions))
            return found

    alone = await seen(tmp_path / "alone", False)
    assert await seen(tmp_path / "flooded", True) == alone
    print(f"{sum(cached for cached, _ in alone)} tokens found and {alone[-1][1]} blocks evicted, both times")
    assert sum(cached > 0 for cached, _ in alone) > 15
    assert alone[-1][1] > blocks // 2
