from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks import reuse_cost
from benchmarks.reuse_cost import Asked, Prompts, WrongAnswer
from tests.cachestore.serving import WELCOME, connected, serving

LOADS = {"prompts": (3, 40, 1), "answers": (4, 9, 12)}


@pytest.mark.anyio
async def test_both_sides_are_asked_the_same_in_turns(tmp_path: Path) -> None:
    async with serving(tmp_path / "a") as a, serving(tmp_path / "b") as b, connected(a) as mine, connected(b) as theirs:
        asked = {"with": Asked(mine, time.process_time), "without": Asked(theirs, time.process_time)}
        samples = await reuse_cost.measure(asked, Prompts(WELCOME.limits.vocabulary_tokens), 2, LOADS)
        computed = [(await client.stats()).computed_tokens for client in (mine, theirs)]
        # Four rounds, two of which are not counted; of an answer, the last token is not computed.
        assert computed == [4 * (3 * 40 + 4 * (9 + 11))] * 2
        # Blocks of four tokens, those of answers included.
        assert [(await client.stats()).cached_blocks for client in (mine, theirs)] == [4 * (3 * 10 + 4 * 5)] * 2
    assert {load: {side: len(each) for side, each in sides.items()} for load, sides in samples.items()} == {
        f"{load}, {what}": {"with": 2, "without": 2} for load in LOADS for what in ("seconds", "CPU seconds")
    }
    # A line for each pair and for each median, and a heading.
    assert len(reuse_cost.text(samples).splitlines()) == 1 + 4 * 2 + 4


@pytest.mark.anyio
async def test_what_finds_something_is_no_figure(tmp_path: Path) -> None:
    (prompt,) = Prompts(WELCOME.limits.vocabulary_tokens).draw(1, 20)
    async with serving(tmp_path) as server, connected(server) as client:
        asked = Asked(client, time.process_time)
        assert min(await asked.seconds([prompt], 4)) > 0
        with pytest.raises(WrongAnswer, match="cached_tokens=16"):
            await asked.seconds([prompt], 4)


def test_no_two_prompts_begin_alike() -> None:
    prompts = Prompts(100)
    drawn = [*prompts.draw(60, 5), *prompts.draw(40, 5)]
    assert len({prompt[0] for prompt in drawn}) == 100


def test_a_ratio_says_how_many_times_as_long_it_takes_with_the_cache() -> None:
    samples = {"prompts": {"with": [2.2, 2.0, 4.0], "without": [2.0, 2.0, 2.0]}}
    assert reuse_cost.text(samples).splitlines()[-1].endswith("1.100 (1.000 – 2.000)")


def test_wrong_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        reuse_cost.parse(["--rounds", "0"])
    assert ended.value.code == 2
    assert "--rounds 0 measures nothing" in capsys.readouterr().err
