"""A server that speaks OpenAI's `/v1/completions`, asked with token ids, timed, and held to what was asked for."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx

PATIENCE_SECONDS = 600.0


class WrongAnswer(Exception):
    """A server did something else than it was asked for, so its figures would mean something else: one line."""


@dataclass(frozen=True, slots=True)
class Answer:
    """
    Attributes:
        sent_at, first_at, last_at: `time.perf_counter()` seconds, when the request was sent and when the first and the
            last event with tokens came.
        first_tokens: of the first event. Text of half a character may be held back, or a server may join tokens.
        token_ids: empty where the server does not tell them.
        cached_tokens: of the prompt; None where the server does not tell it.
    """

    sent_at: float
    first_at: float
    last_at: float
    first_tokens: int
    tokens: int
    token_ids: list[int]
    cached_tokens: int | None

    @property
    def first_token_ms(self) -> float:
        return 1e3 * (self.first_at - self.sent_at)

    @property
    def decode_tokens_per_second(self) -> float:
        """From the first event to the last. Raises WrongAnswer where all came at once."""
        seconds = self.last_at - self.first_at
        if seconds <= 0:
            raise WrongAnswer(f"all {self.tokens} tokens came at once: there is no speed to measure")
        return (self.tokens - self.first_tokens) / seconds


class MeasuredServer:
    """
    Args:
        name: in what is printed.
        url: with or without `/v1`.
        model: as the server calls it; None for the first that it serves.

    Attributes:
        answers, joined_answers: how many answers there were, and in how many the first event had several tokens.
    """

    def __init__(self, name: str, url: str, key: str | None, model: str | None) -> None:
        self.name = name
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model or ""
        self.answers = self.joined_answers = 0
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=PATIENCE_SECONDS,
            trust_env=False,
        )

    async def open(self) -> None:
        """Find out what it serves. Raises WrongAnswer when it serves nothing."""
        if not self.model:
            response = await self._http.get("/v1/models")
            await self._require_success(response)
            models = response.json()["data"]
            if not models:
                raise WrongAnswer(f"{self.name} serves no model")
            self.model = models[0]["id"]

    async def close(self) -> None:
        await self._http.aclose()

    async def greedy_text(self, prompt: str, answer_tokens: int) -> str:
        """What it answers to a text."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": answer_tokens, "temperature": 0}
        response = await self._http.post("/v1/completions", json=body)
        await self._require_success(response)
        return str(response.json()["choices"][0]["text"])

    async def complete(self, prompt: list[int], answer_tokens: int) -> Answer:
        """Greedily `answer_tokens` tokens, whatever they are.

        Raises:
            WrongAnswer: the prompt or the answer has another length than it should, or the server does not tell.
        """
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        request = self._http.build_request("POST", "/v1/completions", json=body)
        event_times: list[float] = []
        token_ids: list[int] = []
        first_tokens = 0
        usage: dict[str, Any] | None = None
        sent_at = time.perf_counter()
        response = await self._http.send(request, stream=True)
        try:
            await self._require_success(response)
            async for at, event in _events(response):
                if "error" in event:
                    raise WrongAnswer(f"{self.name} failed within an answer: {event['error']}")
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    told = choice.get("token_ids") or []
                    if told or choice["text"]:
                        event_times.append(at)
                        token_ids += told
                        first_tokens = first_tokens or len(told) or 1
        finally:
            await response.aclose()
        if usage is None or not event_times:
            raise WrongAnswer(f"{self.name} told no usage, or sent no token")
        self._check("prompt", usage["prompt_tokens"], len(prompt))
        self._check("answer", usage["completion_tokens"], answer_tokens)
        if token_ids:
            self._check("stream", len(token_ids), answer_tokens)
        self.answers += 1
        self.joined_answers += first_tokens > 1
        cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        return Answer(
            sent_at, event_times[0], event_times[-1], first_tokens, answer_tokens, token_ids, cached_tokens
        )

    def _check(self, what: str, told_tokens: int, expected_tokens: int) -> None:
        if told_tokens != expected_tokens:
            raise WrongAnswer(f"{self.name}: the {what} has {told_tokens} tokens and should have {expected_tokens}")

    async def _require_success(self, response: httpx.Response) -> None:
        if not response.is_success:
            await response.aread()
            raise WrongAnswer(f"{self.name} answered {response.status_code}: {response.text[:300]}")


async def _events(response: httpx.Response) -> AsyncIterator[tuple[float, dict[str, Any]]]:
    """Each event with the moment at which its bytes were there."""
    rest = b""
    async for received in response.aiter_raw():
        at = time.perf_counter()
        *lines, rest = (rest + received).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (data := line.removeprefix(b"data:").strip()) != b"[DONE]":
                yield at, json.loads(data)
