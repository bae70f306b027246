"""Limits as clients meet them: what is admitted, what is refused and with which words, and what a change changes."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.tenants.tables import QuotaState, Reservation, Usage
from policies.rates import MINUTE_MS
from tests.system.in_process import until
from tests.system.metered import TENANTS, Metered, limit, metered, rows, settled, wait_for_nobody
from tests.system.scripted import byte_ids
from tests.system.wire import refusal, streamed

pytestmark = pytest.mark.anyio


def left(answer: httpx.Response, of: str) -> int:
    return int(answer.headers[f"x-ratelimit-remaining-{of}"])


async def test_b143_of_twenty_requests_at_once_as_many_run_as_fit(tmp_path: Path) -> None:
    async with metered(tmp_path) as m:
        await m.limit(tokens_per_minute=1000)
        m.runner.script(*byte_ids("123456789"))
        m.runner.close()
        asked = [asyncio.create_task(m.ask(100, 100, ignore_eos=False)) for _ in range(20)]
        await until(lambda: len(m.submitted) + sum(each.done() for each in asked) == 20)
        refused = [each.result() for each in asked if each.done()]
        assert len(refused) == 15
        for answer in refused:
            assert refusal(answer, 429)["code"] == "rate_limit_exceeded"
            assert answer.headers["x-should-retry"] == "true"
        m.runner.open()
        answers = await asyncio.gather(*asked)
        assert Counter(each.status_code for each in answers) == {200: 5, 429: 15}
        await settled(m.inside)
        # Each used 110 of the 200 that it held: 450 are there again, and no more.
        for remaining in (450 - 200, 450 - 110 - 200):
            more = await m.ask(100, 100, ignore_eos=False)
            assert (more.status_code, left(more, "tokens")) == (200, remaining)
            await settled(m.inside)
        assert left(await m.ask(100, 131), "tokens") == 450 - 220
        assert (await m.ask(100, 130)).status_code == 200


async def test_b145_what_can_never_fit_is_told_so(tmp_path: Path) -> None:
    async with metered(tmp_path) as m:
        await m.limit(tokens_per_minute=100)
        for prompt_tokens, max_tokens, cost in ((300, None, 301), (300, 1, 301), (50, 500, 550)):
            answer = await m.ask(prompt_tokens, max_tokens)
            error = refusal(answer, 429)
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
            assert f"may cost {cost} tokens" in error["message"]
            assert "can never fit this tenant's limit of 100 tokens per minute" in error["message"]
            assert answer.headers["x-should-retry"] == "false"
            assert "retry-after" not in answer.headers
            assert left(answer, "tokens") == 100
        answer = await m.ask(50, 50)
        assert (answer.status_code, left(answer, "tokens")) == (200, 0)
        assert answer.json()["usage"]["total_tokens"] == 100
        # Where no maximum is given, the answer is as long as what is left.
        m.clock.now_ms += MINUTE_MS
        assert (await m.ask(70, None)).json()["usage"]["completion_tokens"] == 30


@pytest.mark.parametrize("at_once", [True, False])
async def test_b146_a_request_refused_for_concurrency_uses_up_no_other_limit(at_once: bool, tmp_path: Path) -> None:
    async with metered(tmp_path) as m:
        await m.limit(requests_per_minute=2, concurrent_requests=1, tokens_per_minute=1000)
        m.runner.close()
        if at_once:
            both = [asyncio.create_task(m.ask(10, 10)) for _ in range(2)]
            await until(lambda: len(m.submitted) == 1 and any(each.done() for each in both))
            a, b = sorted(both, key=lambda each: each.done())
        else:
            a = await m.begin(10, 10)
            b = asyncio.create_task(m.ask(10, 10))
        refused = await b
        message = refusal(refused, 429)["message"]
        assert "1 requests are running, which is this tenant's limit of 1 concurrent requests" in message
        assert refused.headers["retry-after"] == "1"
        assert (left(refused, "requests"), left(refused, "tokens")) == (1, 980)
        m.runner.open()
        assert (await a).status_code == 200
        await settled(m.inside)
        c = await m.ask(10, 10)
        assert c.status_code == 200
        assert (left(c, "requests"), left(c, "tokens")) == (0, 960)
        d = refusal(await m.ask(1, 1), 429)
        assert "2 requests are counted of this tenant's limit of 2 requests per minute" in d["message"]


async def test_b147_requests_that_waited_too_long_give_their_places_back(tmp_path: Path) -> None:
    async with metered(tmp_path, max_running=1) as m:
        await m.limit(concurrent_requests=3)
        filling = Metered(m.inside, m.runner, await m.inside.customer("filling"), m.clock)
        m.runner.close()
        full = await filling.begin(10, 20)
        await filling.generate(1)
        await wait_for_nobody(m.inside, m.customer.id)
        waiting = [await m.begin(10, 10) for _ in range(3)]
        await m.limit(concurrent_requests=3)
        assert "3 requests are running" in refusal(await m.ask(10, 10), 429)["message"]
        assert len(await rows(m.inside, Reservation)) == 4
        m.runner.let()
        for answer in await asyncio.gather(*waiting):
            assert refusal(answer, 503)["code"] == "server_is_overloaded"
        await settled(m.inside, running=1)
        (reserved,) = await rows(m.inside, Reservation)
        assert reserved.tenant_id == filling.customer.id
        booked = [(row.outcome, row.input_tokens, row.output_tokens, row.cost) for row in await rows(m.inside, Usage)]
        assert booked == [("refused", 0, 0, 0)] * 3
        normal = await m.begin(10, 10)
        m.runner.open()
        assert (await normal).status_code == (await full).status_code == 200


@pytest.mark.parametrize("most", [1, 3])
async def test_b150_the_request_that_reaches_the_limit_is_admitted_and_the_next_is_not(
    most: int, tmp_path: Path
) -> None:
    async with metered(tmp_path) as m:
        await m.limit(requests_per_minute=most)
        answers = [await m.ask(1, 1) for _ in range(most + 1)]
        assert [answer.status_code for answer in answers] == [200] * most + [429]
        assert [left(answer, "requests") for answer in answers] == [*reversed(range(most)), 0]
        wait_ms = int(answers[-1].headers["retry-after-ms"])
        assert wait_ms == MINUTE_MS // most
        # What it says is true, to the millisecond.
        m.clock.now_ms += wait_ms - 1
        assert (await m.ask(1, 1)).status_code == 429
        m.clock.now_ms += 1
        assert [(await m.ask(1, 1)).status_code for _ in range(2)] == [200, 429]


# --- changed while requests run


async def test_b154_what_is_left_of_a_lowered_limit_is_never_negative(tmp_path: Path) -> None:
    async with metered(tmp_path) as m:
        await m.limit(tokens_per_minute=5000)
        m.runner.script(*byte_ids("x" * 49))
        m.runner.close()
        stream = await m.begin(970, 1000, stream=True, ignore_eos=False)
        sequence = await m.generate(10)
        assert len(sequence.tokens) == 980
        await m.limit(tokens_per_minute=1000)
        during = await m.ask(1, 1)
        m.runner.open()
        assert streamed(await stream)[-1]["choices"][0]["finish_reason"] == "stop"
        assert len(sequence.tokens) == 1020
        await settled(m.inside)
        after = await m.ask(1, 1)
        # The whole of the reservation is counted as long as it runs, then what was used.
        for answer, counted in ((during, 1970), (after, 1020)):
            wait_ms = (counted + 1 - 1000) * MINUTE_MS // 1000
            message = refusal(answer, 429)["message"]
            assert f"{counted} are counted of this tenant's limit of 1000 tokens per minute" in message
            assert f"Try again in {-(-wait_ms // 1000)} s" in message
            assert answer.headers["retry-after-ms"] == str(wait_ms)
            assert left(answer, "tokens") == 0
            assert answer.headers["x-ratelimit-limit-tokens"] == "1000"
            assert answer.headers["x-ratelimit-reset-tokens"] == f"{counted * MINUTE_MS / 1000 / 1000:.3f}s"
        m.clock.now_ms += wait_ms + MINUTE_MS // 1000
        admitted = await m.ask(1, 1)
        assert (admitted.status_code, left(admitted, "tokens")) == (200, 0)


async def test_b161_the_end_of_a_stream_moves_counters_and_no_setting(tmp_path: Path) -> None:
    async with metered(tmp_path) as m:
        (key,) = (await m.inside.admin.get(f"{TENANTS}/{m.customer.id}/keys")).json()["data"]
        scope = f"{m.customer.id}/keys/{key['id']}"
        await m.limit(tokens_per_day=10_000)
        await limit(m.inside, scope, tokens_per_day=5000, requests_per_minute=100)
        m.runner.script(*byte_ids("x" * 29))
        m.runner.close()
        stream = await m.begin(100, 1000, stream=True, ignore_eos=False)
        await m.generate(10)
        await limit(m.inside, scope, tokens_per_day=500)
        lowered = await m.inside.admin.get(f"{TENANTS}/{scope}/quotas")
        disabled = await m.inside.admin.patch(f"{TENANTS}/{scope}", json={"status": "disabled"})
        assert (disabled.status_code, disabled.json()["status"]) == (200, "disabled")
        states = {row.scope: row for row in await rows(m.inside, QuotaState)}
        assert {row.day_used for row in states.values()} == {0}

        m.runner.open()
        assert streamed(await stream)[-1]["choices"][0]["finish_reason"] == "stop"
        await settled(m.inside)
        assert {row.scope: row.day_used for row in await rows(m.inside, QuotaState)} == dict.fromkeys(states, 130)
        (booked,) = await rows(m.inside, Usage)
        assert (booked.key_id, booked.outcome, booked.cost) == (key["id"], "finished", 130)
        after = await m.inside.admin.get(f"{TENANTS}/{scope}/quotas")
        assert (after.json(), after.headers["etag"]) == (lowered.json(), lowered.headers["etag"])
        assert after.json()["tokens_per_day"] == 500
        now = (await m.inside.admin.get(f"{TENANTS}/{scope}")).json()
        assert now | {"last_used_at": None} == disabled.json() | {"last_used_at": None}
        assert refusal(await m.ask(1, 1), 401)["code"] == "invalid_api_key"


async def test_b172_a_tenants_key_changes_no_limit_and_no_key(tmp_path: Path) -> None:
    async with metered(tmp_path) as m:
        other = await m.inside.customer("b")
        await m.limit(tokens_per_day=100)
        at = f"{TENANTS}/{m.customer.id}/keys"
        blocked = (await m.inside.admin.post(at, json={})).json()
        await m.inside.admin.patch(f"{at}/{blocked['id']}", json={"status": "disabled"})
        (others,) = (await m.inside.admin.get(f"{TENANTS}/{other.id}/keys")).json()["data"]
        attempts = [
            ("PUT", f"{TENANTS}/{m.customer.id}/quotas", {"tokens_per_day": 10**9}),
            ("PATCH", f"{at}/{blocked['id']}", {"status": "active"}),
            ("PATCH", f"{TENANTS}/{other.id}/keys/{others['id']}", {"status": "disabled"}),
        ]

        async def settings() -> list[Any]:
            paths = [f"{TENANTS}/{id}/{what}" for id in (m.customer.id, other.id) for what in ("quotas", "keys")]
            told = [(await m.inside.admin.get(path)).json() for path in paths]
            for key in (*told[1]["data"], *told[3]["data"]):
                # Noted for each use, sooner or later.
                del key["last_used_at"]
            return told

        before = await settings()
        for secret in (m.customer.key, blocked["secret"]):
            for headers in ({"authorization": f"Bearer {secret}"}, {"authorization": "", "x-api-key": secret}):
                for method, path, body in attempts:
                    answer = await m.inside.admin.request(method, path, json=body, headers=headers)
                    assert refusal(answer, 401)["code"] == "invalid_api_key"
        assert await settings() == before
        # An administrator may do all of it.
        for method, path, body in attempts:
            assert (await m.inside.admin.request(method, path, json=body)).status_code == 200
        assert [now != was for now, was in zip(await settings(), before, strict=True)] == [True, True, False, True]
