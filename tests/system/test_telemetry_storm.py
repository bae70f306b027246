"""Many requests whose clients leave when they like: nothing is held, and each is one trace and one line."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from starlette.types import Receive, Scope, Send

from cachestore.scheduler import Row
from tests.system.in_process import in_process
from tests.system.scripted import CHAT, TEXT, ScriptedRunner, Words, idle, listening, until
from tests.system.traces import Recording

pytestmark = pytest.mark.anyio

CLIENTS = 16


class SlowRunner(ScriptedRunner):
    def launch(self, rows: Sequence[Row]) -> list[int]:
        time.sleep(0.002)
        return super().launch(rows)


def request(numbers: random.Random, model: str, key: str, host: str) -> bytes:
    """One of any kind; some are refused."""
    path = numbers.choice([CHAT, TEXT])
    text = "".join(numbers.choices("salt ", k=numbers.randrange(1, 200)))
    prompt = {"prompt": text} if path == TEXT else {"messages": [{"role": "user", "content": text}]}
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": numbers.randrange(1, 60),
        "stream": numbers.random() < 0.6,
        "n": numbers.choice([1, 1, 1, 3]),
        "ignore_eos": True,
        "temperature": numbers.choice([0, 0.5, 1, 1, 1, 3]),
    }
    key = numbers.choice([key] * 19 + ["sk-saltern-wrong"])
    content = json.dumps(body | prompt).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {key}\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.once)])
async def test_random_aborts_hold_nothing_and_leave_no_span_open(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    caplog.set_level(logging.INFO, "saltern.request")
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    numbers, recording, runner = random.Random(seed), Recording(), SlowRunner()
    model, begun = Words.write(tmp_path / "model"), 0
    async with in_process(
        tmp_path, model.directory, 512, runner=runner, telemetry=recording.telemetry, max_running=8
    ) as inside:
        key = (await inside.customer("a")).key

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal begun
            begun += scope["type"] == "http"
            await inside.gateway.tenant_app(scope, receive, send)

        async with listening(counted) as url:
            address = urlsplit(url)

            async def client(number: int) -> None:
                for _ in range(number, count, CLIENTS):
                    reader, writer = await asyncio.open_connection(address.hostname, address.port)
                    writer.write(request(numbers, inside.model, key, address.netloc))
                    stays = numbers.random() < 0.3
                    patience = 60 if stays else numbers.choice([0.001, 0.01, 0.03, 0.1, 0.3]) * numbers.random()
                    try:
                        await asyncio.wait_for(reader.read(), patience)
                    except TimeoutError:
                        assert not stays, "an answer never ended"
                    writer.transport.abort()

            await asyncio.gather(*map(client, range(CLIENTS)))
            await idle(inside)
            completions = inside.gateway.completions
            await until(lambda: not (completions._running or completions._choices or completions._closing))
            found = await recording.some(begun)
    outcomes = Counter(record.getMessage().partition("outcome=")[2].split()[0] for record in lines(caplog))
    assert sum(outcomes.values()) == begun
    print(f"{begun} of {count} requests began: {dict(outcomes)}, {sum(len(trace.spans) for trace in found)} spans")
    assert begun > 0.8 * count
    assert min(outcomes[outcome] for outcome in ("finished", "aborted", "refused")) > 0.02 * count
    assert outcomes["failed"] == 0


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Of the requests to the tenants' listener."""
    records = [record for record in caplog.records if record.name == "saltern.request"]
    return [record for record in records if "route=/v1/" in record.getMessage()]
