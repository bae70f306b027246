"""What the commands of the admin API have in common: options, the client, and how an answer is shown."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.admin_client import AdminClient, AdminClientError, default_data_dir

DataDir = Annotated[
    Path,
    typer.Option(
        envvar="SALTERN_DATA_DIR",
        default_factory=default_data_dir,
        show_default="~/.local/share/saltern",
        help="Its admin-url and admin-key are used unless SALTERN_ADMIN_URL and SALTERN_ADMIN_KEY are set.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, as the admin API answers; lists whole.")]
TenantOption = Annotated[str, typer.Option("--tenant", help="Name or id.")]


@contextmanager
def open_client(data_dir: Path) -> Iterator[AdminClient]:
    """What the API refuses within is one line on stderr and exit code 1."""
    try:
        yield AdminClient.open(data_dir)
    except AdminClientError as error:
        typer.echo(f"saltern: {error}", err=True)
        raise typer.Exit(1) from None


def show(answer: Any, as_json: bool, text: str) -> None:
    typer.echo(json.dumps(answer, indent=2) if as_json else text)


def show_fields(answer: Mapping[str, Any], as_json: bool, null: str = "-") -> None:
    """A line for each field.

    Args:
        null: how a field without a value reads.
    """
    show(answer, as_json, "\n".join(f"{name}: {_cell(value, null)}" for name, value in answer.items()))


def show_rows(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], as_json: bool) -> None:
    show({"data": rows, "next_cursor": None}, as_json, table(rows, columns))


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    lines = [columns, *[[_cell(row[column], "-") for column in columns] for row in rows]]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _cell(value: Any, null: str) -> str:
    if value is None:
        return null
    return ", ".join(value) if isinstance(value, list) else str(value)
