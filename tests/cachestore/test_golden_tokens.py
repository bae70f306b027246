"""The store answers token for token like transformers' own `generate`, whatever the company, the cache or the pool."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.cachestore import reference
from tests.cachestore.conftest import MakeRunner
from tests.cachestore.support import Answer, Harness

ANSWER_TOKENS = 64
# Two logits that are closer than this may be rounded into either order.
CLOSE = 1e-3
VOCABULARY_TOKENS = 49_152

PREAMBLE = (
    "You are the keeper of a lighthouse on a small island in the north. Every evening you climb the stairs, trim the "
    "wick and light the lamp, and every morning you write into the log what passed by in the night: ships, storms, "
    "birds that lost their way. You write plainly and you never invent a ship. When somebody asks you a question, you "
    "answer from the log, and if the log says nothing about it you say so. "
)

PROMPTS = (
    "The capital of France",
    "Once upon a time there was a little fox who wanted to learn how to swim, so she went to the river and",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    PREAMBLE + "Question: what did you see in the night of the first of May?\nAnswer:",
    PREAMBLE + "Question: how do you trim a wick?\nAnswer:",
    PREAMBLE + PREAMBLE.replace("island", "rock") + PREAMBLE.replace("north", "west") + "This is the log. Tonight",
    "Water boils at 100 degrees Celsius at sea level. On a high mountain the air is thinner, which means that",
    "A list of ten things to pack for a week of walking in the mountains:\n1.",
)


@dataclass
class Reference:
    """The other process, begun early so that it computes while we do."""

    process: subprocess.Popen[bytes]
    answers: dict[str, list[list[float]]] | None = None

    def compared(self, ours: list[list[int]]) -> None:
        """Equal up to where the reference itself was in doubt, and it was in doubt about few."""
        if self.answers is None:
            assert self.process.stdout is not None
            self.answers = json.load(self.process.stdout)
            assert self.process.wait() == 0
        compared = 0
        for number, (mine, theirs, gaps) in enumerate(
            zip(ours, self.answers["tokens"], self.answers["gaps"], strict=True)
        ):
            end = next((at for at, gap in enumerate(gaps) if gap < CLOSE), ANSWER_TOKENS)
            assert mine[:end] == theirs[:end], f"prompt {number}"
            assert len(mine) == len(theirs) == ANSWER_TOKENS
            compared += end
        assert compared > 0.9 * ANSWER_TOKENS * len(ours)


@pytest.fixture(scope="module")
def prompts(default_model: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(default_model / "tokenizer.json"))
    encoded = [tokenizer.encode(text).ids for text in PROMPTS]
    assert min(map(len, encoded)) <= 5
    assert max(map(len, encoded)) > 200
    return encoded


@pytest.fixture(scope="module")
def golden(default_model: Path, prompts: list[list[int]]) -> Iterator[Reference]:
    process = subprocess.Popen(
        [sys.executable, reference.__file__, str(default_model)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps({"prompts": prompts, "tokens": ANSWER_TOKENS}).encode())
    process.stdin.close()
    yield Reference(process)
    process.kill()
    process.wait()


def _store(make_runner: MakeRunner, blocks: int, step_tokens: int) -> Harness:
    return Harness(
        make_runner(blocks),
        blocks=blocks,
        block_tokens=16,
        step_tokens=step_tokens,
        vocabulary_tokens=VOCABULARY_TOKENS,
    )


def _together(store: Harness, prompts: list[list[int]]) -> list[Answer]:
    answers = [store.submit(prompt, max_tokens=ANSWER_TOKENS) for prompt in prompts]
    store.run(*answers)
    for answer in answers:
        store.seal(answer)
    return answers


def _shared_tokens(prompt: list[int], other: list[int]) -> int:
    """Of the whole blocks with which both begin, but for the last token."""
    same = next((at for at, (one, two) in enumerate(zip(prompt, other, strict=False)) if one != two), len(other))
    return min(same, len(prompt) - 1) // 16 * 16


def test_golden_tokens_alone_cold_and_again_from_cache(
    make_runner: MakeRunner, prompts: list[list[int]], golden: Reference
) -> None:
    cold, cached = [], []
    for prompt in prompts:
        store = _store(make_runner, 32, step_tokens=256)
        cold.append(store.complete(prompt, max_tokens=ANSWER_TOKENS))
        assert cold[-1].cached_tokens == 0
        # The first tokens tell whether the cached ones were read; the rest is what the next test compares.
        cached.append(store.complete(prompt, max_tokens=8))
        assert cached[-1].cached_tokens == (len(prompt) - 1) // 16 * 16
        assert cached[-1].tokens == cold[-1].tokens[:8]
    golden.compared([answer.tokens for answer in cold])


def test_golden_tokens_all_together_cold_and_again_from_cache(
    make_runner: MakeRunner, prompts: list[list[int]], golden: Reference
) -> None:
    store = _store(make_runner, 80, step_tokens=1024)
    cold = _together(store, prompts)
    # Whoever begins like another one waits for its blocks.
    shared = [
        max((_shared_tokens(each, other) for other in prompts[:at]), default=0) for at, each in enumerate(prompts)
    ]
    assert [answer.cached_tokens for answer in cold] == shared
    cached = _together(store, prompts)
    assert [answer.cached_tokens for answer in cached] == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]
    golden.compared([answer.tokens for answer in cold])
    golden.compared([answer.tokens for answer in cached])
    assert store.engine.scheduler.preemptions == 0


def test_golden_tokens_where_the_pool_is_too_small_for_all_of_them(
    make_runner: MakeRunner, prompts: list[list[int]], golden: Reference
) -> None:
    store = _store(make_runner, 34, step_tokens=96)
    answers = _together(store, prompts)
    preempted = [answer for answer in answers if answer.finished and answer.finished.counts.preemptions]
    assert len(preempted) >= 3
    assert store.engine.stats(pushed=False).preemptions >= 3
    golden.compared([answer.tokens for answer in answers])
