from __future__ import annotations

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from prometheus_client import CollectorRegistry, generate_latest

from cachestore.protocol import StatsReport
from gateway.telemetry import names
from gateway.telemetry.metrics import RequestMetrics
from gateway.telemetry.providers import CARDINALITY_LIMITS, meter_provider
from gateway.telemetry.store_totals import StoreTotals, Totals
from tests.gateway.telemetry.records import finished, generation, started


def series(tenants: int, *, tenant_labels: int) -> list[str]:
    """What Prometheus reads after so many tenants asked once each."""
    registry = CollectorRegistry()
    reader = PrometheusMetricReader(registry=registry, cardinality_limits=CARDINALITY_LIMITS)
    metrics = RequestMetrics(meter_provider([reader]).get_meter("test"), tenant_labels=tenant_labels)
    for number in range(tenants):
        request = generation()
        request.tenant_id = f"tnt_{number}"
        finished(started(request))
        metrics.count(request)
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]


def test_b179_five_thousand_tenants_make_no_series() -> None:
    few, many = series(1, tenant_labels=0), series(5000, tenant_labels=0)
    assert len(many) == len(few)
    assert "tnt_" not in "".join(many)


def test_b179_with_names_the_first_thousand_tenants_have_series_and_the_rest_shares_one() -> None:
    found = series(5000, tenant_labels=names.MAX_TENANT_LABELS)
    requests = [line for line in found if line.startswith("saltern_tenant_requests_total")]
    assert len(requests) == names.MAX_TENANT_LABELS + 1
    (rest,) = [line for line in requests if f'saltern_tenant_id="{names.OTHER_TENANT}"' in line]
    assert float(rest.split()[-1]) == 5000 - names.MAX_TENANT_LABELS
    tokens = [line for line in found if line.startswith("saltern_tenant_tokens_total")]
    assert len(tokens) == 2 * (names.MAX_TENANT_LABELS + 1)
    assert sum(float(line.split()[-1]) for line in tokens) == 5000 * 55
    assert not [line for line in found if "overflow" in line]


def report(steps: int) -> StatsReport:
    return StatsReport(
        pushed=True,
        total_blocks=10,
        free_blocks=10,
        held_blocks=0,
        cached_blocks=0,
        reserved_blocks=0,
        missing_blocks=0,
        running=0,
        waiting=0,
        ended=0,
        steps=steps,
        step_ns=1000 * steps,
        computed_tokens=0,
        preemptions=2 * steps,
        evictions=3 * steps,
        limit_evictions=steps,
    )


def test_counters_go_on_over_stores_that_start_anew_and_never_fall() -> None:
    totals = StoreTotals()
    for store, steps, expected in (
        ("a", 5, 5),
        ("a", 5, 5),
        ("a", 7, 7),
        ("a", 6, 7),  # an older report that came late
        ("a", 8, 8),
        ("b", 3, 11),
        ("b", 9, 17),
    ):
        totals.take(store, report(steps))
        assert totals.totals == Totals(expected, 1000 * expected, 2 * expected, 3 * expected, expected)
