"""What the end of a drain does to a request that has not reached the store."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from gateway.prompt.tokens import Prompt, Tokenizer
from tests.system.in_process import in_process

pytestmark = pytest.mark.anyio


async def test_a_request_that_is_still_tokenised_at_the_end_of_a_drain_may_be_sent_again(
    tmp_path: Path, default_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenise, begun, go_on = Tokenizer.completion, threading.Event(), threading.Event()

    def slowly(tokenizer: Tokenizer, text: str) -> Prompt:
        begun.set()
        assert go_on.wait(20)
        return tokenise(tokenizer, text)

    async with in_process(tmp_path, default_model) as saltern:
        customer = await saltern.customer("late")
        body = {"model": saltern.model, "prompt": "Salt", "max_tokens": 1}
        assert (await saltern.http.post("/v1/completions", json=body, headers=customer.headers)).status_code == 200
        monkeypatch.setattr(Tokenizer, "completion", slowly)
        try:
            asking = asyncio.create_task(saltern.http.post("/v1/completions", json=body, headers=customer.headers))
            assert await asyncio.to_thread(begun.wait, 20)
            await saltern.gateway.completions.drain(0)
            answer = await asking
        finally:
            go_on.set()
        assert answer.status_code == 503
        assert answer.headers["x-should-retry"] == "true"
        assert answer.json()["error"]["code"] == "server_is_overloaded"
