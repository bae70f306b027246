"""What it costs to keep the books of the block cache, beside vLLM's cache manager.

    python -m benchmarks.bookkeeping [--peer PATH_TO_PYTHON] [--rounds 15] [--json]

CPU time per block of a prompt of 8,192 blocks of 16 tokens, whose keys are computed, to match it, take blocks for what
did not match, publish and let go of it all:

    cold        nothing matches, and the pool is empty
    warm        all but the last block match
    pressure    nothing matches, and every block is one that was cached
    accounts    the same, as 64 prompts of 128 blocks, each of one of 64 accounts (vLLM knows no accounts)

and bytes of Python per block of a pool that is full of cached ones, after four times as many gave way. `--peer` is a
Python in which vLLM can be imported; the two sides are processes of one thread, and take turns slice by slice.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.arguments import parse_rounds, rounds_parser
from benchmarks.bookkeeping_sides import MEMORY_BLOCKS, SLICES
from benchmarks.figures import Spread, table

PROMPT_BLOCKS = 8_192


class Turns:
    """A process that does one piece of work at a time when it is told to."""

    def __init__(self, python: str, side: str, prompt_blocks: int) -> None:
        command = [python, "-m", "benchmarks.bookkeeping_sides", side, str(prompt_blocks)]
        self._side = side
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        # What it imports may print too.
        while self._line() != "ready":
            pass

    def cost(self, work: str) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(work + "\n")
        self._process.stdin.flush()
        return float(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self._side} ended: exit status {self._process.wait()}")
        return line.strip()

    def close(self) -> None:
        self._process.communicate()


def measure(sides: dict[str, str], rounds: int, prompt_blocks: int) -> dict[str, dict[str, list[float]]]:
    """Samples by side and work: nanoseconds per block of each slice, bytes per cached block by blocks of the pool.

    Args:
        sides: the Python of each.

    Raises:
        RuntimeError: a process ended before its work.
    """
    turns = {side: Turns(python, side, prompt_blocks) for side, python in sides.items()}
    samples: dict[str, dict[str, list[float]]] = {side: {name: [] for name in SLICES} for side in sides}
    try:
        # The first round is not counted, and who is first changes.
        for number in range(rounds + 1):
            for name in SLICES:
                for side in list(sides)[:: -1 if number % 2 else 1]:
                    cost = turns[side].cost(name)
                    if number:
                        samples[side][name].append(cost)
        for blocks in MEMORY_BLOCKS:
            for side in sides:
                samples[side][str(blocks)] = [turns[side].cost(str(blocks))]
    finally:
        for each in turns.values():
            each.close()
    return samples


def text(samples: dict[str, dict[str, list[float]]]) -> str:
    ours, *peers = samples
    rows = [["", *samples, *[f"{ours} is so many times as fast as {peer}" for peer in peers]]]
    for name in SLICES:
        row = [f"{name}, ns per block"]
        for each in samples.values():
            spread = Spread.of(each[name])
            row.append(f"{spread.median:,.0f} ({spread.least:,.0f} – {spread.greatest:,.0f})")
        for peer in peers:
            ratio = Spread.of_ratios(samples[peer][name], samples[ours][name])
            row.append(f"{ratio.median:.1f} ({ratio.least:.1f} – {ratio.greatest:.1f})")
        rows.append(row)
    for blocks in MEMORY_BLOCKS:
        row = [f"bytes per block, {blocks:,} cached"]
        rows.append([*row, *[f"{each[str(blocks)][0]:.0f}" for each in samples.values()], *["" for _ in peers]])
    return table(rows)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = rounds_parser(__doc__, 15)
    parser.add_argument("--peer", metavar="PYTHON")
    return parse_rounds(parser, arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    sides = {"saltern": sys.executable} | ({"vllm": options.peer} if options.peer else {})
    samples: dict[str, Any] = measure(sides, options.rounds, PROMPT_BLOCKS)
    print(json.dumps(samples, indent=2) if options.json else text(samples))
    return 0


if __name__ == "__main__":
    sys.exit(main())
