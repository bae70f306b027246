"""Keys, salts and the cache of a tenant, against whoever tries another's."""

from __future__ import annotations

import contextlib
import json
import pickle
import random
import re
import socket
import sqlite3
from contextlib import closing

from tests.system.support import Server, Tenant, random_prompt
from tests.system.wire import RawResponse, exchange, refusal


def test_b003_a_prompt_that_is_cached_whole_hits_as_far_as_it_can(tenant: Tenant) -> None:
    prompt = random_prompt("b003", 64)
    answers = [tenant.complete(prompt[:tokens], max_tokens=3).json() for tokens in (48, 48, 64, 64)]
    assert [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers] == [0, 32, 48, 48]
    texts = [answer["choices"][0]["text"] for answer in answers]
    assert texts[0] == texts[1]
    assert texts[2] == texts[3]


def test_b159_a_deleted_key_is_refused_at_once(server: Server, tenant: Tenant) -> None:
    keys = server.admin.get(f"/admin/v1/tenants/{tenant.id}/keys").json()["data"]
    assert tenant.complete("x").status_code == 200
    assert server.admin.delete(f"/admin/v1/tenants/{tenant.id}/keys/{keys[0]['id']}").status_code == 204
    assert refusal(tenant.complete("x"), 401)["code"] == "invalid_api_key"
    assert refusal(server.http.get("/v1/models", headers=tenant.headers), 401)["code"] == "invalid_api_key"


def test_b166_a_salt_is_never_empty_and_never_set_from_outside(server: Server, tenant: Tenant, other: Tenant) -> None:
    prompt = random_prompt("b166", 40)
    for salt in ("", " ", "\t\n", "\u3000"):
        for stream in (False, True):
            assert refusal(tenant.complete(prompt, cache_salt=salt, stream=stream), 400)["param"] == "cache_salt"
            assert refusal(tenant.chat("Hi.", cache_salt=salt, stream=stream), 400)["param"] == "cache_salt"
    for path in ("", f"/{tenant.id}/keys", f"/{tenant.id}/salts/rotate"):
        for field in ("salt", "cache_salt", "epoch"):
            body = ({"name": "salted"} if path == "" else {}) | {field: "0" * 64}
            assert refusal(server.admin.post(f"/admin/v1/tenants{path}", json=body), 400)["param"] == field
    assert server.admin.get("/admin/v1/tenants", params={"name": "salted"}).json()["data"] == []
    salts = server.admin.get(f"/admin/v1/tenants/{tenant.id}/salts").json()["data"]
    assert [salt["epoch"] for salt in salts] == [1]
    # What was refused was kept nowhere, and what no salt was given for is the tenant's own.
    assert [tenant.cached_tokens(prompt), tenant.cached_tokens(prompt), other.cached_tokens(prompt)] == [0, 32, 0]


def test_b167_no_character_of_a_salt_means_anything(server: Server, tenant: Tenant, other: Tenant) -> None:
    prompt = random_prompt("b167", 20)
    salts = ["b/c", "c", "/c", "b@c", "b\x00c", "b\x00", "../c", "..", "b" * 256, "Ω" * 128]
    assert [tenant.cached_tokens(prompt, cache_salt=salt) for salt in salts] == [0] * len(salts)
    assert [tenant.cached_tokens(prompt, cache_salt=salt) for salt in salts] == [16] * len(salts)
    for salt in ("b" * 257, "Ω" * 129, "b" * 10_000):
        assert refusal(tenant.complete(prompt, cache_salt=salt), 400)["param"] == "cache_salt"
    # A tenant's name is no part of a key, and none has a separator.
    assert refusal(server.admin.post("/admin/v1/tenants", json={"name": "a/b"}), 400)["param"] == "name"
    assert [other.cached_tokens(prompt, cache_salt=salt) for salt in ("c", "b/c")] == [0, 0]
    assert [other.cached_tokens(prompt, cache_salt=salt) for salt in ("c", "b/c")] == [16, 16]


def test_b169_another_tenants_salt_and_prompt_reach_nothing_of_its(tenant: Tenant, other: Tenant) -> None:
    prompt = random_prompt("b169", 40)
    assert tenant.cached_tokens(prompt, cache_salt="team-1") == 0
    assert other.cached_tokens(prompt, cache_salt="team-1") == 0
    assert tenant.cached_tokens(prompt, cache_salt="team-1") == 32
    assert other.cached_tokens(prompt, cache_salt="team-1") == 32
    # It only narrows: a tenant's own requests without it find nothing of it.
    assert tenant.cached_tokens(prompt) == 0


def test_b202_another_tenants_prompt_costs_what_an_unknown_one_costs(
    server: Server, tenant: Tenant, other: Tenant
) -> None:
    def cost(asking: Tenant, prompt: list[int]) -> tuple[int, int]:
        before = server.wait_until_idle()
        cached = asking.cached_tokens(prompt)
        return cached, server.wait_until_idle().computed_tokens - before.computed_tokens

    warmed, unknown = random_prompt("b202", 512), random_prompt("b202 other", 512)
    assert cost(tenant, warmed) == (0, 512)
    assert cost(other, warmed) == cost(other, unknown) == (0, 512)
    assert cost(tenant, warmed) == (496, 16)


def with_authorization(server: Server, *values: bytes) -> RawResponse:
    lines = b"".join(b"authorization: " + value + b"\r\n" for value in values)
    return exchange(server.url, b"GET /v1/models HTTP/1.1\r\nhost: test\r\n" + lines + b"connection: close\r\n\r\n")


def test_b200_a_credential_of_any_bytes_is_refused_and_breaks_nothing(server: Server, tenant: Tenant) -> None:
    valid = f"Bearer {tenant.key}".encode()
    assert with_authorization(server, valid).status == 200
    malformed: list[list[bytes]] = [
        [b"Bearer \xe9"],
        [b"Bearer \xc3\xa9"],
        [b"Bearer"],
        [b""],
        [valid, valid],
        [valid, b"Bearer x"],
        [b"Bearer x" + b"\xe9" * 8000],
    ]
    answers = [with_authorization(server, *values) for values in malformed]
    assert [answer.status for answer in answers] == [401] * len(malformed)
    # They can't be told apart.
    assert len({answer.body for answer in answers}) == 1
    assert answers[0].error()["code"] == "invalid_api_key"
    large = with_authorization(server, b"Bearer " + b"x" * 100_000)
    assert large.status == 431
    assert large.error()["type"] == "invalid_request_error"
    many = exchange(server.url, b"GET /livez HTTP/1.1\r\nHost: saltern\r\n" + b"a: b\r\n" * 101 + b"\r\n")
    assert many.status == 431
    assert with_authorization(server, valid).status == 200
    assert "Traceback" not in server.log()


def test_b204_a_refused_key_says_nothing_of_itself_or_of_us(server: Server, tenant: Tenant) -> None:
    def mint() -> tuple[str, str]:
        made = server.admin.post(f"/admin/v1/tenants/{tenant.id}/keys", json={}).json()
        return made["id"], made["secret"]

    (deleted_id, deleted), (disabled_id, disabled) = mint(), mint()
    unknown = tenant.key[:-10] + ("0" if tenant.key[-10] != "0" else "1") + tenant.key[-9:]
    for key in (tenant.key, deleted, disabled):
        assert server.http.get("/v1/models", headers={"x-api-key": key}).status_code == 200
    assert server.admin.delete(f"/admin/v1/tenants/{tenant.id}/keys/{deleted_id}").status_code == 204
    with closing(sqlite3.connect(server.data_dir / "saltern.db", timeout=10)) as database, database:
        changed = database.execute("UPDATE api_keys SET status = 'disabled' WHERE id = ?", (disabled_id,))
        assert changed.rowcount == 1
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    answers = [server.http.get("/v1/models", headers={"x-api-key": key}) for key in (unknown, deleted, disabled)]
    assert refusal(answers[0], 401)["code"] == "invalid_api_key"
    assert len({answer.content for answer in answers}) == 1
    assert len({json.dumps(sorted(answer.headers.keys())) for answer in answers}) == 1
    said = answers[0].text.lower()
    assert "api_keys" in tables
    assert not [table for table in tables if table in said]
    for key in (unknown, deleted, disabled):
        # No eight characters of its id or of its secret, and no digest, which is longer than any word.
        parts = key.lower().split("-")[2:]
        assert not [part for part in parts for at in range(len(part) - 7) if part[at : at + 8] in said]
    assert not re.search(r"[0-9a-f]{16}|saltern|sqlite|sqlalchemy|hash|hmac|digest|pepper", said)
    assert server.http.get("/v1/models", headers=tenant.headers).status_code == 200


def test_b198_the_stores_socket_refuses_what_is_no_message(server: Server, tenant: Tenant) -> None:
    prompt = random_prompt("b198", 40)
    tenant.cached_tokens(prompt)
    closed_before = server.log().count("closed: ")
    payloads = [
        pickle.dumps({"request": 1}),
        random.Random("b198").randbytes(4096),
        (1 << 30).to_bytes(4, "big"),
        b"GET / HTTP/1.1\r\n\r\n",
    ]
    for payload in payloads:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(10)
            connection.connect(str(server.socket))
            connection.sendall(payload)
            with contextlib.suppress(ConnectionError):
                assert connection.recv(1) == b""
    # Each cost its own connection and a line in the log; the gateway's goes on, with what is cached.
    assert server.log().count("closed: ") - closed_before == len(payloads)
    assert tenant.cached_tokens(prompt) == 32
