"""What stores have counted, over all stores that this gateway was connected to: counters that never fall."""

from __future__ import annotations

from dataclasses import dataclass, fields

from cachestore.protocol import StatsReport


@dataclass(slots=True)
class Totals:
    steps: int = 0
    step_ns: int = 0
    preemptions: int = 0
    evictions: int = 0
    limit_evictions: int = 0


class StoreTotals:
    """A store that starts anew counts from zero again; one that is only reached anew goes on."""

    def __init__(self) -> None:
        self.totals = Totals()
        self._store = ""
        self._seen = Totals()

    def take(self, store: str, report: StatsReport) -> None:
        """Add what has happened since the last report of this store; of an older report nothing."""
        if store != self._store:
            self._store, self._seen = store, Totals()
        for field in fields(Totals):
            now, before = getattr(report, field.name), getattr(self._seen, field.name)
            if now > before:
                setattr(self.totals, field.name, getattr(self.totals, field.name) + now - before)
                setattr(self._seen, field.name, now)
