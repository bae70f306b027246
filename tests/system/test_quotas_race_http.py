"""Sixty-four requests at once, half of them to each of two gateways on one store and one database, and one budget."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from cachestore.protocol import Abort, Submit
from gateway.tenants.tables import Usage
from tests.gateway.tenants.ledger import check_ledger
from tests.system.in_process import in_process, second_gateway, until
from tests.system.metered import check_books, limit, random_prompt, rows, settled
from tests.system.scene import Scene
from tests.system.scripted import TEXT, ScriptedRunner, Words, idle, listening

pytestmark = pytest.mark.anyio

RACING = 64


@asynccontextmanager
async def two_gateways(folder: Path, database_url: str) -> AsyncIterator[tuple[str, Scene, Scene]]:
    """Behind real ports, on one closed model and one database; and the tenant that both serve."""
    model, runner = Words.write(folder / "model"), ScriptedRunner()
    async with (
        in_process(folder, model.directory, runner=runner, database_url=database_url) as one,
        second_gateway(one, folder, database_url=database_url) as two,
        listening(one.gateway.tenant_app) as first,
        listening(two.gateway.tenant_app) as second,
    ):
        customer = await one.customer("racing")
        runner.close()
        yield customer.id, Scene(one, runner, first, customer.key), Scene(two, runner, second, customer.key)
        for inside in (one, two):
            await idle(inside)
            await check_books(inside)


def where_it_is_noon() -> str:
    """A time zone in which no day ends while a test runs."""
    return f"Etc/GMT{datetime.now(UTC).hour - 12:+d}"


@pytest.mark.parametrize("leaving", [False, True], ids=["all stay", "some leave"])
async def test_64_racing_requests_in_two_gateways_spend_a_budget_and_not_one_token_more(
    leaving: bool, tmp_path: Path, database_url: str
) -> None:
    draw = random.Random(RACING)
    sizes = [(draw.randint(1, 60), draw.randint(5, 60)) for _ in range(RACING)]
    budget = sum(map(sum, sizes)) // 2
    async with two_gateways(tmp_path, database_url) as (tenant_id, one, two):
        await limit(one.inside, tenant_id, tokens_per_day=budget, time_zone=where_it_is_noon())
        prompts = [random_prompt(f"racing {number}", size[0]) for number, size in enumerate(sizes)]
        clients = await asyncio.gather(
            *(
                (one, two)[n % 2].ask(TEXT, n % 4 < 2, prompt=prompts[n], max_tokens=sizes[n][1])
                for n in range(RACING)
            )
        )
        answers = [asyncio.create_task(client.answer()) for client in clients]

        submits, aborts = one.arrived.of(Submit), one.arrived.of(Abort)
        # The model is closed: none has ended before all were decided.
        await until(lambda: len(submits) + sum(answer.done() for answer in answers) == RACING)
        await check_ledger(one.inside.gateway.directory.database)
        admitted = [n for n in range(RACING) if not answers[n].done()]
        refused = [n for n in range(RACING) if answers[n].done()]
        assert admitted
        assert refused
        for n in refused:
            said = answers[n].result()
            assert said.startswith(b"HTTP/1.1 429 ")
            assert b"running requests hold the rest" in said
            assert b"x-should-retry: true" in said

        leavers = admitted[::2] if leaving else []
        for _ in range(3):
            await one.step()
        for n in leavers:
            clients[n].leave()
        await until(lambda: len(aborts) == len(leavers))
        one.runner.open()
        for n in admitted:
            if n not in leavers:
                assert (await answers[n]).startswith(b"HTTP/1.1 200 ")
        await settled(one.inside)
        await settled(two.inside)

        used = await rows(one.inside, Usage)
        cost = sum(row.cost for row in used)
        assert cost <= budget
        ends = Counter(row.outcome for row in used)
        assert ends == Counter(finished=len(admitted) - len(leavers), cancelled=len(leavers))
        if not leaving:
            assert sorted(row.cost for row in used) == sorted(sum(sizes[n]) for n in admitted)
            # What was refused did not fit.
            assert budget - cost < min(sum(sizes[n]) for n in refused)
            return
        last = random_prompt("what those who left did not use", budget - cost - 1)
        for gateway, max_tokens, status in ((one, 2, b"429"), (two, 1, b"200"), (one, 1, b"429")):
            said = await (await gateway.ask(TEXT, False, prompt=last, max_tokens=max_tokens)).answer()
            assert said.startswith(b"HTTP/1.1 %s " % status)
        assert b"insufficient_quota" in said
        assert sum(row.cost for row in await rows(one.inside, Usage)) == budget
