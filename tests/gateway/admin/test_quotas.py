"""Limits as administrators set them, and what was used as they and the tenant read it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from gateway.tenants.ledger import Ask, Settlement
from gateway.tenants.quotas import Quotas
from gateway.tenants.tables import QuotaState
from tests.gateway.admin.served import TENANTS, Served, served
from tests.gateway.admin.test_routes import refused

pytestmark = pytest.mark.anyio

NOTHING_SET: dict[str, Any] = {
    "requests_per_minute": None,
    "tokens_per_minute": None,
    "concurrent_requests": None,
    "tokens_per_day": None,
    "tokens_per_month": None,
    "time_zone": "UTC",
}
OF_TENANTS: dict[str, Any] = {
    "max_context_tokens": None,
    "max_output_tokens": None,
    "models": None,
    "cached_token_weight": 100,
    "device_reserved_tokens": 0,
    "device_max_tokens": None,
    "weight": 1.0,
    "strict": False,
    "queue_wait_seconds": 30,
}


async def scopes(admin: Served) -> tuple[str, str]:
    """Paths of the limits of a tenant and of its key."""
    tenant = await admin.tenant("demo")
    key = (await admin.client.post(f"{TENANTS}/{tenant['id']}/keys", json={})).json()
    at = f"{TENANTS}/{tenant['id']}"
    return f"{at}/quotas", f"{at}/keys/{key['id']}/quotas"


async def test_limits_are_read_set_and_changed(tmp_path: Path) -> None:
    async with served(tmp_path) as admin:
        of_tenant, of_key = await scopes(admin)
        for path, all_of_it in ((of_tenant, NOTHING_SET | OF_TENANTS), (of_key, NOTHING_SET)):
            assert (await admin.client.get(path)).json() == all_of_it
            put = await admin.client.put(path, json={"tokens_per_day": 500, "time_zone": "Asia/Tokyo"})
            wanted = all_of_it | {"tokens_per_day": 500, "time_zone": "Asia/Tokyo"}
            assert (put.status_code, put.json()) == (200, wanted)
            patched = await admin.client.patch(path, json={"tokens_per_minute": 7, "tokens_per_day": None})
            wanted |= {"tokens_per_minute": 7, "tokens_per_day": None}
            assert patched.json() == (await admin.client.get(path)).json() == wanted
            merged = await admin.client.patch(
                path, content=b'{"time_zone": "UTC"}', headers={"content-type": "application/merge-patch+json"}
            )
            assert merged.json() == wanted | {"time_zone": "UTC"}
            assert (await admin.client.put(path, json={})).json() == all_of_it
        body = {"models": ["a", "b"], "max_output_tokens": 9, "max_context_tokens": 10, "cached_token_weight": 0}
        of_cache = {"device_reserved_tokens": 17, "device_max_tokens": 33, "weight": 2.5, "queue_wait_seconds": 5}
        wanted = NOTHING_SET | OF_TENANTS | body | of_cache
        assert (await admin.client.put(of_tenant, json=body | of_cache)).json() == wanted
        strict = {"device_reserved_tokens": 33, "strict": True, "weight": 1}
        assert (await admin.client.patch(of_tenant, json=strict)).json() == wanted | strict


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens_per_day", 0),
        ("tokens_per_day", -1),
        ("tokens_per_day", 1.5),
        ("tokens_per_day", "1"),
        ("requests_per_minute", 10**12 + 1),
        ("cached_token_weight", 1001),
        ("time_zone", "Nowhere/Nowhere"),
        ("time_zone", None),
        ("time_zone", "../../etc/passwd"),
        ("time_zone", "'; DROP TABLE quotas; --"),
        ("time_zone", "a\x00b"),
        ("models", [1]),
        ("device_max_tokens", 0),
        ("device_reserved_tokens", -1),
        ("device_reserved_tokens", None),
        ("weight", 0),
        ("weight", -1.0),
        ("weight", 1e-300),
        ("weight", 1001),
        ("strict", True),
        ("strict", 1),
        ("queue_wait_seconds", 0),
        ("queue_wait_seconds", 601),
        ("host_reserved_tokens", 5),
        ("host_max_tokens", 5),
        ("nothing_like_it", 1),
    ],
)
async def test_bad_limits_are_refused_by_name_and_change_nothing(field: str, value: Any, tmp_path: Path) -> None:
    async with served(tmp_path) as admin:
        of_tenant, of_key = await scopes(admin)
        for path in (of_tenant, of_key):
            before = (await admin.client.get(path)).json()
            for send in (admin.client.put, admin.client.patch):
                error = refused(await send(path, json={field: value, "tokens_per_month": 5}), 400)
                assert (error["param"] or "").startswith(field)
            assert (await admin.client.get(path)).json() == before
        for field in OF_TENANTS:
            assert "tenant" in (refused(await admin.client.put(of_key, json={field: 5}), 400)["message"] or "")


async def test_a_stale_etag_changes_nothing(tmp_path: Path) -> None:
    async with served(tmp_path) as admin:
        for path in await scopes(admin):
            first = (await admin.client.get(path)).headers["etag"]
            second = (await admin.client.put(path, json={"tokens_per_day": 5})).headers["etag"]
            assert first != second
            for send in (admin.client.put, admin.client.patch):
                refused(await send(path, json={"tokens_per_day": 6}, headers={"if-match": first}), 412)
            assert (await admin.client.get(path)).headers["etag"] == second
            for tags in (second, f'"other", {second}', "*"):
                answer = await admin.client.put(path, json={"tokens_per_day": 5}, headers={"if-match": tags})
                assert answer.status_code == 200


async def test_what_does_not_exist_has_no_limits(tmp_path: Path) -> None:
    async with served(tmp_path) as admin:
        of_tenant, of_key = await scopes(admin)
        other = (await admin.tenant("other"))["id"]
        key_id = of_key.split("/")[-2]
        for path in (
            f"{TENANTS}/ten_0/quotas",
            f"{TENANTS}/{other}/keys/{key_id}/quotas",
            f"{TENANTS}/{key_id}/quotas",
            f"{TENANTS}/' OR 1=1 --/quotas",
            f"{of_tenant.removesuffix('/quotas')}/keys/key_0/quotas",
        ):
            for method in ("GET", "PUT", "PATCH"):
                refused(await admin.client.request(method, path, json={}), 404)


async def test_b161_changing_limits_leaves_what_was_used(tmp_path: Path) -> None:
    async with served(tmp_path) as admin:
        of_tenant, of_key = await scopes(admin)
        tenant_id, key_id = of_tenant.split("/")[-2], of_key.split("/")[-2]
        await admin.client.put(of_tenant, json={"tokens_per_day": 1000, "tokens_per_minute": 5000})
        await admin.client.put(of_key, json={"tokens_per_day": 1000})
        database = admin.door.directory.database
        quotas = Quotas(database)
        await quotas.start()
        await quotas.reserve(Ask("res_long", tenant_id, key_id, 100, 300, 300))
        await admin.client.put(of_key, json={"tokens_per_day": 150})
        await admin.client.patch(of_tenant, json={"tokens_per_day": 800})
        await quotas.settle(Settlement("res_long", tenant_id, key_id, "finished", 100, 50, 90))
        async with database.read() as session:
            used = (await session.scalars(select(QuotaState.day_used))).all()
        assert used == [145, 145]
        assert (await admin.client.get(of_key)).json()["tokens_per_day"] == 150
        assert (await admin.client.get(of_tenant)).json()["tokens_per_day"] == 800
        await quotas.close()


async def test_usage_is_told_by_hour_and_by_day(tmp_path: Path) -> None:
    hour = 3_600_000
    at = int(datetime(2030, 5, 17, 22, tzinfo=UTC).timestamp() * 1000)
    clock = {"now": at}
    async with served(tmp_path) as admin:
        of_tenant, of_key = await scopes(admin)
        tenant_id, key_id = of_tenant.split("/")[-2], of_key.split("/")[-2]
        quotas = Quotas(admin.door.directory.database, lambda: clock["now"])
        await quotas.start()
        for number, later in enumerate((0, 1, hour, 2 * hour)):
            clock["now"] = at + later
            await quotas.reserve(Ask(f"res_{number}", tenant_id, key_id, 100, 300, 300))
            await quotas.settle(Settlement(f"res_{number}", tenant_id, key_id, "finished", 100, 50, 90))
        await quotas.close()
        path = f"{TENANTS}/{tenant_id}/usage"
        span = {"start": "2030-05-01T00:00:00Z", "end": "2030-05-20T00:00:00Z"}
        each = {"requests": 1, "input_tokens": 100, "cached_tokens": 50, "output_tokens": 90, "cost": 145}

        def times(count: int) -> dict[str, int]:
            return {name: count * value for name, value in each.items()}

        days = (await admin.client.get(path, params=span)).json()
        assert days == {
            "data": [{"start": "2030-05-17T00:00:00Z", **times(3)}, {"start": "2030-05-18T00:00:00Z", **times(1)}],
            "total": times(4),
        }
        hours = (await admin.client.get(path, params=span | {"bucket": "hour"})).json()
        assert [(row["start"], row["requests"]) for row in hours["data"]] == [
            ("2030-05-17T22:00:00Z", 2), ("2030-05-17T23:00:00Z", 1), ("2030-05-18T00:00:00Z", 1),
        ]  # fmt: skip
        assert hours["total"] == days["total"]
        nothing = (await admin.client.get(path)).json()
        assert nothing == {"data": [], "total": times(0)}
        for bad in (
            {"bucket": "week"},
            {"start": "yesterday"},
            {"start": "2030-05-01"},
            {"limit": "5"},
            {"start": span["end"], "end": span["start"]},
            {"start": "2000-01-01T00:00:00Z"},
            {"end": "0001-01-02T00:00:00Z"},
        ):
            refused(await admin.client.get(path, params=bad), 400)
        refused(await admin.client.get(f"{TENANTS}/ten_0/usage"), 404)
