import base64
from datetime import datetime
from pathlib import Path

import httpx
import pytest
from sqlalchemy import text

from gateway.http.errors import Unauthorized
from gateway.tenants import api_keys
from gateway.tenants.fences import Dropped, PendingFence
from tests.gateway.admin.served import TENANTS, Served, served
from tests.gateway.tenants.opened import bearer

pytestmark = pytest.mark.anyio

ROUTES = [
    ("POST", TENANTS, "tenants:write"),
    ("GET", TENANTS, "tenants:read"),
    ("GET", TENANTS + "/{tenant}", "tenants:read"),
    ("DELETE", TENANTS + "/{tenant}", "tenants:write"),
    ("POST", TENANTS + "/{tenant}/keys", "keys:write"),
    ("GET", TENANTS + "/{tenant}/keys", "keys:read"),
    ("GET", TENANTS + "/{tenant}/keys/key_0", "keys:read"),
    ("PATCH", TENANTS + "/{tenant}/keys/key_0", "keys:write"),
    ("POST", TENANTS + "/{tenant}/keys/key_0/rotate", "keys:write"),
    ("DELETE", TENANTS + "/{tenant}/keys/key_0", "keys:write"),
    ("GET", TENANTS + "/{tenant}/salts", "salts:read"),
    ("POST", TENANTS + "/{tenant}/salts/rotate", "salts:write"),
    ("GET", TENANTS + "/{tenant}/quotas", "quotas:read"),
    ("PUT", TENANTS + "/{tenant}/quotas", "quotas:write"),
    ("PATCH", TENANTS + "/{tenant}/quotas", "quotas:write"),
    ("GET", TENANTS + "/{tenant}/keys/key_0/quotas", "quotas:read"),
    ("PUT", TENANTS + "/{tenant}/keys/key_0/quotas", "quotas:write"),
    ("PATCH", TENANTS + "/{tenant}/keys/key_0/quotas", "quotas:write"),
    ("GET", TENANTS + "/{tenant}/cache", "cache:read"),
    ("DELETE", TENANTS + "/{tenant}/cache", "cache:write"),
    ("GET", TENANTS + "/{tenant}/usage", "usage:read"),
]


def refused(answer: httpx.Response, status: int) -> dict[str, str | None]:
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, str | None] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def test_a_tenant_is_created_shown_listed_and_deleted(tmp_path: Path) -> None:
    async with served(tmp_path) as admin:
        created = await admin.client.post(TENANTS, json={"name": "demo"})
        tenant = created.json()
        assert created.status_code == 201
        assert list(tenant) == ["id", "name", "status", "created_at", "updated_at", "normalisation", "alignment"]
        assert tenant["id"].startswith("ten_")
        assert (tenant["name"], tenant["status"]) == ("demo", "active")
        assert (tenant["normalisation"], tenant["alignment"]) == ("off", "off")
        assert tenant["created_at"].endswith("Z")
        assert (await admin.client.get(created.headers["location"])).json() == tenant
        assert (await admin.client.get(TENANTS)).json() == {"data": [tenant], "next_cursor": None}
        deleted = await admin.client.delete(f"{TENANTS}/{tenant['id']}")
        assert (deleted.status_code, deleted.content) == (204, b"")
        assert refused(await admin.client.get(f"{TENANTS}/{tenant['id']}"), 404)["code"] == "not_found"
        assert (await admin.client.get(TENANTS)).json()["data"] == []


async def test_a_name_taken_is_409_and_free_again_after_deletion(tmp_path: Path) -> None:
    async with served(tmp_path) as admin:
        tenant = await admin.tenant("demo")
        error = refused(await admin.client.post(TENANTS, json={"name": "demo"}), 409)
        assert error["param"] == "name"
        assert "'demo'" in (error["message"] or "")
        await admin.client.delete(f"{TENANTS}/{tenant['id']}")
        assert (await admin.tenant("demo"))["id"] != tenant["id"]


BAD_NAMES = ["", "A", "a b", "a/b", "a_b", "a\n", "ä", "a" * 65, "'; DROP TABLE tenants; --", None, 1]


async def test_names_are_1_to_64_of_a_few_characters(tmp_path: Path) -> None:
    async with served(tmp_path) as admin:
        for name in BAD_NAMES:
            assert refused(await admin.client.post(TENANTS, json={"name": name}), 400)["param"] == "name"
        await admin.tenant("a" * 64)
        await admin.tenant("-0-")


NEVER_SET_FROM_OUTSIDE = ["salt", "cache_salt", "epoch", "account", "offload_key", "id", "status"]


async def test_b166_no_admin_body_may_carry_a_salt_or_anything_unknown(tmp_path: Path) -> None:
    async with served(tmp_path) as admin:
        tenant = await admin.tenant("demo")
        at = f"{TENANTS}/{tenant['id']}"
        for field in NEVER_SET_FROM_OUTSIDE:
            for value in ("", " ", "c2FsdA==", None, 1):
                refused(await admin.client.post(TENANTS, json={"name": "other", field: value}), 400)
                refused(await admin.client.post(at + "/keys", json={field: value}), 400)
                refused(await admin.client.post(at + "/salts/rotate", json={field: value}), 400)
        assert [row["name"] for row in (await admin.client.get(TENANTS)).json()["data"]] == ["demo"]
        assert (await admin.client.get(at + "/keys")).json()["data"] == []
        assert [row["epoch"] for row in (await admin.client.get(at + "/salts")).json()["data"]] == [1]
        assert (await admin.client.post(at + "/salts/rotate", json={})).status_code == 200
        assert (await admin.client.post(at + "/keys", json={})).status_code == 201


async def test_tenants_are_found_by_name(tmp_path: Path) -> None:
    async with served(tmp_path) as admin:
        tenant = await admin.tenant("demo")
        await admin.tenant("demo-2")
        assert (await admin.client.get(TENANTS, params={"name": "demo"})).json()["data"] == [tenant]
        assert (await admin.client.get(TENANTS, params={"name": "nobody"})).json()["data"] == []
        for name in ("' OR 1=1 --", "demo\x00", "%", ""):
            refused(await admin.client.get(TENANTS, params={"name": name}), 400)


async def test_lists_come_in_pages_in_the_order_they_were_made(tmp_path: Path) -> None:
    async with served(tmp_path) as admin:
        names = [f"t{number}" for number in range(5)]
        for name in names:
            tenant = await admin.tenant(name)
        at = f"{TENANTS}/{tenant['id']}"
        for number in range(4):
            await admin.client.post(at + "/keys", json={"name": f"k{number}"})
            await admin.client.post(at + "/salts/rotate")
        for path, field, expected in (
            (TENANTS, "name", names),
            (at + "/keys", "name", ["k0", "k1", "k2", "k3"]),
            (at + "/salts", "epoch", [1, 2, 3, 4, 5]),
        ):
            seen: list[object] = []
            query = {"limit": "2"}
            while True:
                page = (await admin.client.get(path, params=query)).json()
                assert 1 <= len(page["data"]) <= 2
                seen += [row[field] for row in page["data"]]
                if page["next_cursor"] is None:
                    break
                query["cursor"] = page["next_cursor"]
            assert seen == expected


def cursor(content: str) -> str:
    return base64.urlsafe_b64encode(content.encode()).decode()


BAD_QUERIES: list[dict[str, str]] = [
    {"limit": "0"},
    {"limit": "201"},
    {"limit": "-1"},
    {"limit": "x"},
    {"limit": "9" * 5000},
    {"cursor": ""},
    {"cursor": "é"},
    {"cursor": "x"},
    {"cursor": cursor("9" * 16)},
    {"cursor": cursor("1.x' OR 1=1 --")},
    {"cursor": cursor("9" * 17 + ".ten_0")},
    {"salt": "x"},
]


async def test_list_parameters_out_of_range_are_400(tmp_path: Path) -> None:
    async with served(tmp_path) as admin:
        for query in BAD_QUERIES:
            refused(await admin.client.get(TENANTS, params=query), 400)
        assert (await admin.client.get(TENANTS, params={"cursor": cursor("9" * 16 + ".ten_0")})).json()["data"] == []
        assert (await admin.client.get(TENANTS + "?limit=1&limit=2")).status_code == 400


async def test_a_key_works_and_its_secret_is_shown_once(tmp_path: Path) -> None:
    async with served(tmp_path) as admin:
        tenant = await admin.tenant("demo")
        at = f"{TENANTS}/{tenant['id']}/keys"
        created = await admin.client.post(at, json={"name": "laptop"})
        key = created.json()
        assert created.status_code == 201
        assert created.headers["cache-control"] == "no-store"
        assert created.headers["location"] == f"{at}/{key['id']}"
        secret = key.pop("secret")
        fields = ["id", "name", "last4", "scopes", "status", "created_at", "expires_at", "last_used_at"]
        assert list(key) == fields
        assert key["scopes"] == ["cache:read", "completions", "usage:read"]
        assert (key["name"], key["status"], key["expires_at"]) == ("laptop", "active", None)
        assert key["last4"] == secret[-4:]
        assert (await admin.client.get(at)).json() == {"data": [key], "next_cursor": None}
        principal = await admin.door.directory.authenticate(bearer(secret.encode()))
        assert (principal.tenant_id, principal.key_id) == (tenant["id"], key["id"])
        assert (await admin.client.delete(f"{at}/{key['id']}")).status_code == 204
        with pytest.raises(Unauthorized):
            await admin.door.directory.authenticate(bearer(secret.encode()))
        refused(await admin.client.delete(f"{at}/{key['id']}"), 404)


async def test_a_key_may_have_fewer_scopes_and_an_end(tmp_path: Path) -> None:
    async with served(tmp_path) as admin:
        at = f"{TENANTS}/{(await admin.tenant('demo'))['id']}/keys"
        body = {"scopes": ["completions"], "expires_at": "2999-01-01T02:00:00+02:00"}
        key = (await admin.client.post(at, json=body)).json()
        assert key["scopes"] == ["completions"]
        assert (await admin.client.get(at)).json()["data"][0]["expires_at"] == "2999-01-01T00:00:00Z"
        principal = await admin.door.directory.authenticate(bearer(key["secret"].encode()))
        assert principal.scopes == {"completions"}
        admin.door.clock.now = datetime.fromisoformat("2999-01-01T00:00:00Z")
        with pytest.raises(Unauthorized):
            await admin.door.directory.authenticate(bearer(key["secret"].encode()))


BAD_KEY_FIELDS: list[tuple[str, object]] = [
    ("name", ""),
    ("name", "x" * 65),
    ("name", "a\x1b[31m"),
    ("name", "a\x00"),
    ("name", 1),
    ("scopes", []),
    ("scopes", ["tenants:write"]),
    ("scopes", "completions"),
    ("expires_at", "2020-01-01T00:00:00Z"),
    ("expires_at", "2999-01-01T00:00:00"),
    ("expires_at", "9999-12-31T23:59:59-23:00"),
    ("expires_at", 4102444800),
]


async def test_a_key_body_out_of_range_is_400(tmp_path: Path) -> None:
    async with served(tmp_path) as admin:
        at = f"{TENANTS}/{(await admin.tenant('demo'))['id']}/keys"
        for field, value in BAD_KEY_FIELDS:
            param = refused(await admin.client.post(at, json={field: value}), 400)["param"]
            assert (param or "").startswith(field)
        assert (await admin.client.get(at)).json()["data"] == []


async def test_rotation_is_answered_after_the_store_has_dropped(tmp_path: Path) -> None:
    async with served(tmp_path) as admin:
        tenant = await admin.tenant("demo")
        at = f"{TENANTS}/{tenant['id']}/salts"
        account = (await admin.door.registry.tenants(1))[0].account
        answer = await admin.client.post(at + "/rotate")
        assert answer.status_code == 200
        assert answer.json() == {"epoch": 2, "dropped": {"blocks": 3, "bytes": 4096}}
        assert admin.link.asked == [(account, 2)]
        assert await admin.door.directory.pending_fences() == []
        first, second = (await admin.client.get(at)).json()["data"]
        assert list(first) == ["epoch", "created_at", "state", "blocks", "bytes"]
        assert (first["epoch"], first["state"], first["blocks"], first["bytes"]) == (1, "dropped", 0, 0)
        assert (second["epoch"], second["state"], second["blocks"], second["bytes"]) == (2, "active", None, None)


async def test_rotation_without_a_store_is_200_and_its_fence_stays_pending(tmp_path: Path) -> None:
    async with served(tmp_path) as admin:
        tenant = await admin.tenant("demo")
        at = f"{TENANTS}/{tenant['id']}/salts"
        admin.link.answer = None
        assert (await admin.client.post(at + "/rotate")).json() == {"epoch": 2, "dropped": None}
        (fence,) = await admin.door.directory.pending_fences()
        assert (fence.account, fence.epoch) == admin.link.asked[0]
        assert [row["state"] for row in (await admin.client.get(at)).json()["data"]] == ["dropping", "active"]
        admin.link.answer = Dropped(0, 0)
        assert (await admin.client.post(at + "/rotate")).json() == {"epoch": 3, "dropped": {"blocks": 0, "bytes": 0}}
        assert await admin.door.directory.pending_fences() == []


async def test_deletion_without_a_store_is_204_and_its_fence_stays_pending(tmp_path: Path) -> None:
    async with served(tmp_path) as admin:
        gone, dropped = await admin.tenant("gone"), await admin.tenant("dropped")
        assert (await admin.client.delete(f"{TENANTS}/{dropped['id']}")).status_code == 204
        assert await admin.door.directory.pending_fences() == []
        admin.link.answer = None
        account = (await admin.door.registry.tenants(1))[0].account
        assert (await admin.client.delete(f"{TENANTS}/{gone['id']}")).status_code == 204
        fences = await admin.door.directory.pending_fences()
        assert fences == [PendingFence(fences[0].id, account, None)]


async def test_line_29_foreign_ids_answer_like_ids_that_do_not_exist(tmp_path: Path) -> None:
    async with served(tmp_path) as admin:
        one, two = await admin.tenant("one"), await admin.tenant("two")
        key = (await admin.client.post(f"{TENANTS}/{one['id']}/keys", json={})).json()
        foreign = await admin.client.delete(f"{TENANTS}/{two['id']}/keys/{key['id']}")
        unknown = await admin.client.delete(f"{TENANTS}/{two['id']}/keys/key_000000000000")
        odd = await admin.client.delete(f"{TENANTS}/{two['id']}/keys/%27%20OR%201=1")
        for answer in (foreign, unknown, odd):
            assert refused(answer, 404) == refused(unknown, 404)
        assert len((await admin.client.get(f"{TENANTS}/{one['id']}/keys")).json()["data"]) == 1


async def test_every_route_of_an_unknown_tenant_is_404(tmp_path: Path) -> None:
    async with served(tmp_path) as admin:
        for method, path, _ in ROUTES[2:]:
            for tenant in ("ten_0000000000000000", "x", "%00", "ten_%27"):
                reads = method in ("PUT", "PATCH") or (path.endswith("/keys") and method == "POST")
                body: dict[str, str] | None = {} if reads else None
                answer = await admin.client.request(method, path.format(tenant=tenant), json=body)
                refused(answer, 404)


async def test_line_37_every_route_wants_an_admin_key(tmp_path: Path) -> None:
    async with served(tmp_path) as admin:
        declared = [(route.method, route.auth.removeprefix("admin:")) for route in admin.app.routes]
        assert declared == [(method, scope) for method, _, scope in ROUTES]
        tenant = await admin.tenant("demo")
        key = (await admin.client.post(f"{TENANTS}/{tenant['id']}/keys", json={})).json()["secret"]
        for method, path, _ in ROUTES:
            path = path.format(tenant=tenant["id"])
            for headers in ({"authorization": ""}, {"authorization": f"Bearer {key}"}):
                error = refused(await admin.client.request(method, path, headers=headers), 401)
                assert error["code"] == "invalid_api_key"
        assert (await admin.client.get(f"{TENANTS}/{tenant['id']}")).status_code == 200


async def test_line_46_an_admin_key_without_the_scope_is_403(tmp_path: Path) -> None:
    async with served(tmp_path) as admin:
        tenant = await admin.tenant("demo")
        for method, path, scope in ROUTES:
            path = path.format(tenant=tenant["id"])
            others = {needed for _, _, needed in ROUTES} - {scope}
            await grant(admin, others)
            assert refused(await admin.client.request(method, path), 403)["type"] == "permission_error"
        await grant(admin, {scope for _, _, scope in ROUTES})
        assert (await admin.client.get(f"{TENANTS}/{tenant['id']}")).status_code == 200
        assert admin.link.asked == []


async def test_b200_and_b204_odd_and_wrong_admin_keys_get_one_generic_401(tmp_path: Path) -> None:
    async with served(tmp_path) as admin:
        wrong = api_keys.mint("admin", "000000000000", bytes(32)).reveal()
        values = [b"Bearer \xe9", b"Bearer \xc3\xa9", b"Bearer", b"", b"Bearer " + wrong]
        bodies = set()
        for value in values:
            request = httpx.Request("GET", "http://admin" + TENANTS, headers=[(b"authorization", value)])
            answer = await admin.client.send(request)
            refused(answer, 401)
            bodies.add(answer.content)
        key = admin.admin_key.encode()
        twice = [(b"authorization", b"Bearer " + key)] * 2
        answer = await admin.client.send(httpx.Request("GET", "http://admin" + TENANTS, headers=twice))
        refused(answer, 401)
        bodies.add(answer.content)
        huge = {"authorization": "Bearer " + "x" * 100_000}
        refused(await admin.client.get(TENANTS, headers=huge), 431)
        assert len(bodies) == 1
        assert b"admin_keys" not in bodies.pop()
        assert (await admin.client.get(TENANTS)).status_code == 200


async def test_line_48_nothing_secret_is_logged_at_debug_level(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    async with served(tmp_path) as admin:
        tenant = await admin.tenant("demo")
        at = f"{TENANTS}/{tenant['id']}"
        key = (await admin.client.post(at + "/keys", json={})).json()
        await admin.client.get(TENANTS, headers={"authorization": f"Bearer {key['secret']}"})
        salt = await admin.door.directory.salt(tenant["id"], 1)
        await admin.client.post(at + "/salts/rotate")
        await admin.client.delete(at)
    assert "HTTP Request: DELETE" in caplog.text
    for secret in (key["secret"][24:], admin.admin_key[30:], salt.reveal().hex(), repr(salt.reveal())[2:14]):
        assert secret not in caplog.text


async def grant(admin: Served, scopes: set[str]) -> None:
    granted = "[" + ", ".join(f'"{scope}"' for scope in sorted(scopes)) + "]"
    async with admin.door.directory.database.write() as session:
        await session.execute(text("UPDATE admin_keys SET scopes = :scopes"), {"scopes": granted})
