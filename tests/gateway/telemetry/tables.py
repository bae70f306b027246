"""The tables of docs/telemetry.md, made from the declarations.

    python -m tests.gateway.telemetry.tables     writes them into the page
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from gateway.telemetry import names

PAGE = Path(__file__).parents[3] / "docs" / "telemetry.md"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _names(attributes: Iterable[names.Attribute]) -> str:
    return ", ".join(f"`{attribute.name}`" for attribute in attributes)


def _attributes() -> list[names.Attribute]:
    used = {each.name: each for kind in (*names.SPANS, *names.METRICS) for each in kind.attributes}
    return [used[name] for name in sorted(used)]


def tables() -> dict[str, str]:
    """By the name between the page's markers."""
    return {
        "spans": _table(
            ("span", "covers", "attributes"),
            ((f"`{span.name}`", span.meaning, _names(span.attributes)) for span in names.SPANS),
        ),
        "metrics": _table(
            ("metric", "kind", "unit", "counts", "attributes"),
            ((f"`{m.name}`", m.kind, m.unit, m.meaning, _names(m.attributes)) for m in names.METRICS),
        ),
        "attributes": _table(
            ("attribute", "type", "meaning"),
            ((f"`{attribute.name}`", attribute.type, attribute.meaning) for attribute in _attributes()),
        ),
        "log": _table(("field", "meaning"), ((f"`{field.name}`", field.meaning) for field in names.LOG_FIELDS)),
    }


def written(page: str) -> str:
    """The page with its tables as they should be."""
    for name, table in tables().items():
        between = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        page, found = between.subn(lambda match, table=table: match[1] + table + match[2], page)
        assert found == 1, f"the page has {found} places for {name}"
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
