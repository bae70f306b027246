"""`saltern quotas`, `saltern usage` and `saltern cache` against a real server on a real socket."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gateway.tenants.ledger import Ask, Settlement
from gateway.tenants.quotas import Quotas
from tests.gateway.admin.listening import done, failed, listening, misused
from tests.gateway.admin.served import Served
from tests.gateway.admin.test_quotas import NOTHING_SET, OF_TENANTS

pytestmark = pytest.mark.anyio

GET = ("quotas", "get", "--tenant", "demo")
SET = ("quotas", "set", "--tenant", "demo")
USAGE = ("usage", "--tenant", "demo")


async def ids(admin: Served, data_dir: Path) -> tuple[str, str]:
    """Of a new tenant and its new key."""
    tenant = await admin.tenant("demo")
    return tenant["id"], json.loads(await done(data_dir, "keys", "create", "--tenant", "demo", "--json"))["id"]


def flag(field: str) -> str:
    return "--model" if field == "models" else "--" + field.replace("_", "-")


async def test_every_limit_is_set_by_its_name_and_unlimited_again(tmp_path: Path) -> None:
    values = {name: number for number, name in enumerate((NOTHING_SET | OF_TENANTS), 1)}
    values |= {"time_zone": "Asia/Tokyo", "models": ["a"]}
    values |= {"device_reserved_tokens": 48, "device_max_tokens": 48, "weight": 2.5, "strict": True}
    async with listening(tmp_path) as admin:
        _, key_id = await ids(admin, tmp_path)
        for scope, fields in (((), NOTHING_SET | OF_TENANTS), (("--key", key_id), NOTHING_SET)):
            assert json.loads(await done(tmp_path, *GET, *scope, "--json")) == fields
            wanted = dict(fields)
            for name in fields:
                given = [] if name == "strict" else values[name] if name == "models" else [str(values[name])]
                wanted[name] = values[name]
                changed = await done(tmp_path, *SET, *scope, flag(name), *given, "--json")
                assert json.loads(changed) == wanted
            # Null is what a limit that is not set reads; the others have a value of their own.
            unset = [name for name, default in fields.items() if default is None]
            flags = [word for name in unset for word in (flag(name), "none")]
            wanted |= dict.fromkeys(unset)
            if "strict" in fields:
                flags.append("--no-strict")
                wanted["strict"] = False
            assert json.loads(await done(tmp_path, *SET, *scope, *flags, "--json")) == wanted
            assert json.loads(await done(tmp_path, *GET, *scope, "--json")) == wanted


async def test_limits_are_told_a_line_each(tmp_path: Path) -> None:
    async with listening(tmp_path) as admin:
        _, key_id = await ids(admin, tmp_path)
        told = await done(tmp_path, *SET, "--tokens-per-day", "1000", "--model", "a", "--model", "b")
        assert told == await done(tmp_path, *GET)
        lines = told.splitlines()
        assert [line.partition(": ")[0] for line in lines] == [*NOTHING_SET, *OF_TENANTS]
        assert {"tokens_per_day: 1000", "tokens_per_month: unlimited", "time_zone: UTC", "models: a, b"} <= set(lines)
        of_key = (await done(tmp_path, *GET, "--key", key_id)).splitlines()
        assert len(of_key) == len(NOTHING_SET)
        assert "tokens_per_day: unlimited" in of_key


async def test_a_command_line_that_sets_nothing_or_no_number_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    for arguments, said in (
        ((), "nothing to set"),
        (("--tokens-per-day", "many"), "'--tokens-per-day': 'many'"),
        (("--requests-per-minute", "1.5"), "'--requests-per-minute': '1.5'"),
        (("--concurrent-requests", ""), "'--concurrent-requests': ''"),
        (("--cached-token-weight", "none"), "'--cached-token-weight': "),
        (("--model", "none", "--model", "a"), "--model none is all models"),
        (("--device-reserved-tokens", "none"), "'--device-reserved-tokens': "),
        (("--weight", "much"), "'--weight': "),
    ):
        assert said in await misused(tmp_path, *SET, *arguments)


async def test_what_the_api_refuses_is_one_line_that_names_the_limit(tmp_path: Path) -> None:
    async with listening(tmp_path) as admin:
        _, key_id = await ids(admin, tmp_path)
        of_key = ("--key", key_id)
        for arguments, said in (
            (("--tokens-per-day", "0"), "tokens_per_day: "),
            (("--tokens-per-day", "-1"), "tokens_per_day: "),
            (("--tokens-per-day", "9" * 30), "64 bits"),
            (("--cached-token-weight", "1001"), "cached_token_weight: "),
            (("--time-zone", "Nowhere/Nowhere"), "time_zone must be a name of the IANA database"),
            (("--model", ""), "models"),
            (("--device-reserved-tokens", "5", "--device-max-tokens", "4"), "device_max_tokens 4"),
            (("--strict",), "strict needs device_reserved_tokens = device_max_tokens"),
            ((*of_key, "--max-context-tokens", "5"), "max_context_tokens is a limit of tenants"),
            ((*of_key, "--weight", "5"), "weight is a limit of tenants"),
            ((*of_key, "--model", "none"), "models is a limit of tenants"),
            (("--key", "key_0", "--tokens-per-day", "5"), "HTTP 404"),
        ):
            assert said in await failed(tmp_path, *SET, *arguments)
        assert json.loads(await done(tmp_path, *GET, "--json")) == NOTHING_SET | OF_TENANTS
        assert json.loads(await done(tmp_path, *GET, *of_key, "--json")) == NOTHING_SET
        assert "there is no tenant 'nobody'" in await failed(tmp_path, "quotas", "get", "--tenant", "nobody")


async def test_usage_is_a_table_with_a_total(tmp_path: Path) -> None:
    at = int(datetime(2030, 5, 17, 22, tzinfo=UTC).timestamp() * 1000)
    clock = {"now": at}
    span = ("--start", "2030-05-17T00:00:00+00:00", "--end", "2030-05-20T00:00:00Z")
    async with listening(tmp_path) as admin:
        tenant_id, key_id = await ids(admin, tmp_path)
        quotas = Quotas(admin.door.directory.database, lambda: clock["now"])
        await quotas.start()
        for number in range(3):
            clock["now"] = at + number * 3_600_000
            await quotas.reserve(Ask(f"res_{number}", tenant_id, key_id, 100, 300, 300))
            await quotas.settle(Settlement(f"res_{number}", tenant_id, key_id, "finished", 100, 50, 90))
        await quotas.close()
        table = [line.split() for line in (await done(tmp_path, *USAGE, *span)).splitlines()]
        assert table == [
            ["start", "requests", "input_tokens", "cached_tokens", "output_tokens", "cost"],
            ["2030-05-17T00:00:00Z", "2", "200", "100", "180", "290"],
            ["2030-05-18T00:00:00Z", "1", "100", "50", "90", "145"],
            ["total", "3", "300", "150", "270", "435"],
        ]
        hours = json.loads(await done(tmp_path, *USAGE, *span, "--bucket", "hour", "--json"))
        assert [row["start"] for row in hours["data"]] == [
            "2030-05-17T22:00:00Z", "2030-05-17T23:00:00Z", "2030-05-18T00:00:00Z",
        ]  # fmt: skip
        assert hours["total"]["cost"] == 435
        assert (await done(tmp_path, *USAGE)).splitlines()[1:] == [
            "total  0         0             0              0              0"
        ]
        for bad, said in (
            (("--bucket", "week"), "bucket: "),
            (("--start", "yesterday"), "start: "),
            (("--end", "2030-05-20"), "end: "),
            (("--start", span[3], "--end", span[1]), "start must lie before end"),
        ):
            assert said in await failed(tmp_path, *USAGE, *bad)


async def test_what_is_cached_is_told_and_flushed(tmp_path: Path) -> None:
    get, flush = (("cache", verb, "--tenant", "demo") for verb in ("get", "flush"))
    async with listening(tmp_path) as admin:
        await admin.tenant("demo")
        assert (await done(tmp_path, *get)).splitlines() == [
            "device_blocks: 3",
            "device_tokens: 48",
            "device_bytes: 4096",
            "device_reserved_tokens: 32",
            "device_max_tokens: unlimited",
            "hit_tokens: 100",
            "miss_tokens: 20",
        ]
        assert json.loads(await done(tmp_path, *get, "--json"))["device"]["max_tokens"] is None
        assert await done(tmp_path, *flush) == "dropped 3 blocks, 4096 bytes\n"
        assert json.loads(await done(tmp_path, *flush, "--json")) == {"blocks": 3, "bytes": 4096}
        admin.link.answer = None
        for command in (get, flush):
            assert "HTTP 503" in await failed(tmp_path, *command)
