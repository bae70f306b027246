from __future__ import annotations

import subprocess
import sys

import pytest

from gateway.settings import SettingsError
from gateway.telemetry.providers import Exporters, tracer_provider

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}


@pytest.mark.parametrize(
    ("environment", "spans", "metrics"),
    [
        ({}, 0, 0),
        (ENDPOINT, 1, 1),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9/v1/traces"}, 1, 0),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://127.0.0.1:9/v1/metrics"}, 0, 1),
        (ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"}, 0, 1),
        (ENDPOINT | {"OTEL_METRICS_EXPORTER": "none"}, 1, 0),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "true"}, 0, 0),
        (ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, 1, 1),
    ],
)
def test_telemetry_is_sent_where_the_standard_variables_say(
    environment: dict[str, str], spans: int, metrics: int
) -> None:
    exporters = Exporters.from_environment(environment)
    try:
        assert (len(exporters.spans), len(exporters.metrics)) == (spans, metrics)
        assert (tracer_provider(exporters) is not None) == bool(spans)
    finally:
        for each in (*exporters.spans, *exporters.metrics):
            each.shutdown()


@pytest.mark.parametrize("protocol", ["grpc", "http/json"])
def test_another_protocol_is_refused_with_the_remedy(protocol: str) -> None:
    with pytest.raises(SettingsError, match=rf"not as {protocol}: set OTEL_EXPORTER_OTLP_PROTOCOL to http/protobuf"):
        Exporters.from_environment(ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": protocol})


@pytest.mark.parametrize("headers", ["canary", "a=b,canary", "key: canary=", "a=canary;b=c", "a=cänary", 'a="canary"'])
@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"])
def test_headers_that_the_library_would_log_are_refused_and_not_repeated(
    name: str, headers: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(SettingsError, match="HEADERS or that of traces is no list of name=value") as refused:
        Exporters.from_environment(ENDPOINT | {name: headers})
    assert not any(word in str(refused.value) + caplog.text for word in ("canary", "cänary"))


@pytest.mark.parametrize("headers", ["api-key=a%2Cb==, x = y ,", "Authorization=Bearer a.b-c/d=="])
def test_headers_as_the_library_takes_them_are_taken(
    headers: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", headers)
    exporters = Exporters.from_environment(ENDPOINT | {"OTEL_EXPORTER_OTLP_HEADERS": headers})
    for each in (*exporters.spans, *exporters.metrics):
        each.shutdown()
    assert "Header format" not in caplog.text


def test_without_an_endpoint_nothing_is_installed() -> None:
    """No global provider, and no exporter is even imported."""
    code = (
        "import sys; from gateway.telemetry.providers import Exporters;"
        "from gateway.telemetry.telemetry import Telemetry;"
        "Telemetry(Exporters.from_environment({})); from opentelemetry import metrics, trace;"
        "print(type(trace.get_tracer_provider()).__name__, type(metrics.get_meter_provider()).__name__,"
        "[name for name in sys.modules if '.otlp' in name])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found == "ProxyTracerProvider _ProxyMeterProvider []\n"
