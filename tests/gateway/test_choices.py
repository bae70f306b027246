"""In which order choices are submitted, what one failure does to the others, and what is counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from gateway.choices import Choices, Piece
from gateway.http.answers import Usage
from gateway.http.errors import ApiError
from gateway.prompt.returned import Part, ReturnedToken
from tests.system.scripted import until

pytestmark = pytest.mark.anyio

# Prompts by the number of their tokens.
A, B = 20, 30
REFUSED, FAILED = ApiError(400, "refused"), ApiError(500, "failed")


class Answer:
    """Stands in for an answer of the store: `say` and `end` make it do so."""

    def __init__(self, prompt_tokens: int, cached_tokens: int) -> None:
        self.finish_reason: Any = None
        self.closed = False
        self.tokens = 0
        self._prompt_tokens = prompt_tokens
        self._cached_tokens = cached_tokens
        self._events: asyncio.Queue[Part | Exception | None] = asyncio.Queue()

    def say(self, text: str, *tokens: ReturnedToken) -> None:
        self._events.put_nowait(Part(text, list(tokens)))

    def end(self, how: Exception | None = None) -> None:
        self._events.put_nowait(how)

    async def pieces(self) -> AsyncIterator[Part]:
        while (event := await self._events.get()) is not None:
            if isinstance(event, Exception):
                raise event
            self.tokens += 1
            yield event
        self.finish_reason = "length"

    def usage(self) -> Usage:
        return Usage.of(
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            cache_write_tokens=self._cached_tokens + 1,
            completion_tokens=self.tokens,
        )

    async def close(self) -> None:
        self.closed = True


class Store:
    """Notes what is submitted; admits it at once unless `admits` has an event to wait for or an error."""

    def __init__(self) -> None:
        self.submitted: list[tuple[int, int]] = []
        self.answers: dict[tuple[int, int], Answer] = {}
        self.admits: dict[tuple[int, int], asyncio.Event | Exception] = {}
        self.closing: set[asyncio.Task[None]] = set()
        self.prompts_tokens: tuple[int, ...] = ()
        self._tasks_before = asyncio.all_tasks()

    async def submit(self, number: int, choice: int) -> Any:
        key = (self.prompts_tokens[number], choice)
        self.submitted.append(key)
        admits = self.admits.get(key)
        if isinstance(admits, Exception):
            raise admits
        if admits is not None:
            await admits.wait()
        # The first finds nothing, the others its blocks.
        answer = self.answers[key] = Answer(key[0], 16 * min(choice, 1))
        return answer

    def choices(self, *prompts_tokens: int, n: int) -> Choices:
        self.prompts_tokens = prompts_tokens
        return Choices(self.submit, len(prompts_tokens), n, self.closing)

    async def all_closed(self) -> None:
        """Wait until no task is left, and see that every answer was closed by then."""
        await until(lambda: asyncio.all_tasks() <= self._tasks_before)
        assert all(answer.closed for answer in self.answers.values())


async def settled() -> None:
    """Let every task run as far as it can: nothing here waits for anything but this loop."""
    for _ in range(20):
        await asyncio.sleep(0)


async def taken(choices: Choices, into: list[Piece]) -> None:
    async for piece in choices.pieces():
        into.append(piece)


async def test_all_are_submitted_at_once_and_first_choices_first() -> None:
    store = Store()
    store.admits[A, 0] = asyncio.Event()
    choices = store.choices(A, B, n=3)
    await settled()
    assert store.submitted == [(A, 0), (B, 0), (A, 1), (B, 1), (A, 2), (B, 2)]
    choices.close()


async def test_what_is_admitted_is_the_first_choice_of_every_prompt() -> None:
    store = Store()
    first, other = store.admits[B, 0], store.admits[B, 1] = asyncio.Event(), asyncio.Event()
    choices = store.choices(A, B, n=2)
    admitted = asyncio.create_task(choices.admitted())
    await settled()
    assert (A, 1) in store.answers
    assert not admitted.done()
    first.set()
    await settled()
    assert admitted.done()
    assert not other.is_set()
    choices.close()
    await store.all_closed()


async def test_choices_that_end_without_text_end() -> None:
    store, got = Store(), []
    choices = store.choices(A, n=2)
    await choices.admitted()
    await settled()
    for answer in store.answers.values():
        answer.end()
    await taken(choices, got)
    assert got == [Piece(0, "", "length"), Piece(1, "", "length")]


async def test_tokens_come_with_their_text_and_what_has_none_with_the_end() -> None:
    store, got = Store(), []
    choices = store.choices(A, n=1)
    await choices.admitted()
    word, special = ReturnedToken(5, 0), ReturnedToken(1, 1)
    store.answers[A, 0].say("a", word)
    store.answers[A, 0].say("")
    store.answers[A, 0].say("", special)
    store.answers[A, 0].end()
    await taken(choices, got)
    assert got == [Piece(0, "a", tokens=[word]), Piece(0, "", "length", [special])]


async def test_indexes_count_prompt_by_prompt_and_every_choice_ends_once() -> None:
    store, got = Store(), []
    choices = store.choices(A, B, n=2)
    await choices.admitted()
    await settled()
    assert choices.count == 4
    for prompt, text in ((B, "b"), (A, "a")):
        for choice in (1, 0):
            store.answers[prompt, choice].say(f"{text}{choice}")
    await settled()
    for answer in store.answers.values():
        answer.end()
    await taken(choices, got)
    texts = ["".join(piece.text for piece in got if piece.index == index) for index in range(4)]
    assert texts == ["a0", "a1", "b0", "b1"]
    assert sorted(piece.index for piece in got if piece.finish_reason) == [0, 1, 2, 3]
    # An empty piece of text is not sent.
    assert all(piece.text or piece.finish_reason for piece in got)
    await store.all_closed()


async def test_usage_counts_each_prompt_once_and_the_output_of_all() -> None:
    store, got = Store(), []
    choices = store.choices(A, B, n=3)
    await choices.admitted()
    await settled()
    assert len(store.answers) == 6
    for prompt in (A, B):
        store.answers[prompt, 0].say("x")
    for answer in store.answers.values():
        answer.say("y")
        answer.end()
    await taken(choices, got)
    usage = choices.usage()
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (20 + 30, 6 + 2, 58)
    # Of the first choices, though the others found 16 tokens each.
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert usage.prompt_tokens_details.cache_write_tokens == 2


async def assert_refused(store: Store) -> None:
    choices = store.choices(A, B, n=2)
    with pytest.raises(ApiError) as refused:
        await choices.admitted()
    assert refused.value is REFUSED
    choices.close()
    await store.all_closed()


async def test_a_refusal_of_any_prompt_is_the_answer_before_anything_is_sent() -> None:
    store = Store()
    store.admits[B, 0] = REFUSED
    await assert_refused(store)


async def test_a_refusal_of_a_later_choice_fails_the_request() -> None:
    store = Store()
    store.admits[A, 0] = asyncio.Event()
    store.admits[B, 1] = REFUSED
    await assert_refused(store)


def failing_later(store: Store) -> None:
    store.answers[A, 1].end(FAILED)


def failing_first(store: Store) -> None:
    store.answers[A, 0].end(FAILED)


def failing_other_prompt(store: Store) -> None:
    store.answers[B, 0].end(FAILED)


@pytest.mark.parametrize("fail", [failing_later, failing_first, failing_other_prompt])
async def test_one_choice_that_fails_fails_the_request(fail: Callable[[Store], None]) -> None:
    store, got = Store(), []
    choices = store.choices(A, B, n=2)
    await choices.admitted()
    await settled()
    fail(store)
    store.answers[A, 0].say("a")
    with pytest.raises(ApiError) as failed:
        await taken(choices, got)
    assert failed.value is FAILED
    choices.close()
    await store.all_closed()
    assert not any(piece.finish_reason for piece in got)


async def test_an_error_that_is_nobodys_fault_is_raised_too() -> None:
    store = Store()
    choices = store.choices(A, n=1)
    await choices.admitted()
    store.answers[A, 0].end(RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        await taken(choices, [])
    choices.close()
    await store.all_closed()


@pytest.mark.parametrize("admitted", [True, False])
async def test_an_interruption_ends_the_request_wherever_it_is(admitted: bool) -> None:
    store = Store()
    if not admitted:
        store.admits[A, 0] = asyncio.Event()
    choices = store.choices(A, n=2)
    await settled()
    choices.interrupt(FAILED)
    with pytest.raises(ApiError):
        await (taken(choices, []) if admitted else choices.admitted())
    choices.close()
    await store.all_closed()


async def test_closing_ends_what_waits_and_what_runs() -> None:
    store = Store()
    store.admits[B, 0] = asyncio.Event()
    choices = store.choices(A, B, n=3)
    await settled()
    store.answers[A, 0].say("a")
    await settled()
    assert len(store.answers) == 5
    choices.close()
    await store.all_closed()
    assert not store.closing
    with pytest.raises(asyncio.CancelledError):
        await choices.admitted()
