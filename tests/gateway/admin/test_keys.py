"""Keys that change: disabled, narrowed, expired, given another secret. The next request meets what was decided."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from gateway.http.errors import Unauthorized
from gateway.tenants.directory import Principal
from tests.gateway.admin.served import TENANTS, Served, served
from tests.gateway.admin.test_routes import refused
from tests.gateway.tenants.opened import bearer

pytestmark = pytest.mark.anyio


async def key_of(admin: Served, **fields: Any) -> tuple[str, dict[str, Any]]:
    """The path of a new tenant's new key, and the key."""
    tenant = await admin.tenant("demo")
    created = await admin.client.post(f"{TENANTS}/{tenant['id']}/keys", json=fields)
    return created.headers["location"], created.json()


async def opens(admin: Served, secret: str) -> Principal | None:
    try:
        return await admin.door.directory.authenticate(bearer(secret.encode()))
    except Unauthorized:
        return None


async def test_a_key_is_shown_and_changed(tmp_path: Path) -> None:
    async with served(tmp_path) as admin:
        path, key = await key_of(admin, name="first")
        secret = key.pop("secret")
        assert (await admin.client.get(path)).json() == key
        changed = await admin.client.patch(path, json={"name": None, "scopes": ["usage:read", "usage:read"]})
        assert changed.json() == key | {"name": None, "scopes": ["usage:read"]}
        principal = await opens(admin, secret)
        assert principal is not None
        assert principal.scopes == {"usage:read"}
        assert (await admin.client.patch(path, json={})).json() == changed.json()
        for bad in ({"name": ""}, {"name": "a\n"}, {"scopes": []}, {"scopes": ["admin"]}, {"status": "revoked"},
                    {"expires_at": "2000-01-01T00:00:00Z"}, {"secret": "x"}, {"tenant_id": "ten_0"}):  # fmt: skip
            refused(await admin.client.patch(path, json=bad), 400)
        assert (await admin.client.get(path)).json() == changed.json()


async def test_b161_a_disabled_key_opens_nothing_until_it_is_active_again(tmp_path: Path) -> None:
    async with served(tmp_path) as admin:
        path, key = await key_of(admin)
        assert await opens(admin, key["secret"])
        assert (await admin.client.patch(path, json={"status": "disabled"})).json()["status"] == "disabled"
        assert await opens(admin, key["secret"]) is None
        assert (await admin.client.patch(path, json={"status": "active"})).json()["status"] == "active"
        assert await opens(admin, key["secret"])


async def test_b164_the_secret_before_a_rotation_opens_until_its_deadline_and_not_at_it(tmp_path: Path) -> None:
    async with served(tmp_path) as admin:
        path, key = await key_of(admin)
        rotated = await admin.client.post(path + "/rotate", json={"grace_seconds": 10})
        assert rotated.status_code == 200
        assert rotated.headers["cache-control"] == "no-store"
        other = rotated.json()
        assert other["id"] == key["id"]
        assert other["secret"] != key["secret"]
        assert other["secret"].startswith("sk-saltern-" + key["id"].removeprefix("key_"))
        assert other["last4"] == other["secret"][-4:]
        for secret in (key["secret"], other["secret"]):
            principal = await opens(admin, secret)
            assert principal is not None
            assert principal.key_id == key["id"]
        async with admin.door.directory.database.read() as session:
            until = await session.scalar(text("SELECT previous_until FROM api_keys"))
        clock = admin.door.clock
        deadline = clock.now.fromisoformat(until).replace(tzinfo=clock.now.tzinfo)
        # The clock moves by a microsecond whenever it is read.
        clock.now = deadline - timedelta(milliseconds=1)
        assert await opens(admin, key["secret"])
        clock.now = deadline - timedelta(microseconds=1)
        assert await opens(admin, key["secret"]) is None
        assert await opens(admin, other["secret"])


async def test_a_rotation_without_grace_ends_every_secret_before(tmp_path: Path) -> None:
    async with served(tmp_path) as admin:
        path, first = await key_of(admin)
        second = (await admin.client.post(path + "/rotate", json={"grace_seconds": 600})).json()
        third = (await admin.client.post(path + "/rotate")).json()
        assert await opens(admin, first["secret"]) is None
        assert await opens(admin, second["secret"]) is None
        assert await opens(admin, third["secret"])
        for bad in ({"grace_seconds": -1}, {"grace_seconds": 604_801}, {"grace": 1}):
            refused(await admin.client.post(path + "/rotate", json=bad), 400)
        for method, where, body in (("GET", path, None), ("PATCH", path, {}), ("POST", path + "/rotate", None)):
            foreign = where.replace(path.split("/")[-3], (await admin.tenant(f"other-{method.lower()}"))["id"])
            refused(await admin.client.request(method, foreign, json=body), 404)


async def test_b164_a_time_that_is_none_is_over(tmp_path: Path) -> None:
    async with served(tmp_path) as admin:
        path, key = await key_of(admin)
        other = (await admin.client.post(path + "/rotate", json={"grace_seconds": 600})).json()
        assert await opens(admin, key["secret"])
        database = admin.door.directory.database
        for column, secret in (("previous_until", key["secret"]), ("expires_at", other["secret"])):
            assert await opens(admin, secret)
            async with database.write() as session:
                await session.execute(text(f"UPDATE api_keys SET {column} = 'zzz'"))
            assert await opens(admin, secret) is None
        assert (await admin.client.get(path)).json()["status"] == "expired"
        assert (await admin.client.get(path.rpartition("/")[0])).json()["data"][0]["status"] == "expired"
