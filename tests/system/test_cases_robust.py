"""What broke other servers' stop strings, streams, choices and histories, case by case, over HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from cachestore.protocol import Abort, Finished
from tests.cachestore.serving import Arrivals, submissions
from tests.cachestore.support import next_token
from tests.gateway.prompt import tokenizers
from tests.system.in_process import Customer, InProcess, in_process
from tests.system.scripted import (
    CHAT,
    TEXT,
    ScriptedRunner,
    Words,
    byte_ids,
    events_of,
    idle,
    listening,
    tokens_of,
    until,
)
from tests.system.support import Server, Tenant
from tests.system.wire import DONE, error_form, events, finish_reasons, refusal, streamed, text_of

pytestmark = pytest.mark.anyio

ROUTES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [{"role": "user", "content": "x"}]}),
    (TEXT, {"prompt": "x"}),
]
USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


@asynccontextmanager
async def saying(folder: Path, *words: str, template: str = tokenizers.CHATML) -> AsyncIterator[Scene]:
    """A model whose vocabulary has these words."""
    model, runner = Words.write(folder / "model", *words, template=template), ScriptedRunner()
    async with in_process(folder, model.directory, runner=runner) as inside:
        yield Scene(inside, runner, model, await inside.customer("a"))
        await idle(inside)


class Scene:
    def __init__(self, inside: InProcess, runner: ScriptedRunner, words: Words, customer: Customer) -> None:
        self.inside = inside
        self.runner = runner
        self.words = words
        self.customer = customer

    def script(self, *words: str) -> None:
        self.runner.script(*self.words.ids(*words))

    async def ask(self, path: str, **fields: Any) -> httpx.Response:
        body = {"model": self.inside.model, "max_tokens": 60, "temperature": 0} | fields
        return await self.inside.http.post(path, json=body, headers=self.customer.headers)

    async def said(self, **fields: Any) -> tuple[str, str, int]:
        """Text, reason and completion tokens: the same on both routes, streamed or not."""
        found = set()
        for path, prompt in ROUTES:
            answer = (await self.ask(path, **prompt, **fields)).json()
            (choice,) = answer["choices"]
            text = choice["text"] if path == TEXT else choice["message"]["content"]
            found.add((text, choice["finish_reason"], answer["usage"]["completion_tokens"]))
            *chunks, last = streamed(await self.ask(path, **prompt, **fields, **USAGE))
            found.add((text_of(chunks), finish_reasons(chunks)[-1], last["usage"]["completion_tokens"]))
        (one,) = found
        return one


def openai_client(inside: InProcess, customer: Customer) -> openai.AsyncOpenAI:
    http = httpx.AsyncClient(transport=httpx.ASGITransport(inside.gateway.tenant_app))
    return openai.AsyncOpenAI(
        base_url="http://saltern/v1",
        api_key=customer.key,
        max_retries=0,
        http_client=http,  # type: ignore[arg-type]  # httpx2's, which is equal
    )


async def test_b013_a_rewritten_history_has_other_names_and_no_named_block_is_rewritten(
    default_model: Path, tmp_path: Path
) -> None:
    begun, runner = list(range(1, 16)), ScriptedRunner()
    runner.says = lambda sequence: 901 if list(sequence.tokens) == begun else next_token(sequence.tokens)
    async with in_process(tmp_path, default_model, runner=runner) as inside:
        session, other = await inside.customer("a"), await inside.customer("b")
        submitted = submissions(inside.engine)

        async def ask(customer: Customer, prompt: list[int], max_tokens: int) -> tuple[str, int]:
            body = {"model": inside.model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
            answer = (await inside.http.post(TEXT, json=body, headers=customer.headers)).json()
            await idle(inside)
            return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        await ask(session, begun, 2)
        ((name, block),) = inside.engine.index.names()
        slots = [block * 16 + offset for offset in range(16)]
        written = [runner._slots[slot] for slot in slots]
        edited, kept = [*begun, 702, 5], [*begun, 901, 5]
        warm = [await ask(session, prompt, 8) for prompt in (edited, kept)]
        assert [cached for _, cached in warm] == [0, 16]
        assert submitted[1].keys != submitted[2].keys == name.key
        # The named block is as it was; what the double read of it is checked at each step, by `idle`.
        assert inside.engine.index.get(name) == block
        assert [runner._slots[slot] for slot in slots] == written
        cold = [await ask(other, prompt, 8) for prompt in (edited, kept)]
        assert [cached for _, cached in cold] == [0, 0]
        assert [text for text, _ in warm] == [text for text, _ in cold]


async def test_b081_a_template_without_a_system_role_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    refuses = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system role here') }}{% endif %}"
    async with saying(tmp_path, template=refuses + tokenizers.CHATML) as scene:
        submitted = submissions(scene.inside.engine)
        user = {"role": "user", "content": "x"}
        with caplog.at_level(logging.DEBUG):
            for stream in (False, True):
                messages = [{"role": "system", "content": "s"}, user]
                error = refusal(await scene.ask(CHAT, messages=messages, stream=stream), 400)
                assert (error["type"], error["param"]) == ("invalid_request_error", "messages")
                assert "No system role here" in error["message"]
        # Nothing was asked of the store, so nothing can be charged.
        assert not submitted
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info]
        assert "Traceback" not in caplog.text
        assert (await scene.ask(CHAT, messages=[user])).status_code == 200
        assert submitted


async def test_b103_a_stop_string_over_two_tokens_is_seen(tmp_path: Path) -> None:
    async with saying(tmp_path, " green", " red", " blue", " tail") as scene:
        said = events_of(scene.inside)
        scene.script(" green", " red", " blue", " tail")
        assert await scene.said(stop=["red blue"]) == (" green ", "stop", 3)
        await idle(scene.inside)
        # The store was told to stop: at most the steps until it heard of it were computed.
        assert {event.reason for event in said if isinstance(event, Finished)} <= {"aborted", "stop"}
        # The positive control.
        assert await scene.said(stop=["blue red"]) == (" green red blue tail", "stop", 5)


async def test_b104_text_that_only_began_a_stop_string_is_text(tmp_path: Path) -> None:
    async with saying(tmp_path, "ok", "##E", "TA", "##EN", "Dx") as scene:
        scene.script("ok", "##E", "TA")
        assert await scene.said(stop="##END") == ("ok##ETA", "stop", 4)
        scene.script("ok", "##EN", "Dx")
        assert await scene.said(stop="##END") == ("ok", "stop", 3)


async def test_b105_only_what_may_become_a_stop_string_is_held_back(tmp_path: Path) -> None:
    stop = "abcabcabd"
    async with saying(tmp_path) as scene, listening(scene.inside.gateway.tenant_app) as url:
        scene.runner.script(*byte_ids("xabcabcabcabd and more"))
        assert await scene.said(stop=stop) == ("xabc", "stop", 13)
        scene.runner.script(*byte_ids("hello"))
        scene.runner.close()
        scene.runner.let()
        body = {"model": scene.inside.model, "prompt": "x", "stop": stop, "stream": True}
        async with (
            httpx.AsyncClient(base_url=url, trust_env=False) as http,
            http.stream("POST", TEXT, json=body, headers=scene.customer.headers) as response,
        ):
            received, pieces = b"", response.aiter_bytes()
            for sent in ("h", "he", "hel", "hell", "hello"):
                while text_of(events(received)) != sent:
                    received += await anext(pieces)
                # The model is not asked for the next character before this one was here.
                scene.runner.let()
            scene.runner.open()
            async for piece in pieces:
                received += piece
        assert text_of(events(received)[:-1]) == "hello"


async def test_b107_a_held_back_token_is_not_lost_when_the_end_comes_next(tmp_path: Path) -> None:
    async with saying(tmp_path, "co", "net", "team", "work") as scene:
        scene.script("co", "net")
        assert await scene.said(stop="network") == ("conet", "stop", 3)
        scene.script("team", "work")
        assert await scene.said(stop="network") == ("teamwork", "stop", 3)
        # The same where the token limit is what ends it; and the stop string itself is cut.
        scene.script("co", "net", "work")
        assert await scene.said(stop="network", max_tokens=2) == ("conet", "length", 2)
        assert await scene.said(stop="network") == ("co", "stop", 3)


@pytest.mark.parametrize("n", [1, 2])
async def test_b111_the_usage_chunk_has_choices_and_the_client_takes_it(tmp_path: Path, n: int) -> None:
    async with saying(tmp_path, "he", "llo") as scene, openai_client(scene.inside, scene.customer) as client:
        scene.script("he", "llo")
        model = scene.inside.model
        for path, prompt in ROUTES:
            *_, raw = streamed(await scene.ask(path, **prompt, n=n, **USAGE))
            assert raw["choices"] == []
            create: Any = client.chat.completions.create if path == CHAT else client.completions.create
            whole = await create(model=model, **prompt, n=n)
            chunks = [chunk async for chunk in await create(model=model, **prompt, n=n, **USAGE)]
            assert chunks[-1].choices == []
            assert all(chunk.usage is None and chunk.choices for chunk in chunks[:-1])
            counts = whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens
            last = chunks[-1].usage
            assert (last.prompt_tokens, last.completion_tokens, last.total_tokens) == counts
            assert whole.usage.completion_tokens == 3 * n
            assert len(whole.choices) == n


async def test_b114_each_index_begins_with_a_role_and_ends_once(tmp_path: Path) -> None:
    async with saying(tmp_path, "he", "llo") as scene:
        scene.script("he", "llo")
        path, prompt = ROUTES[0]
        chunks = streamed(await scene.ask(path, **prompt, n=2, stream=True))
        for index in range(2):
            choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
            assert [choice["delta"].get("role") for choice in choices] == ["assistant", *[None] * (len(choices) - 1)]
            reasons = [choice["finish_reason"] for choice in choices]
            assert reasons == [*[None] * (len(choices) - 1), "stop"]
            assert "".join(choice["delta"].get("content", "") for choice in choices) == "hello"
        assert all(len(chunk["choices"]) == 1 for chunk in chunks)
        assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1


async def take(stream: Any, into: list[Any]) -> None:
    async for chunk in stream:
        into.append(chunk.model_dump(exclude_unset=True))


async def test_b116_an_error_within_a_stream_is_an_event(tmp_path: Path) -> None:
    async with saying(tmp_path, "he", "llo") as scene, openai_client(scene.inside, scene.customer) as client:
        launch, steps = scene.runner.launch, 0

        def failing(rows: Any) -> Any:
            nonlocal steps
            steps += 1
            scene.runner.fault = RuntimeError("planted") if steps == 6 else None
            return launch(rows)

        scene.runner.launch = failing  # type: ignore[method-assign]
        scene.script(*["he", "llo"] * 10)
        for path, prompt in ROUTES:
            said, steps = events_of(scene.inside), 0
            response = await scene.ask(path, **prompt, **USAGE)
            *chunks, last = events(response.content)
            assert text_of(chunks) == "hellohellohe"
            error = error_form(last)
            assert (error["type"], DONE in chunks) == ("server_error", False)
            assert response.content.endswith(b"}\n\n")
            # What will be charged: the prompt and five tokens.
            (finished,) = [event for event in said if isinstance(event, Finished)]
            assert (finished.reason, finished.counts.output_tokens) == ("error", 5)
            assert finished.counts.prompt_tokens > 0
            create: Any = client.chat.completions.create if path == CHAT else client.completions.create
            steps, got = 0, []
            with pytest.raises(openai.APIError) as raised:
                await take(await create(model=scene.inside.model, **prompt, stream=True), got)
            assert text_of(got) == "hellohellohe"
            assert raised.value.message == error["message"]


def test_b118_chunks_carry_the_index_of_their_choice(server: Server, tenant: Tenant) -> None:
    body: dict[str, Any] = {"n": 3, "seed": 11, "temperature": 1.5, "max_tokens": 5, "ignore_eos": True}
    whole = tenant.complete("Salt is", **body).json()
    texts = [choice["text"] for choice in whole["choices"]]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    response = tenant.complete("Salt is", **body, stream=True)
    chunks = streamed(response)
    joined = ["", "", ""]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        joined[choice["index"]] += choice["text"]
    assert joined == texts
    assert finish_reasons(chunks).count("length") == 3
    assert response.content.count(b"[DONE]") == 1


async def test_b131_a_prompt_of_token_ids(tmp_path: Path) -> None:
    async with saying(tmp_path, "he") as scene:
        scene.script("he")
        vocabulary = scene.words.ids("he")[0] + 1
        one = (await scene.ask(TEXT, prompt=[5, 6, 7])).json()
        assert one["usage"]["prompt_tokens"] == 3
        two = (await scene.ask(TEXT, prompt=[[5, 6], [7]])).json()
        assert [choice["index"] for choice in two["choices"]] == [0, 1]
        submitted = submissions(scene.inside.engine)
        for prompt in ([5, -1], [vocabulary], [True], []):
            assert refusal(await scene.ask(TEXT, prompt=prompt), 400)["type"] == "invalid_request_error"
        assert not submitted
        assert (await scene.ask(TEXT, prompt=[vocabulary - 1])).status_code == 200


async def test_b133_equal_request_ids_of_clients_mix_nothing_up(tmp_path: Path) -> None:
    async with saying(tmp_path) as scene:
        inside, runner = scene.inside, scene.runner
        submitted = submissions(inside.engine)
        # Each answer repeats its prompt's letter, in a way that tells its choices apart.
        runner.says = lambda sequence: (
            byte_ids("-+")[sequence.sampling.seed % 2] if (sequence.output_tokens % 2) else sequence.tokens[0]
        )
        runner.close()
        headers = scene.customer.headers | {"x-request-id": "same", "x-client-request-id": "same"}

        async def ask(letter: str) -> httpx.Response:
            body = {"model": inside.model, "prompt": letter, "n": 2, "max_tokens": 200, "seed": 0}
            return await inside.http.post(TEXT, json=body, headers=headers)

        async with asyncio.TaskGroup() as group:
            asked = {letter: group.create_task(ask(letter)) for letter in "ab"}
            while len(inside.engine.scheduler.running) < 4:
                await until(lambda: runner.waiting)
                runner.let()
                await asyncio.sleep(0.005)
            running = [(row.connection, row.request) for row in inside.engine.scheduler.running]
            runner.open()
        assert len(set(running)) == len({(submit.request) for submit in submitted}) == 4
        assert sorted(map(tokens_of, submitted)) == sorted([byte_ids("a"), byte_ids("b")] * 2)
        ids = set()
        for letter, task in asked.items():
            response = task.result()
            texts = [choice["text"] for choice in response.json()["choices"]]
            assert texts == [f"{letter}-" * 100, f"{letter}+" * 100]
            ids |= {response.headers["x-request-id"], response.json()["id"]}
        assert len(ids) == 4
        assert "same" not in ids


async def test_b030_an_abort_that_comes_while_the_end_is_computed_frees_once(tmp_path: Path) -> None:
    async with saying(tmp_path, "he") as scene, listening(scene.inside.gateway.tenant_app) as url:
        inside, runner = scene.inside, scene.runner
        said, aborts = events_of(inside), Arrivals(inside.store).of(Abort)
        scene.script("he")
        runner.close()
        runner.let()
        free = inside.engine.pool.free
        body = {"model": inside.model, "prompt": "x", "stream": True}
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
            async with http.stream("POST", TEXT, json=body, headers=scene.customer.headers) as response:
                # Kept, because a stream whose reader is collected is closed.
                pieces = response.aiter_bytes()
                await anext(pieces)
                # The engine is in the step that ends the answer when its client leaves.
                await until(lambda: len(runner.steps) == 1 and runner.waiting)
                held = inside.engine.pool.held
            await until(lambda: aborts)
        runner.open()
        await idle(inside, 1)
        assert [event.reason for event in said if isinstance(event, Finished)] == ["stop"]
        assert (held, inside.engine.pool.free) == (1, free)
