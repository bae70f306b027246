"""What huge prompts and clients that leave do to everybody else: nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import httpx
import pytest

from tests.system.support import Server, random_prompt
from tests.system.wire import refusal, send_only

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONGEST_GAP_SECONDS = 0.5


@asynccontextmanager
async def connected(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as http:
        yield http


def gaps(times: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


def text_body(server: Server, prompt: str | list[int]) -> tuple[str, bytes]:
    return TEXT, json.dumps({"model": server.model, "prompt": prompt}).encode()


def chat_body(server: Server, content: str) -> tuple[str, bytes]:
    messages = [{"role": "user", "content": content}]
    return CHAT, json.dumps({"model": server.model, "messages": messages}).encode()


@pytest.mark.anyio
async def test_b209_huge_prompts_hold_up_neither_health_checks_nor_streams(server: Server) -> None:
    asking, streaming = server.tenant(), server.tenant()
    # Prepared before: what is measured here is the server, not this loop.
    contents = {
        "one word": text_body(server, "a" * 4_090_000),
        "many words": text_body(server, "ab " * 1_363_000),
        "escapes": chat_body(server, "aaaä\n" * 260_000),
        "ids": text_body(server, [1] * 1_300_000),
        "lists": (TEXT, b'{"model": "x", "prompt": [' + b"[]," * 1_300_000 + b"[]]}"),
        "over the limit": text_body(server, "a" * 5_000_000),
        # Few enough bytes to be tokenised: only the tokens say that it is too long.
        "tokenised": text_body(server, "salt " * 260_000),
        "tokenised chat": chat_body(server, "salt " * 260_000),
    }
    live: list[float] = []
    chunks: list[float] = []
    done = asyncio.Event()

    async def poll() -> None:
        async with connected(server) as http:
            while not done.is_set():
                assert (await http.get("/livez")).status_code == 200
                live.append(time.monotonic())
                await asyncio.sleep(0.05)

    async def stream(started: asyncio.Event) -> None:
        body = {"model": server.model, "prompt": "1 2 3", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        async with (
            connected(server) as http,
            http.stream("POST", TEXT, json=body, headers=streaming.headers) as response,
        ):
            async for _ in response.aiter_bytes():
                chunks.append(time.monotonic())
                started.set()
                if done.is_set():
                    return

    async def send(path: str, content: bytes) -> httpx.Response:
        headers = asking.headers | {"content-type": "application/json"}
        async with connected(server) as http:
            return await http.post(path, content=content, headers=headers)

    started = asyncio.Event()
    others = [asyncio.create_task(poll()), asyncio.create_task(stream(started))]
    refused = {}
    try:
        await started.wait()
        for what, (path, content) in contents.items():
            began = time.monotonic()
            refused[what] = await send(path, content)
            print(f"{what}: {len(content)} bytes refused in {time.monotonic() - began:.2f} s")
    finally:
        done.set()
        await asyncio.gather(*others)
    print(f"longest gaps: /livez {max(gaps(live)):.3f} s, stream {max(gaps(chunks)):.3f} s")
    assert max(gaps(live)) < LONGEST_GAP_SECONDS
    assert max(gaps(chunks)) < LONGEST_GAP_SECONDS
    assert len(chunks) > 10
    for what, response in refused.items():
        if what == "over the limit":
            assert "4194304" in refusal(response, 413)["message"]
            continue
        error = refusal(response, 400)
        if what == "lists":
            assert "1300005 objects, lists and fields" in error["message"]
            continue
        if what == "ids":
            assert "1300000 values or more" in error["message"]
            continue
        assert error["code"] == "context_length_exceeded"
        assert "8192" in error["message"]
        assert ("bytes" in error["message"]) == (what in ("one word", "many words", "escapes"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_client_that_leaves_is_computed_for_no_longer(server: Server, path: str, stream: bool) -> None:
    prompt = {"messages": [{"role": "user", "content": "Go on."}]} if path == CHAT else {"prompt": "1 2 3"}
    fields: dict[str, Any] = prompt | {"max_tokens": 8000, "ignore_eos": True, "stream": stream}
    tenant = server.tenant()
    server.wait_until_idle()
    with send_only(tenant, path, fields):
        deadline = time.monotonic() + 10
        while server.stats().running == 0:
            assert time.monotonic() < deadline
    report = server.wait_until_idle(1)
    assert report.held_blocks == 0
    assert tenant.complete("x").status_code == 200


def test_clients_that_leave_at_any_moment_leave_nothing_behind(server: Server) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    tenants = [server.tenant() for _ in range(4)]
    expected = tenants[0].complete("1 2 3 4 5", max_tokens=6).json()["choices"]
    before = server.wait_until_idle()
    fates: Counter[str] = Counter()

    async def request(http: httpx.AsyncClient) -> None:
        fate = draw.choice(["stays", "leaves at some moment", "leaves within the stream"])
        tenant, stream = draw.choice(tenants), fate == "leaves within the stream" or draw.random() < 0.5
        prompts: list[tuple[str, dict[str, Any]]] = [
            (TEXT, {"prompt": random_prompt(f"leave {draw.randrange(12)}", draw.randrange(4, 40))}),
            (CHAT, {"messages": [{"role": "user", "content": f"Tell me of number {draw.randrange(12)}."}]}),
        ]
        path, prompt = draw.choice(prompts)
        # Whoever leaves asked for more than anybody would wait for.
        max_tokens = draw.randrange(1, 9) if fate == "stays" else 4000
        body = {"model": server.model, "max_tokens": max_tokens, "stream": stream, "ignore_eos": True} | prompt
        patience_seconds = draw.uniform(0, 1.5) if fate == "leaves at some moment" else None
        pieces_left = draw.randrange(1, 4) if fate == "leaves within the stream" else None
        with contextlib.suppress(TimeoutError):
            async with (
                asyncio.timeout(patience_seconds),
                http.stream("POST", path, json=body, headers=tenant.headers) as response,
            ):
                assert response.status_code == 200
                async for _ in response.aiter_bytes():
                    if pieces_left is not None and (pieces_left := pieces_left - 1) == 0:
                        break
                else:
                    assert fate == "stays"
        fates[fate] += 1

    async def storm() -> None:
        slots = asyncio.Semaphore(16)
        async with connected(server) as http:

            async def in_turn() -> None:
                async with slots:
                    await request(http)

            await asyncio.gather(*(in_turn() for _ in range(100)))

    asyncio.run(storm())
    after = server.wait_until_idle(2)
    print(fates)
    assert sum(fates.values()) == 100
    assert len(fates) == 3
    assert after.held_blocks == 0
    assert after.free_blocks + after.cached_blocks == after.total_blocks == before.total_blocks
    assert after.computed_tokens > before.computed_tokens
    assert tenants[0].complete("1 2 3 4 5", max_tokens=6).json()["choices"] == expected
