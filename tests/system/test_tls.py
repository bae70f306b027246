"""`saltern serve` with TLS on both listeners, as operators and their customers meet it."""

from __future__ import annotations

import json
import re
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
from openai import OpenAI

from tests.gateway.certificates import Identity
from tests.system.served import command_line
from tests.system.support import SALTERN, serve_environment
from tests.system.test_start import lines_until, refused

# The store's answers take their time, so that a client can leave in the middle of one.
LONG_TOKENS = 1000
# Half of a TLS connection can't be closed: a client that was refused and waits for the end waits for so long.
LIMITS = ("gateway.http.connection.LINGER_SECONDS=0.3",)


@dataclass(frozen=True)
class Secured:
    """A server with a certificate of its own for either listener, whose CAs are in `trusted`."""

    data_dir: Path
    trusted: Path
    url: str
    admin_url: str
    banner: str

    def saltern(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """An admin command, that trusts what the environment says."""
        command = [SALTERN, *arguments, "--data-dir", str(self.data_dir)]
        environment = serve_environment() | environment
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)


@contextmanager
def secured(folder: Path, default_model: Path) -> Iterator[Secured]:
    tenant, admin = Identity.make(folder / "tenant"), Identity.make(folder / "admin")
    trusted = folder / "trusted.pem"
    trusted.write_bytes(tenant.ca.read_bytes() + admin.ca.read_bytes())
    data_dir = folder / "data"
    (data_dir / "run").mkdir(parents=True, mode=0o700)
    # Half of it is in the file.
    lines = {"port": 0, "admin_port": 0, "tls_cert": str(tenant.cert), "tls_key": str(tenant.key)}
    (data_dir / "saltern.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in lines.items()))
    flags = ["--admin-tls-cert", str(admin.cert), "--admin-tls-key", str(admin.key), "--model", str(default_model)]
    with (folder / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            command_line(data_dir, "serve", *flags, limits=LIMITS, store=("--step-seconds", "0.01")),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=serve_environment(),
        )
    try:
        banner = "\n".join(lines_until(process.stdout, "EOF"))
        url, admin_url = re.findall(r"(https://127\.0\.0\.1:\d+)/(?:v1|admin/v1)\b", banner)[:2]
        yield Secured(data_dir, trusted, url, admin_url, banner)
        process.terminate()
        assert process.wait(10) == 0
        assert "Traceback" not in (folder / "stderr").read_text()
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Secured]:
    with secured(tmp_path_factory.mktemp("tls"), default_model) as running:
        yield running


@pytest.fixture(scope="module")
def key(server: Secured) -> str:
    """Of a tenant that was made through TLS."""
    trusting = {"SSL_CERT_FILE": str(server.trusted)}
    created = server.saltern("tenants", "create", "demo", **trusting)
    assert created.stdout.startswith("created tenant demo"), created.stderr
    return server.saltern("keys", "create", "--tenant", "demo", "--quiet", **trusting).stdout.strip()


def test_the_banner_and_the_files_of_the_admin_commands_say_https(server: Secured) -> None:
    assert "http://" not in server.banner
    assert f"curl -s {server.url}/v1/chat/completions" in server.banner
    assert "# Where a certificate is of your own CA: export SSL_CERT_FILE=" in server.banner
    assert (server.data_dir / "admin-url").read_text() == f"{server.admin_url}\n"


def test_an_admin_command_trusts_the_ca_that_it_is_told_and_no_other(server: Secured, key: str) -> None:
    listed = server.saltern("keys", "list", "--tenant", "demo", "--json", SSL_CERT_FILE=str(server.trusted))
    assert [row["last4"] for row in json.loads(listed.stdout)["data"]] == [key[-4:]]
    elsewhere = {"SALTERN_ADMIN_URL": server.admin_url.replace("127.0.0.1", "localhost")}
    named = server.saltern("tenants", "list", SSL_CERT_FILE=str(server.trusted), **elsewhere)
    assert named.returncode == 0, named.stderr
    for environment in ({}, {"SSL_CERT_FILE": str(server.trusted.with_name("tenant") / "ca.pem")}):
        failed = server.saltern("tenants", "list", **environment)
        assert failed.returncode == 1
        (line,) = failed.stderr.splitlines()
        assert "CERTIFICATE_VERIFY_FAILED" in line
        assert "set SSL_CERT_FILE to the certificate of the CA that signed it" in line


def test_the_official_client_talks_through_tls_and_may_leave_in_the_middle(
    server: Secured, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(server.trusted))
    with OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60) as client:
        (model,) = client.models.list().data
        asked = {"model": model.id, "prompt": "Salt is made of", "temperature": 0}
        whole = client.completions.create(**asked, max_tokens=4, extra_body={"ignore_eos": True})  # type: ignore[call-overload]
        assert whole.usage.completion_tokens == 4
        long = {"max_tokens": LONG_TOKENS, "extra_body": {"ignore_eos": True}, "stream": True}
        stream = client.completions.create(**asked, **long)  # type: ignore[call-overload]
        assert next(iter(stream)).choices[0].finish_reason is None
        stream.close()
        # What it left is over, and what comes next is answered.
        again = client.completions.create(**asked, max_tokens=4, stream=True)  # type: ignore[call-overload]
        assert [*again][-1].choices[0].finish_reason in ("length", "stop")
    monkeypatch.delenv("SSL_CERT_FILE")
    with (
        OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60) as stranger,
        pytest.raises(openai.APIConnectionError),
    ):
        stranger.models.list()


def test_each_listener_has_its_own_certificate_and_neither_answers_plain_http(server: Secured) -> None:
    for url, name in ((server.url, "tenant"), (server.admin_url, "admin")):
        trust = ssl.create_default_context(cafile=str(server.trusted.with_name(name) / "ca.pem"))
        with httpx.Client(verify=trust, trust_env=False) as client:
            assert client.get(f"{url}/livez").text == "live\n"
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(f"{url}/livez".replace("https", "http"), trust_env=False, timeout=20)


def test_a_malformed_request_is_refused_through_tls(server: Secured) -> None:
    host, port = server.url.removeprefix("https://").split(":")
    trust = ssl.create_default_context(cafile=str(server.trusted))
    with (
        socket.create_connection((host, int(port)), timeout=20) as raw,
        trust.wrap_socket(raw, server_hostname=host) as connection,
    ):
        connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n")
        answer = b""
        while piece := connection.recv(1 << 16):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close\r\n" in answer


@pytest.mark.parametrize("command", ["serve", "gateway"])
def test_files_that_do_not_belong_together_are_refused_before_anything_starts(command: str, tmp_path: Path) -> None:
    one, other = Identity.make(tmp_path / "one"), Identity.make(tmp_path / "other")
    line = refused(command, "--data-dir", tmp_path / "data", "--tls-cert", one.cert, "--tls-key", other.key)
    assert line == f"saltern: --tls-key {other.key} is not the key of {one.cert}: give those that belong together"
    assert not (tmp_path / "data" / "saltern.db").exists()
