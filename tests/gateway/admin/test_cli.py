"""The admin commands against a real server on a real socket."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gateway.admin.listening import listening, saltern
from tests.gateway.tenants.opened import bearer

pytestmark = pytest.mark.anyio


async def test_the_lines_of_the_quick_start(tmp_path: Path) -> None:
    async with listening(tmp_path) as admin:
        env = {"SALTERN_DATA_DIR": str(tmp_path)}
        created = await saltern("tenants", "create", "demo", env=env)
        assert created.exit_code == 0
        assert created.output.startswith("created tenant demo (ten_")
        again = await saltern("tenants", "create", "demo", env=env)
        assert again.exit_code == 1
        assert "already" in again.stderr
        assert len(again.stderr.splitlines()) == 1
        key = await saltern("keys", "create", "--tenant", "demo", "--quiet", env=env)
        assert key.exit_code == 0
        assert len(key.stdout.splitlines()) == 1
        await admin.door.directory.authenticate(bearer(key.stdout.strip().encode()))


async def test_every_command_in_json_and_in_words(tmp_path: Path) -> None:
    async with listening(tmp_path) as admin:
        env = {"SALTERN_DATA_DIR": str(tmp_path)}
        tenant = json.loads((await saltern("tenants", "create", "demo", "--json", env=env)).stdout)
        assert json.loads((await saltern("tenants", "get", "demo", "--json", env=env)).stdout) == tenant
        assert json.loads((await saltern("tenants", "get", tenant["id"], "--json", env=env)).stdout) == tenant
        assert json.loads((await saltern("tenants", "list", "--json", env=env)).stdout)["data"] == [tenant]
        assert tenant["id"] in (await saltern("tenants", "list", env=env)).stdout
        assert "name: demo" in (await saltern("tenants", "get", "demo", env=env)).stdout

        key = json.loads((await saltern("keys", "create", "--tenant=demo", "--name=one", "--json", env=env)).stdout)
        shown = (await saltern("keys", "create", "--tenant", "demo", env=env)).stdout
        assert "shown this once" in shown
        listed = json.loads((await saltern("keys", "list", "--tenant", "demo", "--json", env=env)).stdout)["data"]
        assert [row["name"] for row in listed] == ["one", None]
        table = (await saltern("keys", "list", "--tenant", "demo", env=env)).stdout
        assert key["id"] in table
        assert key["secret"] not in table + json.dumps(listed)
        assert (await saltern("keys", "delete", key["id"], "--tenant", "demo", env=env)).exit_code == 0

        rotated = json.loads((await saltern("salts", "rotate", "--tenant", "demo", "--json", env=env)).stdout)
        assert rotated == {"epoch": 2, "dropped": {"blocks": 3, "bytes": 4096}}
        assert "3 blocks" in (await saltern("salts", "rotate", "--tenant", "demo", env=env)).stdout
        admin.link.answer = None
        assert "no store answered" in (await saltern("salts", "rotate", "--tenant", "demo", env=env)).stdout
        salts = json.loads((await saltern("salts", "list", "--tenant", "demo", "--json", env=env)).stdout)["data"]
        assert [row["state"] for row in salts] == ["dropped", "dropped", "dropping", "active"]
        assert "dropping" in (await saltern("salts", "list", "--tenant", "demo", env=env)).stdout

        assert json.loads((await saltern("tenants", "delete", "demo", "--json", env=env)).stdout)["id"] == tenant["id"]
        assert await admin.door.registry.tenants(10) == []


async def test_lists_longer_than_a_page_are_whole(tmp_path: Path) -> None:
    async with listening(tmp_path) as admin:
        for number in range(51):
            await admin.door.registry.create_tenant(f"t{number}")
        listed = await saltern("tenants", "list", "--json", env={"SALTERN_DATA_DIR": str(tmp_path)})
        rows = json.loads(listed.stdout)["data"]
        assert [row["name"] for row in rows] == [f"t{number}" for number in range(51)]


async def test_url_and_key_come_from_the_environment_before_the_files(tmp_path: Path) -> None:
    async with listening(tmp_path) as admin:
        url = (tmp_path / "admin-url").read_text().strip()
        elsewhere = str(tmp_path / "elsewhere")
        env = {"SALTERN_DATA_DIR": elsewhere, "SALTERN_ADMIN_URL": url, "SALTERN_ADMIN_KEY": admin.admin_key}
        assert (await saltern("tenants", "list", env=env)).exit_code == 0
        assert (await saltern("tenants", "list", "--data-dir", str(tmp_path), env={})).exit_code == 0
        wrong = await saltern("tenants", "list", env={**env, "SALTERN_ADMIN_KEY": "canary-key"})
        assert wrong.exit_code == 1
        assert "SALTERN_ADMIN_KEY" in wrong.stderr
        assert "canary-key" not in wrong.output


async def test_every_error_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    async with listening(tmp_path) as admin:
        env = {"SALTERN_DATA_DIR": str(tmp_path)}
        for arguments, message in (
            (("tenants", "get", "nobody"), "there is no tenant 'nobody'"),
            (("tenants", "get", "ten_nobody"), "There is no such tenant"),
            (("tenants", "get", "../x?y"), "1 to 64 of a-z"),
            (("tenants", "create", "Bad Name"), "1 to 64 of a-z"),
            (("keys", "create", "--tenant", "nobody"), "there is no tenant 'nobody'"),
            (("keys", "delete", "../../x", "--tenant", "nobody"), "there is no tenant"),
        ):
            failed = await saltern(*arguments, env=env)
            assert failed.exit_code == 1
            assert len(failed.stderr.splitlines()) == 1
            assert message in failed.stderr
            assert failed.stdout == ""
            assert admin.admin_key not in failed.output


async def test_without_a_server_the_line_says_what_to_do(tmp_path: Path) -> None:
    env = {"SALTERN_DATA_DIR": str(tmp_path)}
    missing = await saltern("tenants", "list", env=env)
    assert missing.exit_code == 1
    assert "saltern serve" in missing.stderr
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    for broken in (url, "http://[", "ftp://x", "no url"):
        env |= {"SALTERN_ADMIN_URL": broken, "SALTERN_ADMIN_KEY": "sk"}
        failed = await saltern("tenants", "list", env=env)
        assert failed.exit_code == 1
        assert "SALTERN_ADMIN_URL" in failed.stderr
        assert len(failed.stderr.splitlines()) == 1


def test_the_commands_import_neither_torch_nor_the_server() -> None:
    heavy = "('torch', 'transformers', 'numpy', 'sqlalchemy', 'alembic', 'starlette')"
    script = f"import sys, gateway.cli; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
