"""Figures as lines while they are made, as tables in the end, and as a file that is up to date at any time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.figures import Spread, table
from benchmarks.gpu.machine import Sample

OURS = "saltern"


@dataclass(frozen=True, slots=True)
class Figure:
    """What became of one contender in one case: times, or else why there are none.

    Attributes:
        share: of the limit, which the shapes' least work and the median time make.
        aim: the share that is aimed at.
        wrong: what was wrong with the result; it was not timed then.
        missing: why it was not measured, which is nobody's fault.
    """

    part: str
    case: str
    contender: str
    device_us: Spread | None = None
    host_us: float | None = None
    share: float | None = None
    aim: float | None = None
    tiles: dict[str, Any] | None = None
    wrong: str | None = None
    missing: str | None = None

    @classmethod
    def of(
        cls, part: str, case: str, contender: str, samples: Sequence[Sample], *, least_us: float,
        aim: float | None = None, tiles: dict[str, Any] | None = None,
    ) -> Figure:  # fmt: skip
        """Of samples, for work that takes `least_us` at the machine's limit."""
        device_us = Spread.of([sample.device_us for sample in samples])
        host_us = median(sample.host_us for sample in samples)
        return cls(part, case, contender, device_us, host_us, least_us / device_us.median, aim, tiles)

    def __str__(self) -> str:
        if self.wrong is not None:
            return f"{self.contender} WRONG: {self.wrong}"
        if self.device_us is None:
            return f"{self.contender} not measured: {self.missing}"
        share = f", {self.share:.0%} of the limit" if self.share is not None else ""
        aim = f" (aim {self.aim:.0%})" if self.aim is not None else ""
        return f"{self.contender} {self.device_us.median:.1f} us{share}{aim}"


@dataclass(slots=True)
class Report:
    """All there is to say of one run, in the file (if one is given) as soon as it is known.

    Attributes:
        facts: by name: versions, device, limits, how the tests went, seconds of each part.
        failures: what else than a figure makes the run a failure.
    """

    file: Path | None
    say: Callable[[str], None]
    facts: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)

    def note(self, name: str, fact: Any, line: str) -> None:
        self.facts[name] = fact
        self.say(line)
        self._write()

    def add(self, figures: Iterable[Figure]) -> None:
        """Figures of one case."""
        figures = list(figures)
        self.figures += figures
        for part, case in dict.fromkeys((figure.part, figure.case) for figure in figures):
            told = "; ".join(str(figure) for figure in figures if (figure.part, figure.case) == (part, case))
            self.say(f"{part}, {case}: {told}")
        self._write()

    def fail(self, line: str) -> None:
        self.failures.append(line)
        self.say(f"FAILED {line}")
        self._write()

    @property
    def status(self) -> int:
        """The exit status: 1 when something failed or a result was wrong."""
        return int(bool(self.failures) or any(figure.wrong is not None for figure in self.figures))

    def _write(self) -> None:
        if self.file is None:
            return
        document = {**self.facts, "failures": self.failures, "figures": [asdict(figure) for figure in self.figures]}
        unfinished = self.file.with_name(self.file.name + ".part")
        unfinished.write_text(json.dumps(document, indent=1) + "\n")
        os.replace(unfinished, self.file)


def tables(figures: Sequence[Figure]) -> str:
    """A table for each part: microseconds of all contenders, and our share of the limit beside what is aimed at."""
    return "\n\n".join(_table(part, figures) for part in dict.fromkeys(figure.part for figure in figures))


def _table(part: str, figures: Sequence[Figure]) -> str:
    cells = {(figure.case, figure.contender): figure for figure in figures if figure.part == part}
    cases = list(dict.fromkeys(case for case, _ in cells))
    contenders = list(dict.fromkeys(contender for _, contender in cells))
    rows = [[f"{part}, us", *contenders, "of the limit", "aim", "host"]]
    for case in cases:
        ours = cells.get((case, OURS))
        told = ["", "", ""]
        if ours is not None and ours.device_us is not None:
            told = [_percent(ours.share), _percent(ours.aim), f"{ours.host_us:.0f}"]
        rows.append([case, *[_time(cells.get((case, contender))) for contender in contenders], *told])
    return table(rows)


def _time(figure: Figure | None) -> str:
    if figure is None or figure.missing is not None:
        return "-"
    return "WRONG" if figure.device_us is None else f"{figure.device_us.median:.1f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"
