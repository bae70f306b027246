"""The spans of one request, made when it is over, each with its own start and end: none can stay open.

    POST /v1/chat/completions          SERVER
     └ chat {model}                    INTERNAL
        ├ tenant.authenticate
        ├ prompt.prepare
        ├ quota.reserve
        ├ store.queue, store.prefill, store.decode     for each submission, from the store's own stamps
        └ quota.settle

Without a generation (another route, or refused before), `tenant.authenticate` is the server span's child. Nothing is
attached to a context, so nothing has to be detached from one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gateway.telemetry import names
from gateway.telemetry.names import Attribute
from gateway.telemetry.record import RequestRecord, Submission

_propagator = TraceContextTextMapPropagator()
# It warns of a client's headers, word for word.
logging.getLogger("opentelemetry.trace").setLevel(logging.CRITICAL)

Attributes = Mapping[Attribute, Any]


@dataclass(frozen=True, slots=True)
class SpanTree:
    """`attributes` with the value None are left out; `is_error` is the span's status."""

    name: str
    start_ns: int
    end_ns: int
    attributes: Attributes
    is_error: bool = False
    children: list[SpanTree] = field(default_factory=list)


def span_tree(record: RequestRecord) -> SpanTree:
    """What is told of a request that is over. Stamps are of CLOCK_MONOTONIC."""
    children = list(_children(record))
    if record.generation is not None:
        children = [_generation(record, children)]
    return SpanTree(
        f"{record.method} {record.route}" if record.route else record.method,
        record.start_ns,
        record.end_ns,
        {
            names.METHOD: record.method,
            names.ROUTE: record.route,
            names.STATUS: record.status_code,
            names.ERROR: record.error,
            names.TENANT: record.tenant_id,
            names.REQUEST_ID: record.request_id,
        },
        # A client's mistake is no fault of the server (semantic conventions for HTTP spans).
        is_error=record.status >= 500 or record.outcome == "failed",
        children=children,
    )


def _children(record: RequestRecord) -> Iterator[SpanTree]:
    if span := record.authenticated:
        yield SpanTree(
            names.AUTHENTICATE.name, span.start_ns, span.end_ns, {names.ERROR: span.error}, bool(span.error)
        )
    if record.prepared:
        span, prepared = record.prepared
        yield SpanTree(
            names.PREPARE.name,
            span.start_ns,
            span.end_ns,
            {
                names.PROMPT_TOKENS: prepared.tokens,
                names.PROMPT_BLOCKS: prepared.blocks,
                names.REMEMBERED_TOKENS: prepared.remembered_tokens,
            },
        )
    if record.reserved:
        span, scope = record.reserved
        attributes = {names.QUOTA_SCOPE: scope, names.ERROR: span.error}
        yield SpanTree(names.RESERVE.name, span.start_ns, span.end_ns, attributes, bool(span.error))
    for submission in record.submissions:
        yield from _store(submission)
    if span := record.settled:
        yield SpanTree(names.SETTLE.name, span.start_ns, span.end_ns, {names.ERROR: span.error}, bool(span.error))


def _generation(record: RequestRecord, children: list[SpanTree]) -> SpanTree:
    wanted, model = record.generation, record.model
    assert wanted is not None
    started = bool(record.started)
    attributes: Attributes = {
        names.OPERATION: record.operation,
        names.PROVIDER_NAME: names.PROVIDER,
        names.REQUEST_MODEL: model,
        names.RESPONSE_MODEL: model,
        names.MAX_TOKENS: wanted.max_tokens,
        names.TEMPERATURE: wanted.temperature,
        names.TOP_P: wanted.top_p,
        names.TOP_K: wanted.top_k or None,
        names.SEED: None if wanted.seed is None else _signed(wanted.seed),
        names.STREAM: wanted.stream,
        names.CHOICES: wanted.n if wanted.n > 1 else None,
        names.STOPS: len(wanted.stop) or None,
        names.RESPONSE_ID: record.response_id,
        names.FINISH_REASONS: record.finish_reasons or None,
        names.FIRST_CHUNK: (record.first_chunk_ns - record.start_ns) / 1e9 if record.first_chunk_ns else None,
        names.INPUT_TOKENS: record.input_tokens if started else None,
        names.OUTPUT_TOKENS: record.output_tokens if started else None,
        names.CACHE_READ_TOKENS: record.cached_tokens if started else None,
        names.CACHE_WRITE_TOKENS: record.written_tokens if started else None,
        names.ERROR: record.error,
        names.TENANT: record.tenant_id,
        names.REQUEST_ID: record.request_id,
    }
    start_ns = record.authenticated.start_ns if record.authenticated else record.start_ns
    name = f"{record.operation} {model}"
    return SpanTree(name, start_ns, record.end_ns, attributes, record.outcome == "failed", children)


def _store(submission: Submission) -> Iterator[SpanTree]:
    """What one submission spent where. Of one whose store was lost only the beginning is known."""
    started, finished, end_ns = submission.started, submission.finished, submission.ended_ns
    error = submission.refusal
    if finished and finished.reason in ("aborted", "error"):
        error = finished.error or finished.reason
    admitted_ns = started.stamps.started_ns if started else end_ns
    queue_error = None if started else error
    yield SpanTree(
        names.QUEUE.name, submission.queued_ns, admitted_ns, {names.ERROR: queue_error}, bool(queue_error)
    )
    if started is None:
        return
    counts = finished.counts if finished else None
    first_token_ns = finished.stamps.first_token_ns if finished else submission.first_output_ns
    prefill_error = None if first_token_ns else error
    decoding = max(0, counts.output_tokens - 1) if counts else 0
    yield SpanTree(
        names.PREFILL.name,
        admitted_ns,
        first_token_ns or end_ns,
        {
            names.CACHED_DEVICE_TOKENS: started.cached_tokens,
            names.MISS_BLOCK: started.miss_block,
            names.MISS_REASON: started.miss_reason,
            names.COMPUTED_TOKENS: counts.computed_tokens if counts else None,
            names.CHUNKS: counts.steps - decoding if counts else None,
            names.ERROR: prefill_error,
        },
        bool(prefill_error),
    )
    if first_token_ns:
        yield SpanTree(
            names.DECODE.name,
            first_token_ns,
            end_ns,
            {
                names.DECODED_TOKENS: submission.output_tokens,
                names.STEPS: decoding if counts else None,
                names.PREEMPTIONS: counts.preemptions if counts else None,
                names.ERROR: error,
            },
            bool(error),
        )


def _signed(seed: int) -> int:
    """A 64-bit seed as the integer that the protocol of traces has."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def emit(tracer: Tracer, record: RequestRecord) -> int:
    """Hand the request's spans to the tracer; answers the trace id, 0 where the request is not traced."""
    context = _propagator.extract(record.trace_headers)
    return _emit(tracer, span_tree(record), record.unix_offset_ns, SpanKind.SERVER, context)


def _emit(tracer: Tracer, tree: SpanTree, offset_ns: int, kind: SpanKind, context: Any) -> int:
    span = tracer.start_span(
        tree.name,
        context,
        kind,
        {str(name): value for name, value in tree.attributes.items() if value is not None},
        start_time=tree.start_ns + offset_ns,
    )
    if not span.is_recording():
        return 0
    inside = set_span_in_context(span, context)
    for child in tree.children:
        _emit(tracer, child, offset_ns, SpanKind.INTERNAL, inside)
    if tree.is_error:
        span.set_status(Status(StatusCode.ERROR))
    span.end(tree.end_ns + offset_ns)
    return span.get_span_context().trace_id
