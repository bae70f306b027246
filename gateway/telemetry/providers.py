"""The OpenTelemetry providers of one gateway: none of them is made the process's global one.

Traces and metrics leave over OTLP/HTTP where the standard variables say where to: OTEL_EXPORTER_OTLP_ENDPOINT, or that
of one signal. Without an endpoint nothing is sent, and no exporter is even imported. Metrics are always there for
Prometheus to read.

Source: OpenTelemetry specification, "Environment Variable Specification" and "OTLP Exporter Configuration".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version

from opentelemetry.sdk.metrics import Counter, MeterProvider
from opentelemetry.sdk.metrics.export import CardinalityLimits, MetricReader
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

from gateway.settings import SettingsError
from gateway.telemetry.names import MAX_TENANT_LABELS, SCOPE

PROTOCOL = "http/protobuf"
# What the library reads as a header. Of all else it logs every letter, and a header is where a backend's key is sent.
_HEADER = re.compile(r"[!#-'*+\-.0-9A-Z^-z|~]+[ \t]*=[ \t]*[ !#-+\--:<-\[\]-~]*")
# By tenant there are at most four outcomes; the library's own limit is 2,000 series.
CARDINALITY_LIMITS: CardinalityLimits = {Counter: 5 * (MAX_TENANT_LABELS + 1)}


@dataclass(frozen=True, slots=True)
class Exporters:
    """Where telemetry goes, besides what Prometheus reads."""

    spans: Sequence[SpanProcessor] = ()
    metrics: Sequence[MetricReader] = field(default=())

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Exporters:
        """
        Raises:
            SettingsError: a protocol that is not spoken here, or no headers.
            ValueError: another value that the library can't use.
        """
        if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
            return cls()
        spans: list[SpanProcessor] = []
        metrics: list[MetricReader] = []
        if _is_sent("TRACES", environment):
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            spans.append(BatchSpanProcessor(OTLPSpanExporter()))
        if _is_sent("METRICS", environment):
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
            from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

            reader = PeriodicExportingMetricReader(OTLPMetricExporter(), cardinality_limits=CARDINALITY_LIMITS)
            metrics.append(reader)
        return cls(spans, metrics)


def _is_sent(signal: str, environment: Mapping[str, str]) -> bool:
    def setting(name: str) -> str | None:
        return environment.get(f"OTEL_EXPORTER_OTLP_{signal}_{name}") or environment.get(f"OTEL_EXPORTER_OTLP_{name}")

    if not setting("ENDPOINT") or environment.get(f"OTEL_{signal}_EXPORTER", "otlp") == "none":
        return False
    protocol = setting("PROTOCOL") or PROTOCOL
    if protocol != PROTOCOL:
        raise SettingsError(
            f"telemetry is sent as {PROTOCOL}, not as {protocol}: set OTEL_EXPORTER_OTLP_PROTOCOL to {PROTOCOL} and "
            "the endpoint to your collector's port for it, 4318 by default"
        )
    if not all(_HEADER.fullmatch(part.strip()) for part in (setting("HEADERS") or "").split(",") if part.strip()):
        raise SettingsError(
            f"OTEL_EXPORTER_OTLP_HEADERS or that of {signal.lower()} is no list of name=value with commas between: "
            "write it so, and what is special in a value as %XX"
        )
    return True


def tracer_provider(exporters: Exporters) -> TracerProvider | None:
    """None when nobody would receive a span."""
    if not exporters.spans:
        return None
    provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
    for processor in exporters.spans:
        provider.add_span_processor(processor)
    return provider


def meter_provider(readers: Sequence[MetricReader]) -> MeterProvider:
    return MeterProvider(readers, _resource(), shutdown_on_exit=False)


def _resource() -> Resource:
    """OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES come before what is said here."""
    ours = Resource({SERVICE_NAME: SCOPE, SERVICE_VERSION: version("saltern")})
    return ours.merge(_named(Resource.create()))


def _named(found: Resource) -> Resource:
    """Without the name that the library makes up where none is set."""
    attributes = dict(found.attributes)
    if str(attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        del attributes[SERVICE_NAME]
    return Resource(attributes)
