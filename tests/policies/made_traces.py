"""Traces made by a rule, and caches that only count. A request is the ids of its blocks, each for a whole prefix."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import OrderedDict
from collections.abc import Sequence

from policies.lifetimes import Lifetimes
from policies.reuse import LearntReuse

Trace = list[list[int]]

NO_LIFETIMES = Lifetimes(lambda: 0)


def document(number: int, blocks: int) -> list[int]:
    return list(range(number * blocks, (number + 1) * blocks))


def scan(seed: int, requests: int) -> Trace:
    """Forty documents of ten blocks, each round of sixty requests followed by sixty that never come again."""
    draw, trace = random.Random(seed), []
    fresh = itertools.count(40)
    while len(trace) < requests:
        trace += [document(draw.randrange(40), 10) for _ in range(60)]
        trace += [document(next(fresh), 10) for _ in range(60)]
    return trace[:requests]


def loop(documents: int, requests: int) -> Trace:
    """Documents of ten blocks, one after the other, again and again."""
    return [document(number % documents, 10) for number in range(requests)]


def zipf(seed: int, requests: int) -> Trace:
    """Two blocks that all have in common, eight of one of 2,000 documents, two that never come again."""
    draw, fresh = random.Random(seed), itertools.count(-1, -1)
    weights = list(itertools.accumulate(1 / rank**0.9 for rank in range(1, 2001)))
    numbers = draw.choices(range(1, 2001), cum_weights=weights, k=requests)
    return [[0, 1, *document(number, 8), next(fresh), next(fresh)] for number in numbers]


def recent(seed: int, requests: int) -> Trace:
    """New documents of five blocks, and old ones the more often the less long ago they were asked for."""
    draw, stack, trace = random.Random(seed), list[int](), []
    fresh = itertools.count()
    for _ in range(requests):
        depth = int(draw.paretovariate(0.5))
        number = stack.pop(-depth) if draw.random() < 0.7 and depth <= len(stack) else next(fresh)
        stack.append(number)
        trace.append(document(number, 5))
    return trace


def chats(seed: int, requests: int) -> Trace:
    """Two of three requests never come again; the others begin a conversation of four turns, each ten blocks longer."""
    draw, fresh, trace = random.Random(seed), itertools.count(), []
    waiting: list[tuple[int, list[int]]] = []
    for number in range(requests):
        due, chain = heapq.heappop(waiting) if waiting and waiting[0][0] <= number else (0, [])
        chain = chain + document(next(fresh), 10)
        trace.append(chain)
        if len(chain) < 40 and (due or draw.random() < 1 / 3):
            heapq.heappush(waiting, (number + draw.randrange(50, 150), chain))
    return trace


def blocks(trace: Trace) -> int:
    return sum(map(len, trace))


def lru_hits(trace: Trace, capacity: int) -> list[int]:
    """Of each request, how many blocks were found."""
    cached: OrderedDict[int, None] = OrderedDict()
    hits = []
    for ids in trace:
        found = list(itertools.takewhile(cached.__contains__, ids))
        hits.append(len(found))
        for each in found:
            del cached[each]
        while len(cached) + len(ids) > capacity:
            cached.popitem(last=False)
        cached.update(dict.fromkeys(reversed(ids)))
    return hits


def reuse_hits(trace: Trace, capacity: int, order: LearntReuse | None = None) -> list[int]:
    """Of each request, how many blocks were found. An id is its own block number: none is ever used for another."""
    order = LearntReuse(capacity, NO_LIFETIMES) if order is None else order
    cached: set[int] = set()
    hits = []
    for ids in trace:
        found = list(itertools.takewhile(cached.__contains__, ids))
        hits.append(len(found))
        order.remove(found)
        made = ids[len(found) :]
        cached.difference_update(order.pop(max(0, len(cached) + len(made) - capacity)))
        order.publish(made, [b"%d" % each for each in made], found[-1] if found else None)
        cached.update(made)
        order.add(ids[::-1])
    return hits


def ratio(hits: Sequence[int], trace: Trace) -> float:
    return sum(hits) / blocks(trace)
