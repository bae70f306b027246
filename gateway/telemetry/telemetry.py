"""What becomes of a request that is over: its spans, its counts, its line in the log."""

from __future__ import annotations

import asyncio
import logging
import threading
import traceback
from collections.abc import Callable, Mapping

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from cachestore.protocol import StatsReport
from gateway.http.routing import Route
from gateway.telemetry import request_log, spans
from gateway.telemetry.metrics import RequestMetrics, observe_gateway
from gateway.telemetry.names import SCOPE
from gateway.telemetry.providers import CARDINALITY_LIMITS, Exporters, meter_provider, tracer_provider
from gateway.telemetry.record import RequestRecord
from gateway.telemetry.store_totals import Totals

log = logging.getLogger("saltern.gateway")

# For what has not been sent when the process ends.
FLUSH_SECONDS = 0.5


class Telemetry:
    """Of one gateway. `close` sends what is left.

    Args:
        tenant_labels: how many tenants have metrics of their own.
    """

    def __init__(self, exporters: Exporters, *, tenant_labels: int = 0) -> None:
        self._registry = CollectorRegistry()
        prometheus = PrometheusMetricReader(
            scope_info_enabled=False, registry=self._registry, cardinality_limits=CARDINALITY_LIMITS
        )
        self._meters = meter_provider([prometheus, *exporters.metrics])
        self._tracers = tracer_provider(exporters)
        self._tracer = self._tracers.get_tracer(SCOPE) if self._tracers else None
        self._meter = self._meters.get_meter(SCOPE)
        self._requests = RequestMetrics(self._meter, tenant_labels=tenant_labels)

    def observe_gateway(
        self,
        *,
        report: Callable[[], StatsReport | None],
        missing_blocks: Callable[[], int],
        totals: Callable[[], Totals],
        unwrap_failures: Callable[[], Mapping[str, int]],
        quota_refusals: Callable[[], Mapping[tuple[str, str], int]],
        lost_reservations: Callable[[], int],
    ) -> None:
        """Publish what these answer whenever metrics are read."""
        observe_gateway(
            self._meter,
            report=report,
            missing_blocks=missing_blocks,
            totals=totals,
            unwrap_failures=unwrap_failures,
            quota_refusals=quota_refusals,
            lost_reservations=lost_reservations,
        )

    def observe(self, record: RequestRecord) -> None:
        """Tell of a request. A fault in telling is logged and reaches no client."""
        try:
            trace_id = spans.emit(self._tracer, record) if self._tracer else 0
            self._requests.count(record)
            request_log.write(record, trace_id)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            kind = type(error).__name__
            log.error("request %s: no telemetry: %s at %s:%s", record.request_id, kind, where.filename, where.lineno)

    def routes(self) -> list[Route]:
        return [Route("GET", "/metrics", "public", self.metrics, summary="Metrics for Prometheus", answers=str)]

    async def metrics(self, request: Request) -> Response:
        text = await asyncio.to_thread(generate_latest, self._registry)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def close(self) -> None:
        """Send what is left, within half a second."""
        # A thread of its own: the event loop would not end before one that it had lent.
        sending = threading.Thread(target=self._shut_down, daemon=True)
        sending.start()
        await asyncio.to_thread(sending.join, FLUSH_SECONDS)

    def _shut_down(self) -> None:
        if self._tracers:
            self._tracers.shutdown()
        self._meters.shutdown(FLUSH_SECONDS * 1000)
