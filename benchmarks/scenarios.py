"""What `benchmarks.serving` asks: prompts of token ids from a seed, and figures by name.

A figure's unit ends its name: `ms` is better when lower, `tok/s` when higher, `tok` is no speed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from benchmarks.measured_server import Answer, MeasuredServer, WrongAnswer

# Ids that are ordinary pieces of words in every common vocabulary: above control tokens and single bytes.
ORDINARY_IDS = range(1_000, 30_000)

PROMPT_TOKENS, TAIL_TOKENS = 1_024, 16
# The server goes on computing while its first token travels, as it does for every real client.
FIRST_TOKEN_ANSWER_TOKENS = 4
REQUESTS, COMMON_TOKENS, OWN_TOKENS, REQUEST_ANSWER_TOKENS = 8, 768, 32, 64
TURNS, OPENING_TOKENS, TURN_TOKENS, TURN_ANSWER_TOKENS = 6, 128, 48, 32
DECODE_PROMPT_TOKENS, DECODE_TOKENS = 32, 128


class Draw:
    """Prompts that are the same for the same seed and share nothing with those of another."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def tokens(self, count: int) -> list[int]:
        return self._random.choices(ORDINARY_IDS, k=count)


Figures = dict[str, float]
Scenario = Callable[[MeasuredServer, Draw], Awaitable[Figures]]


async def long_prompt(server: MeasuredServer, draw: Draw) -> Figures:
    """A prompt that was never seen, then the same with a new tail."""
    prompt = draw.tokens(PROMPT_TOKENS)
    cold = await server.complete(prompt, FIRST_TOKEN_ANSWER_TOKENS)
    if cold.cached_tokens:
        raise WrongAnswer(f"{server.name} knew {cold.cached_tokens} tokens of a prompt that should be new")
    warm = await server.complete(prompt + draw.tokens(TAIL_TOKENS), FIRST_TOKEN_ANSWER_TOKENS)
    return {
        "cold first token, ms": cold.first_token_ms,
        "warm first token, ms": warm.first_token_ms,
    } | _cached("warm cached, tok", warm)


async def eight_at_once(server: MeasuredServer, draw: Draw) -> Figures:
    """Requests with a prefix in common that nobody has seen, then others with the same."""
    common = draw.tokens(COMMON_TOKENS)

    async def together() -> tuple[float, list[Answer]]:
        answers = await asyncio.gather(
            *(server.complete(common + draw.tokens(OWN_TOKENS), REQUEST_ANSWER_TOKENS) for _ in range(REQUESTS))
        )
        seconds = max(answer.last_at for answer in answers) - min(answer.sent_at for answer in answers)
        return REQUESTS * REQUEST_ANSWER_TOKENS / seconds, answers

    cold, answers = await together()
    # Whoever came first can't have found anything; the others may have found what that one computed.
    if all(answer.cached_tokens for answer in answers):
        raise WrongAnswer(f"{server.name} knew a prefix that should be new")
    warm, _ = await together()
    return {"eight at once, cold, tok/s": cold, "eight at once, warm, tok/s": warm}


async def conversation(server: MeasuredServer, draw: Draw) -> Figures:
    """Turns that each begin with all of the turns before them, answers included."""
    history = draw.tokens(OPENING_TOKENS)
    figures: Figures = {}
    for turn in range(1, TURNS + 1):
        answer = await server.complete(history, TURN_ANSWER_TOKENS)
        figures[f"turn {turn} first token, ms"] = answer.first_token_ms
        figures |= _cached(f"turn {turn} cached, tok", answer)
        if not answer.token_ids:
            raise WrongAnswer(f"{server.name} does not tell token ids, and a next turn is made of them")
        history += answer.token_ids + draw.tokens(TURN_TOKENS)
    return figures


async def decode(server: MeasuredServer, draw: Draw) -> Figures:
    """One answer with nothing beside it."""
    answer = await server.complete(draw.tokens(DECODE_PROMPT_TOKENS), DECODE_TOKENS)
    return {"decode, one stream, tok/s": answer.decode_tokens_per_second}


SCENARIOS: tuple[Scenario, ...] = (long_prompt, eight_at_once, conversation, decode)


def _cached(name: str, answer: Answer) -> Figures:
    return {} if answer.cached_tokens is None else {name: answer.cached_tokens}
