"""Many clients, all kinds of requests, a pool much too small for them: every answer is that of its cold greedy run.

The model is two random layers of the Llama kind, loaded by the store's own code; sockets, gateway, store and engine
are real. Answers are compared twice: the tokens that the engine sampled, also for requests whose client left, and the
text that the client got. A comparison ends where the two best logits of the cold run are nearly equal: there rounding
decides.
"""

from __future__ import annotations

import asyncio
import math
import random
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from cachestore import cli
from cachestore.batch import Batch
from cachestore.geometry import BlockLayout
from cachestore.model import KVCache, ModelRunner
from cachestore.protocol import Finished, Message, Sampling, Submit, Tokens
from cachestore.sampling import Samples, sample
from cachestore.scheduler import Row
from gateway.prompt.detokenize import Detokenizer
from gateway.prompt.tokens import Tokenizer
from tests.cachestore.small_models import save_small_model
from tests.cachestore.support import Harness
from tests.system.in_process import BLOCK_TOKENS, Customer, InProcess, in_process
from tests.system.scripted import CHAT, END, TEXT, Words, byte_ids, idle, listening
from tests.system.wire import DONE, events

CLOSE = 1e-4
CLIENTS = 16
TENANTS = 4
MOST_PROMPT_TOKENS, MOST_OUTPUT_TOKENS = 3_000, 40
# The first requests: their prompts have room beside each other and their answers have not.
FIRST_PROMPT_TOKENS, FIRST_OUTPUT_TOKENS = 180, 60
# Room for the longest request and not much more.
BLOCKS = 196
STEP_TOKENS = 256


class Observing(ModelRunner):
    """Keeps, for each token that a request samples, by how much its logit was above the second best."""

    gaps: dict[int, list[float]]

    def launch(self, rows: Sequence[Row]) -> Samples:
        batch = Batch.from_rows(rows, self.block_tokens, self.model.device)
        logits = self.model.logits(batch, self.cache, batch.sample_rows)
        if len(batch.sample_rows):
            best = logits.topk(2, dim=-1).values
            gaps = (best[:, 0] - best[:, 1]).tolist()
            for row, gap in zip([row for row in rows if row.samples], gaps, strict=True):
                self.gaps.setdefault(row.sequence.request, []).append(gap)
        return sample(logits, batch.sampling)


class Checking(ModelRunner):
    """Checks the engine's state between the plan of every step and its computation."""

    inside: InProcess
    mistakes: list[str]

    def launch(self, rows: Sequence[Row]) -> Samples:
        try:
            self.inside.engine.check()
        except AssertionError as error:
            self.mistakes.append(repr(error))
        return super().launch(rows)


class Cold:
    """Answers of an engine of its own, in which no request finds anything: each has an account to itself.

    Args:
        wanted: how many tokens at most of the answer to which prompt (u32le each).
        together: how many requests run beside each other.
    """

    def __init__(
        self,
        runner: ModelRunner,
        layout: BlockLayout,
        vocabulary_tokens: int,
        wanted: dict[bytes, int],
        together: int,
    ) -> None:
        self._answers: dict[bytes, tuple[list[int], list[float]]] = {}
        prompts = list(wanted)
        blocks = together * BLOCKS
        cache = KVCache(layout, blocks, runner.model.dtype, runner.model.device)
        for start in range(0, len(prompts), together):
            observing = Observing(runner.model, cache, BLOCK_TOKENS)
            observing.gaps = {}
            store = Harness(
                observing,
                blocks=blocks,
                block_tokens=BLOCK_TOKENS,
                step_tokens=STEP_TOKENS,
                max_running=together,
                vocabulary_tokens=vocabulary_tokens,
            )
            group = prompts[start : start + together]
            answers = [
                store.submit(
                    array("I", prompt),
                    account=number.to_bytes(16, "big"),
                    max_tokens=wanted[prompt],
                    sampling=Sampling(temperature=0, stop_token_ids=[END]),
                )
                for number, prompt in enumerate(group)
            ]
            store.run(*answers)
            for prompt, answer in zip(group, answers, strict=True):
                assert answer.cached_tokens == 0
                self._answers[prompt] = answer.tokens, observing.gaps[answer.request]

    def answer(self, prompt: list[int], max_tokens: int) -> tuple[list[int], bool]:
        """The tokens that are certain, and whether they are the whole answer."""
        tokens, gaps = self._answers[encoded(prompt)]
        count = min(max_tokens, len(tokens))
        certain = next((at for at, gap in enumerate(gaps[:count]) if gap < CLOSE), count)
        return tokens[:certain], certain == count


def encoded(prompt: list[int]) -> bytes:
    return array("I", prompt).tobytes()


@dataclass
class Sampled:
    """What the engine was asked and what it sampled, by request."""

    prompts: dict[int, list[int]] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ended: Counter[str] = field(default_factory=Counter)

    def watch(self, inside: InProcess) -> None:
        submit, emit = inside.engine.submit, inside.engine._emit

        def noted_submit(connection: int, message: Submit) -> None:
            self.prompts[message.request] = list(array("I", message.tokens))
            submit(connection, message)

        def noted_emit(connection: int, message: Message) -> None:
            if isinstance(message, Tokens):
                for request, tokens, _ in message.entries:
                    self.tokens.setdefault(request, []).extend(tokens)
            elif isinstance(message, Finished):
                self.ended[message.reason] += 1
            emit(connection, message)

        inside.engine.submit = noted_submit  # type: ignore[method-assign]
        inside.engine._emit = noted_emit


@dataclass
class Request:
    customer: Customer
    path: str
    body: dict[str, Any]
    prompts: list[list[int]]
    patience_seconds: float | None
    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] | None = None

    @property
    def n(self) -> int:
        return int(self.body["n"])

    @property
    def tokens(self) -> int:
        return sum(len(prompt) + self.n * int(self.body["max_tokens"]) for prompt in self.prompts)


def requests(draw: random.Random, count: int, inside: InProcess, customers: list[Customer]) -> list[Request]:
    """Prompts of all lengths, most of them beginnings of a few documents, so that they share blocks."""
    made = [first_request(draw, inside, draw.choice(customers)) for _ in range(CLIENTS)]
    documents = ["".join(draw.choices("abcdefghij ", k=MOST_PROMPT_TOKENS)) for _ in range(6)]
    template = inside.gateway.link.connection().model.template

    def text(part: float) -> str:
        length = round(math.exp(part * math.log(MOST_PROMPT_TOKENS)))
        return draw.choice(documents)[:length] + draw.choice(["", "?", "!!", f" {draw.random()}"])

    # Evenly over the logarithm, so that any seed gives about the same total.
    rest = count - len(made)
    parts = [(number + draw.random()) / rest for number in range(rest)]
    draw.shuffle(parts)
    for part in parts:
        body = {"model": inside.model, "n": draw.choice([1, 2, 3]), "stream": draw.random() < 0.5, "temperature": 0}
        body |= {"max_tokens": draw.randint(1, MOST_OUTPUT_TOKENS)}
        if draw.random() < 0.5:
            path, messages = CHAT, [{"role": "user", "content": text(part)}]
            body |= {"messages": messages}
            prompts = [list(template.prompt(messages).tokens)]
        else:
            path, texts = TEXT, [text(part), *(text(draw.random()) for _ in range(draw.choice([0, 0, 0, 1])))]
            prompts = [byte_ids(each) for each in texts]
            body |= {"prompt": draw.choice([texts, prompts])}
        if body["stream"]:
            body |= {"stream_options": {"include_usage": True}}
        patience = draw.uniform(0, 0.5) if draw.random() < 0.15 else None
        made.append(Request(draw.choice(customers), path, body, prompts, patience))
    return made


def first_request(draw: random.Random, inside: InProcess, customer: Customer) -> Request:
    prompt = byte_ids("".join(draw.choices("abcdefghij ", k=FIRST_PROMPT_TOKENS)))
    asked = {"model": inside.model, "prompt": prompt, "n": 1, "max_tokens": FIRST_OUTPUT_TOKENS, "temperature": 0}
    return Request(customer, TEXT, asked | {"stream": False}, [prompt], None)


async def send(http: httpx.AsyncClient, request: Request) -> bool:
    """Whether the client stayed to the end."""
    try:
        async with asyncio.timeout(request.patience_seconds):
            response = await http.post(request.path, json=request.body, headers=request.customer.headers)
    except TimeoutError:
        return False
    assert response.status_code == 200, response.text
    if request.body["stream"]:
        *chunks, last = events(response.content)
        assert last == DONE
        request.usage = chunks[-1]["usage"]
    else:
        chunks = [response.json()]
        request.usage = chunks[0]["usage"]
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        content = choice["text"] if "text" in choice else choice.get("delta", choice.get("message")).get("content", "")
        index = choice["index"]
        request.texts[index] = request.texts.get(index, "") + content
        if choice["finish_reason"]:
            assert index not in request.reasons
            request.reasons[index] = choice["finish_reason"]
    return True


class Comparison:
    """Holds what was answered to the cold runs, as far as those are certain."""

    def __init__(self, cold: Cold, tokenizer: Tokenizer) -> None:
        self.compared_tokens = self.sampled_tokens = 0
        self.answers: set[bytes] = set()
        self._cold = cold
        self._tokenizer = tokenizer

    def engine(self, sampled: Sampled) -> None:
        for request, tokens in sampled.tokens.items():
            certain, _ = self._cold.answer(sampled.prompts[request], len(tokens))
            assert tokens[: len(certain)] == certain
            self.compared_tokens += len(certain)
            self.sampled_tokens += len(tokens)
            self.answers.add(array("I", tokens).tobytes())

    def client(self, request: Request) -> None:
        counted, all_certain = 0, True
        assert sorted(request.texts) == list(range(len(request.prompts) * request.n))
        for number, prompt in enumerate(request.prompts):
            certain, whole = self._cold.answer(prompt, request.body["max_tokens"])
            detokenizer = Detokenizer(self._tokenizer)
            expected = detokenizer.push(certain) + (detokenizer.finish() if whole else "")
            all_certain &= whole
            for index in range(number * request.n, (number + 1) * request.n):
                counted += len(certain)
                if whole:
                    assert request.texts[index] == expected
                    assert request.reasons[index] == ("stop" if certain[-1] == END else "length")
                else:
                    assert request.texts[index].startswith(expected)
        assert request.usage is not None
        assert request.usage["prompt_tokens"] == sum(map(len, request.prompts))
        if all_certain:
            assert request.usage["completion_tokens"] == counted


async def mixed_load(folder: Path, count: int, *, together: int, seconds: float) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    model = Words.write(folder / "model")
    # One wrong block changes nearly every answer to up to 600 tokens of it; among thousands it may be averaged away.
    save_small_model(model.directory, "llama", vocab_size=259, max_position_embeddings=4096)
    options = cli.StoreOptions(model=str(model.directory), socket=folder / "none.sock", threads=1, device="cpu")
    plan = cli.plan_store(options)
    loaded, limits, _ = cli._load(plan, options)
    runner = Checking(loaded.model, KVCache(plan.layout, BLOCKS, loaded.model.dtype, loaded.model.device), BLOCK_TOKENS)
    runner.mistakes = []
    async with in_process(
        folder,
        model.directory,
        BLOCKS,
        runner=runner,  # type: ignore[arg-type]  # one that computes
        step_tokens=STEP_TOKENS,
        max_running=32,
        max_context_tokens=BLOCKS * BLOCK_TOKENS,
        vocabulary_tokens=limits.vocabulary_tokens,
    ) as inside:
        runner.inside = inside
        customers = [await inside.customer(f"tenant-{number}") for number in range(TENANTS)]
        asked = requests(draw, count, inside, customers)
        sampled = Sampled()
        sampled.watch(inside)
        waiting, stayed = iter(asked), []

        async def client(http: httpx.AsyncClient) -> None:
            for request in waiting:
                if await send(http, request):
                    stayed.append(request)

        async with (
            listening(inside.gateway.tenant_app) as url,
            httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as http,
            asyncio.timeout(seconds),
        ):
            await asyncio.gather(*(client(http) for _ in range(CLIENTS)))
        await idle(inside)
        report = inside.engine.stats(pushed=False)
        tokenizer = inside.gateway.link.connection().model.tokenizer
    wanted: dict[bytes, int] = {}
    for prompt, max_tokens in [(prompt, each.body["max_tokens"]) for each in asked for prompt in each.prompts]:
        wanted[encoded(prompt)] = max(max_tokens, wanted.get(encoded(prompt), 0))
    comparison = Comparison(Cold(loaded, plan.layout, limits.vocabulary_tokens, wanted, together), tokenizer)
    comparison.engine(sampled)
    for request in stayed:
        comparison.client(request)
    # Neither is the model one that answers everything alike, nor the pool one that has room.
    assert len(comparison.answers) > len(asked) / 2
    share = comparison.compared_tokens / comparison.sampled_tokens
    total_tokens = sum(request.tokens for request in asked)
    print(
        f"{len(stayed)} of {count} stayed; {len(sampled.prompts)} submissions of {total_tokens} tokens in a pool "
        f"of {BLOCKS * BLOCK_TOKENS}; ended {dict(sampled.ended)}; {report.preemptions} preemptions, "
        f"{report.evictions} evictions, {report.steps} steps of {report.computed_tokens} tokens; "
        f"{share:.4f} of {comparison.sampled_tokens} sampled tokens compared"
    )
    assert total_tokens > 10 * BLOCKS * BLOCK_TOKENS
    assert share > 0.98
    assert len(stayed) > 0.7 * count
    assert sampled.ended["aborted"]
    assert report.preemptions
    assert report.evictions


@pytest.mark.anyio
async def test_mixed_requests_answer_as_each_alone(tmp_path: Path) -> None:
    await mixed_load(tmp_path, 80, together=16, seconds=120)


@pytest.mark.once
@pytest.mark.anyio
async def test_500_mixed_requests_answer_as_each_alone(tmp_path: Path) -> None:
    await mixed_load(tmp_path, 500, together=1, seconds=900)
