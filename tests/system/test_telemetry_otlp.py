"""What reaches an OpenTelemetry backend over OTLP/HTTP from a whole Saltern, also when its store is killed."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gateway.telemetry import names
from tests.system.otlp import receiving
from tests.system.served import EAGER, eventually, running
from tests.system.traces import PREPARED, SETTLED, STORE


def test_traces_and_metrics_reach_a_backend_and_the_last_of_them_when_the_process_ends(
    tmp_path: Path, default_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
        # Nothing is sent before the end.
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "600000")
        with running(tmp_path / "data", "serve", limits=EAGER) as server:
            server.wait_until_ready()
            tenant = server.tenant()
            fine = tenant.complete([*range(100, 140)], max_tokens=3, ignore_eos=True)
            assert fine.status_code == 200
            server.notes.stop_at("decode")
            with ThreadPoolExecutor() as pool:
                killed = pool.submit(tenant.complete, [*range(200, 240)], max_tokens=50, ignore_eos=True)
                server.standing_store()
                server.kill_store()
                assert killed.result().status_code == 503
            server.wait_until_ready()
            assert not receiver.bodies
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(20) == 0
        finished, lost = receiver.traces()
    generation = f"text_completion {server.model}"
    assert finished.names == [generation, *PREPARED, *STORE, *SETTLED]
    assert lost.names == [generation, *PREPARED, *STORE, *SETTLED]
    assert lost["store.decode"].attributes["error.type"] == "store_lost"
    assert lost["store.decode"].attributes["saltern.store.output_tokens"] > 0
    assert lost.root.attributes["error.type"] == "store_lost"
    assert lost.root.attributes["http.response.status_code"] == 503
    assert lost.root.is_error
    assert lost.generation.attributes["gen_ai.usage.input_tokens"] == 40
    assert {"gen_ai.server.request.duration", "saltern.store.steps", "saltern.requests"} <= receiver.metrics
    assert receiver.metrics <= {metric.name for metric in names.METRICS}
    for resource in receiver.resources:
        assert resource["service.name"] == "saltern"
        assert resource["deployment.environment.name"] == "test"


def test_a_backend_that_is_away_costs_no_request_and_no_end(
    tmp_path: Path, default_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    with running(tmp_path / "data", "serve", limits=EAGER) as server:
        server.wait_until_ready()
        assert server.tenant().complete([1, 2, 3]).status_code == 200
        eventually(lambda: "export" in server.log().lower(), "the exporter complains")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
