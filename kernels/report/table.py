"""The report as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from kernels.report.row import Row, problems

HEADINGS = ("variant", "tile", "warps", "stages", "registers", "spills", "shared memory", "matrix", "wide loads")


def table(rows: Sequence[Row]) -> str:
    """One table for each target, its rows in the order given, what is wrong below it, and a line that sums it up."""
    return "\n".join(line for _, some in groupby(rows, lambda row: row.target) for line in _lines(list(some)))


def _lines(rows: list[Row]) -> Iterator[str]:
    cells = [HEADINGS, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADINGS))]
    yield rows[0].target
    for line in cells:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
    faults = [f"  FAILS {row.variant}: {problem}" for row in rows for problem in problems(row)]
    yield from faults
    done = [row for row in rows if row.registers]
    if done:
        fullest = max(done, key=lambda row: row.shared_memory_bytes)
        yield (
            f"  {len(done)} of {len(rows)} compiled, {sum(bool(problems(row)) for row in rows)} fail; "
            f"at most {max(row.registers for row in done)} registers, {max(row.spills for row in done)} spills, "
            f"{fullest.shared_memory_bytes} of {fullest.shared_memory_limit_bytes} bytes of shared memory"
        )
    yield ""


def _cells(row: Row) -> tuple[str, ...]:
    tile = f"{row.rows} × {row.keys}" if row.rows else "-"
    if not row.registers:
        return (row.variant, tile, *["-"] * 6, row.not_available or "no machine code")
    matrix = ", ".join(f"{count} {kind}" for kind, count in row.matrix_instructions.items())
    return (
        row.variant,
        tile,
        str(row.num_warps),
        str(row.num_stages),
        str(row.registers),
        f"{row.spills} + {row.scalar_spills} scalar" if row.scalar_spills else str(row.spills),
        f"{row.shared_memory_bytes} ({row.shared_memory_bytes / row.shared_memory_limit_bytes:.0%})",
        matrix or ("none" if row.matrix_expected else "not expected"),
        str(row.wide_loads),
    )
