"""One trace per request, complete and ended, whatever becomes of the request."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.telemetry import names
from tests.system.in_process import in_process
from tests.system.metered import TENANTS, limit, wait_for_nobody
from tests.system.scene import Scene, scene
from tests.system.scripted import CHAT, TEXT, ScriptedRunner, Words, byte_ids, listening, until
from tests.system.traces import PREPARED, SETTLED, STORE, Recording

pytestmark = pytest.mark.anyio

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def post(url: str, key: str, path: str, **fields: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as http:
        return await http.post(path, json=fields, headers={"authorization": f"Bearer {key}"})


async def decode(s: Scene, sequence: Any, tokens: int) -> None:
    while sequence.output_tokens < tokens:
        await s.step()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "operation", "asked"),
    [
        (CHAT, "chat", {"messages": [{"role": "user", "content": "salt"}]}),
        (TEXT, "text_completion", {"prompt": "salt"}),
    ],
)
async def test_a_finished_request_is_one_trace(
    tmp_path: Path, path: str, operation: str, asked: dict[str, Any], stream: bool
) -> None:
    recording, runner = Recording(), ScriptedRunner()
    model = Words.write(tmp_path / "model")
    async with in_process(tmp_path, model.directory, runner=runner, telemetry=recording.telemetry) as inside:
        customer = await inside.customer("a")
        runner.script(*byte_ids("pepper"))
        fields = {"max_tokens": 50, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3, "stop": ["none"]}
        body = {"model": inside.model, "stream": stream} | fields | asked
        answer = await inside.http.post(path, json=body, headers=customer.headers | {"traceparent": PARENT})
        assert answer.status_code == 200
        (trace,) = await recording.some(1)
    assert trace.names == [f"{operation} {inside.model}", *PREPARED, *STORE, *SETTLED]
    assert trace.root.name == f"POST {path}"
    # The caller's trace goes on.
    assert (trace.root.trace_id, trace.root.parent) == (PARENT[3:35], PARENT[36:52])
    request_id = answer.headers["x-request-id"]
    assert trace.root.attributes == {
        "http.request.method": "POST",
        "http.route": path,
        "http.response.status_code": 200,
        "saltern.tenant.id": customer.id,
        "saltern.request.id": request_id,
    }
    told = dict(trace.generation.attributes)
    prompt_tokens = told.pop("gen_ai.usage.input_tokens")
    assert prompt_tokens >= len("salt")
    assert told.pop("gen_ai.response.id").startswith(("chatcmpl-", "cmpl-"))
    if stream:
        assert 0 < told.pop("gen_ai.response.time_to_first_chunk") < trace.root.end - trace.root.start
    assert told == {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "saltern",
        "gen_ai.request.model": inside.model,
        "gen_ai.response.model": inside.model,
        "gen_ai.request.max_tokens": 50,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.seed": 3,
        "gen_ai.request.stream": stream,
        "saltern.request.stop_count": 1,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.output_tokens": len("pepper") + 1,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.cache_creation.input_tokens": prompt_tokens // 16 * 16,
        "saltern.tenant.id": customer.id,
        "saltern.request.id": request_id,
    }
    assert trace["prompt.prepare"].attributes == {
        "saltern.prompt.tokens": prompt_tokens,
        "saltern.prompt.blocks": prompt_tokens // 16,
        "saltern.prompt.remembered_tokens": 0,
    }
    prefill = dict(trace["store.prefill"].attributes)
    if prompt_tokens >= 16:
        assert (prefill.pop("saltern.cache.miss_block"), prefill.pop("saltern.cache.miss_reason")) == (0, "cold")
    assert prefill == {
        "saltern.cache.device.tokens": 0,
        "saltern.store.computed_tokens": prompt_tokens + len("pepper"),
        "saltern.store.chunks": 1,
    }
    assert trace["store.decode"].attributes == {
        "saltern.store.output_tokens": len("pepper") + 1,
        "saltern.store.steps": len("pepper"),
        "saltern.store.preemptions": 0,
    }
    queue, prefill, decode = (trace[name] for name in STORE)
    assert (queue.end, prefill.end) == (prefill.start, decode.start)
    assert not any(span.is_error for span in trace.spans)


async def test_what_came_from_the_cache_is_told(tmp_path: Path, default_model: Path) -> None:
    recording = Recording()
    async with in_process(tmp_path, default_model, telemetry=recording.telemetry) as inside:
        customer = await inside.customer("a")
        await inside.complete(customer, [*range(100, 140)])
        await inside.complete(customer, [*range(100, 148)])
        await inside.complete(customer, [*range(100, 132), *range(300, 332)])
        await inside.complete(customer, [*range(100, 148), 7])
        *_, longer, other, all_of_it = await recording.some(4)
    assert longer["store.prefill"].attributes["saltern.cache.device.tokens"] == 32
    assert longer.generation.attributes["gen_ai.usage.cache_read.input_tokens"] == 32
    assert longer.generation.attributes["gen_ai.usage.cache_creation.input_tokens"] == 16
    misses = [
        tuple(trace["store.prefill"].attributes.get(f"saltern.cache.miss_{what}") for what in ("block", "reason"))
        for trace in (longer, other, all_of_it)
    ]
    assert misses == [(2, "cold"), (2, "diverged"), (None, None)]


async def test_every_choice_of_every_prompt_has_its_time_at_the_store(tmp_path: Path, default_model: Path) -> None:
    recording = Recording()
    async with in_process(tmp_path, default_model, telemetry=recording.telemetry) as inside:
        customer = await inside.customer("a")
        prompts = [[*range(100, 140)], [*range(200, 250)]]
        body = {"model": inside.model, "prompt": prompts, "n": 3, "max_tokens": 2, "ignore_eos": True}
        usage = (await inside.http.post(TEXT, json=body, headers=customer.headers)).json()["usage"]
        (trace,) = await recording.some(1)
    assert trace.names[:4] == ["text_completion " + inside.model, *PREPARED]
    assert sorted(trace.names[4:]) == sorted([*STORE * 6, *SETTLED])
    told = trace.generation.attributes
    assert told["gen_ai.request.choice.count"] == 3
    assert told["gen_ai.response.finish_reasons"] == ("length",) * 6
    assert told["gen_ai.usage.input_tokens"] == usage["prompt_tokens"] == 90
    assert told["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 12
    cached = usage["prompt_tokens_details"]
    assert told["gen_ai.usage.cache_read.input_tokens"] == cached["cached_tokens"]
    assert told["gen_ai.usage.cache_creation.input_tokens"] == cached["cache_write_tokens"]


async def test_a_request_that_is_refused_is_one_trace_and_says_why(tmp_path: Path) -> None:
    recording = Recording()
    model = Words.write(tmp_path / "model")
    limits = {"max_context_tokens": 100, "telemetry": recording.telemetry}
    async with in_process(tmp_path, model.directory, **limits) as inside:  # type: ignore[arg-type]
        customer = await inside.customer("a")
        body: dict[str, Any] = {"model": inside.model, "prompt": "salt", "max_tokens": 1}
        for headers, fields in (
            ({}, {}),
            (customer.headers, {"temperature": 3}),
            (customer.headers, {"model": "another"}),
            (customer.headers, {"max_tokens": 100}),
        ):
            await inside.http.post(TEXT, json=body | fields, headers=headers)
        inside.gateway.completions.draining = True
        await inside.http.post(TEXT, json=body, headers=customer.headers)
        anonymous, wrong, unknown, long, draining = await recording.some(5)
    told = [(t.root.attributes["http.response.status_code"], t.root.attributes["error.type"]) for t in (
        anonymous, wrong, unknown, long, draining,
    )]
    assert told == [
        (401, "invalid_api_key"),
        (400, "unsupported_value"),
        (404, "model_not_found"),
        (400, "context_length_exceeded"),
        (503, "server_is_overloaded"),
    ]
    assert anonymous.names == wrong.names == unknown.names == draining.names == ["tenant.authenticate"]
    assert anonymous["tenant.authenticate"].attributes == {"error.type": "invalid_api_key"}
    assert "saltern.tenant.id" not in anonymous.root.attributes
    # It named the model, and was prepared for it.
    assert long.names == [f"text_completion {inside.model}", *PREPARED[:2]]
    assert "gen_ai.usage.input_tokens" not in long.generation.attributes
    assert [t.root.is_error for t in (anonymous, wrong, unknown, long, draining)] == [False] * 4 + [True]


async def test_a_request_that_waits_too_long_is_one_trace(tmp_path: Path) -> None:
    recording = Recording()
    async with scene(tmp_path, recording.telemetry, max_running=1) as s:
        staying = await s.ask(TEXT, True, max_tokens=3)
        await s.submitted(1)
        await s.step()
        (tenant,) = (await s.inside.admin.get(TENANTS)).json()["data"]
        await wait_for_nobody(s.inside, tenant["id"])
        waiting = await s.ask(TEXT, True)
        await s.submitted(2)
        await limit(s.inside, tenant["id"])
        await s.step()
        assert b"503" in await waiting.answer()
        (trace,) = await recording.some(1)
        s.runner.open()
        await staying.answer()
    assert trace.names[-2:] == ["store.queue", *SETTLED]
    assert trace["store.queue"].attributes == {"error.type": "queue_timeout"}
    assert trace.root.attributes["error.type"] == "queue_timeout"


async def test_an_abort_in_the_queue_is_one_trace(tmp_path: Path) -> None:
    recording = Recording()
    async with scene(tmp_path, recording.telemetry, max_running=1) as s:
        staying = await s.ask(TEXT, True, max_tokens=1900)
        await s.submitted(1)
        await s.step()
        await s.leave(*await s.begin(CHAT, True))
        (trace,) = await recording.some(1)
        s.runner.open()
        await staying.answer()
    assert trace.names[1:] == [*PREPARED, "store.queue", *SETTLED]
    assert trace["store.queue"].attributes == {"error.type": "aborted"}
    assert trace.root.attributes["http.response.status_code"] == 499
    assert trace.root.attributes["error.type"] == "client_disconnected"
    assert "gen_ai.usage.output_tokens" not in trace.generation.attributes


async def test_b174_a_stream_that_is_closed_early_is_one_ended_trace(tmp_path: Path) -> None:
    recording = Recording()
    async with scene(tmp_path, recording.telemetry, max_running=8) as s:
        s.runner.says = lambda _: byte_ids("x")[0]
        client, sequence = await s.begin(CHAT, True)
        await decode(s, sequence, 2)
        await client.received(2)
        await s.leave(client, sequence)
        (mid_stream,) = await recording.some(1)
        recording.clear()
        await s.leave(*await s.begin(CHAT, True))
        (before,) = await recording.some(1)
    for trace in (mid_stream, before):
        assert trace.root.attributes["error.type"] == "client_disconnected"
        assert trace.generation.attributes["gen_ai.usage.cache_read.input_tokens"] == 0
        assert trace.root.attributes["http.response.status_code"] == 200
    assert mid_stream.generation.attributes["gen_ai.usage.output_tokens"] in (2, 3)
    assert mid_stream["store.decode"].attributes["error.type"] == "aborted"
    assert mid_stream.names[-3:] == ["store.prefill", "store.decode", *SETTLED]
    assert before.names[-2:] == ["store.prefill", *SETTLED]
    assert before["store.prefill"].attributes["error.type"] == "aborted"
    assert before.generation.attributes["gen_ai.usage.output_tokens"] == 0


async def test_b175_the_server_span_ends_after_the_last_byte(tmp_path: Path) -> None:
    """A slow model and a slow reader: the spans last as long as the answer does."""
    recording, runner = Recording(), ScriptedRunner()
    model = Words.write(tmp_path / "model")
    async with (
        in_process(tmp_path, model.directory, runner=runner, telemetry=recording.telemetry) as inside,
        listening(inside.gateway.tenant_app) as url,
    ):
        customer = await inside.customer("a")
        runner.close()

        async def tokens_over_three_seconds() -> None:
            for _ in range(6):
                await until(lambda: runner.waiting)
                await asyncio.sleep(0.5)
                runner.let()
            runner.open()

        pacing = asyncio.create_task(tokens_over_three_seconds())
        body = {"model": inside.model, "prompt": "salt", "max_tokens": 7, "stream": True, "ignore_eos": True}
        await post(url, customer.key, TEXT, **body)
        await pacing
        (trace,) = await recording.some(1)
    assert trace.root.end - trace.root.start >= 3
    assert trace["store.decode"].end - trace["store.decode"].start >= 2.4
    assert trace["store.decode"].end <= trace.root.end


async def test_b176_cancelled_streams_leave_no_detach_error_and_no_trace_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recording = Recording()
    with caplog.at_level(logging.DEBUG):
        async with scene(tmp_path, recording.telemetry, max_running=8) as s:
            for _ in range(25):
                clients = [await s.begin(CHAT, True) for _ in range(4)]
                for client, sequence in clients:
                    await s.leave(client, sequence)
            aborted = await recording.some(100)
            s.runner.open()
            recording.clear()
            assert b" 200 " in await (await s.ask(CHAT, True, max_tokens=2)).answer()
            (last,) = await recording.some(1)
    assert not [line for line in caplog.records if "detach" in line.getMessage() or line.levelno >= logging.ERROR]
    assert len({trace.root.trace_id for trace in (*aborted, last)}) == 101
    assert last.root.parent is None


async def test_only_trace_context_is_read_of_a_client(tmp_path: Path, default_model: Path) -> None:
    recording = Recording()
    async with in_process(tmp_path, default_model, telemetry=recording.telemetry) as inside:
        headers = (await inside.customer("a")).headers
        for sent in (
            {"traceparent": "00-zz-1-01"},
            {"traceparent": "00-00000000000000000000000000000000-b7ad6b7169203331-01"},
            {"tracestate": "a=1", "baggage": "canary=1"},
        ):
            await inside.http.get("/v1/models", headers=headers | sent)
        doubled = [*headers.items(), ("traceparent", PARENT), ("traceparent", PARENT.replace("0af7", "1af7"))]
        await inside.http.get("/v1/models", headers=doubled)
        unsampled = headers | {"traceparent": PARENT[:-2] + "00"}
        await inside.http.get("/v1/models", headers=unsampled)
        found = await recording.some(4)
    assert [trace.root.parent for trace in found] == [None] * 4
    assert all(trace.names == ["tenant.authenticate"] for trace in found)
    assert "canary" not in repr([trace.spans for trace in found])


async def test_a_path_never_becomes_a_span_name(tmp_path: Path, default_model: Path) -> None:
    recording = Recording()
    async with in_process(tmp_path, default_model, telemetry=recording.telemetry) as inside:
        headers = (await inside.customer("a")).headers
        await inside.http.get("/v1/models/canary?canary=1", headers=headers)
        (trace,) = await recording.some(1)
        assert trace.root.name == "GET /v1/models/{model:path}"
        recording.clear()
        await inside.http.request("CANARY", "/v1/canary?canary=1", headers=headers)
        spans = recording._exporter.get_finished_spans()
    assert [span.name for span in spans] == [names.OTHER_METHOD]
    assert "canary" not in repr([trace.spans]) + repr([(span.name, span.attributes) for span in spans]).lower()
