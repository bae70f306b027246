from __future__ import annotations

import pytest

from benchmarks import keys


def test_unkeyed_names_bind_what_came_before_them() -> None:
    names = keys.unkeyed(list(range(40)), 16)
    assert [len(name) for name in names] == [32, 32]
    other = keys.unkeyed([1, *range(1, 40)], 16)
    assert not set(names) & set(other)
    assert keys.unkeyed(list(range(32)), 16) == names


@pytest.mark.anyio
async def test_every_way_is_measured_for_every_size_of_block() -> None:
    spreads = await keys.measure(2)
    assert {name: set(each) for name, each in spreads.items()} == {
        name: {16, 64} for name in ("name_blocks", "ChainKey", "unkeyed")
    }
    assert all(spread.least > 0 for each in spreads.values() for spread in each.values())
    assert len(keys.text(spreads).splitlines()) == 4


def test_wrong_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        keys.parse(["--rounds", "0"])
    assert ended.value.code == 2
    assert "--rounds 0 measures nothing" in capsys.readouterr().err
