"""The instruments: what requests count when they are over, and what is read from the store when somebody scrapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from cachestore.protocol import StatsReport
from gateway.telemetry import names
from gateway.telemetry.names import Attribute, Metric
from gateway.telemetry.record import RequestRecord
from gateway.telemetry.store_totals import Totals

Readings = Iterable[tuple[float, Mapping[Attribute, str]]]

_TIER = {names.TIER: "device"}


class RequestMetrics:
    """Counts requests that are over.

    Args:
        tenant_labels: how many tenants are counted on their own, by public id, the first that come; the rest is one.
    """

    def __init__(self, meter: Meter, *, tenant_labels: int) -> None:
        def histogram(metric: Metric) -> Any:
            return meter.create_histogram(
                metric.name, metric.unit, metric.meaning, explicit_bucket_boundaries_advisory=list(metric.buckets)
            )

        def counter(metric: Metric) -> Any:
            return meter.create_counter(metric.name, metric.unit, metric.meaning)

        self._http = histogram(names.HTTP_DURATION)
        self._duration = histogram(names.REQUEST_DURATION)
        self._first_token = histogram(names.TIME_TO_FIRST_TOKEN)
        self._per_token = histogram(names.TIME_PER_OUTPUT_TOKEN)
        self._usage = histogram(names.TOKEN_USAGE)
        self._overhead = histogram(names.OVERHEAD)
        self._requests = counter(names.REQUESTS)
        self._cache_tokens = counter(names.CACHE_TOKENS)
        self._tenant_labels = tenant_labels
        self._tenants: set[str] = set()
        if tenant_labels:
            self._tenant_requests = counter(names.TENANT_REQUESTS)
            self._tenant_tokens = counter(names.TENANT_TOKENS)

    def count(self, record: RequestRecord) -> None:
        duration = (record.end_ns - record.start_ns) / 1e9
        route = record.route or names.UNMATCHED
        self._http.record(
            duration,
            _labels({names.METHOD: record.method, names.ROUTE: route, names.STATUS: record.status_code}),
        )
        if record.generation is None:
            return
        common = {
            names.OPERATION: record.operation,
            names.PROVIDER_NAME: names.PROVIDER,
            names.REQUEST_MODEL: record.model,
            names.RESPONSE_MODEL: record.model,
        }
        plain = _labels(common)
        self._duration.record(duration, _labels(common | {names.ERROR: record.error}))
        self._requests.add(1, _labels({names.OUTCOME: record.outcome}))
        for submission in record.submissions:
            if started := submission.started:
                cached = started.cached_tokens
                self._cache_tokens.add(cached, _labels(_TIER | {names.CACHE_OUTCOME: "hit"}))
                missed = submission.prompt_tokens - cached
                self._cache_tokens.add(missed, _labels(_TIER | {names.CACHE_OUTCOME: "miss"}))
        if record.started:
            self._usage.record(record.input_tokens, _labels(common | {names.TOKEN_TYPE: "input"}))
            self._usage.record(record.output_tokens, _labels(common | {names.TOKEN_TYPE: "output"}))
        if record.outcome == "finished":
            self._overhead.record(record.overhead_ns / 1e9, {})
            self._first_token.record((record.first_token_ns - record.start_ns) / 1e9, plain)
            for submission in record.submissions:
                if (finished := submission.finished) and submission.output_tokens > 1:
                    decoding_ns = finished.stamps.finished_ns - finished.stamps.first_token_ns
                    self._per_token.record(decoding_ns / 1e9 / (finished.counts.output_tokens - 1), plain)
        self._count_tenant(record)

    def _count_tenant(self, record: RequestRecord) -> None:
        if not self._tenant_labels or record.tenant_id is None:
            return
        if len(self._tenants) < self._tenant_labels:
            self._tenants.add(record.tenant_id)
        tenant = record.tenant_id if record.tenant_id in self._tenants else names.OTHER_TENANT
        self._tenant_requests.add(1, _labels({names.TENANT: tenant, names.OUTCOME: record.outcome}))
        for kind, tokens in (("input", record.input_tokens), ("output", record.output_tokens)):
            self._tenant_tokens.add(tokens, _labels({names.TENANT: tenant, names.TOKEN_TYPE: kind}))


def observe_gateway(
    meter: Meter,
    *,
    report: Callable[[], StatsReport | None],
    missing_blocks: Callable[[], int],
    totals: Callable[[], Totals],
    unwrap_failures: Callable[[], Mapping[str, int]],
    quota_refusals: Callable[[], Mapping[tuple[str, str], int]],
    lost_reservations: Callable[[], int],
) -> None:
    """Publish the store's state and what the gateway has counted whenever it is asked for.

    Args:
        report: the connected store's last one; without a store there are no gauges.
        missing_blocks: what reservations lack to be wholly in force.
        totals: what all stores have counted.
        unwrap_failures: by purpose.
        quota_refusals: by whose limit it was, and which.
    """

    def publish(create: Callable[..., Any], metric: Metric, read: Callable[[], Readings]) -> None:
        def callback(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(value, _labels(labels)) for value, labels in read()]

        create(metric.name, [callback], metric.unit, metric.meaning)

    def counter(metric: Metric, read: Callable[[], Readings]) -> None:
        publish(meter.create_observable_counter, metric, read)

    def gauge(metric: Metric, read: Callable[[StatsReport], Readings]) -> None:
        publish(meter.create_observable_gauge, metric, lambda: read(last) if (last := report()) else ())

    gauge(
        names.CACHE_BLOCKS,
        lambda last: (
            (last.free_blocks, _TIER | {names.BLOCK_STATE: "free"}),
            (last.held_blocks, _TIER | {names.BLOCK_STATE: "held"}),
            (last.cached_blocks, _TIER | {names.BLOCK_STATE: "cached"}),
        ),
    )
    gauge(
        names.RESERVED_BLOCKS,
        lambda last: (
            (last.reserved_blocks, _TIER | {names.RESERVATION_STATE: "in_force"}),
            (missing_blocks(), _TIER | {names.RESERVATION_STATE: "missing"}),
        ),
    )
    gauge(
        names.STORE_REQUESTS,
        lambda last: (
            (last.running, {names.REQUEST_STATE: "running"}),
            (last.waiting, {names.REQUEST_STATE: "waiting"}),
        ),
    )
    counter(
        names.EVICTIONS,
        lambda: [
            (totals().evictions - totals().limit_evictions, _TIER | {names.EVICTION_CAUSE: "capacity"}),
            (totals().limit_evictions, _TIER | {names.EVICTION_CAUSE: "limit"}),
        ],
    )
    counter(names.STORE_STEPS, lambda: [(totals().steps, {})])
    counter(names.STORE_STEP_TIME, lambda: [(totals().step_ns / 1e9, {})])
    counter(names.STORE_PREEMPTIONS, lambda: [(totals().preemptions, {})])
    counter(
        names.UNWRAP_FAILURES,
        lambda: [(count, {names.PURPOSE: purpose}) for purpose, count in unwrap_failures().items()],
    )
    counter(
        names.QUOTA_REFUSALS,
        lambda: [
            (count, {names.QUOTA_SCOPE: scope, names.QUOTA_LIMIT: limit})
            for (scope, limit), count in quota_refusals().items()
        ],
    )
    counter(names.LOST_RESERVATIONS, lambda: [(lost_reservations(), {})])


def _labels(attributes: Mapping[Attribute, Any]) -> dict[str, Any]:
    return {str(name): value for name, value in attributes.items() if value is not None}
