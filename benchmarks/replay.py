"""How often the store finds a prompt's blocks when a recorded trace is asked of it, and what finding them costs.

    python -m benchmarks.replay TRACE --device-blocks N [--policy lru|reuse] [--tenants K] [--json]

A trace has a JSON object on each line, with a list `hash_ids`: one id for each block of a prompt, equal ids for equal
prefixes up to and including that block. Requests come one at a time, each let go before the next is known. Index, pool
and policy are the store's own; without tokens, the rule that the last one of a prompt is computed isn't applied.

With several tenants, a request belongs to the one that a hash of its first id says, not counting the ids with which all
requests begin. Tenants share no blocks, and each is an account without limits: who is furthest over gives way.

Printed are

    hit ratio     blocks found of all blocks; what counts is the longest prefix that is there
    optimal       what it could be at best, if the future were known and blocks were nobody's
    evictions
    operations/s  an operation is one block: looked for, found or made, and let go
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path

from benchmarks.figures import table
from cachestore.blocks import BlockPool
from cachestore.index import PrefixIndex
from policies.reuse import ORDERS

EPOCH = 0


class TraceError(Exception):
    """A trace that can't be replayed."""


@dataclass(frozen=True, slots=True)
class Request:
    account: bytes
    keys: list[bytes]


@dataclass(frozen=True, slots=True)
class Replay:
    policy: str
    device_blocks: int
    tenants: int
    requests: int
    blocks: int
    hit_ratio: float
    optimal_ratio: float
    evictions: int
    operations_per_second: float


def read_trace(path: Path, tenants: int) -> list[Request]:
    """The requests of a file that have a block at all.

    Raises:
        TraceError: a line is not what a trace has, or there is no request.
        OSError: the file can't be read.
    """
    chains: list[list[int]] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                ids = json.loads(line)["hash_ids"]
                if not isinstance(ids, list) or not all(type(each) is int and 0 <= each < 2**64 for each in ids):
                    raise TypeError("not a list of integers below 2^64")
            except (ValueError, KeyError, TypeError) as error:
                raise TraceError(f"{path}, line {number}: no request with `hash_ids`: {error!r}") from error
            if len(set(ids)) != len(ids):
                raise TraceError(f"{path}, line {number}: an id stands for a whole prefix, it can't come twice")
            if ids:
                chains.append(ids)
    if not chains:
        raise TraceError(f"{path} has no request with a block")
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(min(chains), max(chains), strict=False)))
    requests = []
    for ids in chains:
        digest = hashlib.sha256(str(ids[min(common, len(ids) - 1)]).encode()).digest()
        account = (int.from_bytes(digest[:8], "big") % tenants).to_bytes(8, "big")
        requests.append(Request(account, [account + each.to_bytes(8, "big") for each in ids]))
    return requests


def ask(pool: BlockPool, request: Request) -> int:
    """What the store does with a request, from its arrival to its end. Returns the number of blocks found."""
    account, keys = request.account, request.keys
    shared = pool.index.match(account, EPOCH, keys)
    pool.share(account, shared)
    made = pool.allocate(account, len(keys) - len(shared))
    pool.publish(account, EPOCH, made, keys[len(shared) :], shared[-1] if shared else None)
    pool.release(account, shared + made)
    return len(shared)


def optimal_hits(requests: Sequence[Request], device_blocks: int) -> int:
    """Blocks found if, after each request, those with the farthest next use give way.

    A bound rather than a policy: blocks of a request give way to each other, too. After Belady (1966). A block is used
    whenever one behind it in its chain is, so no chain is cut in two.
    """
    next_uses: list[list[float]] = []
    seen: dict[bytes, float] = {}
    for number in range(len(requests) - 1, -1, -1):
        next_uses.append([seen.get(key, math.inf) for key in requests[number].keys])
        seen.update(dict.fromkeys(requests[number].keys, number))
    cached: dict[bytes, float] = {}
    farthest: list[tuple[float, int, bytes]] = []
    hits = 0
    for request in requests:
        hits += sum(1 for _ in takewhile(cached.__contains__, request.keys))
        for depth, (key, next_use) in enumerate(zip(request.keys, next_uses.pop(), strict=True)):
            cached[key] = next_use
            heapq.heappush(farthest, (-next_use, -depth, key))
        while len(cached) > device_blocks:
            next_use, _, key = heapq.heappop(farthest)
            if cached.get(key) == -next_use:
                del cached[key]
    return hits


def replay(requests: Sequence[Request], policy: str, device_blocks: int, tenants: int) -> Replay:
    """Ask for all requests in turn.

    Raises:
        TraceError: a request has more blocks than there are.
    """
    longest = max(len(request.keys) for request in requests)
    if longest > device_blocks:
        raise TraceError(f"a request of {longest} blocks does not fit into {device_blocks}: raise --device-blocks")
    pool = BlockPool(device_blocks, PrefixIndex(), partial(ORDERS[policy], device_blocks))
    for account in {request.account for request in requests}:
        pool.index.raise_epoch(account, EPOCH)
    begun_ns = time.perf_counter_ns()
    hits = sum(ask(pool, request) for request in requests)
    seconds = (time.perf_counter_ns() - begun_ns) / 1e9
    blocks = sum(len(request.keys) for request in requests)
    return Replay(
        policy=policy,
        device_blocks=device_blocks,
        tenants=tenants,
        requests=len(requests),
        blocks=blocks,
        hit_ratio=hits / blocks,
        optimal_ratio=optimal_hits(requests, device_blocks) / blocks,
        evictions=pool.evictions,
        operations_per_second=blocks / seconds,
    )


def text(done: Replay) -> str:
    return table(
        [
            ["policy", done.policy],
            ["device blocks", f"{done.device_blocks:,}"],
            ["tenants", f"{done.tenants:,}"],
            ["requests", f"{done.requests:,}"],
            ["blocks", f"{done.blocks:,}"],
            ["hit ratio", f"{done.hit_ratio:.4f}"],
            ["optimal", f"{done.optimal_ratio:.4f}"],
            ["evictions", f"{done.evictions:,}"],
            ["operations/s", f"{done.operations_per_second:,.0f}"],
        ]
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, metavar="TRACE")
    parser.add_argument("--device-blocks", type=int, required=True, metavar="N")
    parser.add_argument("--policy", choices=sorted(ORDERS), default="lru")
    parser.add_argument("--tenants", type=int, default=1, metavar="K")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    for option in ("device_blocks", "tenants"):
        if getattr(options, option) < 1:
            parser.error(f"--{option.replace('_', '-')} {getattr(options, option)}: 1 at least")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        requests = read_trace(options.trace, options.tenants)
        done = replay(requests, options.policy, options.device_blocks, options.tenants)
    except (TraceError, OSError) as error:
        print(f"replay: {error}", file=sys.stderr)
        return 1
    print(json.dumps(asdict(done), indent=2) if options.json else text(done))
    return 0


if __name__ == "__main__":
    sys.exit(main())
