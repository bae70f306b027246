"""An OTLP/HTTP receiver on loopback that decodes what comes with OpenTelemetry's own protobuf package."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as WireSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from tests.system.traces import Span, Trace, traces

KINDS = {WireSpan.SPAN_KIND_SERVER: "SERVER", WireSpan.SPAN_KIND_INTERNAL: "INTERNAL"}


class Receiver:
    """
    Attributes:
        url: for OTEL_EXPORTER_OTLP_ENDPOINT.
        bodies: all that came, as it came.
        metrics: names of all metrics that came.
        resources: attributes of whoever sent.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.bodies: list[bytes] = []
        self.spans: list[Span] = []
        self.metrics: set[str] = set()
        self.resources: list[dict[str, Any]] = []

    def traces(self) -> list[Trace]:
        """Of requests for generation."""
        return [trace for trace in traces(list(self.spans)) if trace.root.name.endswith("completions")]

    def take(self, path: str, body: bytes) -> bytes:
        self.bodies.append(body)
        if path == "/v1/traces":
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.resources.append({each.key: _value(each.value) for each in resource.resource.attributes})
                self.spans += [_span(span) for scope in resource.scope_spans for span in scope.spans]
            return bytes(ExportTraceServiceResponse().SerializeToString())
        assert path == "/v1/metrics"
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            self.metrics |= {metric.name for scope in resource.scope_metrics for metric in scope.metrics}
        return bytes(ExportMetricsServiceResponse().SerializeToString())


def _span(span: WireSpan) -> Span:
    return Span(
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex() or None,
        span.name,
        KINDS[span.kind],
        span.start_time_unix_nano / 1e9,
        span.end_time_unix_nano / 1e9,
        {each.key: _value(each.value) for each in span.attributes},
        span.status.code == Status.STATUS_CODE_ERROR,
    )


def _value(value: AnyValue) -> Any:
    if value.HasField("array_value"):
        return tuple(map(_value, value.array_value.values))
    return getattr(value, value.WhichOneof("value"))


@contextmanager
def receiving() -> Iterator[Receiver]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["content-type"] == "application/x-protobuf"
            answer = receiver.take(self.path, self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing on stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver = Receiver(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
