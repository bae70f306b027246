from __future__ import annotations

import re

from gateway.telemetry import names
from tests.gateway.telemetry.tables import PAGE, written

ATTRIBUTES = [value for value in vars(names).values() if isinstance(value, names.Attribute)]


def test_the_page_agrees_with_the_declarations() -> None:
    page = PAGE.read_text()
    assert page == written(page), "run python -m tests.gateway.telemetry.tables"


def test_every_name_is_declared_once_and_used() -> None:
    for declared in (ATTRIBUTES, names.METRICS, names.SPANS, names.LOG_FIELDS):
        told = [each.name for each in declared]
        assert len(told) == len(set(told))
    used = {attribute.name for kind in (*names.SPANS, *names.METRICS) for attribute in kind.attributes}
    assert used == {attribute.name for attribute in ATTRIBUTES}
    assert {value for value in vars(names).values() if isinstance(value, names.Metric)} == set(names.METRICS)
    assert {value for value in vars(names).values() if isinstance(value, names.SpanKind)} == set(names.SPANS)


def test_names_are_of_the_conventions_or_begin_with_ours() -> None:
    for each in (*ATTRIBUTES, *names.METRICS):
        assert re.fullmatch(r"(gen_ai|http|error|saltern)(\.[a-z_]+)+", each.name)


def test_metrics_that_nobody_asked_for_bear_no_tenant() -> None:
    bearing = [metric.name for metric in names.METRICS if names.TENANT in metric.attributes]
    assert bearing == ["saltern.tenant.requests", "saltern.tenant.tokens"]
