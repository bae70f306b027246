from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.waste import LIMITS, Ask, Replay, Waste, short, text, trace


def keys_of(prompt_tokens: int) -> bytes:
    return b"".join(b"%032d" % number for number in range(prompt_tokens // 16))


@pytest.mark.parametrize(
    ("prompt_tokens", "waste"),
    [
        (20, Waste(steps=2, allocated=64, unused=12 + 11, ahead=12 + 11, greatest=12 / 32)),
        # The block of the first output token is taken with the prompt's.
        (32, Waste(steps=2, allocated=96, unused=16 + 15, ahead=16 + 15, greatest=16 / 48)),
        # The first step reaches 2,048.
        (2_052, Waste(steps=3, allocated=3 * 2_064, unused=12 + 12 + 11, ahead=16 + 12 + 11, greatest=12 / 2_064)),
    ],
)
def test_what_one_request_leaves_unused(prompt_tokens: int, waste: Waste) -> None:
    assert Replay(LIMITS).run([Ask(prompt_tokens, 2, keys_of(prompt_tokens))]) == waste


def test_short_requests_waste_less_than_4_percent() -> None:
    waste = Replay(LIMITS).run(short(200))
    assert waste.steps >= 64
    assert 0 < waste.unused < 0.04 * waste.allocated
    assert len(text({"short": waste}).splitlines()) == 2


def test_requests_of_a_trace_share_the_blocks_of_equal_ids(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 1_100, "output_length": 3, "hash_ids": [0, 1, 2]},
        {"timestamp": 9, "input_length": 1_024, "output_length": 3, "hash_ids": [0, 3]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second = trace(path)
    assert (first.prompt_tokens, first.answer_tokens, len(first.keys)) == (1_100, 3, 68 * 32)
    assert first.keys[: 32 * 32] == second.keys[: 32 * 32]
    names = [each.keys[at : at + 32] for each in (first, second) for at in range(0, len(each.keys), 32)]
    assert len(set(names)) == 68 + 32
    assert Replay(LIMITS).run([first, second]).steps > 3
