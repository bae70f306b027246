"""A whole Saltern as its users meet it: `saltern serve` on free ports of loopback, and clients of it."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from cachestore.client import StoreClient
from cachestore.protocol import StatsReport

SALTERN = str(Path(sys.executable).with_name("saltern"))
START_SECONDS = 90

_names = itertools.count(1)


@dataclass
class Tenant:
    """A tenant of its own for a test: `id`, an API key, and what is asked with it."""

    server: Server
    id: str
    name: str
    key: str

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    def complete(self, prompt: str | list[int], **fields: Any) -> httpx.Response:
        """Greedy `POST /v1/completions` of one token unless told otherwise."""
        body = {"model": self.server.model, "prompt": prompt, "max_tokens": 1, "temperature": 0} | fields
        return self.server.http.post("/v1/completions", json=body, headers=self.headers)

    def chat(self, content: str, **fields: Any) -> httpx.Response:
        """Greedy `POST /v1/chat/completions` of one user message."""
        messages = [{"role": "user", "content": content}]
        body = {"model": self.server.model, "messages": messages, "max_tokens": 1, "temperature": 0} | fields
        return self.server.http.post("/v1/chat/completions", json=body, headers=self.headers)

    def cached_tokens(self, prompt: str | list[int], **fields: Any) -> int:
        """`cached_tokens` of that prompt, as its usage says."""
        return cached_tokens(self.complete(prompt, **fields))

    def rotate(self) -> dict[str, Any]:
        response = self.server.admin.post(f"/admin/v1/tenants/{self.id}/salts/rotate")
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer


@dataclass
class Server:
    """A running `saltern serve`. `http` is for the tenant API (no credential), `admin` carries the first admin key."""

    process: subprocess.Popen[str]
    data_dir: Path
    url: str
    admin_url: str
    output: list[str]
    model: str = "smollm2-135m-instruct"
    http: httpx.Client = field(init=False)
    admin: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, timeout=60, trust_env=False)
        key = (self.data_dir / "admin-key").read_text().strip()
        self.admin = httpx.Client(
            base_url=self.admin_url, timeout=60, trust_env=False, headers={"authorization": f"Bearer {key}"}
        )

    @property
    def socket(self) -> Path:
        return self.data_dir / "run" / "store.sock"

    def log(self) -> str:
        """What gateway and store have written to stderr."""
        return (self.data_dir.parent / f"{self.data_dir.name}.stderr").read_text()

    def tenant(self, name: str | None = None) -> Tenant:
        """A new tenant with one key."""
        name = name or f"tenant-{os.getpid()}-{next(_names)}"
        created = self.admin.post("/admin/v1/tenants", json={"name": name})
        assert created.status_code == 201, created.text
        tenant_id = created.json()["id"]
        key = self.admin.post(f"/admin/v1/tenants/{tenant_id}/keys", json={})
        assert key.status_code == 201, key.text
        return Tenant(self, tenant_id, name, key.json()["secret"])

    def stats(self) -> StatsReport:
        """What the store says of itself, asked over a connection of our own."""

        async def ask() -> StatsReport:
            client = await StoreClient.connect(self.socket)
            try:
                return await client.stats()
            finally:
                client.close()

        return asyncio.run(ask())

    def wait_until_idle(self, seconds: float = 5) -> StatsReport:
        """The store's report once nothing runs, waits or is held."""
        deadline = time.monotonic() + seconds
        while True:
            report = self.stats()
            if not (report.running or report.waiting or report.ended or report.held_blocks):
                return report
            assert time.monotonic() < deadline, f"still busy after {seconds} s: {report}"
            time.sleep(0.02)


def random_prompt(name: str, tokens: int) -> list[int]:
    """The same ordinary token ids for the same name, and others for another."""
    numbers = random.Random(name)
    return [numbers.randrange(1000, 40000) for _ in range(tokens)]


def cached_tokens(response: httpx.Response) -> int:
    assert response.status_code == 200, response.text
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def serve_environment() -> dict[str, str]:
    """Ours, one thread, no settings from outside."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SALTERN_")}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@contextmanager
def serving(data_dir: Path, *arguments: str) -> Iterator[Server]:
    """`saltern serve` on free ports until the block ends; its process is gone afterwards."""
    command = [SALTERN, "serve", "--data-dir", str(data_dir), "--port", "0", "--admin-port", "0", "--threads", "1"]
    process = subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=(data_dir.parent / f"{data_dir.name}.stderr").open("w"),
        text=True,
        env=serve_environment(),
    )
    try:
        yield _started(process, data_dir)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _started(process: subprocess.Popen[str], data_dir: Path) -> Server:
    assert process.stdout is not None
    output: list[str] = []
    urls: dict[str, str] = {}
    for line in process.stdout:
        output.append(line.rstrip("\n"))
        for name in ("tenant API", "admin API"):
            if line.strip().startswith(name):
                urls[name] = line.split(name, 1)[1].split()[0]
        if line.startswith("EOF"):
            return Server(
                process,
                data_dir,
                urls["tenant API"].removesuffix("/v1"),
                urls["admin API"].removesuffix("/admin/v1"),
                output,
            )
    stderr = (data_dir.parent / f"{data_dir.name}.stderr").read_text()
    raise AssertionError(f"saltern serve ended with {process.wait()}: {stderr}")
