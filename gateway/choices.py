"""All submissions of one request, k prompts × n choices, as one stream of pieces.

All are submitted at once, first choices first. The store lets the others wait for the blocks of their prompt that the
first one fills, so that these are computed once. One choice that fails ends the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from gateway.generation import Answer
from gateway.http.answers import FinishReason, Usage
from gateway.prompt.returned import ReturnedToken


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of one choice, or its end. `index` counts choices: prompt × n + choice.

    `tokens` are those whose text begins here; tokens without any that come last are with the end.
    """

    index: int
    text: str
    finish_reason: FinishReason | None = None
    tokens: Sequence[ReturnedToken] = ()


class Choices:
    """Runs the submissions of one request.

    Args:
        submit: submits prompt number p as its choice number i and answers once the store has admitted it.
        prompts: how many.
        closing: holds the tasks that end requests at the store; they outlive this one.
    """

    def __init__(
        self,
        submit: Callable[[int, int], Awaitable[Answer]],
        prompts: int,
        n: int,
        closing: set[asyncio.Task[None]],
    ) -> None:
        self.count = prompts * n
        self._submit = submit
        self._n = n
        self._closing = closing
        self._answers: dict[int, Answer] = {}
        self._pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self._admissions = [loop.create_future() for _ in range(prompts)]
        self._task = loop.create_task(self._run())

    async def admitted(self) -> None:
        """Wait until the first choice of every prompt runs. Raises what refused one of them."""
        await asyncio.gather(*self._admissions)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Pieces of all choices as they come. Raises what ended one of them early."""
        running = self.count
        while running:
            piece = await self._pieces.get()
            if isinstance(piece, Exception):
                raise piece
            running -= piece.finish_reason is not None
            yield piece

    def finish_reasons(self) -> list[FinishReason]:
        """Of the choices that came to their end, in their order."""
        answers = [self._answers[index] for index in sorted(self._answers)]
        return [answer.finish_reason for answer in answers if answer.finish_reason]

    def usage(self) -> Usage:
        """True counts once all have ended: each prompt once, cache counts of first choices, output of all."""
        firsts = [self._answers[index].usage() for index in range(0, self.count, self._n)]
        return Usage.of(
            prompt_tokens=sum(usage.prompt_tokens for usage in firsts),
            cached_tokens=sum(usage.prompt_tokens_details.cached_tokens for usage in firsts),
            cache_write_tokens=sum(usage.prompt_tokens_details.cache_write_tokens for usage in firsts),
            completion_tokens=sum(answer.usage().completion_tokens for answer in self._answers.values()),
        )

    def interrupt(self, error: Exception) -> None:
        """End the request with this error."""
        for admission in self._admissions:
            if not admission.done():
                admission.set_exception(error)
        self._pieces.put_nowait(error)

    def close(self) -> None:
        """End whatever has not ended; the store hears of it in tasks of their own."""
        self._task.cancel()
        for admission in self._admissions:
            admission.cancel()

    async def ended(self) -> None:
        """Wait until nothing is submitted any more."""
        await asyncio.wait((self._task,))

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                # Tasks begin in the order in which they were made.
                for choice in range(self._n):
                    for number in range(len(self._admissions)):
                        group.create_task(self._choice(number, choice))
        except* Exception as errors:
            self.interrupt(errors.exceptions[0])

    async def _choice(self, number: int, choice: int) -> None:
        index = number * self._n + choice
        answer = await self._submit(number, choice)
        self._answers[index] = answer
        try:
            if not choice and not (admission := self._admissions[number]).done():
                admission.set_result(None)
            textless: Sequence[ReturnedToken] = ()
            async for part in answer.pieces():
                if part.text:
                    self._pieces.put_nowait(Piece(index, part.text, tokens=part.tokens))
                else:
                    textless = part.tokens
            self._pieces.put_nowait(Piece(index, "", answer.finish_reason, textless))
        finally:
            # In a task of its own: this one may have been cancelled, and the end must not be.
            closing = asyncio.create_task(answer.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
