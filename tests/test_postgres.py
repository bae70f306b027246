"""The PostgreSQL that tests run on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import postgres

ROOT = Path(__file__).parents[1]
INNER = """
import asyncio
import asyncpg
import pytest

def test_a_database_of_its_own(postgres_url):
    async def tables():
        connection = await asyncpg.connect(postgres_url.replace("+asyncpg", ""))
        found = await connection.fetchval("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'")
        await connection.execute("CREATE TABLE t (n INTEGER)")
        folder = await connection.fetchval("SHOW data_directory")
        await connection.close()
        return found, folder
    found, folder = asyncio.run(tables())
    assert found == 0
    print("folder", folder)
    assert postgres_url is None, "fails"

def test_both(database_url): pass

def test_neither(): pass
"""


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_inner.py").write_text(INNER)
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", folder, "-p", "tests.postgres"]
    return subprocess.run(
        [*command, "-p", "no:cacheprovider", *arguments, folder / "test_inner.py"],
        cwd=ROOT,
        env=os.environ | environment,
        text=True,
        capture_output=True,
        check=False,
    )


@pytest.mark.parametrize("processes", ["0", "2"])
def test_the_last_line_says_how_many_tests_were_left_out(tmp_path: Path, processes: str) -> None:
    done = run(tmp_path, "--postgres=no", "-n", processes, PATH="/nowhere")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
    assert done.stdout.splitlines()[-1] == "Not run: 2 tests that need PostgreSQL (POSTGRES=no)."


@pytest.mark.postgres
@pytest.mark.parametrize("processes", ["0", "2"])
def test_a_cluster_is_stopped_and_removed_when_a_test_has_failed(tmp_path: Path, processes: str) -> None:
    done = run(tmp_path, "-n", processes)
    assert "1 failed, 3 passed" in done.stdout, done.stdout + done.stderr
    assert "Not run" not in done.stdout
    (folder,) = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("folder ")}
    assert folder.startswith("/tmp/saltern-postgres-")
    assert not Path(folder).exists()
    assert not Path(folder).parent.exists()


def test_without_the_binaries_nothing_runs_and_the_remedy_is_named(tmp_path: Path) -> None:
    (tmp_path / "no_debian.py").write_text(
        "import pathlib, tests.postgres; tests.postgres.DEBIAN_FOLDER = pathlib.Path('/nowhere')"
    )
    done = run(tmp_path, "-p", "no_debian", PATH="/nowhere", PYTHONPATH=str(tmp_path))
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    said = (done.stdout + done.stderr).strip().splitlines()
    assert len(said) == 1
    assert "apt install postgresql" in said[0]
    assert "make test POSTGRES=no" in said[0]


def test_the_newest_of_debians_versions_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(postgres, "DEBIAN_FOLDER", tmp_path)
    assert postgres.find_binaries() is None
    for version in ("9.6", "16", "9.5"):
        (tmp_path / version / "bin").mkdir(parents=True)
        (tmp_path / version / "bin" / "initdb").touch()
    assert postgres.find_binaries() == tmp_path / "16" / "bin"


@pytest.mark.postgres
def test_a_cluster_goes_with_tests_that_are_killed() -> None:
    code = (
        "import os, signal; from tests.postgres import Cluster, find_binaries; "
        "print(Cluster(find_binaries()).url(), flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, stdout=subprocess.PIPE, check=False)
    folder = Path(done.stdout.strip().partition("host=")[2])
    assert folder.name.startswith("saltern-postgres-")
    while folder.exists():
        time.sleep(0.05)
