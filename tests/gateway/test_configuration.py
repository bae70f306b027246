"""Where settings come from: flags before the environment, the environment before the file, the file before defaults."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gateway.cli import app
from gateway.config_file import KEYS
from gateway.options import GatewayOptions, ServeOptions, StoreOptions

ROOT = Path(__file__).resolve().parents[2]
COMMANDS: dict[str, Any] = {"serve": ServeOptions, "gateway": GatewayOptions, "store": StoreOptions}

# A value of each setting for the file, the environment and the command line; none is the default.
VALUES: dict[str, tuple[Any, Any, Any]] = {
    "data_dir": ("/tmp/a", "/tmp/b", "/tmp/c"),
    "socket": ("/tmp/a.sock", "/tmp/b.sock", "/tmp/c.sock"),
    "log_level": ("debug", "warning", "error"),
    "model": ("a", "b", "c"),
    "model_name": ("a", "b", "c"),
    "database_url": ("sqlite+aiosqlite:///a", "sqlite+aiosqlite:///b", "sqlite+aiosqlite:///c"),
    "kek_file": ("/tmp/a", "/tmp/b", "/tmp/c"),
    "host": ("127.0.0.2", "127.0.0.3", "127.0.0.4"),
    "port": (1, 2, 3),
    "admin_port": (1, 2, 3),
    "tls_cert": ("/a", "/b", "/c"),
    "tls_key": ("/a", "/b", "/c"),
    "admin_tls_cert": ("/a", "/b", "/c"),
    "admin_tls_key": ("/a", "/b", "/c"),
    "drain_seconds": (1, 2.5, 3.5),
    "tenant_metrics": (1, 2, 3),
    "device": ("cpu", "cuda", "cpu"),
    "dtype": ("fp32", "bf16", "fp16"),
    "kv_dtype": ("bf16", "int8", "fp8"),
    "block_tokens": (8, 32, 64),
    "cache_memory": ("1GiB", "2GiB", "3GiB"),
    "max_context": (1, 2, 3),
    "max_running": (1, 2, 3),
    "step_tokens": (1, 2, 3),
    "eviction": ("reuse", "reuse", "reuse"),
    "threads": (1, 2, 3),
}


@pytest.fixture(autouse=True)
def nothing_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in os.environ:
        if name.startswith("SALTERN_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))


def saltern(*arguments: str | Path, **environment: str) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)], env=environment)


def shown(*arguments: str | Path, **environment: str) -> dict[str, dict[str, Any]]:
    done = saltern("config", "show", "--json", *arguments, **environment)
    assert done.exit_code == 0, done.output
    settings: dict[str, dict[str, Any]] = json.loads(done.stdout)["settings"]
    return settings


def refused(*arguments: str | Path, **environment: str) -> str:
    """The one line of a command that is refused."""
    done = saltern(*arguments, **environment)
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def written(path: Path, **values: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in values.items())
    path.write_text("".join(lines).replace("\x7f", "\\u007f"))
    return path


def test_the_table_has_every_setting() -> None:
    assert set(VALUES) == set(KEYS)
    assert {field.name for options in COMMANDS.values() for field in dataclasses.fields(options)} == {*KEYS, "config"}


@pytest.mark.parametrize("command", COMMANDS)
def test_flags_come_before_the_environment_and_that_before_the_file(command: str, tmp_path: Path) -> None:
    names = {field.name for field in dataclasses.fields(COMMANDS[command])} - {"config"}
    # What is of another command does not disturb.
    of_file = written(tmp_path / "some.toml", **{name: values[0] for name, values in VALUES.items()})
    of_nothing = written(tmp_path / "empty.toml")
    environment = {f"SALTERN_{name.upper()}": str(values[1]) for name, values in VALUES.items()}
    flags = [part for name in names for part in (flag(name), str(VALUES[name][2]))]

    def all_from(place: int, source: str) -> dict[str, dict[str, Any]]:
        return {name: {"value": VALUES[name][place], "source": source} for name in names}

    asked = ("--command", command, "--config")
    defaults = shown(*asked, of_nothing)
    assert {name for name in names if defaults[name]["source"] != "default"} == set()
    assert {name for name in names if defaults[name]["value"] in VALUES[name]} == set()
    assert shown(*asked, of_file) == all_from(0, "file")
    assert shown(*asked, of_nothing, **environment) == all_from(1, "environment")
    assert shown(*asked, of_file, **environment) == all_from(1, "environment")
    assert shown(*asked, of_nothing, *flags) == all_from(2, "flag")
    assert shown(*asked, of_file, *flags) == all_from(2, "flag")
    assert shown(*asked, of_nothing, *flags, **environment) == all_from(2, "flag")
    assert shown(*asked, of_file, *flags, **environment) == all_from(2, "flag")


def test_the_file_of_the_data_directory_is_found_and_may_be_missing(tmp_path: Path) -> None:
    assert shown()["port"] == {"value": 8000, "source": "default"}
    written(tmp_path / "home" / "saltern" / "saltern.toml", port=1)
    assert shown()["port"] == {"value": 1, "source": "file"}
    written(tmp_path / "data" / "saltern.toml", port=2)
    for there in (["--data-dir", tmp_path / "data"], []):
        environment = {} if there else {"SALTERN_DATA_DIR": str(tmp_path / "data")}
        assert shown(*there, **environment)["port"]["value"] == 2
        # Another that is named is read instead of it.
        named = written(tmp_path / "named.toml", host="::1")
        assert shown("--config", named, *there, **environment)["port"]["source"] == "default"
        assert shown(*there, **environment, SALTERN_CONFIG=str(named))["host"]["value"] == "::1"
    assert not (tmp_path / "data" / "run").exists()


def test_a_file_that_was_named_has_to_be_there_and_to_be_readable(tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    for command in COMMANDS:
        line = refused("config", "show", "--command", command, "--config", missing)
        assert line == f"saltern: {missing} can't be read (No such file or directory): choose another --config"
    assert "missing.toml can't be read" in refused("config", "show", SALTERN_CONFIG=str(missing))
    assert f"{tmp_path} can't be read (Is a directory)" in refused("config", "show", "--config", tmp_path)


def test_a_named_file_may_say_where_the_data_directory_is_and_the_one_in_it_may_not(tmp_path: Path) -> None:
    named = written(tmp_path / "named.toml", data_dir=str(tmp_path / "there"))
    # A file in that directory is another one: only the one that was named is read.
    written(tmp_path / "there" / "saltern.toml", port=1)
    settings = shown("--config", named)
    assert settings["data_dir"] == {"value": str(tmp_path / "there"), "source": "file"}
    assert settings["kek_file"]["value"] == str(tmp_path / "there" / "kek")
    assert settings["port"]["source"] == "default"
    assert shown("--config", named, "--data-dir", tmp_path / "flag")["data_dir"]["value"] == str(tmp_path / "flag")

    found = written(tmp_path / "here" / "saltern.toml", data_dir=str(tmp_path / "there"))
    line = refused("config", "show", "--data-dir", tmp_path / "here")
    assert line.startswith(f"saltern: {found}: data_dir can't stand in the file that is found through it: use --data-")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot = 8000", "'prot' is no setting: did you mean port?"),
        ("cache-memory = '1GiB'", "'cache-memory' is no setting: did you mean cache_memory?"),
        ("THREADS = 1", "'THREADS' is no setting: did you mean threads?"),
        ("config = 'x'", "'config' is no setting"),
        ("life_descriptor = 3", "'life_descriptor' is no setting"),
        ("[serve]\nport = 1", "'serve' is no setting"),
        ("zzzzzz = 1", "'zzzzzz' is no setting: `saltern config show` lists those that exist"),
        ("port = '8000'", "port is text: write a whole number, such as port = 8"),
        ("port = 80.5", "port is a number: write a whole number"),
        ("threads = true", "threads is true or false: write a whole number"),
        ("drain_seconds = '4'", "drain_seconds is text: write a number, such as drain_seconds = 2.5"),
        ("drain_seconds = true", "drain_seconds is true or false: write a number"),
        ("cache_memory = 4", "cache_memory is a whole number: write text in quotes, such as cache_memory ="),
        ("model = ['a']", "model is a list: write text in quotes"),
        ("model = {a = 1}", "model is a table: write text in quotes"),
        ("host = 1979-05-27", "host is a date or a time: write text in quotes"),
        ("model = ''", "model is empty or has a zero byte: leave the line out for the default"),
        ('kek_file = "a\\u0000b"', "kek_file is empty or has a zero byte"),
        ("port = 65536", "port = 65536 is not accepted: Input should be less than or equal to 65535"),
        ("drain_seconds = -1", "drain_seconds = -1 is not accepted"),
        ("drain_seconds = nan", "drain_seconds = nan is not accepted"),
        ("drain_seconds = inf", "drain_seconds = inf is not accepted"),
        ("max_running = 0", "max_running = 0 is not accepted: Input should be greater than or equal to 1"),
        ("device = 'gpu'", "device = gpu is not accepted: 'gpu' is not one of 'auto', 'cpu', 'cuda'"),
        ("log_level = 'INFO'", "log_level = INFO is not accepted: 'INFO' is not one of 'debug', 'info'"),
        ("cache_memory = '5 cows'", "cache_memory: '5 cows' is no size: write a number with B, KiB"),
        ("port = 1\nport = 2", "is no TOML: Cannot overwrite a value (at "),
        ("x = " + "[" * 9999, "is no TOML for settings: it is nested too deep"),
        ("host = localhost", "is no TOML: Invalid value (at line 1, column 8); write key = value lines, text"),
    ],
)
def test_what_a_file_may_not_say_is_refused_with_its_name_and_the_remedy(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "saltern.toml"
    path.write_text(text)
    (line,) = {refused("config", "show", "--command", command, "--data-dir", tmp_path) for command in COMMANDS}
    assert line.startswith(f"saltern: {path}")
    assert said in line
    # What is on the command line and right does not make up for what the file says and is wrong.
    assert refused("config", "show", "--data-dir", tmp_path, "--device", "cpu", "--threads", "1") == line
    # Who asks for help gets it.
    assert saltern("serve", "--data-dir", tmp_path, "--help").exit_code == 0


def test_a_file_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "saltern.toml").write_bytes(b"host = '\xff'")
    assert "is no TOML: byte 8 is not UTF-8; save it as UTF-8" in refused("config", "show", "--data-dir", tmp_path)


def test_a_value_of_the_wrong_kind_is_not_repeated(tmp_path: Path) -> None:
    # Such as a URL in the wrong line.
    written(tmp_path / "saltern.toml", port="postgresql+asyncpg://saltern:canary@host/db")
    assert "canary" not in refused("config", "show", "--data-dir", tmp_path)


def test_the_admin_commands_take_no_notice_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "saltern.toml").write_text("no TOML")
    failed = saltern("tenants", "list", "--data-dir", tmp_path)
    assert failed.exit_code == 1
    assert "admin-url" in failed.stderr
    assert "toml" not in failed.stderr


URLS = {
    "postgresql+asyncpg://saltern:canary@db/saltern": "postgresql+asyncpg://saltern:***@db/saltern",
    "postgresql+asyncpg://db/saltern?password=canary&user=me": "postgresql+asyncpg://db/saltern?password=***&user=***",
    "postgresql+asyncpg://saltern:can@canary@db/saltern": "***",
    "postgresql+asyncpg://sal/tern:canary@db/saltern": "***",
    "sqlite+aiosqlite:////tmp/me@home.db": "sqlite+aiosqlite:////tmp/me%40home.db",
    "postgresql+asyncpg//saltern:canary@db": "***",
    "postgresql+asyncpg://saltern:canary@db:port/saltern": "***",
    "sqlite+aiosqlite:////tmp/x.db": "sqlite+aiosqlite:////tmp/x.db",
}


@pytest.mark.parametrize("url", URLS)
def test_the_password_of_a_database_is_not_shown(url: str, tmp_path: Path) -> None:
    written(tmp_path / "saltern.toml", database_url=url)
    for asked in (["--data-dir", tmp_path], ["--database-url", url]):
        text = saltern("config", "show", *asked)
        assert text.exit_code == 0
        assert "canary" not in text.output + saltern("config", "show", "--json", *asked).output
        assert shown(*asked)["database_url"]["value"] == URLS[url]
        # It would not be one that works.
        assert ("database_url" in tomllib.loads(text.stdout)) == ("***" not in URLS[url])


def test_a_certificate_without_its_key_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "saltern.toml", tls_cert="/a", tls_key="/a", admin_tls_key="/a")
    for command in ("serve", "gateway"):
        line = refused("config", "show", "--command", command, "--data-dir", tmp_path)
        assert line == "saltern: --admin-tls-key is without --admin-tls-cert: give both for TLS, or neither"


@pytest.mark.parametrize("level", ["debug", "error"])
def test_only_salterns_own_log_follows_the_level(level: str) -> None:
    """At debug, libraries write down what they send to a database."""
    script = (
        "import logging, sys; from gateway import cli, process; cli._configure_logging(sys.argv[1])\n"
        "print(logging.getLogger('saltern.gateway').getEffectiveLevel())\n"
        "import aiosqlite, alembic, asyncio, httpx, sqlalchemy.ext.asyncio, uvicorn\n"
        "print(min(logging.getLogger(name).getEffectiveLevel() for name in [None, *logging.root.manager.loggerDict] "
        "if not str(name).startswith('saltern')))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, level], capture_output=True, text=True, check=False)
    own, least = map(int, done.stdout.split())
    assert own == logging.getLevelNamesMapping()[level.upper()], done.stderr
    assert least >= logging.WARNING


def test_what_is_shown_is_a_file_of_the_same_settings(tmp_path: Path) -> None:
    given = {name: of_file for name, (of_file, _, _) in VALUES.items()} | {"model": 'quote " back \\ \x7f ü 😀'}
    first = shown("--config", written(tmp_path / "first.toml", **given))
    assert {name: setting["value"] for name, setting in first.items()} == given
    text = saltern("config", "show", "--config", tmp_path / "first.toml").stdout
    assert f"# saltern serve; the file is {tmp_path / 'first.toml'}\n" in text
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "saltern.toml").write_text(text)
    again = shown("--data-dir", tmp_path / "data")
    assert {name: setting["source"] for name, setting in again.items() if name != "data_dir"} == dict.fromkeys(
        set(VALUES) - {"data_dir"}, "file"
    )
    assert {name: again[name]["value"] for name in VALUES if name != "data_dir"} == {
        name: given[name] for name in VALUES if name != "data_dir"
    }


def test_what_is_not_set_is_named_with_its_default(tmp_path: Path) -> None:
    text = saltern("config", "show", "--command", "store", "--data-dir", tmp_path, "--threads", "2").stdout
    assert f"# saltern store; the file is {tmp_path / 'saltern.toml'}, which is not there\n" in text
    assert "# max_running is not set. Requests; default 32 on CPU, 256 on CUDA.\n" in text
    assert re.search(r"^threads = 2 +# flag$", text, re.MULTILINE)
    assert "admin_port" not in text


def test_a_store_that_is_started_gets_all_on_its_command_line(tmp_path: Path) -> None:
    chosen = ServeOptions(
        config=tmp_path / "saltern.toml", data_dir=tmp_path, threads=3, log_level="debug", model="m", port=1
    )
    arguments = chosen.store_arguments()
    # It reads no file, so that nothing is read twice.
    written(tmp_path / "home" / "saltern" / "saltern.toml", threads=9, dtype="bf16", step_tokens=9)
    store = shown("--command", "store", *arguments, SALTERN_CONFIG=str(tmp_path / "home" / "saltern" / "saltern.toml"))
    assert {name: store[name]["value"] for name in ("threads", "log_level", "model", "dtype", "socket")} == {
        "threads": 3,
        "log_level": "debug",
        "model": "m",
        "dtype": "auto",
        "socket": str(tmp_path / "run" / "store.sock"),
    }
    assert "file" not in {setting["source"] for setting in store.values()}
    assert store["step_tokens"]["value"] is None


def test_the_readme_says_of_each_setting_what_is_so() -> None:
    text = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| `--([a-z-]+)` \| `(SALTERN_[A-Z_]+)` \| `?([a-z_]+|—)`? \|", text, re.MULTILINE)
    assert [name for name, _, _ in rows] == [*dict.fromkeys(name for name, _, _ in rows)]
    assert {name for name, _, _ in rows} == {flag(name)[2:] for name in (*KEYS, "config")}
    for name, variable, key in rows:
        assert variable == f"SALTERN_{name.upper().replace('-', '_')}"
        assert key == ("—" if name == "config" else name.replace("-", "_"))
    (example,) = re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert set(tomllib.loads(example)) <= set(KEYS)


def test_a_byte_order_mark_of_an_editor_is_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "some.toml"
    file.write_bytes(b"\xef\xbb\xbfport = 9\r\n")
    assert shown("--config", file)["port"] == {"value": 9, "source": "file"}
