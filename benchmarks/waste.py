"""What of the block cache is held and not used, as requests come, grow and go.

    python -m benchmarks.waste [--trace conversation.jsonl]

The engine with a model that answers at once, blocks of 16 tokens, and the limits of a store on CUDA. At every step, of
all slots in the blocks that requests hold, the share of those that no token has, blocks that were taken ahead included.
A prompt's tokens have theirs from admission on; "or ahead" counts those that no step has reached as unused too.

    short    2,000 requests of 100 to 400 tokens, unlike from the first on, that are answered by 64
    trace    all requests of a file in the format of Mooncake's traces, in its order, each as soon as there is room
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import table
from cachestore.engine import Engine, Sampled
from cachestore.protocol import (
    KEY_BYTES,
    TOKEN_BYTES,
    Finished,
    Limits,
    Message,
    OpenAccount,
    Rejected,
    Sampling,
    Seal,
    Submit,
)
from cachestore.scheduler import Row

ACCOUNT = b"benchmarks.waste"
BLOCK_TOKENS = 16
PER_TRACE_BLOCK = 512 // BLOCK_TOKENS
LIMITS = Limits(
    blocks=262_144, max_context_tokens=262_144, max_running=256, step_tokens=2_048, vocabulary_tokens=49_152
)
# Requests that wait at once.
WAITING = 32


@dataclass(frozen=True, slots=True)
class Ask:
    """
    Attributes:
        keys: of the prompt's full blocks, one after the other.
    """

    prompt_tokens: int
    answer_tokens: int
    keys: bytes


@dataclass(slots=True)
class Waste:
    """Of all steps together, in slots."""

    steps: int = 0
    allocated: int = 0
    unused: int = 0
    ahead: int = 0
    greatest: float = 0.0


class Double:
    """Stands in for the model: it computes nothing, and answers every row with the same token."""

    def launch(self, rows: Sequence[Row]) -> list[Sampled]:
        return [Sampled(0) for row in rows if row.samples]

    def collect(self, in_flight: list[Sampled]) -> list[Sampled]:
        return in_flight


class Replay:
    """Requests one after the other, some of which always wait for room, and what the engine holds for them."""

    def __init__(self, limits: Limits) -> None:
        self._engine = Engine(
            Double(), limits=limits, block_tokens=BLOCK_TOKENS, block_bytes=512, emit=self._heard, clock_ns=lambda: 1
        )
        self._engine.open_account(OpenAccount(account=ACCOUNT, epoch=0))
        self._asks: list[Ask] = []
        self._finished: list[int] = []

    def run(self, asks: Iterable[Ask]) -> Waste:
        waste, engine, coming = Waste(), self._engine, iter(asks)
        while True:
            while len(engine.scheduler.queued) < WAITING and (ask := next(coming, None)):
                self._submit(ask)
            if not engine.has_work:
                return waste
            plan = engine.plan()
            self._count(waste, plan.rows)
            engine.compute(plan)
            for request in self._finished:
                named = len(self._asks[request].keys) // KEY_BYTES
                engine.seal(1, Seal(request=request, first_block=named, keys=b"", last=True))
            self._finished.clear()

    def _count(self, waste: Waste, rows: Sequence[Row]) -> None:
        # A block that several hold is full: what is unused is in the blocks at the ends.
        running = self._engine.scheduler.running
        held = sum(len(sequence.table) * BLOCK_TOKENS for sequence in running)
        tokens = sum(len(sequence.tokens) for sequence in running)
        computed = sum(sequence.computed_tokens for sequence in running) + sum(row.count for row in rows)
        allocated = self._engine.pool.held * BLOCK_TOKENS
        waste.steps += 1
        waste.allocated += allocated
        waste.unused += held - tokens
        waste.ahead += held - computed
        waste.greatest = max(waste.greatest, (held - tokens) / allocated)

    def _submit(self, ask: Ask) -> None:
        submit = Submit(
            request=len(self._asks),
            account=ACCOUNT,
            epoch=0,
            tokens=bytes(ask.prompt_tokens * TOKEN_BYTES),
            keys=ask.keys,
            sampling=Sampling(temperature=0),
            max_tokens=ask.answer_tokens,
            queue_deadline_ns=2,
        )
        self._asks.append(ask)
        self._engine.submit(1, submit)

    def _heard(self, connection: int, message: Message) -> None:
        if isinstance(message, Rejected):
            raise ValueError(f"request {message.request} was rejected: {message.detail}")
        if isinstance(message, Finished):
            self._finished.append(message.request)


def short(requests: int) -> Iterator[Ask]:
    draw = random.Random(0)
    for _ in range(requests):
        prompt_tokens = draw.randint(100, 400)
        yield Ask(prompt_tokens, 64, draw.randbytes(prompt_tokens // BLOCK_TOKENS * KEY_BYTES))


def trace(path: Path) -> Iterator[Ask]:
    """A block of the trace is many of ours, named by its id and their place in the prompt."""
    with path.open() as lines:
        for line in lines:
            each = json.loads(line)
            ids, blocks = each["hash_ids"], each["input_length"] // BLOCK_TOKENS
            names = (b"%d %d" % (ids[block // PER_TRACE_BLOCK], block) for block in range(blocks))
            keys = [hashlib.sha256(name).digest() for name in names]
            yield Ask(each["input_length"], each["output_length"], b"".join(keys))


def text(wastes: dict[str, Waste]) -> str:
    rows = [["", "steps", "slots a step", "unused", "in the worst step", "unused or ahead"]]
    for name, each in wastes.items():
        shares = [each.unused / each.allocated, each.greatest, each.ahead / each.allocated]
        per_step = each.allocated // each.steps
        rows.append([name, f"{each.steps:,}", f"{per_step:,}", *[f"{share:.3%}" for share in shares]])
    return table(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    options = parser.parse_args(arguments)
    wastes = {"short": Replay(LIMITS).run(short(2_000))}
    if options.trace:
        wastes["trace"] = Replay(LIMITS).run(trace(options.trace))
    print(text(wastes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
