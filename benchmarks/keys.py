"""What it costs to name the blocks of a prompt under a tenant's secret.

    python -m benchmarks.keys [--rounds 50] [--json]

Nanoseconds per token of

    name_blocks    what the gateway does: token ids to bytes, then a name for each full block, in slices
    ChainKey       the names alone: one HMAC-SHA-256 for each block
    unkeyed        names without a secret, as vLLM makes them by default: SHA-256 over the pickled tuple of the
                   parent's name, the block's token ids and nothing else

in turns within one run, so that what else the machine does meets all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import sys
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pickle import dumps
from typing import Any

from benchmarks.arguments import parse_rounds, rounds_parser
from benchmarks.figures import Spread, table
from cachestore.protocol import LAYOUT_VERSION
from gateway.prompt.align import name_blocks, u32le
from gateway.prompt.block_keys import ChainKey, Context
from gateway.secret import Secret

TOKENS = 8_192
BLOCK_TOKENS = (16, 64)
VOCABULARY_TOKENS = 49_152


def chain_key(block_tokens: int) -> ChainKey:
    context = Context(
        model_fingerprint=bytes(32),
        tokenizer_fingerprint=bytes(32),
        dtype="fp32",
        kv_dtype="fp32",
        block_tokens=block_tokens,
        layers=30,
        kv_heads=3,
        key_dim=64,
        value_dim=64,
        layout_version=LAYOUT_VERSION,
        rope_context_tokens=0,
        scope=b"",
    )
    return ChainKey(Secret(bytes(32)), context)


def unkeyed(tokens: list[int], block_tokens: int) -> list[bytes]:
    """The name of every full block, 32 bytes each."""
    parent, names = bytes(32), []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        link = (parent, tuple(tokens[start : start + block_tokens]), None)
        # The newest protocol there is.
        parent = hashlib.sha256(dumps(link, protocol=-1)).digest()
        names.append(parent)
    return names


async def measure(rounds: int) -> dict[str, dict[int, Spread]]:
    """Nanoseconds per token, by way and by tokens of a block."""
    numbers = random.Random(0).choices(range(VOCABULARY_TOKENS), k=TOKENS)
    tokens = array("I", numbers)
    encoded = u32le(tokens)
    ways: dict[tuple[str, int], Callable[[], Awaitable[object]]] = {}

    def add(block_tokens: int) -> None:
        chain = chain_key(block_tokens)

        async def names_alone() -> object:
            return chain.extend(chain.root, encoded)

        async def without_secret() -> object:
            return unkeyed(numbers, block_tokens)

        ways["name_blocks", block_tokens] = lambda: name_blocks(tokens, chain)
        ways["ChainKey", block_tokens] = names_alone
        ways["unkeyed", block_tokens] = without_secret

    for block_tokens in BLOCK_TOKENS:
        add(block_tokens)
    samples: dict[tuple[str, int], list[float]] = {way: [] for way in ways}
    # The first round is not counted.
    for counts in (False, *[True] * rounds):
        for way, work in ways.items():
            begun_ns = time.perf_counter_ns()
            await work()
            if counts:
                samples[way].append((time.perf_counter_ns() - begun_ns) / TOKENS)
    spreads: dict[str, dict[int, Spread]] = {}
    for (name, block_tokens), each in samples.items():
        spreads.setdefault(name, {})[block_tokens] = Spread.of(each)
    return spreads


def text(spreads: dict[str, dict[int, Spread]]) -> str:
    rows = [["ns per token: median (least)", *[f"blocks of {block_tokens}" for block_tokens in BLOCK_TOKENS]]]
    for name, each in spreads.items():
        rows.append([name, *[f"{spread.median:.1f} ({spread.least:.1f})" for spread in each.values()]])
    return table(rows)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    return parse_rounds(rounds_parser(__doc__, 50), arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    spreads = asyncio.run(measure(options.rounds))
    plain: dict[str, Any] = {
        name: {block_tokens: asdict(spread) for block_tokens, spread in each.items()} for name, each in spreads.items()
    }
    print(json.dumps(plain, indent=2) if options.json else text(spreads))
    return 0


if __name__ == "__main__":
    sys.exit(main())
