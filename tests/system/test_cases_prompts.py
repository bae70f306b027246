"""What a request becomes on its way to the store: tokens and names of blocks; and streams of a store that falters."""

from __future__ import annotations

import asyncio
import hashlib
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from cachestore.scheduler import Row
from gateway import completions
from gateway.prompt.model_files import read_model_files
from gateway.prompt.tokens import Tokenizer
from tests.cachestore.serving import submissions
from tests.gateway.prompt import tokenizers
from tests.system.in_process import Customer, InProcess, in_process
from tests.system.insider import block_names
from tests.system.scripted import CHAT, TEXT, idle, tokens_of
from tests.system.wire import DONE, error_form, events, finish_reasons, text_of

pytestmark = pytest.mark.anyio


async def ask(inside: InProcess, customer: Customer, path: str, **fields: Any) -> httpx.Response:
    body = {"model": inside.model, "max_tokens": 1, "temperature": 0} | fields
    response = await inside.http.post(path, json=body, headers=customer.headers)
    assert response.status_code == 200, response.text
    return response


def say(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


async def test_b002_only_the_tenants_salt_gives_the_key_that_the_store_keeps(
    default_model: Path, tmp_path: Path
) -> None:
    block, stored, customers = list(range(1, 17)), [], []
    for start in range(2):
        # The second start has the same database and a store that knows nothing.
        async with in_process(tmp_path, default_model) as inside:
            if start == 0:
                customers = [await inside.customer(name) for name in ("a", "b")]
            assert not list(inside.engine.index.names())
            await ask(inside, customers[0], TEXT, prompt=[*block, 17])
            stored.append([name.key for name, _ in inside.engine.index.names()])
            salts = [(await inside.gateway.directory.salt(customer.id, 1)).reveal() for customer in customers]
            welcome = inside.store.welcome
    ours, theirs, constant = (block_names(salt, welcome, block) for salt in (*salts, bytes(32)))
    assert stored == [ours, ours]
    plain = [hashlib.sha256(struct.pack("<16I", *block)).digest()]
    assert all(other != ours for other in (theirs, constant, plain))


async def test_b079_one_bos_in_each_case(tmp_path: Path) -> None:
    model_dir = tokenizers.with_bos(tmp_path / "model")
    tokenizer = Tokenizer(read_model_files(model_dir))
    (bos,) = tokenizer.encode("<s>")
    words = list(tokenizer.encode("hello world"))
    async with in_process(tmp_path, model_dir) as inside:
        customer, submitted = await inside.customer("a"), submissions(inside.engine)
        for prompt in ("<s>hello world", "hello world", [bos, *words], [bos, bos, *words], words):
            await ask(inside, customer, TEXT, prompt=prompt)
        # Text begins with one; ids are used unchanged, whatever they are.
        once = [bos, *words]
        assert [tokens_of(each) for each in submitted] == [once, once, once, [bos, *once], words]
        # A chat has the one that its template writes.
        await ask(inside, customer, CHAT, messages=say("hello world"))
        chat = tokens_of(submitted[-1])
        assert (chat[0], chat.count(bos)) == (bos, 1)


async def test_b128_unknown_fields_change_no_token_and_no_name(default_model: Path, tmp_path: Path) -> None:
    async with in_process(tmp_path, default_model) as inside:
        customer, submitted = await inside.customer("a"), submissions(inside.engine)
        messages = say("The quick brown fox says hello world.")
        await ask(inside, customer, CHAT, messages=messages)
        extended = [message | {"unknown": "x"} for message in messages]
        await ask(inside, customer, CHAT, messages=extended, unknown="x", metadata={"a": "b"})
        await ask(inside, customer, CHAT, messages=messages, prompt_cache_key="x", user="x", safety_identifier="x")
        await ask(inside, customer, CHAT, messages=messages, cache_salt="x")
        plain, *others, salted = submitted
        assert plain.keys
        assert [(other.tokens, other.keys) for other in others] == [(plain.tokens, plain.keys)] * 2
        # This one enters the names, though not the prompt.
        assert salted.tokens == plain.tokens
        assert salted.keys != plain.keys


async def test_b099_a_byte_order_mark_in_a_message_reaches_the_model(default_model: Path, tmp_path: Path) -> None:
    mark = list(Tokenizer(read_model_files(default_model)).encode("\ufeff"))
    async with in_process(tmp_path, default_model) as inside:
        customer, submitted = await inside.customer("a"), submissions(inside.engine)
        for content in ("x", "x\ufeff"):
            await ask(inside, customer, CHAT, messages=say(content))
        plain, marked = map(tokens_of, submitted)
        start = next(i for i, pair in enumerate(zip(plain, marked, strict=False)) if len(set(pair)) > 1)
        assert marked == [*plain[:start], *mark, *plain[start:]]


class FalteringRunner:
    """Makes one step of a store wait, and another fail. Steps are counted from when it is made."""

    def __init__(self, inside: InProcess, *, waits: int | None = None, fails: int | None = None) -> None:
        self.go_on = threading.Event()
        self._launch = inside.runner.launch
        self._steps, self._waits, self._fails = 0, waits, fails
        inside.runner.launch = self.launch  # type: ignore[method-assign]

    def launch(self, rows: Sequence[Row]) -> list[int]:
        self._steps += 1
        if self._steps == self._waits:
            self.go_on.wait(30)
        if self._steps == self._fails:
            raise RuntimeError("planted")
        return self._launch(rows)


@pytest.mark.parametrize(("path", "prompt"), [(CHAT, {"messages": say("x")}), (TEXT, {"prompt": "x"})])
async def test_b120_keepalives_are_comments_and_a_failure_is_the_last_event(
    default_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, prompt: dict[str, Any]
) -> None:
    monkeypatch.setattr(completions, "KEEPALIVE_SECONDS", 0.02)
    fields = prompt | {"max_tokens": 4, "stream": True, "ignore_eos": True}
    async with in_process(tmp_path, default_model) as inside:
        customer = await inside.customer("a")
        runner = FalteringRunner(inside, waits=2)
        asyncio.get_running_loop().call_later(0.3, runner.go_on.set)
        response = await ask(inside, customer, path, **fields)
        assert response.content.count(b": keepalive\n\n") >= 2
        *chunks, done = events(response.content)
        assert done == DONE
        assert finish_reasons(chunks)[-1] == "length"

        FalteringRunner(inside, fails=3)
        response = await ask(inside, customer, path, **fields)
        *chunks, error = events(response.content)
        assert text_of(chunks)
        assert set(finish_reasons(chunks)) == {None}
        assert error_form(error)["type"] == "server_error"
        assert b"planted" not in response.content

        # The engine goes on and holds nothing of it.
        assert events((await ask(inside, customer, path, **fields)).content)[-1] == DONE
        await idle(inside)
