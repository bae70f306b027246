"""Line 12 of the promise: wherever a gateway is killed, what it answered is there, once, and nothing is half done."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from gateway.http.errors import Unauthorized
from gateway.tenants import quotas as quotas_module
from gateway.tenants import schema
from gateway.tenants.database import Database
from gateway.tenants.directory import Directory
from gateway.tenants.keyring import SaltUnavailable
from gateway.tenants.quotas import Quotas
from gateway.tenants.registry import Registry
from gateway.tenants.tables import (
    AdminKey,
    ApiKey,
    Epoch,
    Fence,
    GatewayRow,
    Quota,
    QuotaState,
    Reservation,
    Tenant,
    Usage,
)
from tests.gateway.tenants.crasher import CACHED, FIRST_STEPS, MOST, OUTPUT, PROMPT_TOKENS, STEPS, Course, Crasher, Told
from tests.gateway.tenants.ledger import check_ledger
from tests.gateway.tenants.opened import bearer
from tests.gateway.tenants.test_quotas_race import until_true

pytestmark = pytest.mark.anyio

# A tenth of what is cached counts.
COST = PROMPT_TOKENS - CACHED + CACHED // 10 + OUTPUT
FIRST_MOMENTS = [f"{when} {step}" for step in FIRST_STEPS for when in ("before", "after")]
LATER_MOMENTS = [f"{when} {step}" for step in STEPS[len(FIRST_STEPS) :] for when in ("before", "after")]
MOMENTS = FIRST_MOMENTS + LATER_MOMENTS


@pytest.fixture(scope="module")
def crasher() -> Iterator[Crasher]:
    with Crasher() as crasher:
        yield crasher


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas_module, "BEAT_SECONDS", 0.005)


class After:
    """A gateway that starts after another one was killed, and finds what it left."""

    def __init__(self, told: Told, directory: Directory) -> None:
        self.told = told
        self.directory = directory
        self.database = directory.database
        self.registry = Registry(self.database, directory.keyring)

    @classmethod
    @asynccontextmanager
    async def started(cls, told: Told) -> AsyncIterator[After]:
        data_dir = Path(told.course.data_dir)
        database = await Database.open(told.course.url)
        try:
            directory = await Directory.open(database, data_dir / "kek")
            await directory.ensure_first_admin_key(data_dir)
            yield cls(told, directory)
        finally:
            await database.close()

    async def check(self) -> None:
        await self.check_first_admin_key()
        tenant = await self.tenant()
        await self.check_key(tenant)
        await self.check_limits(tenant)
        await self.check_secrets(tenant)
        await self.check_fences(tenant)
        await self.check_reservations()
        await check_ledger(self.database)

    async def all(self, table: Any, *conditions: Any) -> list[Any]:
        async with self.database.read() as session:
            return list((await session.scalars(select(table).where(*conditions))).all())

    async def check_first_admin_key(self) -> None:
        text = (Path(self.told.course.data_dir) / "admin-key").read_bytes().strip()
        await self.directory.authenticate_admin(bearer(text))
        assert len(await self.all(AdminKey)) == 1

    async def tenant(self) -> Tenant | None:
        found = await self.all(Tenant, Tenant.name == self.told.course.name)
        made, deleted = self.told.happened("tenant"), self.told.happened("delete")
        if made is not None and deleted is not None:
            assert len(found) == made - deleted
        living = {row.id for row in await self.all(Tenant)}
        for table in (ApiKey, Epoch, Quota, QuotaState):
            assert {row.tenant_id for row in await self.all(table)} <= living
        return found[0] if found else None

    async def check_key(self, tenant: Tenant | None) -> None:
        """It opens the door until its tenant is gone."""
        if tenant is None:
            if self.told.key:
                with pytest.raises(Unauthorized):
                    await self.directory.authenticate(bearer(self.told.key))
            return
        keys = await self.registry.keys(tenant.id, 10)
        assert keys is not None
        assert len(keys) in counts(self.told.happened("key"))
        if self.told.key:
            principal = await self.directory.authenticate(bearer(self.told.key))
            assert (principal.key_id, principal.tenant_id) == (keys[0].id, tenant.id)

    async def check_limits(self, tenant: Tenant | None) -> None:
        if tenant is not None:
            quotas = await self.all(Quota, Quota.tenant_id == tenant.id)
            assert sum(quota.key_id is None for quota in quotas) in counts(self.told.happened("tenant limits"))
            assert sum(quota.key_id is not None for quota in quotas) in counts(self.told.happened("key limits"))

    async def check_secrets(self, tenant: Tenant | None) -> None:
        """Those of the tenant's epoch open; whatever was before it is gone, and no byte of it is left on disk."""
        if tenant is not None:
            assert tenant.epoch - 1 in counts(self.told.happened("rotate"))
            await self.directory.salt(tenant.id, tenant.epoch)
            await self.directory.offload_key(tenant.id, tenant.epoch)
        for epoch in range(1, tenant.epoch if tenant else 3):
            for secret in (self.directory.salt, self.directory.offload_key):
                with pytest.raises(SaltUnavailable):
                    await secret(self.told.tenant_id, epoch)
        destroyed = self.told.destroyed[: (tenant.epoch - 1) * 2 if tenant else None]
        content = files(Path(self.told.course.data_dir))
        assert not [secret for secret in destroyed if secret in content]

    async def check_fences(self, tenant: Tenant | None) -> None:
        """What a store did not confirm is pending, and goes once it is asked again."""
        told, account = self.told, tenant.account if tenant else self.told.account
        if tenant is None and told.account:
            change, epoch = "fence of deletion", None
        elif tenant is not None and tenant.epoch == 2:
            change, epoch = "fence", 2
        else:
            assert await self.all(Fence, Fence.account == account) == []
            return
        pending = [fence for fence in await self.directory.pending_fences() if fence.account == account]
        done = told.happened(f"{change} done")
        assert 1 - len(pending) in counts(done)
        assert [fence.epoch for fence in pending] == [epoch] * len(pending)
        assert pending or f"after {change}" in told.passed
        for fence in pending:
            await self.directory.fence_done(fence)
        assert [fence for fence in await self.directory.pending_fences() if fence.account == account] == []
        if tenant is not None:
            salts = await self.registry.salts(tenant.id, 10)
            assert salts is not None
            assert [salt.state for salt in salts] == ["dropped", "active"]

    async def check_reservations(self) -> None:
        """What was settled is booked as it was, what was only reserved as lost, and what was neither not at all."""
        told, name = self.told, self.told.course.name
        quotas = Quotas(self.database)
        await quotas.start()
        await until_true(lambda: self.count(Reservation))
        await until_true(lambda: self.count(GatewayRow, GatewayRow.id != quotas.gateway_id))
        await quotas.close()
        lost = 0
        for id, which in ((f"{name}_1", ""), (f"{name}_2", " another")):
            booked = [(row.outcome, row.cost) for row in await self.all(Usage, Usage.id == id)]
            assert len(booked) in counts(told.happened(f"reserve{which}")), (id, booked)
            settled = told.happened(f"settle{which}")
            outcomes = {True: ["finished"], False: ["lost"], None: ["finished", "lost"]}[settled]
            for outcome, cost in booked:
                assert outcome in outcomes
                assert cost == (COST if outcome == "finished" else MOST)
                lost += outcome == "lost"
        assert quotas.lost_reservations == lost
        assert not await self.count(GatewayRow)

    async def count(self, table: Any, *conditions: Any) -> int:
        async with self.database.read() as session:
            return int(await session.scalar(select(func.count()).select_from(table).where(*conditions)) or 0)


def counts(happened: bool | None) -> set[int]:
    """How many rows there may be of what happened, or did not, or may have."""
    return {0, 1} if happened is None else {int(happened)}


def files(data_dir: Path) -> bytes:
    """Every byte of a SQLite database, read by another process: who closes such a file gives up its own locks."""
    return subprocess.check_output(["cat", "/dev/null", *data_dir.glob("saltern.db*")])


async def check(told: Told) -> None:
    """Nothing but a new start, and a wait for the dead gateway to be missed, makes everything right."""
    # Who finds the schema begins behind it.
    assert told.passed in (MOMENTS[: len(told.passed)], MOMENTS[2 : 2 + len(told.passed)])
    async with After.started(told) as after:
        await after.check()


async def test_a_course_that_lives_passes_each_moment_once(
    crasher: Crasher, database_url: str, tmp_path: Path
) -> None:
    told = crasher.run(Course(database_url, str(tmp_path), "ten"))
    assert not told.killed
    assert told.passed == MOMENTS
    assert told.answered == list(STEPS)
    await check(told)


@pytest.mark.parametrize("moment", FIRST_MOMENTS)
async def test_line_12_a_first_start_killed_at_any_commit_is_made_good_by_the_next(
    moment: str, crasher: Crasher, database_url: str, tmp_path: Path
) -> None:
    told = crasher.run(Course(database_url, str(tmp_path), "ten", die_at=moment))
    assert told.killed
    assert told.passed[-1] == moment
    assert await schema.database_version(database_url) == (schema.newest() if told.happened("schema") else None)
    await check(told)


async def test_line_12_killed_at_any_commit_or_message(crasher: Crasher, database_url: str, tmp_path: Path) -> None:
    await check(crasher.run(Course(database_url, str(tmp_path), "lives")))
    for number, moment in enumerate(LATER_MOMENTS):
        told = crasher.run(Course(database_url, str(tmp_path), f"ten{number}", die_at=moment))
        assert told.killed
        assert told.passed[-1] == moment
        await check(told)


@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.once)])
async def test_line_12_killed_at_any_moment_at_all(
    kills: int, crasher: Crasher, database_url: str, tmp_path: Path
) -> None:
    rng = random.Random(12)
    for number in range(kills):
        # One that lives, now and then, shows how long they take now.
        if number % 20 == 0:
            began = time.monotonic()
            assert not crasher.run(Course(database_url, str(tmp_path), f"lives{number}")).killed
            seconds = time.monotonic() - began
        course = Course(database_url, str(tmp_path), f"ten{number}", die_within=rng.random() * seconds)
        await check(crasher.run(course))
