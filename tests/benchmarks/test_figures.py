from __future__ import annotations

import pytest

from benchmarks.figures import Spread, percentile, table


def test_a_spread_has_the_middle_and_the_ends() -> None:
    assert Spread.of([5.0, 1.0, 2.0]) == Spread(2.0, 1.0, 5.0)
    with pytest.raises(ValueError, match="nothing was measured"):
        Spread.of([])


def test_a_ratio_is_of_the_medians_and_its_ends_are_of_the_pairs() -> None:
    assert Spread.of_ratios([1.0, 4.0, 6.0], [2.0, 2.0, 6.0]) == Spread(2.0, 0.5, 2.0)
    with pytest.raises(ValueError, match="shorter"):
        Spread.of_ratios([1.0, 2.0], [1.0])


@pytest.mark.parametrize(("share", "value"), [(0.5, 50), (0.99, 99), (0.991, 100), (1.0, 100), (0.001, 1)])
def test_a_percentile_is_the_nearest_rank(share: float, value: float) -> None:
    assert percentile([float(sample) for sample in range(100, 0, -1)], share) == value


@pytest.mark.parametrize(("samples", "share"), [([], 0.5), ([1.0], 0.0), ([1.0], 99.0)])
def test_a_percentile_of_nothing_or_beyond_is_refused(samples: list[float], share: float) -> None:
    with pytest.raises(ValueError, match="no percentile"):
        percentile(samples, share)


def test_a_table_lines_up() -> None:
    assert table([["name", "ms"], ["a", "10.5"], ["longer", "1"]]) == "name      ms\na       10.5\nlonger     1"
