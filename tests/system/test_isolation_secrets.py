"""Lines 6, 16 and 48 of the promise: nothing is served without a salt, and secrets lie and show nowhere."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import pytest

from tests.spellings import found
from tests.system.insider import Insider
from tests.system.support import Server, Tenant, random_prompt

ONE_BLOCK = 17
SALT = "purpose = 'salt' AND tenant_id = ?"


@pytest.fixture
def insider(server: Server) -> Insider:
    return Insider(server)


DAMAGES = {
    "deleted": f"DELETE FROM wrapped_secrets WHERE {SALT}",
    "empty": f"UPDATE wrapped_secrets SET wrapped = x'' WHERE {SALT}",
    "zeros": f"UPDATE wrapped_secrets SET wrapped = zeroblob(60) WHERE {SALT}",
    "cut": f"UPDATE wrapped_secrets SET wrapped = substr(wrapped, 1, 59) WHERE {SALT}",
    "of another epoch": f"UPDATE wrapped_secrets SET epoch = epoch + 1 WHERE {SALT}",
    "under a lost key": f"UPDATE wrapped_secrets SET kek_id = '0123456789abcdef' WHERE {SALT}",
    "its offload key": "UPDATE wrapped_secrets SET wrapped = (SELECT wrapped FROM wrapped_secrets WHERE "
    f"purpose = 'offload_key' AND tenant_id = ?1) WHERE {SALT.replace('?', '?1')}",
    "the pepper": "UPDATE wrapped_secrets SET wrapped = (SELECT wrapped FROM wrapped_secrets WHERE "
    f"purpose = 'apikey-pepper') WHERE {SALT}",
}


@pytest.mark.parametrize(
    ("damage", "rotated"), [(damage, False) for damage in DAMAGES] + [("deleted", True), ("zeros", True)]
)
def test_line_06_without_a_salt_that_opens_nothing_reaches_the_store(
    server: Server, insider: Insider, tenant: Tenant, damage: str, rotated: bool
) -> None:
    prompt = random_prompt("line 6", ONE_BLOCK)
    if rotated:
        # The gateway has the old epoch's salt open: that is no substitute.
        tenant.complete(prompt)
        tenant.rotate()
    with insider.database() as database:
        saved = database.execute(f"SELECT * FROM wrapped_secrets WHERE {SALT}", (tenant.id,)).fetchone()
        assert database.execute(DAMAGES[damage], (tenant.id,)).rowcount == 1

    before = server.wait_until_idle()
    for answer in (tenant.complete(prompt), tenant.chat("Hello."), tenant.complete(prompt, stream=True)):
        assert answer.status_code == 503
        assert answer.json()["error"]["type"] == "service_unavailable_error"
        assert answer.headers["x-should-retry"] == "true"
    after = server.stats()
    assert (after.steps, after.computed_tokens, after.cached_blocks) == (
        before.steps,
        before.computed_tokens,
        before.cached_blocks,
    )

    with insider.database() as database:
        database.execute(f"DELETE FROM wrapped_secrets WHERE {SALT}", (tenant.id,))
        database.execute(f"INSERT INTO wrapped_secrets VALUES ({', '.join('?' * len(saved))})", saved)
    assert [tenant.cached_tokens(prompt), tenant.cached_tokens(prompt)] == [0, 16]
    assert server.wait_until_idle().computed_tokens == before.computed_tokens + ONE_BLOCK + 1


def test_line_16_no_salt_offload_key_or_api_key_is_readable_in_the_database(
    server: Server, insider: Insider, tenant: Tenant
) -> None:
    prompt = random_prompt("line 16", ONE_BLOCK)
    tenant.complete(prompt)
    first = insider.secrets(tenant)
    tenant.rotate()
    tenant.complete(prompt)
    second = insider.secrets(tenant)
    admin_key = (server.data_dir / "admin-key").read_text().strip()
    kek = base64.b64decode((server.data_dir / "kek").read_text().split()[1])
    secrets = {
        "salt of epoch 1": first.salt,
        "salt of epoch 2": second.salt,
        "offload key of epoch 1": first.offload_key,
        "offload key of epoch 2": second.offload_key,
        "key-encryption key": kek,
        # The digits between id and checksum; the id and the last four are no secrets.
        "API key": tenant.key.encode()[-49:-6],
        "admin key": admin_key.encode()[-49:-6],
    }
    assert {len(secret) for name, secret in secrets.items() if "API" not in name and "admin" not in name} == {32}
    with insider.database() as database:
        (wrapped,) = database.execute(
            f"SELECT wrapped FROM wrapped_secrets WHERE {SALT} AND epoch = 2", (tenant.id,)
        ).fetchone()
    dump, files = insider.dump().encode(), insider.files()
    for place in (dump, files):
        assert [name for name, secret in secrets.items() if found(secret, place)] == []
        # What is stored in the clear, and the wrapped salt, are found by the same search.
        for known in (tenant.name.encode(), tenant.id.encode(), second.account, wrapped):
            assert found(known, place)


CANARY = "canary-b7c1f0"


def test_line_48_canaries_of_prompts_and_keys_show_in_no_log_line_and_no_error(
    server: Server, insider: Insider, tenant: Tenant
) -> None:
    body = {"model": server.model, "prompt": CANARY, "max_tokens": 1}
    chat = {"model": server.model, "messages": [{"role": "user", "content": CANARY}], "max_tokens": 1}
    refused: list[tuple[dict[str, Any], int]] = [
        (body | {"model": CANARY}, 404),
        (body | {"temperature": CANARY}, 400),
        (body | {"max_tokens": CANARY}, 400),
        (body | {"stop": [CANARY] * 9}, 400),
        (body | {"stop": {CANARY: CANARY}}, 400),
        (body | {"cache_salt": CANARY * 40}, 400),
        (body | {"prompt_cache_key": CANARY * 40}, 400),
        (body | {"prompt_cache_options": {CANARY: CANARY}}, 400),
        (body | {"prompt_cache_options": {"ttl": CANARY}}, 400),
        (body | {"prompt_cache_retention": CANARY}, 400),
        (body | {"prompt": [CANARY, 1]}, 400),
        (body | {"prompt": {CANARY: CANARY}}, 400),
        (body | {"priority": CANARY}, 400),
        (body | {"logit_bias": {CANARY: 1}}, 400),
        (body | {"stream_options": {"include_usage": CANARY}}, 400),
        (body | {"prompt": CANARY * 8000}, 400),
        (body | {"max_tokens": 10**6}, 400),
    ]
    raw = [json.dumps(body)[:-1].encode(), f'{{"{CANARY}": 1, "{CANARY}": 2}}'.encode(), b"\xff" + CANARY.encode()]
    bad_chats: list[dict[str, Any]] = [
        {"messages": [{"role": CANARY, "content": CANARY}]},
        {"messages": [{"role": "user", "content": [{"type": CANARY, "text": CANARY}]}]},
        {"messages": [{"role": "user", "content": {CANARY: CANARY}}]},
        {"messages": [{"role": "assistant", "content": CANARY, "tool_calls": [{"id": CANARY}]}]},
        {"messages": CANARY},
    ]
    answers = []
    for fields, status in refused:
        answers.append(server.http.post("/v1/completions", json=fields, headers=tenant.headers))
        assert answers[-1].status_code == status, (fields.keys(), answers[-1].text)
    for fields in bad_chats:
        answers.append(server.http.post("/v1/chat/completions", json=chat | fields, headers=tenant.headers))
        assert answers[-1].status_code == 400
    for content in raw:
        headers = tenant.headers | {"content-type": "application/json"}
        answers.append(server.http.post("/v1/completions", content=content, headers=headers))
        assert answers[-1].status_code == 400
    for path in (f"/v1/{CANARY}", f"/{CANARY}/v1/completions"):
        answers.append(server.http.post(path, json=body, headers=tenant.headers))
        assert answers[-1].status_code == 404
    for key in (f"sk-saltern-{CANARY}", f"sk-saltern-admin-{CANARY}", tenant.key[:-1]):
        answers.append(server.http.get("/v1/models", headers={"authorization": f"Bearer {key}"}))
        answers.append(server.admin.get("/admin/v1/tenants", headers={"authorization": f"Bearer {key}"}))
        assert {answer.status_code for answer in answers[-2:]} == {401}
    answers.append(server.admin.post("/admin/v1/tenants", json={"name": f"{CANARY}!"}))
    assert answers[-1].status_code == 400

    # What does succeed, streaming and not, and what fails inside: a salt that does not open is told in the log.
    assert tenant.chat(CANARY).status_code == 200
    assert tenant.complete(CANARY, stream=True).status_code == 200
    unlucky = server.tenant()
    with insider.database() as database:
        database.execute(DAMAGES["zeros"], (unlucky.id,))
    answers.append(unlucky.complete(CANARY))
    assert answers[-1].status_code == 503

    secrets = insider.secrets(tenant)
    log = "\n".join((server.log(), *server.output)).encode()
    errors = b"\n".join(answer.content + repr(answer.headers.multi_items()).encode() for answer in answers)
    hidden = [CANARY.encode(), secrets.salt, secrets.offload_key, secrets.account, tenant.key.encode()[-49:-6]]
    for place in (log, errors):
        assert [secret for secret in hidden if found(secret, place)] == []
    # Token ids would be a list of numbers.
    assert not re.search(rb"\d{2,5}, \d{2,5}, \d{2,5}", log)
    # The same search finds what the log and the errors do say.
    assert found(unlucky.id.encode(), log)
    assert found(b"invalid_api_key", errors)
