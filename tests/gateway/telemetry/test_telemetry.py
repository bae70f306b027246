from __future__ import annotations

import asyncio
import logging
import threading

import pytest
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway.telemetry.providers import Exporters
from gateway.telemetry.record import RequestRecord
from gateway.telemetry.telemetry import Telemetry

PATIENCE_SECONDS = 20


class Stuck(SpanProcessor):
    """Sends what is left to a backend that says nothing, until it is let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.began = self.ended = False

    def shutdown(self) -> None:
        self.began = True
        self.let_go.wait(PATIENCE_SECONDS)
        self.ended = True


def test_a_backend_that_says_nothing_does_not_keep_the_process_from_its_end() -> None:
    """Not even the event loop's, which waits for the threads that it was asked to run things in."""
    stuck = Stuck()
    with asyncio.Runner() as runner:
        runner.run(Telemetry(Exporters(spans=[stuck])).close())
    try:
        assert stuck.began
        assert not stuck.ended
    finally:
        stuck.let_go.set()


@pytest.mark.parametrize(
    "headers",
    [
        [(b"tracestate", b"canary")],
        [(b"tracestate", b"\x1bcanary=\xff")],
        [(b"tracestate", b",".join(b"canary%d=1" % number for number in range(99)))],
        [(b"tracestate", b"canary" * 2000)],
    ],
)
def test_what_a_client_sends_as_a_trace_reaches_no_log(
    headers: list[tuple[bytes, bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    parent = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    caplog.set_level(logging.DEBUG)
    spans = InMemorySpanExporter()
    telemetry = Telemetry(Exporters(spans=[SimpleSpanProcessor(spans)]))
    for traceparent in (parent, b"canary" * 100, b"canary"):
        RequestRecord(
            request_id="req_1",
            method="GET",
            headers=[(b"traceparent", traceparent), *headers],
            observe=telemetry.observe,
        ).release()
    assert len(spans.get_finished_spans()) == 3
    assert [record.name for record in caplog.records] == ["saltern.request"] * 3
    assert "canary" not in caplog.text
