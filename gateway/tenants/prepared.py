"""Queries of every request on SQLite: compiled once, executed by its own driver.

SQLAlchemy takes several times as long to hand a query over as SQLite takes to answer it.
"""

from __future__ import annotations

import sqlite3
from collections import namedtuple
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Select
from sqlalchemy.engine import Dialect


class Prepared:
    """
    Args:
        statement: names the columns of the rows; its values are converted as its types say.
        dialect: SQLite's.
    """

    def __init__(self, statement: Select[*tuple[Any, ...]], dialect: Dialect) -> None:
        compiled = statement.compile(dialect=dialect, compile_kwargs={"render_postcompile": True})
        self._sql = str(compiled)
        self._names = compiled.positiontup or []
        self._constants = {name: value for name, value in compiled.params.items() if value is not None}
        columns = list(statement.selected_columns)
        # Types can't tell what is named only here.
        self._row = namedtuple("Row", [column.key for column in columns])  # type: ignore[misc]
        self._converted = [
            (number, convert)
            for number, column in enumerate(columns)
            if (convert := column.type.dialect_impl(dialect).result_processor(dialect, None))
        ]

    def rows(self, connection: sqlite3.Connection, values: Mapping[str, object]) -> list[Any]:
        """Raises sqlite3.OperationalError: the database is locked, or gone."""
        given = {**self._constants, **values}
        found = []
        for row in connection.execute(self._sql, [given[name] for name in self._names]):
            converted = list(row)
            for number, convert in self._converted:
                converted[number] = convert(converted[number])
            found.append(self._row(*converted))
        return found
