"""The commands as an operator meets them: starts that cannot work, starts that do, and how they end."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.system.support import SALTERN, Server, Tenant, random_prompt, serve_environment, serving
from tests.system.wire import finish_reasons, streamed

REFUSED_WITHIN_SECONDS = 5
FREE_PORTS = ("--port", "0", "--admin-port", "0")

# Notes in a file whom the process and its children want to reach over a network.
LISTENING_IN = """
import os, sys

def note(event, arguments):
    if event in ("socket.getaddrinfo", "socket.connect") and not isinstance(arguments[-1], (str, bytes)):
        with open(os.environ["NOTES"], "a") as notes:
            notes.write(f"{event} {arguments}\\n")

sys.addaudithook(note)
"""


def saltern(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [SALTERN, *map(str, arguments)]
    environment = serve_environment() | environment
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)


def refused(*arguments: str | Path, **environment: str) -> str:
    """The one line of a start that is refused: soon, with exit code 2.

    Its processor time is measured: what else runs on the machine does not count, and a wait meets the timeout.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = saltern(*arguments, **environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used_seconds < REFUSED_WITHIN_SECONDS
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    # The first start in a directory also says what it made there.
    (line,) = [line for line in done.stderr.splitlines() if "made the key-encryption key" not in line]
    assert line.startswith("saltern: ")
    return line


def broken_model(kind: str, folder: Path, default_model: Path) -> str:
    """Make a model that can't be served; what its refusal has to say beside the path."""
    if kind == "missing":
        return "does not exist"
    folder.mkdir()
    if kind == "empty":
        return "config.json, tokenizer.json and weights"
    for file in default_model.iterdir():
        (folder / file.name).symlink_to(file)
    if kind == "without config":
        (folder / "config.json").unlink()
        return "has no config.json"
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return "tokenizer.json is not a tokenizer"


@pytest.mark.parametrize("command", ["serve", "store"])
@pytest.mark.parametrize("kind", ["missing", "empty", "without config", "wrong tokenizer"])
def test_b185_a_model_that_is_not_there_costs_one_line(
    tmp_path: Path, default_model: Path, command: str, kind: str
) -> None:
    folder, notes = tmp_path / "model", tmp_path / "notes"
    missing = broken_model(kind, folder, default_model)
    (tmp_path / "sitecustomize.py").write_text(LISTENING_IN)
    listened = {"PYTHONPATH": str(tmp_path), "NOTES": str(notes)}
    ports = FREE_PORTS if command == "serve" else ()
    line = refused(command, "--data-dir", tmp_path / "data", "--model", folder, *ports, **listened)
    assert str(folder) in line
    assert missing in line
    assert not notes.exists()


def test_b185_a_hub_id_is_looked_up_and_an_absolute_path_is_not(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(LISTENING_IN)
    notes = tmp_path / "notes"
    environment = {
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": str(tmp_path / "hub"),
        "NOTES": str(notes),
        "PYTHONPATH": str(tmp_path),
        "SALTERN_DATA_DIR": str(tmp_path / "data"),
    }
    for path in (tmp_path / "nobody" / "nothing", "./nobody/nothing", "~/nobody/nothing"):
        assert "does not exist" in refused("store", "--model", path, **environment)
        assert not notes.exists()
    assert "nobody/nothing is no folder here" in refused("store", "--model", "nobody/nothing", **environment)
    assert "127.0.0.1" in notes.read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cache-memory", "900GiB"], r"a cache of 900\.00 GiB .* memory is [\d.]+ GiB: --cache-memory [\d.]+GiB or"),
        (["--cache-memory", "1KiB"], r"1024 bytes holds no block of 737280 bytes \(16 tokens\): raise --cache-memory"),
        (["--cache-memory", "5 cows"], r"'5 cows' is no size: .* such as 1GiB"),
        (["--block-tokens", "24"], r"--block-tokens 24 is not offered: choose from 8, 16, 32, 64, 128"),
        (["--max-context", "8193"], r"--max-context 8193 is too long, the model was made for 8192: lower it"),
        (
            ["--max-context", "8192", "--cache-memory", "64MiB"],
            r"--max-context 8192 is too long, the cache holds 1456 tokens: raise --cache-memory, or lower it",
        ),
        (["--max-running", "300"], r"--max-running 300 is above --step-tokens 256: .* raise --step-tokens or lower"),
    ],
)
def test_a_start_that_cannot_work_says_why_with_the_numbers(tmp_path: Path, arguments: list[str], said: str) -> None:
    assert re.search(said, refused("store", "--data-dir", tmp_path / "data", *arguments))


def test_serve_passes_on_why_its_store_did_not_start(tmp_path: Path) -> None:
    line = refused("serve", "--data-dir", tmp_path / "data", *FREE_PORTS, "--cache-memory", "900GiB")
    assert "a cache of 900.00 GiB" in line
    assert not list((tmp_path / "data").rglob("*.sock"))


@pytest.mark.parametrize("option", ["--port", "--admin-port"])
def test_a_port_in_use_is_named_with_the_option_that_chooses_another(tmp_path: Path, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = {"--port": "0", "--admin-port": "0"} | {option: str(port)}
        line = refused("serve", "--data-dir", tmp_path, *(part for pair in ports.items() for part in pair))
    assert f"127.0.0.1 port {port} (Address already in use): choose another {option}" in line


def test_a_data_directory_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for directory in (tmp_path / "file" / "data", Path("/proc/saltern")):
        for command in ("serve", "store", "gateway"):
            line = refused(command, "--data-dir", directory)
            assert f"the data directory {directory} can't be written" in line
            assert "choose another --data-dir" in line


def test_a_misspelt_variable_is_refused_with_the_one_that_was_meant(tmp_path: Path) -> None:
    assert "SALTERN_PROT is no setting: did you mean SALTERN_PORT?" in refused("serve", SALTERN_PROT="8000")
    assert "SALTERN_ADMIN_KEYS is no setting" in refused("tenants", "list", SALTERN_ADMIN_KEYS="x")
    # A right one is read.
    assert "9.00 GiB" in refused("store", "--data-dir", tmp_path, SALTERN_CACHE_MEMORY="900009GiB")


@pytest.mark.parametrize(
    "variable",
    [
        {"OTEL_BSP_SCHEDULE_DELAY": "0"},
        {"OTEL_METRIC_EXPORT_INTERVAL": "-1"},
        {"OTEL_METRICS_EXEMPLAR_FILTER": "some"},
    ],
)
def test_what_opentelemetry_cannot_use_is_refused(tmp_path: Path, variable: dict[str, str]) -> None:
    ports = ("--port", "0", "--admin-port", "0")
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"} | variable
    line = refused("gateway", "--data-dir", tmp_path, *ports, **environment)
    assert "OpenTelemetry can't use what one of the OTEL_ variables says (" in line


@pytest.mark.parametrize("command", ["serve", "gateway", "store"])
def test_a_file_that_is_wrong_is_refused_by_each_command(tmp_path: Path, command: str) -> None:
    (tmp_path / "saltern.toml").write_text("cache_memroy = '1GiB'")
    said = f"saltern: {tmp_path / 'saltern.toml'}: 'cache_memroy' is no setting: did you mean cache_memory?"
    assert refused(command, "--data-dir", tmp_path) == said
    assert [file.name for file in tmp_path.iterdir()] == ["saltern.toml"]


def test_a_store_that_is_started_heeds_the_file_of_its_gateway(tmp_path: Path) -> None:
    (tmp_path / "some.toml").write_text(f"data_dir = '{tmp_path / 'data'}'\ncache_memory = '900GiB'\nport = 0\n")
    line = refused("serve", "--admin-port", "0", "--config", tmp_path / "some.toml")
    assert "a cache of 900.00 GiB" in line
    assert (tmp_path / "data" / "saltern.db").exists()


def test_a_data_directory_serves_once(server: Server) -> None:
    for command in ("serve", "gateway"):
        line = refused(command, "--data-dir", server.data_dir, *FREE_PORTS)
        assert f"another saltern runs on {server.data_dir}: stop it, or choose another --data-dir" in line
    assert server.tenant().complete("x").status_code == 200


def child_of(process: subprocess.Popen[str]) -> int:
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(child)


def test_a_terminated_server_ends_its_answers_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with serving(tmp_path / "data", "--cache-memory", "64MiB") as server:
        store = child_of(server.process)
        command = Path(f"/proc/{store}/cmdline").read_bytes().split(b"\0")
        assert [Path(command[1].decode()).name, command[2]] == ["saltern", b"store"]
        assert server.socket.exists()
        tenant = server.tenant()
        body = {"model": server.model, "prompt": "1 2 3", "max_tokens": 8, "ignore_eos": True, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body, headers=tenant.headers) as response:
            pieces = response.iter_bytes()
            received = next(pieces)
            server.process.send_signal(signal.SIGTERM)
            received += b"".join(pieces)
        chunks = streamed(httpx.Response(200, headers=response.headers, content=received))
        assert finish_reasons(chunks)[-1] == "length"
        assert server.process.wait(10) == 0
        assert not Path(f"/proc/{store}").exists()
        assert not server.socket.exists()
        with pytest.raises(httpx.ConnectError):
            server.http.get("/livez")
        assert "Traceback" not in server.log()


@contextmanager
def running(*arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """A command until the block ends; it has to end well when it is told to."""
    process = subprocess.Popen(
        [SALTERN, *map(str, arguments)],
        env=serve_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
        process.terminate()
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.communicate()


def lines_until(stream: Any, wanted: str) -> list[str]:
    """Lines of a process's output, up to the first with `wanted` in it."""
    lines = []
    for line in stream:
        lines.append(line.rstrip("\n"))
        if wanted in line:
            return lines
    raise AssertionError(f"it ended without {wanted!r}: {lines}")


def test_b015_store_and_gateway_by_themselves_with_blocks_of_64(tmp_path: Path) -> None:
    path, data_dir = tmp_path / "run" / "store.sock", tmp_path / "data"
    options = ("--block-tokens", "64", "--cache-memory", "64MiB", "--threads", "1")
    with (
        running("store", "--socket", path, *options) as store,
        running("gateway", "--socket", path, "--data-dir", data_dir, *FREE_PORTS) as gateway,
    ):
        log = lines_until(store.stderr, "smallest prefix")
        assert "(22 blocks of 64, the smallest prefix that is reused)" in log[-1]
        output = lines_until(gateway.stdout, "EOF")
        banner = "\n".join(output)
        assert "the smallest prefix that is reused is 64 tokens" in banner
        url, admin_url = re.findall(r"(http://[\d.:]+)/(?:v1|admin/v1)\b", banner)[:2]
        server = Server(gateway, data_dir, url, admin_url, output)
        tenant = server.tenant()
        short, long = random_prompt("b015", 50), random_prompt("b015", 70)
        assert [tenant.cached_tokens(prompt) for prompt in (short, short, long, long)] == [0, 0, 0, 64]
        assert server.http.get("/readyz").text == "ready\n"
        status = server.admin.get("/readyz?verbose").text
        ready, step_age, *sizes = status.splitlines()
        assert (ready, step_age.split()[0]) == ("ready", "step_age_ms")
        assert sizes == ["block_tokens 64", "cache_tokens 1408", "context_tokens 1408"]
    assert not path.exists()


def test_the_lines_of_the_banner_work_when_they_are_pasted(server: Server, tmp_path: Path) -> None:
    after = server.output.index("In a second terminal:") + 1
    pasted = [line for line in server.output[after:] if not line.startswith("pip install")]
    # Four tokens, and always the same ones: one drawn at random may be the end.
    greedily = r"\1max_tokens\g<2>4, \1temperature\g<2>0"
    script = re.sub(r'("?)max_tokens(": |=)64', greedily, "\n".join(pasted))
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-euo", "pipefail"],
        input=f"{script}\n",
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    created, answered = done.stdout.split("\n", 1)
    assert created.startswith("created tenant demo (ten_")
    # With curl, and then with the client.
    whole, end = json.JSONDecoder().raw_decode(answered)
    assert whole["usage"]["completion_tokens"] == 4
    assert whole["choices"][0]["message"]["content"]
    assert answered[end:].strip()


def test_tenants_are_administered_from_the_command_line(server: Server) -> None:
    def run(*arguments: str, code: int = 0) -> Any:
        done = saltern(*arguments, "--data-dir", server.data_dir, "--json")
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout) if code == 0 else done.stderr

    created = run("tenants", "create", "from-cli")
    key = run("keys", "create", "--tenant", "from-cli", "--name", "first")
    tenant = Tenant(server, created["id"], "from-cli", key["secret"])
    prompt = random_prompt("from the command line", 40)
    assert [tenant.cached_tokens(prompt) for _ in range(2)] == [0, 32]
    rotated = run("salts", "rotate", "--tenant", "from-cli")
    assert (rotated["epoch"], rotated["dropped"]["blocks"]) == (2, 2)
    assert tenant.cached_tokens(prompt) == 0
    assert run("keys", "delete", key["id"], "--tenant", "from-cli") == {"id": key["id"], "deleted": True}
    assert tenant.complete(prompt).status_code == 401
    assert run("tenants", "delete", "from-cli") == {"id": created["id"], "deleted": True}
    assert "there is no tenant 'from-cli'" in run("tenants", "get", "from-cli", code=1)
