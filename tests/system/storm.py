"""Tenants that ask all the time, streaming and not, and rotate in between; and the account of what became of it.

Over a store double, so each answer is known beforehand and every name that reached a store can be worked out again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from cachestore.protocol import Welcome
from gateway.prompt.detokenize import Detokenizer
from gateway.prompt.model_files import read_model_files
from gateway.prompt.tokens import Tokenizer
from gateway.tenants.database import Database
from gateway.tenants.directory import Directory
from tests.cachestore.support import expected_answer
from tests.system.insider import Insider, block_names
from tests.system.served import PATIENCE_SECONDS, Running
from tests.system.support import Tenant, random_prompt
from tests.system.wire import DONE, events, text_of

HEAD_TOKENS = 40
BLOCK_TOKENS = 16
PAUSE_SECONDS = 0.1


@dataclass(eq=False)
class Asked:
    """One request, from when it was sent. Times are monotonic seconds, 0 where it did not come to that.

    Attributes:
        least_epoch: that of its tenant when it was sent.
        end: `answered`, `error event`, or `refused` with a status before the answer began.
    """

    customer: Customer
    prompt: list[int]
    max_tokens: int
    stream: bool
    least_epoch: int
    sent_at: float = field(default_factory=time.monotonic)
    begun_at: float = 0.0
    ended_at: float = 0.0
    end: str = ""
    status: int = 0
    headers: httpx.Headers = field(default_factory=httpx.Headers)
    body: bytes = b""


@dataclass(eq=False)
class Customer:
    """A tenant with the salts of all its epochs, as they are in the database while they last."""

    tenant: Tenant
    account: bytes
    head: list[int]
    epoch: int = 1
    salts: dict[int, bytes] = field(default_factory=dict)


class Storm:
    """`asked` is all there was; `running` those that have not ended."""

    def __init__(self, server: Running, welcome: Welcome, directory: Directory, seed: int) -> None:
        self.asked: list[Asked] = []
        self.running: set[Asked] = set()
        self.customers: list[Customer] = []
        self.draw = random.Random(seed)
        self.welcome = welcome
        self.directory = directory
        self._server = server
        self._numbers = itertools.count(1)
        self._over = False
        self._tokenizer = Tokenizer(read_model_files(Path(welcome.model_dir)))
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=PATIENCE_SECONDS, limits=limits)
        self._admin = httpx.AsyncClient(
            base_url=server.admin_url, trust_env=False, timeout=PATIENCE_SECONDS, headers=server.admin.headers
        )

    async def add(self, tenant: Tenant) -> Customer:
        principal = await self.directory.authenticate([(b"x-api-key", tenant.key.encode())])
        customer = Customer(tenant, principal.account, random_prompt(tenant.name, HEAD_TOKENS))
        await self._learn_salt(customer)
        self.customers.append(customer)
        return customer

    async def _learn_salt(self, customer: Customer) -> None:
        salt = await self.directory.salt(customer.tenant.id, customer.epoch)
        customer.salts[customer.epoch] = salt.reveal()

    async def rotate(self, customer: Customer) -> dict[str, Any]:
        answer = await self._admin.post(f"/admin/v1/tenants/{customer.tenant.id}/salts/rotate")
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        assert body["epoch"] == customer.epoch + 1
        customer.epoch += 1
        await self._learn_salt(customer)
        return body

    async def ask(self, customer: Customer, *, stream: bool, max_tokens: int, tail: int = 8) -> Asked:
        """A prompt that nobody asked before, behind the head that all of the tenant's begin with."""
        prompt = customer.head + random_prompt(f"{customer.tenant.name} {next(self._numbers)}", tail)
        asked = Asked(customer, prompt, max_tokens, stream, customer.epoch)
        self.asked.append(asked)
        self.running.add(asked)
        body = {
            "model": self._server.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": stream,
        }
        try:
            async with self._http.stream(
                "POST", "/v1/completions", json=body, headers=customer.tenant.headers
            ) as response:
                asked.status, asked.headers = response.status_code, response.headers
                async for piece in response.aiter_bytes():
                    asked.begun_at = asked.begun_at or time.monotonic()
                    asked.body += piece
            asked.end = _end(asked)
        except httpx.TransportError as error:
            asked.end = f"broken: {error!r}"
        asked.ended_at = time.monotonic()
        self.running.discard(asked)
        return asked

    async def keep_asking(self, customer: Customer, *, stream: bool) -> None:
        while not self._over:
            await self.ask(
                customer,
                stream=stream,
                max_tokens=self.draw.randrange(40, 100) if stream else self.draw.randrange(10, 40),
                tail=self.draw.choice([8, 8, 8, 150]),
            )
            await asyncio.sleep(PAUSE_SECONDS)

    def streaming(self) -> int:
        """Streams whose client has text and waits for more."""
        return sum(asked.stream and bool(asked.begun_at) for asked in self.running)

    async def until_over(self, asked: set[Asked], since: float, seconds: float) -> None:
        """All of these have ended, within so many seconds."""
        while left := asked & self.running:
            assert time.monotonic() - since < seconds, f"{len(left)} of {len(asked)} have not ended after {seconds} s"
            await asyncio.sleep(0.002)

    def end(self) -> None:
        self._over = True

    async def close(self) -> None:
        await self._http.aclose()
        await self._admin.aclose()

    # --- the account

    def fates(self) -> Counter[str]:
        return Counter(f"{'stream' if asked.stream else 'plain'} {asked.end}" for asked in self.asked)

    def check_answers(self) -> None:
        """All ended in a way that is promised, and what was answered is right."""
        for asked in self.asked:
            assert asked.end in ("answered", "error event", "refused 503"), f"{asked.end}\n{self._server.log()}"
            if asked.end == "answered":
                said = events(asked.body) if asked.stream else []
                text = text_of(said[:-1]) if asked.stream else httpx.Response(200, content=asked.body).json()
                assert (text if asked.stream else text["choices"][0]["text"]) == self._expected(asked)
            elif asked.end == "refused 503":
                check_refusal(asked.headers)

    def _expected(self, asked: Asked) -> str:
        detokenizer = Detokenizer(self._tokenizer)
        return detokenizer.push(expected_answer(asked.prompt, asked.max_tokens)) + detokenizer.finish()

    def check_names(self) -> Counter[str]:
        """Every block that reached any store was named with the salt of its tenant and epoch, and of no older epoch.

        Answers how many names there were of prompts and of answers, and how many requests found blocks.
        """
        owners = {customer.account.hex(): customer for customer in self.customers}
        asked_by_prompt = {tuple(asked.prompt): asked for asked in self.asked}
        named: dict[tuple[int, int, int], list[str]] = {}
        counts: Counter[str] = Counter()
        prompts: dict[tuple[int, int, int], tuple[Customer, int, list[int]]] = {}
        opened: set[tuple[int, str, int]] = set()
        for entry in self._server.notes.entries():
            where = entry.pid, entry.connection, entry.request
            if entry.kind == "Submit" and entry.account in owners:
                customer = owners[entry.account]
                assert entry.epoch >= asked_by_prompt[tuple(entry.tokens)].least_epoch
                assert len(entry.keys) == len(entry.tokens) // BLOCK_TOKENS
                prompts[where], named[where] = (customer, entry.epoch, entry.tokens), list(entry.keys)
                counts["prompt blocks"] += len(entry.keys)
            elif entry.kind == "Seal" and where in named:
                named[where] += entry.keys
                counts["answer blocks"] += len(entry.keys)
            elif entry.kind == "Started" and where in prompts:
                customer, epoch, _ = prompts[where]
                first = (entry.pid, customer.tenant.id, epoch) not in opened
                opened.add((entry.pid, customer.tenant.id, epoch))
                # A store that is new, and an epoch that is new, find nothing.
                assert not (first and entry.cached_tokens)
                counts["hits"] += entry.cached_tokens > 0
        for where, (customer, epoch, prompt) in prompts.items():
            tokens = prompt + expected_answer(prompt, len(named[where]) * BLOCK_TOKENS - len(prompt))
            names = block_names(customer.salts[epoch], self.welcome, tokens)
            assert [name.hex() for name in names[: len(named[where])]] == named[where]
        counts["submitted"] = len(prompts)
        return counts


def check_refusal(headers: httpx.Headers) -> None:
    """What a 503 tells a client's library."""
    assert headers["retry-after"] == "1"
    assert headers["retry-after-ms"] == "1000"
    assert headers["x-should-retry"] in ("true", "false")


def _end(asked: Asked) -> str:
    if asked.status != 200:
        return f"refused {asked.status}"
    if not asked.stream:
        return "answered"
    *_, last = events(asked.body)
    if last == DONE:
        return "answered"
    assert last.keys() == {"error"}
    assert last["error"]["type"] == "service_unavailable_error"
    assert last["error"]["code"] == "server_is_overloaded"
    return "error event"


@asynccontextmanager
async def storm(server: Running, seed: int, tenants: int = 3) -> AsyncIterator[Storm]:
    """Each tenant streams twice and asks once at any time, until the block ends and what runs then has ended too."""
    welcome = await asyncio.to_thread(Insider(server).welcome)
    database = await Database.open(f"sqlite+aiosqlite:///{server.data_dir / 'saltern.db'}")
    made = Storm(server, welcome, await Directory.open(database, server.data_dir / "kek"), seed)
    workers: list[asyncio.Task[None]] = []
    try:
        for _ in range(tenants):
            customer = await made.add(await asyncio.to_thread(server.tenant))
            workers += [
                asyncio.create_task(made.keep_asking(customer, stream=stream)) for stream in (True, True, False)
            ]
        yield made
        made.end()
        async with asyncio.timeout(PATIENCE_SECONDS):
            await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*workers, return_exceptions=True)
        await made.close()
        await database.close()
