"""Records of requests that never were, for what is made of them."""

from __future__ import annotations

from typing import Any

from cachestore.protocol import Counts, Finished, Rejected, Stamps, Started
from gateway.http.shapes import CompletionRequest
from gateway.telemetry.record import RequestRecord, Span, Submission

SECOND = 1_000_000_000


def record(*, headers: list[tuple[bytes, bytes]] | None = None, method: str = "POST", **fields: Any) -> RequestRecord:
    """One that began at 100 s and ended at 110 s, and was authenticated and answered."""
    made = RequestRecord(request_id="req_1", method=method, headers=headers or [], observe=lambda record: None)
    made.start_ns, made.end_ns, made.unix_offset_ns = 100 * SECOND, 110 * SECOND, 0
    made.route, made.is_public, made.status, made.tenant_id = "/v1/completions", False, 200, "tnt_1"
    made.authenticated = Span(100 * SECOND, 101 * SECOND)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def generation(**fields: Any) -> RequestRecord:
    """One that named the model."""
    body: dict[str, Any] = {"model": "salty", "prompt": "x"} | fields
    wanted = CompletionRequest(**body).generation()
    return record(operation="text_completion", model="salty", generation=wanted, block_tokens=16)


def started(record: RequestRecord, *, cached_tokens: int = 32, first: bool = True) -> Submission:
    """A submission of 50 tokens that was queued at 102 s and admitted at 103 s."""
    submission = record.submission(50, first=first, queued_ns=102 * SECOND)
    stamps = Stamps(queued_ns=102 * SECOND, started_ns=103 * SECOND)
    submission.started = Started(
        request=1, cached_tokens=cached_tokens, miss_block=2, miss_reason="diverged", stamps=stamps
    )
    return submission


def finished(submission: Submission, *, reason: Any = "length", output_tokens: int = 5, **fields: Any) -> None:
    """Its first token came at 105 s, its last at 109 s."""
    first_token_ns = 105 * SECOND if output_tokens else 0
    end = Finished(
        request=1,
        reason=reason,
        stamps=Stamps(
            queued_ns=102 * SECOND,
            started_ns=103 * SECOND if submission.started else 0,
            first_token_ns=first_token_ns,
            finished_ns=109 * SECOND,
        ),
        counts=Counts(output_tokens=output_tokens, computed_tokens=22, steps=6, written_blocks=1, preemptions=1),
        **fields,
    )
    submission.finish(end, output_tokens)


def rejected(code: Any) -> Rejected:
    return Rejected(request=1, code=code, detail="detail")
