"""What is noted of one HTTP request on its way: stamps and counts, never content.

A record is over when the response is, and every submission at the store as well: an aborted one ends a moment after its
client has left. Then it is handed to whoever observes, once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from cachestore.protocol import Finished, Rejected, Started
from gateway.http.answers import FinishReason
from gateway.http.errors import ApiError
from gateway.http.shapes import Generation
from gateway.telemetry.names import OTHER_METHOD

Outcome = Literal["finished", "aborted", "refused", "failed"]
Operation = Literal["chat", "text_completion"]

STORE_LOST = "store_lost"
CLIENT_DISCONNECTED = "client_disconnected"
# What nginx logs for a client that left before there was a status.
CLIENT_CLOSED_REQUEST = 499

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"})

now_ns = time.monotonic_ns


@dataclass(slots=True)
class Span:
    """A time that was taken; CLOCK_MONOTONIC in ns, as the store's stamps are. `error`: why it did not succeed."""

    start_ns: int
    end_ns: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """`tokens` and full `blocks` of all prompts; `remembered_tokens` were not tokenised again."""

    tokens: int
    blocks: int
    remembered_tokens: int


class Submission:
    """One choice at the store, from `Submit` to its end.

    Attributes:
        first: it is the first choice of its prompt, which counts the prompt.
        first_output_ns: when its first tokens came; the store's own stamp comes with its end.
        output_tokens: what it sampled, up to the one that completed a stop string.
        refusal: the code with which the store refused it, or `store_lost`.
    """

    def __init__(self, record: RequestRecord, prompt_tokens: int, *, first: bool, queued_ns: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.first = first
        self.queued_ns = queued_ns
        self.first_output_ns = 0
        self.ended_ns = 0
        self.started: Started | None = None
        self.finished: Finished | None = None
        self.refusal: str | None = None
        self.output_tokens = 0
        self._record = record

    def finish(self, finished: Finished, output_tokens: int) -> None:
        if not self.ended_ns:
            self.finished, self.output_tokens = finished, output_tokens
            self._end(max(finished.stamps.finished_ns, self.queued_ns))

    def refuse(self, rejected: Rejected) -> None:
        if not self.ended_ns:
            self.refusal = rejected.code
            self._end(now_ns())

    def lose(self, output_tokens: int) -> None:
        """The store went away, or does not answer."""
        if not self.ended_ns:
            self.refusal, self.output_tokens = STORE_LOST, output_tokens
            self._end(now_ns())

    def _end(self, ended_ns: int) -> None:
        self.ended_ns = ended_ns
        self._record.submission_ended()


class RequestRecord:
    """One request. Whoever makes it or holds it calls `release` when its part is over.

    Attributes:
        route: the template that matched, None where none did.
        authenticated, prepared, reserved, settled: when that was done; `reserved` with whose limit refused it.
        generation: how to generate, once the request is known to be for the served model.
        status: of the response; 0 as long as there is none.
        disconnected: the client left before the end.
        failure: why the request was refused or its answer ended early.
    """

    def __init__(
        self,
        *,
        request_id: str,
        method: str,
        headers: list[tuple[bytes, bytes]],
        observe: Callable[[RequestRecord], None],
    ) -> None:
        self.request_id = request_id
        self.method = method if method in _METHODS else OTHER_METHOD
        self.trace_headers = _trace_headers(headers)
        self.start_ns = now_ns()
        self.unix_offset_ns = time.time_ns() - self.start_ns
        self.end_ns = 0
        self.route: str | None = None
        self.is_public = True
        self.status = 0
        self.tenant_id: str | None = None
        self.authenticated: Span | None = None
        self.prepared: tuple[Span, Prepared] | None = None
        self.reserved: tuple[Span, str | None] | None = None
        self.settled: Span | None = None
        self.operation: Operation = "chat"
        self.model: str | None = None
        self.generation: Generation | None = None
        self.block_tokens = 0
        self.response_id: str | None = None
        self.first_chunk_ns = 0
        self.finish_reasons: list[FinishReason] = []
        self.disconnected = False
        self.failure: str | None = None
        self.submissions: list[Submission] = []
        self._observe = observe
        # The response, each submission, and a reservation.
        self._held = 1
        self._ended = asyncio.Event()

    def submission(self, prompt_tokens: int, *, first: bool, queued_ns: int) -> Submission:
        """One that was sent to the store. `queued_ns`: before it was, as the store may be quick."""
        submission = Submission(self, prompt_tokens, first=first, queued_ns=queued_ns)
        self.submissions.append(submission)
        self.hold()
        return submission

    async def submissions_ended(self) -> None:
        """Wait until the store is done with all of them; nothing may be submitted any more."""
        while not all(submission.ended_ns for submission in self.submissions):
            self._ended.clear()
            await self._ended.wait()

    def fail(self, error: ApiError) -> None:
        """What the client is told; of the store's own reasons the last."""
        reasons = [submission.refusal for submission in self.submissions if submission.refusal]
        self.failure = reasons[-1] if reasons else error.code or str(error.status)

    def submission_ended(self) -> None:
        self._ended.set()
        self.release()

    def hold(self) -> None:
        """One more has to `release` it before it is over."""
        self._held += 1

    def release(self) -> None:
        self._held -= 1
        if not self._held:
            self.end_ns = now_ns()
            self._observe(self)

    @property
    def status_code(self) -> int:
        return self.status or CLIENT_CLOSED_REQUEST

    @property
    def error(self) -> str | None:
        return CLIENT_DISCONNECTED if self.disconnected else self.failure

    @property
    def outcome(self) -> Outcome:
        if self.disconnected:
            return "aborted"
        if self.failure is None:
            return "finished"
        return "failed" if self.started else "refused"

    @property
    def started(self) -> list[Submission]:
        """What the store admitted."""
        return [submission for submission in self.submissions if submission.started]

    @property
    def input_tokens(self) -> int:
        return sum(submission.prompt_tokens for submission in self.started if submission.first)

    @property
    def cached_tokens(self) -> int:
        return sum(s.started.cached_tokens for s in self.submissions if s.started and s.first)

    @property
    def written_tokens(self) -> int:
        blocks = sum(s.finished.counts.written_blocks for s in self.submissions if s.finished and s.first)
        return blocks * self.block_tokens

    @property
    def output_tokens(self) -> int:
        return sum(submission.output_tokens for submission in self.submissions)

    @property
    def first_token_ns(self) -> int:
        """When the first token was sampled; 0 when none was."""
        stamps = [s.finished.stamps.first_token_ns for s in self.submissions if s.finished]
        return min(filter(None, stamps), default=0)

    @property
    def queue_ns(self) -> int:
        """The longest wait in the store's queue."""
        ends = [(s.started.stamps.started_ns if s.started else s.ended_ns) - s.queued_ns for s in self.submissions]
        return max(0, *ends) if ends else 0

    @property
    def overhead_ns(self) -> int:
        """What was not the store's: before the first submission and after the last end."""
        if not self.submissions:
            return self.end_ns - self.start_ns
        store_ns = max(s.ended_ns for s in self.submissions) - min(s.queued_ns for s in self.submissions)
        return max(0, self.end_ns - self.start_ns - store_ns)


def _trace_headers(headers: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """`traceparent` and `tracestate` (W3C Trace Context), and nothing else that a client sends."""
    found: dict[str, str] = {}
    for name, value in headers:
        if name == b"traceparent":
            if "traceparent" in found:
                return {}
            found["traceparent"] = value.decode("latin-1")
        elif name == b"tracestate":
            # Several lines are one list.
            found["tracestate"] = ",".join(filter(None, (found.get("tracestate"), value.decode("latin-1"))))
    return found
