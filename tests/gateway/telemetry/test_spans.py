from __future__ import annotations

import pytest

from gateway.http.errors import ApiError
from gateway.telemetry.spans import SpanTree, span_tree
from tests.gateway.telemetry.records import SECOND, finished, generation, record, rejected, started


def shape(tree: SpanTree) -> dict[str, tuple[float, float, str | None]]:
    """Of each span below the root: seconds since the request, and why it failed."""
    found = {}
    for child in tree.children:
        error = next((value for name, value in child.attributes.items() if name.name == "error.type"), None)
        found[child.name] = ((child.start_ns / SECOND) - 100, (child.end_ns / SECOND) - 100, error)
        found |= shape(child)
    return found


def attributes(tree: SpanTree, name: str) -> dict[str, object]:
    (found,) = [child for child in tree.children if child.name == name]
    return {str(attribute): value for attribute, value in found.attributes.items() if value is not None}


def test_a_generation_is_told_by_the_stamps_of_the_store() -> None:
    request = generation()
    finished(started(request))
    assert shape(span_tree(request)) == {
        "text_completion salty": (0, 10, None),
        "tenant.authenticate": (0, 1, None),
        "store.queue": (2, 3, None),
        "store.prefill": (3, 5, None),
        "store.decode": (5, 9, None),
    }
    (asked,) = span_tree(request).children
    # Two of six steps led to the first token.
    assert attributes(asked, "store.prefill")["saltern.store.chunks"] == 2
    assert attributes(asked, "store.decode") == {
        "saltern.store.output_tokens": 5,
        "saltern.store.steps": 4,
        "saltern.store.preemptions": 1,
    }


def test_an_abort_is_told_where_it_happened() -> None:
    waiting, prefilling, decoding = generation(), generation(), generation()
    finished(waiting.submission(50, first=True, queued_ns=102 * SECOND), reason="aborted", output_tokens=0)
    finished(started(prefilling), reason="aborted", output_tokens=0)
    finished(started(decoding), reason="aborted")
    for request, name in ((waiting, "store.queue"), (prefilling, "store.prefill"), (decoding, "store.decode")):
        request.disconnected = True
        found = shape(span_tree(request))
        assert [span for span, (*_, error) in found.items() if error == "aborted"] == [name]
        assert list(found)[-1] == name
        assert request.outcome == "aborted"


def test_a_store_that_is_lost_is_told_as_far_as_it_is_known() -> None:
    request = generation()
    submission = started(request)
    submission.first_output_ns = 104 * SECOND
    submission.lose(3)
    submission.ended_ns = 106 * SECOND
    request.fail(ApiError(503, "lost"))
    found = shape(span_tree(request))
    assert found["store.prefill"] == (3, 4, None)
    assert found["store.decode"] == (4, 6, "store_lost")
    assert (request.outcome, request.error, request.output_tokens) == ("failed", "store_lost", 3)


def test_the_first_end_of_a_submission_counts() -> None:
    request = generation()
    submission = started(request)
    finished(submission)
    submission.lose(0)
    submission.refuse(rejected("draining"))
    assert (request.output_tokens, submission.refusal) == (5, None)


@pytest.mark.parametrize("code", ["queue_timeout", "draining", "over_capacity"])
def test_a_refusal_by_the_store_names_its_reason(code: str) -> None:
    request = generation()
    submission = request.submission(50, first=True, queued_ns=102 * SECOND)
    submission.refuse(rejected(code))
    request.fail(ApiError(503, "no", code="server_is_overloaded"))
    assert (request.outcome, request.error) == ("refused", code)


def test_only_first_choices_count_their_prompt() -> None:
    request = generation(n=2)
    finished(started(request))
    finished(started(request, cached_tokens=48, first=False))
    told = (request.input_tokens, request.cached_tokens, request.written_tokens, request.output_tokens)
    assert told == (50, 32, 16, 10)


def test_a_record_is_told_once_when_response_and_submissions_are_over() -> None:
    told = []
    request = generation()
    request._observe = told.append
    submission = started(request)
    request.release()
    assert told == []
    finished(submission)
    assert told == [request]
    submission.lose(0)
    assert told == [request]


@pytest.mark.parametrize(("seed", "told"), [(0, 0), (-1, -1), ((1 << 63) - 1, (1 << 63) - 1), (-(1 << 63), -(1 << 63))])
def test_a_seed_is_told_as_it_was_sent(seed: int, told: int) -> None:
    (asked,) = span_tree(generation(seed=seed)).children
    assert {str(name): value for name, value in asked.attributes.items()}["gen_ai.request.seed"] == told


def test_what_a_client_did_wrong_is_no_error_of_the_server() -> None:
    refused, broken = record(status=429, failure="rate_limit_exceeded"), record(status=500, failure="500")
    assert not span_tree(refused).is_error
    assert span_tree(broken).is_error
