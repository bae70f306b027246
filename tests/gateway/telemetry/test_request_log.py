from __future__ import annotations

import logging

import pytest

from gateway.telemetry import names, request_log
from gateway.telemetry.request_log import line, values
from tests.gateway.telemetry.records import finished, generation, record, started


def test_a_line_has_what_happened_in_the_order_that_is_declared() -> None:
    request = generation()
    finished(started(request))
    assert line(request, 0xAB) == (
        "request=req_1 trace=000000000000000000000000000000ab tenant=tnt_1 method=POST route=/v1/completions "
        "status=200 outcome=finished input_tokens=50 cached_tokens=32 output_tokens=5 "
        "queue_ms=1000.0 first_token_ms=5000.0 overhead_ms=3000.0 duration_ms=10000.0"
    )


def test_fields_are_those_that_are_declared() -> None:
    assert list(values(record(), 0)) == [field.name for field in names.LOG_FIELDS]


def test_what_a_request_does_not_have_is_left_out() -> None:
    unmatched = record(route=None, status=404, tenant_id=None, failure="not_found")
    assert line(unmatched, 0) == (
        "request=req_1 method=POST route=unmatched status=404 outcome=refused error=not_found duration_ms=10000.0"
    )


def test_probes_are_logged_at_debug_level_and_their_refusals_are_not(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "saltern.request")
    request_log.write(record(is_public=True, route="/livez"), 0)
    request_log.write(record(is_public=True, route="/readyz", status=503), 0)
    request_log.write(record(), 0)
    assert [each.levelname for each in caplog.records] == ["DEBUG", "INFO", "INFO"]
