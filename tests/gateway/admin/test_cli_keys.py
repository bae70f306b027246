"""`saltern keys` against a real server on a real socket."""

import json
from pathlib import Path

import pytest

from tests.gateway.admin.listening import done, failed, listening, misused
from tests.gateway.admin.test_keys import opens

pytestmark = pytest.mark.anyio

OF_DEMO = ("--tenant", "demo")


async def test_a_key_is_made_with_scopes_and_an_end_and_shown(tmp_path: Path) -> None:
    async with listening(tmp_path) as admin:
        await admin.tenant("demo")
        narrow = ("--scope", "completions", "--scope", "usage:read", "--expires-at", "2031-01-01T00:00:00Z")
        key = json.loads(await done(tmp_path, "keys", "create", *OF_DEMO, *narrow, "--json"))
        secret = key.pop("secret")
        assert (key["scopes"], key["expires_at"]) == (["completions", "usage:read"], "2031-01-01T00:00:00Z")
        assert json.loads(await done(tmp_path, "keys", "get", key["id"], *OF_DEMO, "--json")) == key
        lines = (await done(tmp_path, "keys", "get", key["id"], *OF_DEMO)).splitlines()
        assert lines[0] == f"id: {key['id']}"
        assert {"name: -", "scopes: completions, usage:read", "last_used_at: -"} <= set(lines)
        assert not any(secret in line for line in lines)
        for bad, said in (
            (("--scope", "admin"), "scopes"),
            (("--expires-at", "tomorrow"), "expires_at"),
            (("--expires-at", "2000-01-01T00:00:00Z"), "expires_at must lie between now and"),
        ):
            assert said in await failed(tmp_path, "keys", "create", *OF_DEMO, *bad)
        assert len(json.loads(await done(tmp_path, "keys", "list", *OF_DEMO, "--json"))["data"]) == 1


async def test_a_disabled_key_opens_nothing_until_it_is_enabled(tmp_path: Path) -> None:
    async with listening(tmp_path) as admin:
        await admin.tenant("demo")
        key = json.loads(await done(tmp_path, "keys", "create", *OF_DEMO, "--json"))
        assert await done(tmp_path, "keys", "disable", key["id"], *OF_DEMO) == f"key {key['id']} is disabled\n"
        assert await opens(admin, key["secret"]) is None
        assert "disabled" in await done(tmp_path, "keys", "list", *OF_DEMO)
        enabled = json.loads(await done(tmp_path, "keys", "enable", key["id"], *OF_DEMO, "--json"))
        assert enabled["status"] == "active"
        assert await opens(admin, key["secret"])


async def test_a_key_is_rotated_with_and_without_grace(tmp_path: Path) -> None:
    async with listening(tmp_path) as admin:
        await admin.tenant("demo")
        key = json.loads(await done(tmp_path, "keys", "create", *OF_DEMO, "--json"))
        first, rotate = key["secret"], ("keys", "rotate", key["id"], *OF_DEMO)
        second = (await done(tmp_path, *rotate, "--grace-seconds", "600", "--quiet")).removesuffix("\n")
        assert await opens(admin, first)
        assert await opens(admin, second)
        words, third = (await done(tmp_path, *rotate)).splitlines()
        assert words == f"rotated key {key['id']}, shown this once:"
        assert [bool(await opens(admin, secret)) for secret in (first, second, third)] == [False, False, True]
        assert "grace_seconds" in await failed(tmp_path, *rotate, "--grace-seconds", "-1")
        assert "--quiet" in await misused(tmp_path, *rotate, "--quiet", "--json")
        assert await opens(admin, third)


async def test_the_table_tells_when_a_key_was_used_last(tmp_path: Path) -> None:
    async with listening(tmp_path) as admin:
        await admin.tenant("demo")
        key = json.loads(await done(tmp_path, "keys", "create", *OF_DEMO, "--json"))
        head, row = (await done(tmp_path, "keys", "list", *OF_DEMO)).splitlines()
        assert (head.split()[-1], row.split()[-1]) == ("last_used_at", "-")
        admin.door.clock.advance(days=1)
        assert await opens(admin, key["secret"])
        await admin.door.directory.last_used.write()
        _, row = (await done(tmp_path, "keys", "list", *OF_DEMO)).splitlines()
        assert row.split()[-1].startswith("2030-01-02T")


async def test_what_is_no_id_of_a_key_reaches_nothing_else(tmp_path: Path) -> None:
    async with listening(tmp_path) as admin:
        await admin.tenant("demo")
        for key_id in ("..", ".", "", "../salts", "ten_0"):
            for command in (
                ("keys", "delete", key_id),
                ("keys", "get", key_id),
                ("keys", "disable", key_id),
                ("keys", "rotate", key_id),
                ("quotas", "get", "--key", key_id),
                ("quotas", "set", "--tokens-per-day", "5", "--key", key_id),
            ):
                line = await failed(tmp_path, *command, *OF_DEMO)
                assert line == f"saltern: there is no key {key_id!r}: see `saltern keys list`"
        assert [tenant.name for tenant in await admin.door.registry.tenants(10)] == ["demo"]
        assert "tokens_per_day: unlimited" in await done(tmp_path, "quotas", "get", *OF_DEMO)


async def test_a_key_of_another_tenant_is_none(tmp_path: Path) -> None:
    async with listening(tmp_path) as admin:
        await admin.tenant("demo")
        await admin.tenant("other")
        key = json.loads(await done(tmp_path, "keys", "create", *OF_DEMO, "--json"))
        for verb in ("get", "disable", "enable", "rotate", "delete"):
            assert "HTTP 404" in await failed(tmp_path, "keys", verb, key["id"], "--tenant", "other")
        assert await opens(admin, key["secret"])
