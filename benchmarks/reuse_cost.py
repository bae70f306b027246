"""What the prefix cache costs a store that finds nothing in it.

    python -m benchmarks.reuse_cost [--rounds 10] [--cache-memory 256MiB] [--json]

Two processes of `saltern store` over the default model, one of them with `--no-prefix-cache`, are asked the same over
their sockets, one while the other is idle; who is first changes with every round. No two prompts begin with the same
token, and all blocks get names, those of answers while they are said, as a gateway gives them. A load is

    prompts    4 requests at once of 512 tokens, one token answered
    answers    8 requests at once of 64 tokens, 48 tokens answered

and is timed from the first request to the last token. Printed are the seconds of each pair and the CPU seconds of the
store, and how many times as long it takes with the cache. CPU time says more where the machine does other things, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.arguments import parse_rounds, rounds_parser
from benchmarks.figures import Spread, table
from benchmarks.keys import chain_key
from benchmarks.processes import Measured, ProcessError, running
from cachestore.client import Output, StoreClient
from cachestore.protocol import Finished, Rejected, Sampling, Started

ACCOUNT = b"benchmarks.reuse"
# After so many rounds, which are not counted, every block has been used: what is counted evicts.
WARM_UP_ROUNDS = 2
HOUR_NS = 3_600_000_000_000
#: Requests, and the tokens of the prompt and of the answer of each.
LOADS = {"prompts": (4, 512, 1), "answers": (8, 64, 48)}
SIDES: dict[str, list[str]] = {"with": [], "without": ["--no-prefix-cache"]}


class WrongAnswer(Exception):
    """A store did something else than it was asked for: one line."""


class Asked:
    """A store and what it is asked.

    Args:
        cpu_seconds: what its process has used so far.
    """

    def __init__(self, client: StoreClient, cpu_seconds: Callable[[], float]) -> None:
        self._client = client
        self._cpu_seconds = cpu_seconds
        self._block_tokens = client.welcome.geometry.block_tokens
        self._names = chain_key(self._block_tokens)

    async def seconds(self, prompts: Sequence[list[int]], answer_tokens: int) -> tuple[float, float]:
        """From the first request to the last token, and of CPU until all is done. Raises WrongAnswer."""
        used, begun = self._cpu_seconds(), time.perf_counter()
        ended = await asyncio.gather(*(self._answer(prompt, answer_tokens) for prompt in prompts))
        # What was sent before is in force when it answers.
        await self._client.account_report(ACCOUNT)
        return max(ended) - begun, self._cpu_seconds() - used

    async def _answer(self, prompt: list[int], answer_tokens: int) -> float:
        tokens = list(prompt)
        keys = self._keys(tokens, 0, self._names.root)
        request = self._client.submit(
            account=ACCOUNT,
            epoch=0,
            tokens=array("I", prompt).tobytes(),
            keys=keys,
            sampling=Sampling(temperature=0),
            max_tokens=answer_tokens,
            queue_deadline_ns=time.monotonic_ns() + HOUR_NS,
        )
        named, parent = len(keys), keys[-1]
        while not isinstance(event := await request.next(), Finished):
            if isinstance(event, Rejected) or (isinstance(event, Started) and event.cached_tokens):
                raise WrongAnswer(f"a prompt that nobody has seen was answered with {event}")
            if isinstance(event, Output):
                ended = time.perf_counter()
                tokens += event.tokens
                if keys := self._keys(tokens, named, parent):
                    request.seal(keys)
                    named, parent = named + len(keys), keys[-1]
        if len(tokens) != len(prompt) + answer_tokens:
            raise WrongAnswer(f"{len(tokens) - len(prompt)} tokens were answered and not {answer_tokens}")
        request.seal([], last=True)
        return ended

    def _keys(self, tokens: list[int], named: int, parent: bytes) -> list[bytes]:
        """Names of the full blocks that have none."""
        full = len(tokens) // self._block_tokens
        words = array("I", tokens[named * self._block_tokens : full * self._block_tokens])
        return self._names.extend(parent, words.tobytes())


class Prompts:
    """Prompts of which no two begin with the same token."""

    def __init__(self, vocabulary_tokens: int) -> None:
        self._random = random.Random(0)
        self._first = iter(self._random.sample(range(vocabulary_tokens), vocabulary_tokens))
        self._vocabulary_tokens = vocabulary_tokens

    def draw(self, count: int, tokens: int) -> list[list[int]]:
        vocabulary = range(self._vocabulary_tokens)
        return [[next(self._first), *self._random.choices(vocabulary, k=tokens - 1)] for _ in range(count)]


Samples = dict[str, dict[str, list[float]]]


async def measure(
    sides: dict[str, Asked], prompts: Prompts, rounds: int, loads: dict[str, tuple[int, int, int]] = LOADS
) -> Samples:
    """Seconds, and CPU seconds, by load and side, one for each round.

    Raises:
        WrongAnswer: a store found something, or answered something else than it was asked for.
    """
    samples: Samples = {
        f"{load}, {what}": {side: [] for side in sides} for load in loads for what in ("seconds", "CPU seconds")
    }
    for number in range(-WARM_UP_ROUNDS, rounds):
        for load, (requests, prompt_tokens, answer_tokens) in loads.items():
            drawn = prompts.draw(requests, prompt_tokens)
            for side in list(sides)[:: -1 if number % 2 else 1]:
                seconds, cpu_seconds = await sides[side].seconds(drawn, answer_tokens)
                if number >= 0:
                    samples[f"{load}, seconds"][side].append(seconds)
                    samples[f"{load}, CPU seconds"][side].append(cpu_seconds)
    return samples


async def measure_at(stores: dict[str, tuple[Path, Measured]], rounds: int) -> Samples:
    """The same of processes and their sockets, one of which caches what it computes. Raises WrongAnswer."""
    clients = {side: await StoreClient.connect(socket) for side, (socket, _) in stores.items()}
    try:
        asked = {side: Asked(client, stores[side][1].cpu_seconds) for side, client in clients.items()}
        prompts = Prompts(clients["with"].welcome.limits.vocabulary_tokens)
        samples = await measure(asked, prompts, rounds)
        cached = {side: (await client.stats()).cached_blocks for side, client in clients.items()}
    finally:
        for client in clients.values():
            client.close()
    if not cached["with"] or cached["without"]:
        raise WrongAnswer(f"blocks that are cached at the end: {cached}")
    return samples


def run(options: argparse.Namespace) -> Samples:
    """Start both, measure, end both. Raises ProcessError or WrongAnswer: one line why there are no figures."""
    # Without settings of Saltern.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SALTERN_", "OTEL_"))}
    with tempfile.TemporaryDirectory(prefix="saltern-") as folder, ExitStack() as stack:
        stores = {}
        for side, flags in SIDES.items():
            socket = Path(folder) / f"{side}.sock"
            command = [sys.executable, "-m", "gateway.cli", "store", "--socket", str(socket), *flags]
            command += ["--cache-memory", options.cache_memory]
            store = stack.enter_context(running(command, Path(folder) / f"{side}.log", environment))
            store.wait_until(socket.exists, "listening")
            stores[side] = socket, store
        return asyncio.run(measure_at(stores, options.rounds))


def ratios(each: dict[str, list[float]]) -> list[float]:
    """How many times as long it took with the cache, of each pair."""
    return [mine / theirs for mine, theirs in zip(each["with"], each["without"], strict=True)]


def text(samples: Samples) -> str:
    rows = [["", "with", "without", "ratio"]]
    for load, each in samples.items():
        pairs = zip(each["with"], each["without"], ratios(each), strict=True)
        rows += [[load, f"{mine:.2f}", f"{theirs:.2f}", f"{ratio:.3f}"] for mine, theirs, ratio in pairs]
    for load, each in samples.items():
        ratio = Spread.of(ratios(each))
        medians = [f"{statistics.median(each[side]):.2f}" for side in SIDES]
        rows.append(
            [f"{load}, median", *medians, f"{ratio.median:.3f} ({ratio.least:.3f} – {ratio.greatest:.3f})"]
        )
    return table(rows)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = rounds_parser(__doc__, 10)
    parser.add_argument("--cache-memory", default="256MiB", help="of each: less than the prompts take fills it")
    return parse_rounds(parser, arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        samples: dict[str, Any] = run(options)
    except (ProcessError, WrongAnswer) as error:
        print(f"benchmarks.reuse_cost: {error}", file=sys.stderr)
        return 1
    print(json.dumps(samples, indent=2) if options.json else text(samples))
    return 0


if __name__ == "__main__":
    sys.exit(main())
