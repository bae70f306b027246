"""Lines 28, 29, 33, 37, 45 and 46 of the promise: who gets in, and what those who don't get to know."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import httpx
import pytest

from cachestore.client import StoreClient, StoreLost
from gateway.tenants import api_keys
from tests.system.in_process import in_process
from tests.system.insider import Insider
from tests.system.support import Server, Tenant, random_prompt

PUBLIC = {"/livez", "/readyz", "/metrics", "/openapi.json", "/admin/openapi.json"}

# What differs between any two answers.
OF_THE_MOMENT = {"date", "x-request-id"}


def refusal(answer: httpx.Response) -> tuple[int, bytes, list[tuple[str, str]]]:
    """All that a client can tell one answer from another by, but for time."""
    headers = [item for item in answer.headers.multi_items() if item[0] not in OF_THE_MOMENT]
    return answer.status_code, answer.content, headers


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_line_28_unknown_wrong_and_revoked_keys_get_one_answer(server: Server, tenant: Tenant) -> None:
    keys_at = f"/admin/v1/tenants/{tenant.id}/keys"

    def new_key() -> dict[str, Any]:
        created: dict[str, Any] = server.admin.post(keys_at, json={}).json()
        return created

    revoked, disabled, expired, deleted = new_key(), new_key(), new_key(), server.tenant()
    assert server.admin.delete(f"{keys_at}/{revoked['id']}").status_code == 204
    assert server.admin.delete(f"/admin/v1/tenants/{deleted.id}").status_code == 204
    with Insider(server).database() as database:
        database.execute("UPDATE api_keys SET status = 'disabled' WHERE id = ?", (disabled["id"],))
        database.execute("UPDATE api_keys SET expires_at = '2020-01-01 00:00:00.000000' WHERE id = ?", (expired["id"],))
    own_id = tenant.key.removeprefix("sk-saltern-")[:12]
    keys = {
        "revoked": revoked["secret"],
        "disabled": disabled["secret"],
        "expired": expired["secret"],
        "of a deleted tenant": deleted.key,
        "wrong": api_keys.mint("tenant", own_id, bytes(32)).reveal().decode(),
        "unknown": api_keys.mint("tenant", "0" * 12, bytes(32)).reveal().decode(),
        "of an administrator": (server.data_dir / "admin-key").read_text().strip(),
        "with a typo": tenant.key[:-1] + ("a" if tenant.key[-1] != "a" else "b"),
        "malformed": "sk-saltern-",
    }
    body = {"model": server.model, "prompt": "Salt.", "max_tokens": 1}
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions")):
        missing = refusal(server.http.request(method, path, json=body))
        assert missing[0] == 401
        answers = {
            name: refusal(server.http.request(method, path, json=body, headers=bearer(key)))
            for name, key in keys.items()
        }
        assert answers == dict.fromkeys(keys, missing)
        assert server.http.request(method, path, json=body, headers=tenant.headers).status_code == 200


def test_line_29_foreign_ids_answer_like_ids_that_do_not_exist(server: Server, tenant: Tenant, other: Tenant) -> None:
    foreign = "key_" + other.key.removeprefix("sk-saltern-")[:12]
    unknown = "key_" + "0" * 12
    answers = [server.admin.delete(f"/admin/v1/tenants/{tenant.id}/keys/{id}") for id in (foreign, unknown)]
    assert answers[0].status_code == 404
    assert refusal(answers[0]) == refusal(answers[1])
    # The foreign key is what it was, and goes where it belongs.
    assert server.http.get("/v1/models", headers=other.headers).status_code == 200
    assert server.admin.delete(f"/admin/v1/tenants/{other.id}/keys/{foreign}").status_code == 204
    assert server.http.get("/v1/models", headers=other.headers).status_code == 401


def test_line_33_the_store_listens_on_a_socket_for_us_alone_and_on_no_port(server: Server) -> None:
    assert stat.S_IMODE(server.socket.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(server.socket.stat().st_mode) == 0o600
    assert server.socket.stat().st_uid == os.geteuid()
    gateway = server.process.pid
    (store,) = (int(child) for child in Path(f"/proc/{gateway}/task/{gateway}/children").read_text().split())
    # The gateway has its two; the store, looked at in the same way, has none.
    assert len(tcp_listeners(gateway)) == 2
    assert tcp_listeners(store) == []


def tcp_listeners(process: int) -> list[str]:
    """Local addresses of the TCP sockets on which a process listens."""
    inodes = set()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        target = os.readlink(descriptor)
        if target.startswith("socket:["):
            inodes.add(target[len("socket:[") : -1])
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]
    ]
    return [fields[1] for fields in lines if fields[3] == "0A" and fields[9] in inodes]


@pytest.mark.anyio
async def test_line_33_a_peer_with_another_uid_is_not_spoken_with(tmp_path: Path, default_model: Path) -> None:
    async with in_process(tmp_path, default_model) as saltern:
        store = saltern.store
        (await StoreClient.connect(store.socket_path)).close()
        assert store.refused_peers == 0
        # From now on we are the other uid: file modes would not stop root, so the peer is looked at.
        store.allowed_uid = os.geteuid() + 1
        with pytest.raises(StoreLost):
            await StoreClient.connect(store.socket_path)
        assert store.refused_peers == 1
        store.allowed_uid = os.geteuid()
        (await StoreClient.connect(store.socket_path)).close()
        assert store.refused_peers == 1


@pytest.mark.anyio
async def test_line_37_an_anonymous_walk_over_all_routes_yields_health_and_401(
    tmp_path: Path, default_model: Path
) -> None:
    async with in_process(tmp_path, default_model) as saltern:
        customer = await saltern.customer("walker")
        nobody, unchanged = {"authorization": ""}, dict[str, str]()
        doors = (
            (saltern.gateway.tenant_app, saltern.http, nobody, customer.headers),
            (saltern.gateway.admin_app, saltern.admin, nobody, unchanged),
        )
        walked = set()
        for app, client, anonymous, credential in doors:
            assert app.routes
            for route in app.routes:
                path = route.path.replace("{model:path}", saltern.model)
                path = path.format(tenant_id=customer.id, key_id="key_000000000000")
                for method in {route.method, "HEAD"} if route.method == "GET" else {route.method}:
                    answer = await client.request(method, path, headers=anonymous)
                    if route.path in PUBLIC:
                        assert answer.status_code == 200
                        continue
                    assert answer.status_code == 401, (method, path)
                    assert answer.headers["www-authenticate"] == "Bearer"
                    if method != "DELETE":
                        # Whatever the handler thinks of an empty request, it is reached.
                        answer = await client.request(method, path, headers=credential)
                        assert answer.status_code != 401, (method, path)
                    walked.add((route.method, route.path))
            declared = {(route.method, route.path) for route in app.routes if route.auth != "public"}
            assert declared <= walked
        assert {("POST", "/v1/completions"), ("POST", "/admin/v1/tenants")} <= walked


def test_line_46_tenant_keys_are_refused_on_the_admin_api_and_admin_keys_on_the_tenant_api(
    server: Server, tenant: Tenant
) -> None:
    at = f"/admin/v1/tenants/{tenant.id}"
    admin_routes: list[tuple[str, str, dict[str, str] | None]] = [
        ("GET", "/admin/v1/tenants", None),
        ("GET", at, None),
        ("GET", at + "/keys", None),
        ("GET", at + "/salts", None),
        ("POST", at + "/keys", {}),
        ("POST", at + "/salts/rotate", None),
        ("POST", "/admin/v1/tenants", {"name": "by-a-tenant"}),
        ("PATCH", at + "/quotas", {"tokens_per_day": None}),
        ("PUT", at + "/quotas", {}),
        ("PUT", at + "/keys/key_" + tenant.key.removeprefix("sk-saltern-")[:12] + "/quotas", {}),
        ("GET", at + "/usage", None),
        ("DELETE", at + "/keys/key_" + tenant.key.removeprefix("sk-saltern-")[:12], None),
        ("DELETE", at, None),
    ]
    dumped = Insider(server).settings()
    for method, path, body in admin_routes:
        for headers in (tenant.headers, {"x-api-key": tenant.key, "authorization": ""}, {"x-api-key": tenant.key}):
            answer = server.admin.request(method, path, json=body, headers=headers)
            assert answer.status_code == 401, (method, path)
    assert Insider(server).settings() == dumped

    admin_key = (server.data_dir / "admin-key").read_text().strip()
    completion: dict[str, Any] = {"model": server.model, "prompt": random_prompt("line 46", 17), "max_tokens": 1}
    chat: dict[str, Any] = {"model": server.model, "messages": [{"role": "user", "content": "Salt."}], "max_tokens": 1}
    before = server.wait_until_idle()
    for method, path, body in (
        ("POST", "/v1/completions", completion),
        ("POST", "/v1/chat/completions", chat),
        ("GET", "/v1/models", None),
    ):
        for headers in (bearer(admin_key), {"x-api-key": admin_key}):
            assert server.http.request(method, path, json=body, headers=headers).status_code == 401
        assert server.http.request(method, path, json=body, headers=tenant.headers).status_code == 200
    assert server.wait_until_idle().computed_tokens > before.computed_tokens
    # And the same routes with the key that belongs there.
    assert server.admin.get(at).status_code == 200
    assert server.admin.post(at + "/keys", json={}).status_code == 201


METACHARACTERS = (
    "' OR '1'='1",
    "'; DROP TABLE tenants; --",
    '" OR ""="',
    "') UNION SELECT wrapped FROM wrapped_secrets --",
    "%' OR name LIKE '%",
    "\\'; DELETE FROM api_keys; /*",
    "$1 :name ? @x {tenant_id}",
    "\0'\0",
)


def test_line_45_sql_metacharacters_change_no_query(server: Server, tenant: Tenant) -> None:
    insider = Insider(server)
    dumped = insider.settings()
    for text in METACHARACTERS:
        for name, value in (("model", text), ("user", text), ("cache_salt", text), ("prompt", text), ("stop", text)):
            answer = tenant.complete("Salt.", **{name: value}) if name != "prompt" else tenant.complete(text)
            assert answer.status_code == (404 if name == "model" else 200)
        assert tenant.chat(text, prompt_cache_key=text).status_code == 200
        assert insider.settings() == dumped, text

        quoted = httpx.URL("/", params={"x": text}).query.decode().removeprefix("x=")
        at = "/admin/v1/tenants"
        for method, path, body, status in (
            ("POST", at, {"name": text}, 400),
            ("GET", f"{at}?name={quoted}", None, 400),
            ("GET", f"{at}?cursor={quoted}", None, 400),
            ("GET", f"{at}?limit={quoted}", None, 400),
            ("GET", f"{at}/{quoted}", None, 404),
            ("DELETE", f"{at}/{quoted}", None, 404),
            ("POST", f"{at}/{quoted}/salts/rotate", None, 404),
            ("GET", f"{at}/{quoted}/keys", None, 404),
            ("DELETE", f"{at}/{tenant.id}/keys/{quoted}", None, 404),
            ("POST", f"{at}/{tenant.id}/keys", {"expires_at": text}, 400),
            ("POST", f"{at}/{tenant.id}/keys", {"scopes": [text]}, 400),
            ("PUT", f"{at}/{quoted}/quotas", {}, 404),
            ("PATCH", f"{at}/{tenant.id}/keys/{quoted}/quotas", {}, 404),
            ("PUT", f"{at}/{tenant.id}/quotas", {"time_zone": text}, 400),
            ("PUT", f"{at}/{tenant.id}/quotas", {text: 1}, 400),
            ("GET", f"{at}/{tenant.id}/usage?start={quoted}", None, 400),
            ("GET", f"{at}/{tenant.id}/usage?bucket={quoted}", None, 400),
            ("GET", f"{at}/{quoted}/usage", None, 404),
        ):
            assert server.admin.request(method, path, json=body).status_code == status, (method, path)
        if "\0" not in text:
            for headers in (bearer(text), bearer(f"sk-saltern-{text}"), {"x-api-key": text}):
                assert server.http.get("/v1/models", headers=headers).status_code == 401
                assert server.admin.get(at, headers=headers).status_code == 401
        assert insider.settings() == dumped, text

    # Where such text is allowed it is kept as it is.
    for text in METACHARACTERS[:-1]:
        created = server.admin.post(f"/admin/v1/tenants/{tenant.id}/keys", json={"name": text})
        assert created.status_code == 201
        assert created.json()["name"] == text
    listed = server.admin.get(f"/admin/v1/tenants/{tenant.id}/keys").json()["data"]
    assert [key["name"] for key in listed] == [None, *METACHARACTERS[:-1]]
    assert insider.settings() != dumped
