"""An order of eviction that would cut every chain, if what it is told of chains did not keep it from that."""

from __future__ import annotations

from policies.reuse import LearntReuse, _Cell


class Contrary(LearntReuse):
    """What is expected to yield most gives way: the youngest before anything is learnt, heads before their tails."""

    def _rank(self) -> list[_Cell]:
        return super()._rank()[::-1]
