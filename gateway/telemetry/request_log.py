"""One line per request, when it is over: `name=value` pairs of fields that `names.LOG_FIELDS` lists, and no others.

Every value is an id of ours, a number, or a word of a closed set, so none needs quoting and none can break the line.
"""

from __future__ import annotations

import logging

from gateway.telemetry import names
from gateway.telemetry.record import RequestRecord

log = logging.getLogger("saltern.request")


def write(record: RequestRecord, trace_id: int) -> None:
    # What is public is asked for every few seconds by whoever watches over the process.
    level = logging.DEBUG if record.is_public and record.status < 400 else logging.INFO
    if log.isEnabledFor(level):
        log.log(level, "%s", line(record, trace_id))


def line(record: RequestRecord, trace_id: int) -> str:
    fields = values(record, trace_id)
    return " ".join(
        f"{field.name}={fields[field.name]}" for field in names.LOG_FIELDS if fields[field.name] is not None
    )


def values(record: RequestRecord, trace_id: int) -> dict[str, str | int | None]:
    """The fields; None where the request has none."""
    asked = record.generation is not None
    first_token_ns = record.first_token_ns
    return {
        "request": record.request_id,
        "trace": f"{trace_id:032x}" if trace_id else None,
        "tenant": record.tenant_id,
        "method": record.method,
        "route": record.route or names.UNMATCHED,
        "status": record.status_code,
        "outcome": record.outcome,
        "error": record.error,
        "input_tokens": record.input_tokens if asked else None,
        "cached_tokens": record.cached_tokens if asked else None,
        "output_tokens": record.output_tokens if asked else None,
        "queue_ms": _ms(record.queue_ns) if record.submissions else None,
        "first_token_ms": _ms(first_token_ns - record.start_ns) if first_token_ns else None,
        "overhead_ms": _ms(record.overhead_ns) if record.submissions else None,
        "duration_ms": _ms(record.end_ns - record.start_ns),
    }


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.1f}"
