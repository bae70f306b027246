"""What is said of samples: the middle, the ends, and how two servers compare."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """A median, and the least and the greatest that it stands for."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Raises ValueError without samples."""
        if not samples:
            raise ValueError("nothing was measured")
        return cls(statistics.median(samples), min(samples), max(samples))

    @classmethod
    def of_ratios(cls, samples: Sequence[float], others: Sequence[float]) -> Spread:
        """Of `samples` to `others`: the ratio of the medians, between the ratios of the single pairs.

        Raises:
            ValueError: the two are not pairs.
        """
        pairs = [mine / theirs for mine, theirs in zip(samples, others, strict=True)]
        ends = Spread.of(pairs)
        return cls(statistics.median(samples) / statistics.median(others), ends.least, ends.greatest)


def percentile(samples: Sequence[float], share: float) -> float:
    """The least sample that at least `share` (above 0, at most 1) of all samples do not exceed: the nearest rank.

    Raises:
        ValueError: there are no samples, or no such share.
    """
    if not samples or not 0 < share <= 1:
        raise ValueError(f"no percentile {share:g} of {len(samples)} samples")
    return sorted(samples)[math.ceil(share * len(samples)) - 1]


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of equal length as lines: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
