"""Line 21 of the promise: a rotation of the key-encryption key re-wraps every secret, wherever it is killed."""

from __future__ import annotations

import asyncio
import base64
import fcntl
import os
import stat
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from sqlalchemy import delete, insert, select, text, update
from typer.testing import CliRunner

from gateway.cli import app
from gateway.secret import Secret
from gateway.tenants.database import Database
from gateway.tenants.kek_rotation import rotate
from gateway.tenants.keyring import Keyring
from gateway.tenants.tables import WrappedSecret
from gateway.tenants.vault import KekFile, Place, VaultError, Wrapped, kek_id
from tests.gateway.tenants.opened import database_url as sqlite_url
from tests.gateway.tenants.opened import opened
from tests.gateway.tenants.rotating import Rotations

pytestmark = pytest.mark.anyio

Key = tuple[str, str, int]


@asynccontextmanager
async def database_at(url: str) -> AsyncIterator[Database]:
    database = await Database.open(url)
    try:
        yield database
    finally:
        await database.close()


async def rows(database: Database) -> Sequence[WrappedSecret]:
    async with database.read() as session:
        return (await session.scalars(select(WrappedSecret))).all()


async def secrets(database: Database, kek_file: Path) -> dict[Key, bytes]:
    """Every secret, opened by who knows nothing but the database and the file. Raises VaultError."""
    kek = KekFile.open(kek_file)
    opened: dict[Key, bytes] = {}
    for row in await rows(database):
        place: Place = Place(row.purpose, row.tenant_id, row.epoch)  # type: ignore[arg-type]
        opened[row.purpose, row.tenant_id, row.epoch] = (
            await kek.unwrap(place, Wrapped(row.kek_id, row.wrapped))
        ).reveal()
    return opened


def key_ids(kek_file: Path) -> list[str]:
    return [line.split()[0] for line in kek_file.read_text().splitlines()]


def saltern(*arguments: str) -> tuple[int, str, list[str]]:
    done = CliRunner().invoke(app, ["kek", "rotate", *arguments])
    return done.exit_code, done.stdout, done.stderr.splitlines()


async def test_line_21_every_secret_is_wrapped_anew_and_the_old_key_opens_nothing(
    database_url: str, tmp_path: Path
) -> None:
    kek_file = tmp_path / "kek"
    async with opened(tmp_path, database_url) as door:
        for name in ("a", "b"):
            tenant = await door.tenant(name)
            await door.registry.rotate(tenant.id)
        database = door.directory.database
        before, old_rows, old_file = await secrets(database, kek_file), await rows(database), kek_file.read_text()
        assert len(before) == 2 + 2 * 2

        async with database_at(database_url) as another:
            done = await rotate(another, kek_file)

        assert (done.wrapped, done.removed_key_ids) == (6, [old_file.split()[0]])
        assert key_ids(kek_file) == [done.key_id] != done.removed_key_ids
        assert await secrets(database, kek_file) == before
        new_rows = await rows(database)
        assert {row.kek_id for row in new_rows} == {done.key_id}
        assert not {row.wrapped for row in old_rows} & {row.wrapped for row in new_rows}
        (tmp_path / "old").write_text(old_file)
        (tmp_path / "old").chmod(0o600)
        with pytest.raises(VaultError, match="restore the file that belongs to this database"):
            await secrets(database, tmp_path / "old")
        if "sqlite" in database_url:
            assert [row.wrapped for row in old_rows if row.wrapped in door.files()] == []
            assert all(row.wrapped in door.files() for row in new_rows)
        # The gateway that was running all the while goes on, and one that starts now begins.
        door.clock.advance(minutes=5)
        assert (await door.directory.salt(tenant.id, 2)).reveal() == before["salt", tenant.id, 2]
        await Keyring.open(database, kek_file)


async def test_line_21_a_rotation_killed_anywhere_loses_nothing_and_is_ended_by_the_next(
    database_url: str, tmp_path: Path
) -> None:
    kek_file = tmp_path / "kek"
    async with opened(tmp_path, database_url) as door:
        await door.tenant("a")
    async with database_at(database_url) as database:
        first_rows, first_file = await rows(database), kek_file.read_text()
        before = await secrets(database, kek_file)
        with Rotations(database_url, kek_file) as rotations:
            moments, number = [], 1
            while (moment := rotations.run(die_at=number)) is not None:
                moments.append(moment)
                assert await secrets(database, kek_file) == before
                left = key_ids(kek_file)
                assert rotations.run(die_at=0) is None
                # A rotation that has not ended goes on with its own new key.
                if len(left) == 2:
                    assert key_ids(kek_file) == left[:1]
                assert len(key_ids(kek_file)) == 1
                assert key_ids(kek_file) != [first_file.split()[0]]
                assert await secrets(database, kek_file) == before
                assert sorted(name for name in os.listdir(tmp_path) if name.startswith("kek")) == ["kek", "kek.lock"]

                async with database.write() as session:
                    await session.execute(delete(WrappedSecret))
                    values = [
                        {name: getattr(row, name) for name in WrappedSecret.__table__.columns.keys()}  # noqa: SIM118
                        for row in first_rows
                    ]
                    await session.execute(insert(WrappedSecret), values)
                kek_file.write_text(first_file)
                number += 1
        assert moments == [
            "before the file",
            "after the file",
            *["after a row"] * len(first_rows),
            "before the file",
            "after the file",
        ]


async def test_killed_again_and_again_a_rotation_ends_with_the_first_new_key(tmp_path: Path) -> None:
    url, kek_file = sqlite_url(tmp_path), tmp_path / "kek"
    async with opened(tmp_path) as door:
        await door.tenant("a")
        before = await secrets(door.directory.database, kek_file)
        with Rotations(url, kek_file) as rotations:
            assert rotations.run(die_at=2) == "after the file"
            new, old = key_ids(kek_file)
            kills = 0
            while (moment := rotations.run(die_at=1)) is not None and moment == "after a row":
                kills += 1
                assert key_ids(kek_file) == [new, old]
                assert await secrets(door.directory.database, kek_file) == before
                assert {row.kek_id for row in await rows(door.directory.database)} <= {new, old}
            assert (kills, moment) == (len(before), "before the file")
            assert rotations.run(die_at=0) is None
        assert key_ids(kek_file) == [new]
        assert await secrets(door.directory.database, kek_file) == before


async def test_gateways_that_make_secrets_all_the_while_lose_none(database_url: str, tmp_path: Path) -> None:
    kek_file = tmp_path / "kek"
    async with opened(tmp_path, database_url) as door, opened(tmp_path, database_url) as other:
        for number in range(4):
            await door.tenant(f"old-{number}")
        old = key_ids(kek_file)
        arguments = ["--data-dir", str(tmp_path), "--database-url", database_url]
        rotation = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway.cli", "kek", "rotate", *arguments, stdout=asyncio.subprocess.PIPE
        )
        ended = asyncio.create_task(rotation.communicate())
        made: dict[str, int] = {}

        async def serve(name: str) -> None:
            gateway, number = (door, other)[len(name) % 2], 0
            # A few more when it has ended: by gateways that have not heard of it.
            while not ended.done() or number % 4:
                tenant = await gateway.registry.create_tenant(f"{name}-{number}")
                fence = await gateway.registry.rotate(tenant.id)
                assert fence is not None
                made[tenant.id] = fence.epoch or 0
                number += 1
                await asyncio.sleep(0.05)  # SQLite's lock is nobody's for a moment, as it is beside real gateways

        await asyncio.gather(serve("new"), serve("newer"))
        said, _ = await ended
        assert rotation.returncode == 0, said
        assert key_ids(kek_file) != old
        assert len(key_ids(kek_file)) == 1
        found = await secrets(door.directory.database, kek_file)
        assert len(found) == 2 + 2 * (4 + len(made))
        for gateway in (door, other):
            for tenant_id, epoch in made.items():
                assert (await gateway.directory.salt(tenant_id, epoch)).reveal() == found["salt", tenant_id, epoch]
            assert not gateway.directory.keyring.unwrap_failures


async def test_a_secret_that_is_being_made_under_the_old_key_keeps_it(database_url: str, tmp_path: Path) -> None:
    kek_file, place = tmp_path / "kek", Place("salt", "ten_slow", 1)
    async with opened(tmp_path, database_url) as door, database_at(database_url) as another:
        database = door.directory.database
        (old,) = key_ids(kek_file)

        async def has_to_wait() -> bool:
            # SQLite's writer waits for the lock before its first row, PostgreSQL's for the table after its last.
            if database.dialect == "sqlite":
                return len(key_ids(kek_file)) == 2
            async with database.read() as session:
                waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'wrapped_secrets'::regclass"
                return bool(await session.scalar(text(waiting)))

        async with database.write() as session:
            await door.directory.keyring.create(session, place)
            rotation = asyncio.create_task(rotate(another, kek_file))
            while not await has_to_wait() and not rotation.done():
                await asyncio.wait([rotation], timeout=0.01)
            assert not rotation.done()
            assert old in key_ids(kek_file)
        done = await rotation
        assert (done.wrapped, done.removed_key_ids) == (3, [old])
        assert place.tenant_id in {row.tenant_id for row in await rows(database)}
        await secrets(database, kek_file)


async def test_a_reader_between_the_old_row_and_the_new_file_reads_again(tmp_path: Path) -> None:
    kek_file = tmp_path / "kek"
    async with opened(tmp_path) as door, opened(tmp_path) as fresh, database_at(sqlite_url(tmp_path)) as another:
        tenant = await door.tenant("a")
        salt = await door.directory.salt(tenant.id, 1)
        read = fresh.directory.keyring._unwrap

        async def rotated_meanwhile(session: object, place: Place) -> Secret:
            fresh.directory.keyring._unwrap = read  # type: ignore[method-assign]
            async with another.read() as earlier:
                row = await earlier.get(WrappedSecret, (place.purpose, place.tenant_id, place.epoch))
            assert row is not None
            await rotate(another, kek_file)
            # It knows the new file alone.
            await fresh.directory.keyring._provider.health()
            return await fresh.directory.keyring._provider.unwrap(place, Wrapped(row.kek_id, row.wrapped))

        fresh.directory.keyring._unwrap = rotated_meanwhile  # type: ignore[assignment, method-assign]
        assert await fresh.directory.salt(tenant.id, 1) == salt
        assert not fresh.directory.keyring.unwrap_failures


async def test_a_secret_that_does_not_open_stops_it_with_its_place_and_the_old_key_stays(
    database_url: str, tmp_path: Path
) -> None:
    kek_file = tmp_path / "kek"
    async with opened(tmp_path, database_url) as door:
        tenant = await door.tenant("a")
        database, first_file = door.directory.database, kek_file.read_text()
        first = await rows(database)
        of_salt = (WrappedSecret.purpose == "salt", WrappedSecret.tenant_id == tenant.id)
        for damage in ({"wrapped": bytes(60)}, {"kek_id": "0123456789abcdef"}):
            async with database.write() as session:
                (sound,) = [row for row in first if row.purpose == "salt"]
                await session.execute(update(WrappedSecret).where(*of_salt).values(**damage))
            with pytest.raises(VaultError, match=f"the salt of tenant '{tenant.id}', epoch 1 "):
                await rotate(database, kek_file)
            assert kek_file.read_text() == first_file
            # The same in the middle of one that has begun.
            KekFile.open(kek_file).prepend_new_key()
            begun = kek_file.read_text()
            with pytest.raises(VaultError, match=f"the salt of tenant '{tenant.id}', epoch 1 "):
                await rotate(database, kek_file)
            assert kek_file.read_text() == begun
            async with database.write() as session:
                await session.execute(
                    update(WrappedSecret).where(*of_salt).values(kek_id=sound.kek_id, wrapped=sound.wrapped)
                )
            kek_file.write_text(first_file)
        assert (await rotate(database, kek_file)).wrapped == len(first)


async def test_a_plan_changes_nothing_and_says_what_a_rotation_would_do(tmp_path: Path) -> None:
    kek_file = tmp_path / "kek"
    async with opened(tmp_path) as door:
        await door.tenant("a")
        first = {(row.purpose, row.wrapped) for row in await rows(door.directory.database)}
    before, (old,) = kek_file.read_text(), key_ids(kek_file)
    code, said, _ = await asyncio.to_thread(saltern, "--plan", "--data-dir", str(tmp_path))
    assert (code, said) == (0, f"would wrap 4 of 4 secrets under a new key\nwould remove {old}\n")
    async with database_at(sqlite_url(tmp_path)) as database:
        assert {(row.purpose, row.wrapped) for row in await rows(database)} == first
    assert kek_file.read_text() == before
    assert not (tmp_path / "kek.lock").exists()
    with Rotations(sqlite_url(tmp_path), kek_file) as rotations:
        assert rotations.run(die_at=3) == "after a row"
    new = key_ids(kek_file)[0]
    code, said, _ = await asyncio.to_thread(saltern, "--plan", "--data-dir", str(tmp_path))
    assert code == 0
    assert said == (
        f"would wrap 3 of 4 secrets under {new}, as a rotation began that has not ended\nwould remove {old}\n"
    )
    code, said, _ = await asyncio.to_thread(saltern, "--data-dir", str(tmp_path))
    assert (code, said) == (0, f"wrapped 3 secrets under {new}, removed {old}\n")


async def test_the_file_keeps_its_place_mode_and_owner(tmp_path: Path) -> None:
    (tmp_path / "safe").mkdir()
    real = tmp_path / "safe" / "key"
    (tmp_path / "kek").symlink_to(real)
    key = os.urandom(32)
    real.write_text(f"{kek_id(Secret(key))} {base64.b64encode(key).decode()}\n")
    real.chmod(0o440)
    async with opened(tmp_path) as door:
        group = os.getgroups()[-1] if os.geteuid() else 12345
        os.chown(real, -1, group)
        await rotate(door.directory.database, tmp_path / "kek")
    assert (tmp_path / "kek").readlink() == real
    assert stat.S_IMODE(real.stat().st_mode) == 0o440
    assert (real.stat().st_uid, real.stat().st_gid) == (os.geteuid(), group)
    assert key_ids(real) != [kek_id(Secret(key))]


async def test_what_cannot_be_rotated_is_one_line_and_nothing_is_made(tmp_path: Path) -> None:
    def refused(*arguments: str) -> str:
        code, said, errors = saltern("--data-dir", str(tmp_path), *arguments)
        assert (code, said, len(errors)) == (2, "", 1), errors
        return errors[0]

    assert "kek is missing" in await asyncio.to_thread(refused)
    assert os.listdir(tmp_path) == []
    async with opened(tmp_path):
        pass
    before = (tmp_path / "kek").read_text()
    lock = os.open(tmp_path / "kek.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert await asyncio.to_thread(refused) == f"saltern: another rotation of {tmp_path / 'kek'} is running"
    os.close(lock)
    empty = f"sqlite+aiosqlite:///{tmp_path / 'other.db'}"
    assert "the database has no secrets" in await asyncio.to_thread(refused, "--database-url", empty)
    assert (tmp_path / "kek").read_text() == before
