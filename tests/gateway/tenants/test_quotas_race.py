"""Two gateways' quotas, each in a process of its own, race for one budget: not one token over, and none left unused."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import func, select

from gateway.tenants import quotas as quotas_module
from gateway.tenants.database import Database
from gateway.tenants.directory import Directory
from gateway.tenants.ledger import Ask, Settlement
from gateway.tenants.limits import NO_LIMITS
from gateway.tenants.quota_errors import QuotaExceeded
from gateway.tenants.quotas import Quotas
from gateway.tenants.registry import Registry
from gateway.tenants.tables import GatewayRow, Quota, Reservation, Usage, unused_state
from gateway.tenants.tables import QuotaState as State
from tests.gateway.tenants.ledger import check_ledger
from tests.gateway.tenants.racer import Race, Settled
from tests.system.in_process import until

pytestmark = pytest.mark.anyio

CLIENTS = 16
MOST = 150
# That each client sends about; they go on until the budget is spent.
REQUESTS = [500, pytest.param(10_000, marks=pytest.mark.once)]


@dataclass
class Course:
    """A tenant with two keys, one of which has a budget of its own."""

    url: str
    database: Database
    tenant_id: str
    key_ids: list[str]
    budget: int
    key_budget: int
    told: dict[str, Settled] = field(default_factory=dict)

    @classmethod
    async def open(cls, url: str, folder: Path, budget: int) -> Course:
        database = await Database.open(url)
        directory = await Directory.open(database, folder / "kek")
        registry = Registry(database, directory.keyring)
        tenant = await registry.create_tenant("racing")
        keys = [await registry.create_key(tenant.id, None, frozenset({"completions"}), None) for _ in range(2)]
        key_ids = [key[0].id for key in keys if key]
        course = cls(url, database, tenant.id, key_ids, budget, budget // 3)
        await course.limit(tokens_per_day=budget, concurrent_requests=CLIENTS)
        await course.limit(key_ids[0], tokens_per_day=course.key_budget)
        return course

    async def limit(self, key_id: str | None = None, **limits: int) -> None:
        async with self.database.write() as session:
            session.add(
                Quota(
                    scope=key_id or self.tenant_id,
                    tenant_id=self.tenant_id,
                    key_id=key_id,
                    revision=0,
                    **(NO_LIMITS | limits),
                )
            )
            if key_id:
                session.add(unused_state(self.tenant_id, key_id))

    def race(self, seed: int, requests: int, **how: Any) -> Race:
        # More than the budget has room for.
        attempts, clients = 4 * requests * CLIENTS // 2, CLIENTS // 2
        return Race(self.url, self.tenant_id, self.key_ids, clients, attempts, seed, most=MOST, **how)

    @asynccontextmanager
    async def running(self, race: Race) -> AsyncIterator[asyncio.subprocess.Process]:
        """The process of a race; what it says is noted until it ends."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.gateway.tenants.racer", msgspec.json.encode(race).decode(),
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        reading = asyncio.create_task(self._note(process.stdout))
        try:
            yield process
            assert await process.wait() in (0, -signal.SIGKILL)
            await reading
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def _note(self, stdout: asyncio.StreamReader) -> None:
        while line := await stdout.readline():
            if line.endswith(b"}\n") and b'"id"' in line:
                settled = msgspec.json.decode(line, type=Settled)
                assert settled.id not in self.told
                self.told[settled.id] = settled

    async def used(self) -> tuple[int, int]:
        """Cost of the tenant, and of the key that has a budget."""
        async with self.database.read() as session:
            total = await session.scalar(select(func.coalesce(func.sum(Usage.cost), 0)))
            of_key = await session.scalar(
                select(func.coalesce(func.sum(Usage.cost), 0)).where(Usage.key_id == self.key_ids[0])
            )
            return int(total or 0), int(of_key or 0)

    async def check(self) -> None:
        """The ledger is right, and has each settlement that was told of, once, as it was."""
        await check_ledger(self.database)
        async with self.database.read() as session:
            booked = {row.id: row.cost for row in (await session.scalars(select(Usage))).all()}
        assert {id: booked.get(id) for id in self.told} == {each.id: each.cost for each in self.told.values()}
        assert self.told

    async def check_spent(self) -> None:
        used, of_key = await self.used()
        assert self.budget - MOST < used <= self.budget
        assert of_key <= self.key_budget
        assert not await self.count(Reservation)

    async def count(self, table: Any) -> int:
        async with self.database.read() as session:
            return int(await session.scalar(select(func.count()).select_from(table)) or 0)


@asynccontextmanager
async def course(url: str, folder: Path, requests: int) -> AsyncIterator[Course]:
    # A request costs a quarter of the most on average, and some are refused.
    made = await Course.open(url, folder, requests * CLIENTS * MOST // 16)
    try:
        yield made
    finally:
        await made.database.close()


@pytest.mark.parametrize("requests", REQUESTS)
@pytest.mark.parametrize("how", [{}, {"aborts": 0.2}, {"clock_steps": True}], ids=["plain", "aborts", "clock steps"])
async def test_two_processes_spend_a_budget_to_its_end_and_never_more(
    requests: int, how: dict[str, Any], tmp_path: Path, database_url: str
) -> None:
    async with course(database_url, tmp_path, requests) as racing:
        async with racing.running(racing.race(1, requests, **how)), racing.running(racing.race(2, requests, **how)):
            pass
        await racing.check()
        await racing.check_spent()
        assert not await racing.count(GatewayRow)


@pytest.mark.parametrize("requests", REQUESTS)
async def test_a_process_that_is_killed_keeps_nothing_from_the_other(
    requests: int, tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quotas_module, "BEAT_SECONDS", 0.1)
    async with course(database_url, tmp_path, requests) as racing:
        async with racing.running(racing.race(1, requests)) as first, racing.running(racing.race(2, requests)):
            await until(lambda: any(id.startswith("res_1_") for id in racing.told) and len(racing.told) > requests // 4)
            first.kill()
        # The other one, or whoever comes next, books in full what the first had reserved.
        after = Quotas(racing.database)
        await after.start()
        await until_true(lambda: racing.count(Reservation))
        async with racing.running(racing.race(3, requests)):
            pass
        await after.close()
        await racing.check()
        await racing.check_spent()
        async with racing.database.read() as session:
            lost = (await session.scalars(select(Usage).where(Usage.outcome == "lost"))).all()
        assert all(row.id.startswith("res_1_") for row in lost)
        assert len(lost) <= CLIENTS // 2


async def until_true(left: Any) -> None:
    for _ in range(2000):
        if not await left():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("not so in time")


async def test_b147_a_dead_gateways_slots_come_back_and_a_late_word_of_it_is_the_truth(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quotas_module, "BEAT_SECONDS", 0.02)
    async with course(database_url, tmp_path, 100) as racing:
        key_id = racing.key_ids[0]
        # One that does not beat, and one that lives.
        silent, living = Quotas(racing.database), Quotas(racing.database)
        await silent._beat()
        silent._tasks = [asyncio.create_task(silent._write_forever())]
        await living.start()
        for number in range(CLIENTS):
            await silent.reserve(Ask(f"res_silent_{number}", racing.tenant_id, key_id, 60, 100, 100))
        with pytest.raises(QuotaExceeded, match=f"{CLIENTS} requests are running"):
            await living.reserve(Ask("res_refused", racing.tenant_id, key_id, 1, 1, 1))
        await until_true(lambda: racing.count(Reservation))
        assert living.lost_reservations == CLIENTS
        assert (await racing.used())[1] == 100 * CLIENTS
        await living.reserve(Ask("res_after", racing.tenant_id, key_id, 1, 1, 1))
        # It was not dead: what it settles now is what it did use, and what it asks for is given.
        await silent.settle(Settlement("res_silent_0", racing.tenant_id, key_id, "finished", 60, 50, 3))
        await silent.settle(Settlement("res_silent_0", racing.tenant_id, key_id, "finished", 60, 0, 40))
        assert (await racing.used())[1] == 100 * (CLIENTS - 1) + 10 + 5 + 3
        await silent.reserve(Ask("res_silent_again", racing.tenant_id, key_id, 1, 1, 1))
        await living.settle(Settlement("res_after", racing.tenant_id, key_id, "refused"))
        await silent.settle(Settlement("res_silent_again", racing.tenant_id, key_id, "cancelled", 1, 0, 0))
        await check_ledger(racing.database)
        await silent.close()
        await living.close()
        assert not await racing.count(GatewayRow)


async def test_what_is_settled_twice_is_booked_once(tmp_path: Path, database_url: str) -> None:
    async with course(database_url, tmp_path, 100) as racing:
        quotas = Quotas(racing.database)
        await quotas.start()
        ask = Ask("res_one", racing.tenant_id, racing.key_ids[0], 60, 100, 100)
        await quotas.reserve(ask)
        settlement = Settlement("res_one", racing.tenant_id, racing.key_ids[0], "finished", 60, 0, 7)
        await asyncio.gather(*(quotas.settle(settlement) for _ in range(5)))
        await quotas.settle(Settlement("res_never", racing.tenant_id, racing.key_ids[0], "finished", 60, 0, 7))
        assert await racing.used() == (67, 67)
        await quotas.close()
        await check_ledger(racing.database)


async def test_b151_gateways_that_cross_midnight_together_begin_the_day_once(
    tmp_path: Path, database_url: str
) -> None:
    midnight_ms, step = 1_900_022_400_000 // 86_400_000 * 86_400_000, {"now": 0}
    async with course(database_url, tmp_path, 100) as racing:
        key_id = racing.key_ids[1]
        both = [Quotas(racing.database, lambda: midnight_ms + step["now"]) for _ in range(2)]
        for quotas in both:
            await quotas.start()

        async def spend(quotas: Quotas, name: str, tokens: int) -> None:
            await quotas.reserve(Ask(name, racing.tenant_id, key_id, tokens, tokens, tokens))
            await quotas.settle(Settlement(name, racing.tenant_id, key_id, "finished", tokens))

        async def day_used() -> int:
            async with racing.database.read() as session:
                return int(await session.scalar(select(State.day_used).where(State.scope == racing.tenant_id)) or 0)

        step["now"] = -1
        await spend(both[0], "before", 500)
        assert await day_used() == 500
        step["now"] = 0
        await asyncio.gather(*(spend(quotas, f"after {n}", 100) for n, quotas in enumerate(both * 3)))
        assert await day_used() == 600
        for quotas in both:
            await quotas.close()
        await check_ledger(racing.database)


async def test_a_gateway_that_ends_books_what_it_is_just_writing(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with course(database_url, tmp_path, 100) as racing:
        quotas = Quotas(racing.database)
        await quotas.start()
        ask = Ask("res_last", racing.tenant_id, racing.key_ids[1], 60, 100, 100)
        await quotas.reserve(ask)
        begun, may_go, transact = asyncio.Event(), asyncio.Event(), racing.database.transact

        async def held(work: Any) -> Any:
            begun.set()
            await may_go.wait()
            return await transact(work)

        monkeypatch.setattr(racing.database, "transact", held)
        quotas.settle(ask.settlement("finished", 60, 0, 7))
        await begun.wait()
        closing = asyncio.create_task(quotas.close())
        await asyncio.sleep(0)
        may_go.set()
        await closing
        assert await racing.used() == (67, 0)
        assert not await racing.count(Reservation)
        assert not await racing.count(GatewayRow)
