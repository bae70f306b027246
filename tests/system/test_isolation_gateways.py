"""What one gateway has answered is true in the other: a rotation, a revoked key. On both databases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.system.in_process import Customer, InProcess, in_process, second_gateway
from tests.system.support import random_prompt

pytestmark = pytest.mark.anyio

TWO_BLOCKS = 33
CLIENTS = 8
ATTEMPTS = 1000
# So many that there are as many attempts: at least three of each client around a rotation, four around a deletion.
ROTATIONS = -(-ATTEMPTS // (3 * CLIENTS))
DELETIONS = -(-ATTEMPTS // (4 * CLIENTS))


@asynccontextmanager
async def two_gateways(
    folder: Path, model_dir: Path, database_url: str
) -> AsyncIterator[tuple[InProcess, InProcess]]:
    async with (
        in_process(folder, model_dir, database_url=database_url) as one,
        second_gateway(one, folder, database_url=database_url) as two,
    ):
        yield one, two


class Asking:
    """Clients of one gateway that ask without a pause, until told to stop."""

    def __init__(self, gateway: InProcess, customer: Customer, prompt: list[int]) -> None:
        self.attempts = 0
        #: (number of what had been answered when it was sent, status, cached tokens)
        self.answers: list[tuple[int, int, int]] = []
        self.answered = 0
        self._gateway = gateway
        self._customer = customer
        self._prompt = prompt
        self._over = False
        self._tasks = [asyncio.create_task(self._ask()) for _ in range(CLIENTS)]

    async def _ask(self) -> None:
        while not self._over:
            sent_after = self.answered
            answer = await self._gateway.complete(self._customer, self._prompt)
            cached = 0
            if answer.status_code == 200:
                cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            self.answers.append((sent_after, answer.status_code, cached))
            # A refusal in one process needs to wait for nothing, and would let nobody else run.
            await asyncio.sleep(0)

    async def some(self, more: int) -> None:
        """Wait until so many more answers have come."""
        wanted = len(self.answers) + more
        while len(self.answers) < wanted:
            await asyncio.sleep(0)
            if any(task.done() for task in self._tasks):
                await asyncio.gather(*self._tasks)

    async def end(self) -> None:
        self._over = True
        await asyncio.gather(*self._tasks)


async def test_after_a_rotation_the_other_gateway_serves_no_old_epoch(
    tmp_path: Path, default_model: Path, database_url: str
) -> None:
    async with two_gateways(tmp_path, default_model, database_url) as (one, two):
        customer, prompt = await one.customer("rotating"), random_prompt("two gateways rotate", TWO_BLOCKS)
        asking = Asking(two, customer, prompt)
        epochs = 1
        for _ in range(ROTATIONS):
            await asking.some(2 * CLIENTS)
            epochs = (await one.rotate(customer))["epoch"]
            # What the index has now is of the new epoch, or nothing yet.
            assert one.blocks(customer.account).keys() <= {epochs}
            asking.answered += 1
            await asking.some(CLIENTS)
        await asking.end()
        assert {status for _, status, _ in asking.answers} == {200}
        assert len(asking.answers) >= ATTEMPTS
        # The control: it does hit between rotations, and after each one somebody starts cold.
        hits = [cached for _, _, cached in asking.answers if cached]
        assert set(hits) <= {16, 32}
        assert len(hits) > ROTATIONS
        for rotation in range(1, ROTATIONS + 1):
            assert any(not cached for sent_after, _, cached in asking.answers if sent_after >= rotation - 1)
        await one.check()


async def test_after_a_key_is_deleted_the_other_gateway_refuses_it(
    tmp_path: Path, default_model: Path, database_url: str
) -> None:
    async with two_gateways(tmp_path, default_model, database_url) as (one, two):
        prompt, attempts = random_prompt("two gateways revoke", TWO_BLOCKS), 0
        for number in range(DELETIONS):
            customer = await one.customer(f"revoked-{number}")
            asking = Asking(two, customer, prompt)
            await asking.some(2 * CLIENTS)
            principal = await two.gateway.directory.authenticate([(b"x-api-key", customer.key.encode())])
            path = f"/admin/v1/tenants/{customer.id}/keys/{principal.key_id}"
            assert (await one.admin.delete(path)).status_code == 204
            asking.answered += 1
            await asking.some(2 * CLIENTS)
            await asking.end()
            before = [status for sent_after, status, _ in asking.answers if sent_after == 0]
            assert {status for sent_after, status, _ in asking.answers if sent_after} == {401}
            # The control: it was served until then.
            assert before.count(200) >= CLIENTS
            assert set(before) <= {200, 401}
            attempts += len(asking.answers)
        assert attempts >= ATTEMPTS
        await one.check()
