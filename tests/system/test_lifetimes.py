"""How long a request's blocks are wanted, from its JSON to what of its tenant gives way."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from cachestore.protocol import Submit
from tests.cachestore.serving import Arrivals
from tests.system.in_process import Customer, InProcess, in_process
from tests.system.metered import random_prompt
from tests.system.scripted import CHAT, TEXT

pytestmark = pytest.mark.anyio

FOUR_BLOCKS = 65
# Two prompts of four blocks, and what is left of eight more when the older or unwanted one has given way.
POOL_BLOCKS = 13
THE_REST = 8 * 16 + 1


async def ask(inside: InProcess, customer: Customer, prompt: list[int], ttl: str | None = None) -> int:
    """Cached tokens."""
    options = {"prompt_cache_options": {"ttl": ttl}} if ttl else {}
    body = {"model": inside.model, "prompt": prompt, "max_tokens": 1} | options
    answer = await inside.http.post(TEXT, json=body, headers=customer.headers)
    assert answer.status_code == 200, answer.text
    await inside.check()
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize(
    ("older_ttl", "newer_ttl", "is_later", "survivor"),
    [
        ("1h", None, False, "older"),
        (None, "1h", False, "newer"),
        (None, None, False, "newer"),
        # The time that ends first gives way first, and one that is over is none.
        ("2h", "1h", False, "older"),
        ("1h", None, True, "newer"),
    ],
)
async def test_of_a_tenants_prompts_those_that_are_wanted_give_way_last(
    tmp_path: Path, default_model: Path, older_ttl: str | None, newer_ttl: str | None, is_later: bool, survivor: str
) -> None:
    async with in_process(tmp_path, default_model, POOL_BLOCKS) as inside:
        customer = await inside.customer("a")
        prompts = {name: random_prompt(name, FOUR_BLOCKS) for name in ("older", "newer")}
        assert await ask(inside, customer, prompts["older"], older_ttl) == 0
        assert await ask(inside, customer, prompts["newer"], newer_ttl) == 0
        if is_later:
            inside.engine.pool._lifetimes._clock_ns = lambda: time.monotonic_ns() + 7_200_000_000_000
        assert await ask(inside, customer, random_prompt("pressure", THE_REST)) == 0
        (victim,) = prompts.keys() - {survivor}
        assert await ask(inside, customer, prompts[survivor]) == 64
        assert await ask(inside, customer, prompts[victim]) == 0


async def test_a_lifetime_keeps_nothing_from_another_tenant(tmp_path: Path, default_model: Path) -> None:
    async with in_process(tmp_path, default_model, POOL_BLOCKS) as inside:
        customer, other = await inside.customer("a"), await inside.customer("b")
        prompt = random_prompt("a", FOUR_BLOCKS)
        assert [await ask(inside, customer, prompt, "24h") for _ in range(2)] == [0, 64]
        assert await ask(inside, other, random_prompt("b", 12 * 16 + 1)) == 0
        assert await ask(inside, customer, prompt) == 0


@pytest.mark.parametrize(
    ("path", "prompt"), [(TEXT, {"prompt": ["a", "b"]}), (CHAT, {"messages": [{"role": "user", "content": "a"}]})]
)
async def test_every_choice_of_every_prompt_says_so(
    tmp_path: Path, default_model: Path, path: str, prompt: dict[str, Any]
) -> None:
    async with in_process(tmp_path, default_model) as inside:
        customer, submitted = await inside.customer("a"), Arrivals(inside.store).of(Submit)
        body = {"model": inside.model, "max_tokens": 1, "n": 2} | prompt
        for options, ttl_seconds in (({"prompt_cache_options": {"ttl": "2m"}}, 120), ({}, 0)):
            submitted.clear()
            answer = await inside.http.post(path, json=body | options, headers=customer.headers)
            assert answer.status_code == 200, answer.text
            assert [submit.ttl_seconds for submit in submitted] == [ttl_seconds] * len(answer.json()["choices"])
        await inside.check()
