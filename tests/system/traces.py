"""Traces as a backend receives them, held to what every trace must be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway.telemetry import names
from gateway.telemetry.providers import Exporters
from gateway.telemetry.telemetry import Telemetry
from tests.system.in_process import until

STORE = [names.QUEUE.name, names.PREFILL.name, names.DECODE.name]
PREPARED = [names.AUTHENTICATE.name, names.PREPARE.name, names.RESERVE.name]
SETTLED = [names.SETTLE.name]


@dataclass(frozen=True)
class Span:
    """`start`, `end`: unix seconds; `parent` None where the trace begins here."""

    trace_id: str
    span_id: str
    parent: str | None
    name: str
    kind: str
    start: float
    end: float
    attributes: Mapping[str, Any]
    is_error: bool


class Trace:
    """The spans of one request. Made only of a trace that is complete and in order."""

    def __init__(self, spans: list[Span]) -> None:
        by_id = {span.span_id: span for span in spans}
        assert len(by_id) == len(spans), "a span ended twice"
        (self.root,) = [span for span in spans if span.parent not in by_id]
        self.spans = sorted(spans, key=lambda span: (span.start, -span.end))
        self._by_id = by_id
        for span in spans:
            assert span.end >= span.start > 0
            assert span.kind == ("SERVER" if span is self.root else "INTERNAL")
            if span is not self.root:
                parent = by_id[span.parent or ""]
                assert parent.start - 1e-6 <= span.start <= span.end <= parent.end + 1e-6, (span, parent)
            allowed = {attribute.name for attribute in _kind(span).attributes}
            assert set(span.attributes) <= allowed, span

    @property
    def names(self) -> list[str]:
        """Of all spans below the root, in order of their start."""
        return [span.name for span in self.spans if span is not self.root]

    def __getitem__(self, name: str) -> Span:
        (found,) = [span for span in self.spans if span.name == name]
        return found

    @property
    def generation(self) -> Span:
        """The span of what was asked of the model."""
        (found,) = [span for span in self.spans if names.OPERATION.name in span.attributes]
        assert found.parent == self.root.span_id
        assert all(span.parent == found.span_id for span in self.spans if span not in (found, self.root))
        return found


def _kind(span: Span) -> names.SpanKind:
    if span.kind == "SERVER":
        return names.SERVER
    return next((kind for kind in names.SPANS if kind.name == span.name), names.GENERATION)


def traces(spans: Iterable[Span]) -> list[Trace]:
    """In order of their requests."""
    by_trace = defaultdict(list)
    for span in spans:
        by_trace[span.trace_id].append(span)
    return sorted((Trace(spans) for spans in by_trace.values()), key=lambda trace: trace.root.start)


class Recording:
    """Telemetry whose spans stay in memory."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.telemetry = Telemetry(Exporters([SimpleSpanProcessor(self._exporter)]))

    def traces(self) -> list[Trace]:
        """Of requests to a completion route; those of administrators are set-up."""
        finished = [
            Span(
                f"{span.context.trace_id:032x}",
                f"{span.context.span_id:016x}",
                f"{span.parent.span_id:016x}" if span.parent else None,
                span.name,
                span.kind.name,
                (span.start_time or 0) / 1e9,
                (span.end_time or 0) / 1e9,
                span.attributes or {},
                not span.status.is_ok,
            )
            for span in self._exporter.get_finished_spans()
        ]
        return [trace for trace in traces(finished) if "/v1/" in trace.root.name and "/admin" not in trace.root.name]

    async def some(self, count: int) -> list[Trace]:
        """The traces, once there are so many."""
        await until(lambda: len(self._roots()) >= count)
        found = self.traces()
        assert len(found) == count
        return found

    def _roots(self) -> list[Any]:
        spans = self._exporter.get_finished_spans()
        return [s for s in spans if s.kind.name == "SERVER" and "/v1/" in s.name and "/admin" not in s.name]

    def clear(self) -> None:
        self._exporter.clear()
