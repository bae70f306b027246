"""Versions of the schema: made, checked, upgraded, and interrupted."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import select, text
from typer.testing import CliRunner

from gateway.cli import app
from gateway.tenants import engines, schema
from gateway.tenants.database import Database
from gateway.tenants.directory import ADMIN_SCOPES
from gateway.tenants.engines import CannotOpen
from gateway.tenants.limits import NO_LIMITS
from gateway.tenants.schema import SchemaTooNew, SchemaTooOld
from gateway.tenants.tables import AdminKey, ApiKey, Quota, QuotaState, Tenant
from tests.gateway.tenants import killed_upgrades

NEWEST = schema.newest()


async def execute(url: str, statement: str) -> None:
    engine = engines.engine(url)
    async with engine.begin() as connection:
        await connection.execute(text(statement))
    await engine.dispose()


async def check_upgraded(url: str) -> None:
    """What `killed_upgrades.write_oldest` wrote is there, with a quota state for each tenant.

    The admin key that could do everything still can; the other one can do no more than it could.
    """
    database = await Database.open(url)
    async with database.read() as session:
        tenants = (await session.scalars(select(Tenant).order_by(Tenant.id))).all()
        assert [(row.id, row.account, row.created_at) for row in tenants] == [
            (row["id"], row["account"], row["created_at"]) for row in killed_upgrades.TENANTS
        ]
        assert list((await session.scalars(select(ApiKey.scopes))).all()) == [["usage:read"]]
        scopes_of = dict((await session.execute(select(AdminKey.id, AdminKey.scopes))).all())
        assert set(scopes_of["key_all"]) == ADMIN_SCOPES
        assert scopes_of["key_some"] == killed_upgrades.OLD_SCOPES[1:]
        states = (await session.scalars(select(QuotaState).order_by(QuotaState.scope))).all()
        assert [(row.scope, row.tenant_id, row.key_id, row.day_used) for row in states] == [
            (row["id"], row["id"], None, 0) for row in killed_upgrades.TENANTS
        ]
    await database.close()


@pytest.mark.anyio
async def test_b190_many_that_start_at_once_make_the_schema_once(database_url: str) -> None:
    for database in await asyncio.gather(*(Database.open(database_url) for _ in range(6))):
        await database.close()
    assert await schema.database_version(database_url) == NEWEST


@pytest.mark.anyio
async def test_b190_many_that_upgrade_at_once_upgrade_once(database_url: str) -> None:
    await killed_upgrades.write_oldest(database_url)
    before = await asyncio.gather(*(schema.upgrade_database(database_url) for _ in range(6)))
    assert sorted(before, key=str) == ["0001"] + [NEWEST] * 5
    await check_upgraded(database_url)


@pytest.mark.anyio
async def test_limits_that_were_set_before_there_were_any_of_the_cache_have_none(database_url: str) -> None:
    await killed_upgrades.write_oldest(database_url)
    await killed_upgrades.upgrade_to(database_url, "0002")
    await execute(
        database_url,
        "INSERT INTO quotas (scope, tenant_id, time_zone, cached_token_weight) VALUES ('ten_a', 'ten_a', 'UTC', 70)",
    )
    await schema.upgrade_database(database_url)
    database = await Database.open(database_url)
    async with database.read() as session:
        (row,) = (await session.scalars(select(Quota))).all()
        assert {name: getattr(row, name) for name in NO_LIMITS} == {**NO_LIMITS, "cached_token_weight": 70}
        assert row.revision == 0
    await database.close()


@pytest.mark.anyio
async def test_another_schema_is_refused_naming_both_and_the_remedy(database_url: str) -> None:
    await killed_upgrades.write_oldest(database_url)
    with pytest.raises(SchemaTooOld, match=rf"0001.*{NEWEST}.*saltern db upgrade"):
        await Database.open(database_url)
    assert await schema.upgrade_database(database_url) == "0001"
    await (await Database.open(database_url)).close()
    await execute(database_url, "UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(SchemaTooNew, match=rf"9999.*{NEWEST}.*newer"):
        await Database.open(database_url)
    with pytest.raises(SchemaTooNew, match=rf"9999.*{NEWEST}.*newer"):
        await schema.upgrade_database(database_url)
    assert await schema.database_version(database_url) == "9999"


@pytest.mark.parametrize("begin", ["empty", "oldest"])
def test_b191_a_migration_that_is_killed_anywhere_leaves_the_old_schema_or_the_new(
    database_url: str, begin: str
) -> None:
    if begin == "oldest":
        asyncio.run(killed_upgrades.write_oldest(database_url))
    command = [sys.executable, "-m", "tests.gateway.tenants.killed_upgrades", database_url]
    done = subprocess.run(command, text=True, capture_output=True, check=False, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr
    seen = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(seen) > 10
    before = {"empty": None, "oldest": "0001"}[begin]
    assert [version for version, _ in seen] == [before] * (len(seen) - 1) + [NEWEST]
    assert len({tuple(tables) for _, tables in seen[:-1]}) == 1
    assert set(seen[-1][1]) > set(seen[0][1])
    if begin == "oldest":
        asyncio.run(check_upgraded(database_url))


def saltern(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["db", *arguments])
    return done.exit_code, done.output


def test_the_command_line_checks_and_upgrades(database_url: str, tmp_path: Path) -> None:
    where = "--data-dir", str(tmp_path), "--database-url", database_url
    asyncio.run(killed_upgrades.write_oldest(database_url))
    assert saltern("check", *where) == (1, f"database: 0001\nsaltern: {NEWEST}\n")
    assert saltern("upgrade", *where) == (0, f"the database went from schema 0001 to {NEWEST}\n")
    assert saltern("check", *where) == (0, f"database: {NEWEST}\nsaltern: {NEWEST}\n")
    assert saltern("upgrade", *where) == (0, f"the database has schema {NEWEST} already\n")


def test_a_check_makes_no_file(tmp_path: Path) -> None:
    code, told = saltern("check", "--data-dir", str(tmp_path))
    assert code == 2
    assert "no such file" in told
    assert list(tmp_path.iterdir()) == []
    assert saltern("upgrade", "--data-dir", str(tmp_path))[0] == 0
    assert saltern("check", "--data-dir", str(tmp_path))[0] == 0
    with pytest.raises(CannotOpen):
        asyncio.run(schema.database_version("nonsense"))
