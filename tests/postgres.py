"""A PostgreSQL of the tests' own: a pytest plugin that starts one cluster per run, and a database in it for each test.

`--postgres=no` leaves out the tests that need it, and the last line says how many those were.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import asyncpg
import pytest

DEBIAN_FOLDER = Path("/usr/lib/postgresql")
MISSING = (
    "the tests need PostgreSQL's server binaries: install them (on Debian and Ubuntu: apt install postgresql), "
    "or leave those tests out: make test POSTGRES=no"
)
_USER = "saltern"
# Whose standard input ends when the tests are closed, and when they are killed.
_CLEAN_UP = 'cat; "$1/pg_ctl" stop --pgdata="$2/data" --mode=immediate; rm -rf "$2"'
_SETTINGS = {
    "listen_addresses": "",
    "fsync": "off",
    "full_page_writes": "off",
    "shared_buffers": "32MB",
    "max_connections": "200",
}


def find_binaries() -> Path | None:
    """The folder of `initdb` and `postgres`: from PATH, else the newest that Debian's packages have installed."""
    if on_path := shutil.which("initdb"):
        return Path(on_path).resolve().parent
    versions = [folder.parents[1] for folder in DEBIAN_FOLDER.glob("*/bin/initdb")]
    newest = max(versions, key=lambda folder: [int(part) for part in folder.name.split(".")], default=None)
    return None if newest is None else newest / "bin"


class Cluster:
    """Databases in a temporary folder, reached through a socket in it; started when its URL is first asked for."""

    def __init__(self, binaries: Path) -> None:
        self._binaries = binaries
        self._folder: Path | None = None
        self._cleaner: subprocess.Popen[bytes] | None = None

    def url(self, database: str = "postgres") -> str:
        """Of a database that need not exist yet."""
        if self._folder is None:
            # Not $TMPDIR: every user reaches this one, and the path of a socket has to be short.
            self._folder = Path(tempfile.mkdtemp(prefix="saltern-postgres-", dir="/tmp"))
            if (account := _unprivileged()) is not None:
                os.chown(self._folder, account.pw_uid, account.pw_gid)
            self._cleaner = subprocess.Popen(
                ["/bin/sh", "-c", _CLEAN_UP, "sh", self._binaries, self._folder],
                stdin=subprocess.PIPE,
                start_new_session=True,  # or Ctrl-C would end it too
                **self._quietly(),
            )
            self._run("initdb", "--no-sync", "--auth=trust", f"--username={_USER}", "--encoding=UTF8", "--locale=C")
            self.start()
        return f"postgresql+asyncpg://{_USER}@/{database}?host={self._folder}"

    def start(self) -> None:
        """Of a cluster that was stopped."""
        settings = _SETTINGS | {"unix_socket_directories": str(self._folder)}
        options = " ".join(f"-c {name}='{value}'" for name, value in settings.items())
        self._run("pg_ctl", "start", "--wait", "--timeout=120", f"--log={self._folder}/log", f"--options={options}")

    def stop(self) -> None:
        """Every connection ends at once."""
        self._run("pg_ctl", "stop", "--wait", "--mode=immediate")

    def close(self) -> None:
        if self._cleaner is not None:
            self._cleaner.communicate()
            self._cleaner = self._folder = None

    def _run(self, program: str, *arguments: str) -> None:
        command = [self._binaries / program, f"--pgdata={self._folder}/data", *arguments]
        done = subprocess.run(command, check=False, **self._quietly())
        if done.returncode:
            log = Path(f"{self._folder}/log")
            said = log.read_text() if log.exists() else ""
            raise RuntimeError(f"{program} {arguments} failed with {done.returncode}:\n{said}")

    def _quietly(self) -> dict[str, Any]:
        """How programs run: as who may, and without pipes, which the server would inherit and keep open."""
        account = _unprivileged()
        whose = {} if account is None else {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return {"cwd": self._folder, "env": os.environ | {"LC_ALL": "C"}, **silent, **whose}


def _unprivileged() -> pwd.struct_passwd | None:
    """Who runs the server instead of root, who may not."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        return pwd.getpwnam("nobody")


def execute(url: str, statement: str) -> None:
    """One statement outside of any transaction, for tests and fixtures with or without an event loop."""

    async def run() -> None:
        connection = await asyncpg.connect(url.replace("+asyncpg", ""))
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, run()).result()


_CLUSTER = pytest.StashKey[Cluster]()
_LEFT_OUT = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--postgres", choices=["yes", "no"], default="yes", help="no: leave out what needs PostgreSQL")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "postgres: needs PostgreSQL; left out with --postgres=no")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    if _is_worker(session.config) or session.config.getoption("postgres") == "no":
        return
    binaries = find_binaries()
    if binaries is None:
        raise pytest.UsageError(MISSING)
    session.config.stash[_CLUSTER] = Cluster(binaries)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    if (cluster := node.config.stash.get(_CLUSTER, None)) is not None:
        node.workerinput["postgres"] = cluster.url("{}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "postgres_url" in getattr(item, "fixturenames", ()):
            item.add_marker("postgres")
    if config.getoption("postgres") == "no":
        left_out = [item for item in items if item.get_closest_marker("postgres")]
        items[:] = [item for item in items if not item.get_closest_marker("postgres")]
        config.hook.pytest_deselected(items=left_out)
        config.stash[_LEFT_OUT] = len(left_out)


def pytest_sessionfinish(session: pytest.Session) -> None:
    config: Any = session.config
    if _is_worker(config) and _LEFT_OUT in config.stash:
        config.workeroutput["postgres_left_out"] = config.stash[_LEFT_OUT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    # Every worker collects all tests; one that crashed has nothing to say.
    if "postgres_left_out" in getattr(node, "workeroutput", {}):
        node.config.stash[_LEFT_OUT] = node.workeroutput["postgres_left_out"]


def pytest_unconfigure(config: pytest.Config) -> None:
    if (cluster := config.stash.get(_CLUSTER, None)) is not None:
        cluster.close()
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    if _LEFT_OUT in config.stash and reporter is not None and not _is_worker(config):
        reporter.write_line(f"Not run: {config.stash[_LEFT_OUT]} tests that need PostgreSQL (POSTGRES=no).")


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


@pytest.fixture
def postgres_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """An empty database on PostgreSQL, dropped after the test, whoever is connected to it."""
    config: Any = request.config
    template = config.workerinput["postgres"] if _is_worker(config) else config.stash[_CLUSTER].url("{}")
    name = f"test_{uuid.uuid4().hex}"
    execute(template.format("postgres"), f"CREATE DATABASE {name}")
    yield template.format(name)
    execute(template.format("postgres"), f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database: `saltern.db` in the test's folder, and then one on PostgreSQL."""
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path / 'saltern.db'}"
    url: str = request.getfixturevalue("postgres_url")
    return url
