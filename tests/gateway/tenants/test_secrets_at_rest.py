"""Lines 14, 16 and 17 of the promise: what a database holds of secrets, and where alone they open."""

from __future__ import annotations

import base64
import string
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
from sqlalchemy import Connection, inspect, select, text, update

from gateway.http.errors import Unauthorized
from gateway.tenants.keyring import Keyring, SaltUnavailable
from gateway.tenants.tables import ApiKey, Tenant, WrappedSecret
from gateway.tenants.vault import KekFile, Place, Purpose
from tests.gateway.tenants.opened import Opened, bearer, opened
from tests.spellings import found

pytestmark = pytest.mark.anyio

DIGITS = string.digits + string.ascii_uppercase + string.ascii_lowercase


async def rows(door: Opened) -> Sequence[WrappedSecret]:
    async with door.directory.database.read() as session:
        order = (WrappedSecret.tenant_id, WrappedSecret.epoch, WrappedSecret.purpose)
        return (await session.scalars(select(WrappedSecret).order_by(*order))).all()


def place(row: WrappedSecret) -> Place:
    return Place(cast(Purpose, row.purpose), row.tenant_id, row.epoch)


async def put(door: Opened, contents: Sequence[tuple[Place, str, bytes]]) -> None:
    """Give places what they did not have: a key's id and a blob each."""
    async with door.directory.database.write() as session:
        for there, kek_id, blob in contents:
            of_place = (
                WrappedSecret.purpose == there.purpose,
                WrappedSecret.tenant_id == there.tenant_id,
                WrappedSecret.epoch == there.epoch,
            )
            await session.execute(update(WrappedSecret).where(*of_place).values(kek_id=kek_id, wrapped=blob))


async def failures(door: Opened, places: Sequence[Place]) -> Counter[str]:
    """Of a gateway that has opened nothing yet, and is asked for every one of these secrets."""
    keyring = Keyring(door.directory.database, KekFile.open(door.data_dir / "kek"))
    for there in places:
        try:
            await keyring.reveal(there)
        except SaltUnavailable:
            continue
    return keyring.unwrap_failures


async def dump(door: Opened) -> bytes:
    """Every row of every table as text; bytes in hexadecimal."""

    def read(connection: Connection) -> str:
        lines = [
            repr([value.hex() if isinstance(value, bytes) else value for value in row])
            for table in inspect(connection).get_table_names()
            for row in connection.execute(text(f'SELECT * FROM "{table}"'))
        ]
        return "\n".join(lines)

    async with door.directory.database.read() as session:
        return (await (await session.connection()).run_sync(read)).encode()


async def readable(door: Opened) -> dict[str, bytes]:
    """What somebody with a copy has: a dump, and on SQLite every byte of the files, write-ahead log and free pages."""
    everything = {"dump": await dump(door)}
    if door.directory.database.dialect == "sqlite":
        everything["files"] = door.files()
    return everything


def bytes_of(digits: bytes) -> bytes:
    """The 32 random bytes that the base62 digits of an API key spell."""
    number = 0
    for digit in digits.decode():
        number = number * 62 + DIGITS.index(digit)
    return number.to_bytes(32, "big")


async def test_line_17_no_wrapped_secret_opens_in_the_place_of_another(database_url: str, tmp_path: Path) -> None:
    async with opened(tmp_path, database_url) as door:
        a, b, c = [await door.tenant(name) for name in "abc"]
        await door.registry.rotate(b.id)
        await door.registry.rotate(c.id)
        async with door.directory.database.write() as session:
            # A second epoch of one tenant, as no rotation leaves it, and a second version of the pepper.
            for there in (Place("salt", a.id, 2), Place("offload_key", a.id, 2), Place("apikey-pepper", "", 2)):
                await door.directory.keyring.create(session, there)
        first = await rows(door)
        places = [place(row) for row in first]
        assert {there.purpose for there in places} == {"salt", "offload_key", "apikey-pepper", "boot-canary"}
        assert len(places) == 11
        assert await failures(door, places) == {}

        of_each_purpose = Counter(there.purpose for there in places)
        for distance in range(1, len(first)):
            moved = [first[(index + distance) % len(first)] for index in range(len(first))]
            await put(door, [(there, row.kek_id, row.wrapped) for there, row in zip(places, moved, strict=True)])
            assert await failures(door, places) == of_each_purpose
        await put(door, [(there, row.kek_id, row.wrapped) for there, row in zip(places, first, strict=True)])
        assert await failures(door, places) == {}


async def test_line_17_nothing_of_another_table_or_column_opens(database_url: str, tmp_path: Path) -> None:
    async with opened(tmp_path, database_url) as door:
        tenant = await door.tenant("a")
        await door.key(tenant)
        async with door.directory.database.read() as session:
            key = (await session.scalars(select(ApiKey))).one()
            account = (await session.scalars(select(Tenant.account))).one()
        sound = next(row for row in await rows(door) if row.purpose == "salt")
        strangers = [key.digest, key.id.encode(), account, tenant.id.encode(), sound.kek_id.encode(), b""]
        strangers += [key.digest + account + sound.wrapped[:12], bytes(60), sound.wrapped + b"\0"]
        for blob in strangers:
            await put(door, [(place(sound), sound.kek_id, blob)])
            assert await failures(door, [place(sound)]) == {"salt": 1}
        # The id of a key belongs to the place too, even where the same key would be found under it.
        await put(door, [(place(sound), tenant.id[:16], sound.wrapped)])
        assert await failures(door, [place(sound)]) == {"salt": 1}
        await put(door, [(place(sound), sound.kek_id, sound.wrapped)])
        assert await failures(door, [place(sound)]) == {}


async def test_line_16_no_copy_of_the_database_shows_a_secret(database_url: str, tmp_path: Path) -> None:
    async with opened(tmp_path, database_url) as door:
        tenant, other = await door.tenant("a-tenant-name"), await door.tenant("b")
        row, key = await door.key(tenant)
        admin_key = (await door.directory.ensure_first_admin_key(tmp_path)).read_bytes().strip()
        secrets = {
            "salt": (await door.directory.salt(tenant.id, 1)).reveal(),
            "offload key": (await door.directory.offload_key(tenant.id, 1)).reveal(),
        }
        await door.registry.rotate(tenant.id)
        secrets |= {
            "salt of epoch 2": (await door.directory.salt(tenant.id, 2)).reveal(),
            "offload key of epoch 2": (await door.directory.offload_key(tenant.id, 2)).reveal(),
            "pepper": (await door.directory.keyring.reveal(Place("apikey-pepper", "", 1))).reveal(),
            "key-encryption key": base64.b64decode((tmp_path / "kek").read_text().split()[1]),
            # Digits between id and checksum: the id and the last four are no secrets.
            "API key": key[-49:-6],
            "admin key": admin_key[-49:-6],
        }
        for name in ("API key", "admin key"):
            secrets[f"bytes of the {name}"] = bytes_of(secrets[name])
        wrapped = [secret.wrapped for secret in await rows(door)]
        for copy in (await readable(door)).values():
            assert [name for name, secret in secrets.items() if found(secret, copy)] == []
            for known in (b"a-tenant-name", row.id.encode(), row.digest, *wrapped):
                assert found(known, copy)
        # The same search finds each of them, were it stored.
        for name, secret in secrets.items():
            await put(door, [(Place("salt", other.id, 1), "0" * 16, b"before" + secret + b"after")])
            for copy in (await readable(door)).values():
                assert name in [shown for shown, value in secrets.items() if found(value, copy)]


@pytest.mark.parametrize("how", ["deleted", "rotated"])
async def test_line_14_what_a_tenant_had_wrapped_is_nowhere_after(database_url: str, tmp_path: Path, how: str) -> None:
    async with opened(tmp_path, database_url) as door:
        tenant, kept = await door.tenant("a-tenant-that-goes"), await door.tenant("a-tenant-that-stays")
        row, key = await door.key(tenant)
        kept_row, _ = await door.key(kept)
        await door.directory.salt(tenant.id, 1)
        gone = [secret.wrapped for secret in await rows(door) if secret.tenant_id == tenant.id]
        stays = [secret.wrapped for secret in await rows(door) if secret.tenant_id != tenant.id]
        stays += [kept_row.digest, kept_row.id.encode(), kept.id.encode(), kept.name.encode()]
        of_tenant = [row.digest, row.id.encode(), tenant.id.encode(), tenant.name.encode()]
        (gone if how == "deleted" else stays).extend(of_tenant)
        assert all(found(value, copy) for copy in (await readable(door)).values() for value in gone + stays)

        change = door.registry.delete_tenant if how == "deleted" else door.registry.rotate
        assert await change(tenant.id) is not None

        for copy in (await readable(door)).values():
            assert [value for value in gone if found(value, copy)] == []
            assert all(found(value, copy) for value in stays)
        with pytest.raises(SaltUnavailable):
            await door.directory.salt(tenant.id, 1)
        if how == "deleted":
            with pytest.raises(Unauthorized):
                await door.directory.authenticate(bearer(key))
            async with door.directory.database.read() as session:
                for table in ("tenants", "api_keys", "epochs"):
                    assert await session.scalar(text(f"SELECT count(*) FROM {table}")) == 1
        else:
            await door.directory.salt(tenant.id, 2)
