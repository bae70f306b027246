"""The file that holds the key-encryption key."""

import base64
import os
import stat
from pathlib import Path

import pytest

from gateway.secret import Secret
from gateway.tenants.database import Database
from gateway.tenants.directory import Directory
from gateway.tenants.vault import KekFile, Place, VaultError, kek_id
from tests.gateway.tenants.opened import database_url, opened

pytestmark = pytest.mark.anyio

HOME = Place("salt", "ten_a", 1)


def line(key: bytes) -> str:
    return f"{kek_id(Secret(key))} {base64.b64encode(key).decode()}\n"


def kek(path: Path, content: str, mode: int = 0o600) -> Path:
    path.write_text(content)
    path.chmod(mode)
    return path


def test_the_first_start_makes_a_private_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    made = KekFile.open_or_create(tmp_path / "kek")
    assert stat.S_IMODE((tmp_path / "kek").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["kek"]
    assert KekFile.open(tmp_path / "kek").key_id == made.key_id
    assert KekFile.open_or_create(tmp_path / "kek").key_id == made.key_id


async def test_the_first_line_wraps_and_the_others_only_open(tmp_path: Path) -> None:
    old = KekFile.open(kek(tmp_path / "kek", line(b"o" * 32)))
    wrapped = await old.wrap(HOME, Secret(b"s" * 32))
    new = KekFile.open(kek(tmp_path / "kek", line(b"n" * 32) + line(b"o" * 32)))
    assert new.key_id == kek_id(Secret(b"n" * 32))
    assert (await new.wrap(HOME, Secret(b"s"))).kek_id == new.key_id
    assert await new.unwrap(HOME, wrapped) == Secret(b"s" * 32)


async def test_a_key_added_while_running_is_found_when_a_row_names_it(tmp_path: Path) -> None:
    path = kek(tmp_path / "kek", line(b"o" * 32))
    running = KekFile.open(path)
    rotated = KekFile.open(kek(tmp_path / "kek", line(b"n" * 32) + line(b"o" * 32)))
    wrapped = await rotated.wrap(HOME, Secret(b"s" * 32))
    assert await running.unwrap(HOME, wrapped) == Secret(b"s" * 32)
    stranger = await KekFile.open(kek(tmp_path / "other", line(b"x" * 32))).wrap(HOME, Secret(b"s"))
    with pytest.raises(VaultError, match="restore the file that belongs to this database"):
        await running.unwrap(HOME, stranger)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o604, 0o666, 0o644])
def test_a_file_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    path = kek(tmp_path / "kek", line(b"k" * 32))
    KekFile.open(path)
    path.chmod(mode)
    with pytest.raises(VaultError, match=rf"mode 0{mode:o}.*chmod 600"):
        KekFile.open(path)


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = kek(tmp_path / "kek", line(b"k" * 32))
    KekFile.open(path)
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(VaultError, match="belongs to uid"):
        KekFile.open(path)


def test_a_link_is_followed_and_what_it_points_at_is_checked(tmp_path: Path) -> None:
    path = kek(tmp_path / "real", line(b"k" * 32))
    (tmp_path / "kek").symlink_to(path)
    KekFile.open(tmp_path / "kek")
    path.chmod(0o604)
    with pytest.raises(VaultError, match="open to others"):
        KekFile.open(tmp_path / "kek")


def test_a_pipe_or_a_folder_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "kek", 0o600)
    with pytest.raises(VaultError, match="not a regular file"):
        KekFile.open(tmp_path / "kek")
    (tmp_path / "folder").mkdir(mode=0o700)
    with pytest.raises(VaultError, match="not a regular file"):
        KekFile.open(tmp_path / "folder")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "\n",
        "abc\n",
        line(b"k" * 31),
        "0" * 16 + " " + base64.b64encode(b"k" * 32).decode() + "\n",
        line(b"k" * 32)[:-5],
        line(b"k" * 32) + "x",
        "é\n",
        line(b"k" * 32) * 2000,
    ],
)
def test_a_damaged_file_is_refused_without_quoting_it(tmp_path: Path, content: str) -> None:
    with pytest.raises(VaultError) as caught:
        KekFile.open(kek(tmp_path / "kek", content))
    assert base64.b64encode(b"k" * 32).decode()[:8] not in str(caught.value)
    KekFile.open(kek(tmp_path / "kek", line(b"k" * 32)))


async def test_health_fails_when_the_file_is_gone(tmp_path: Path) -> None:
    keys = KekFile.open(kek(tmp_path / "kek", line(b"k" * 32)))
    await keys.health()
    (tmp_path / "kek").unlink()
    with pytest.raises(VaultError, match="is missing"):
        await keys.health()


def test_no_repr_shows_a_key(tmp_path: Path) -> None:
    keys = KekFile.open(kek(tmp_path / "kek", line(b"k" * 32)))
    assert "kkkk" not in repr(keys)
    assert "kkkk" not in repr(vars(keys))


async def test_a_missing_kek_beside_secrets_refuses_to_start_and_is_not_made_anew(tmp_path: Path) -> None:
    async with opened(tmp_path):
        pass
    (tmp_path / "kek").rename(tmp_path / "elsewhere")
    database = await Database.open(database_url(tmp_path))
    with pytest.raises(VaultError, match="restore it from the backup"):
        await Directory.open(database, tmp_path / "kek")
    assert not (tmp_path / "kek").exists()
    await Directory.open(database, tmp_path / "elsewhere")
    await database.close()


async def test_the_kek_of_another_database_refuses_to_start(tmp_path: Path) -> None:
    async with opened(tmp_path):
        pass
    kek(tmp_path / "kek", line(b"k" * 32))
    database = await Database.open(database_url(tmp_path))
    with pytest.raises(VaultError, match=r"boot-canary.*restore the file"):
        await Directory.open(database, tmp_path / "kek")
    await database.close()
