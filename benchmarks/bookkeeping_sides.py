"""One side of `benchmarks.bookkeeping` in a process of its own, in whose Python that side is installed.

    python -m benchmarks.bookkeeping_sides saltern|vllm PROMPT_BLOCKS

A line with the name of a piece of work on its input is answered by one with what it cost.
"""

from __future__ import annotations

import gc
import random
import sys
import time
import tracemalloc
from collections.abc import Sequence
from typing import Any, Protocol

from cachestore.blocks import BlockPool
from cachestore.index import PrefixIndex

BLOCK_TOKENS = 16
KEY_BYTES = 32
ACCOUNTS = [b"%016d" % number for number in range(64)]
SLICES = ("cold", "warm", "pressure", "accounts")
#: Blocks of pools whose memory is taken: the size of the others, and the least for which dictionaries are half empty.
MEMORY_BLOCKS = (16_384, 21_846)
Prompt = tuple[bytes, list[bytes]]


class Side(Protocol):
    """A pool of blocks and what it knows of prefixes."""

    def ready(self, prompts: Sequence[Prompt]) -> list[Any]:
        """Requests as the side gets them, whose keys are computed."""

    def serve(self, requests: Sequence[Any]) -> None:
        """One after the other: match its prompt, take blocks for the rest, publish and let go of all."""

    def clear(self) -> None:
        """Nothing is cached any more."""


class Saltern:
    """What `cachestore.scheduler` and `cachestore.engine` ask of the pool for one request."""

    def __init__(self, blocks: int) -> None:
        self._index = PrefixIndex()
        self._pool = BlockPool(blocks, self._index)
        self._epoch = 0
        self.clear()

    def ready(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        return list(prompts)

    def serve(self, requests: Sequence[Prompt]) -> None:
        pool, epoch = self._pool, self._epoch
        for account, keys in requests:
            table = self._index.match(account, epoch, keys[: len(keys) - 1])
            matched = len(table)
            needed = len(keys) - matched
            assert not pool.above(account, table, needed)
            assert not pool.short(account, table, needed)
            assert pool.miss(account, epoch, keys, table)
            pool.share(account, table)
            table += pool.allocate(account, needed)
            parent = table[matched - 1] if matched else None
            table[matched:] = pool.publish(account, epoch, table[matched:], keys[matched:], parent)
            pool.release(account, table)

    def clear(self) -> None:
        self._epoch += 1
        for account in ACCOUNTS:
            self._pool.forget(account, self._index.raise_epoch(account, self._epoch))


class VLLM:
    """What vLLM's scheduler asks of its cache manager, one full-attention group; it knows no accounts."""

    def __init__(self, blocks: int) -> None:
        import torch
        from vllm.sampling_params import SamplingParams
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.request import Request

        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
        # One block of its pool stands for none.
        config = KVCacheConfig(blocks + 1, [], [KVCacheGroupSpec(["attention"], spec)])
        self._manager = KVCacheManager(
            config,
            max_model_len=blocks * BLOCK_TOKENS,
            scheduler_block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
        )
        self._request, self._sampling = Request, SamplingParams(max_tokens=1)
        self._requests = 0

    def ready(self, prompts: Sequence[Prompt]) -> list[Any]:
        requests = []
        for _, keys in prompts:
            self._requests += 1
            request = self._request(str(self._requests), [0] * (len(keys) * BLOCK_TOKENS), self._sampling, None)
            request.block_hashes = keys
            requests.append(request)
        return requests

    def serve(self, requests: Sequence[Any]) -> None:
        manager = self._manager
        for request in requests:
            matched, tokens, _ = manager.get_computed_blocks(request)
            assert manager.allocate_slots(request, request.num_tokens - tokens, tokens, matched) is not None
            manager.free(request)

    def clear(self) -> None:
        assert self._manager.reset_prefix_cache()


SIDES: dict[str, type[Saltern] | type[VLLM]] = {"saltern": Saltern, "vllm": VLLM}


class Bench:
    """A side's pools, each of twice the blocks of a prompt, and what they are asked."""

    def __init__(self, side: type[Saltern] | type[VLLM], prompt_blocks: int) -> None:
        self._side = side
        self._prompt_blocks = prompt_blocks
        self._random = random.Random(0)
        self._pools: dict[str, Side] = {name: side(2 * prompt_blocks) for name in SLICES}
        for name in ("pressure", "accounts"):
            for _ in range(4):
                self._slice(name)

    def cost(self, name: str) -> float:
        """CPU nanoseconds per block of a slice, or bytes per cached block of a pool of so many."""
        return self._bytes(int(name)) if name.isdigit() else self._slice(name) / self._prompt_blocks

    def _slice(self, name: str) -> int:
        pool = self._pools[name]
        prompts = self._prompts(name)
        if name in ("cold", "warm"):
            pool.clear()
        if name == "warm":
            pool.serve(pool.ready(prompts))
            # A key comes with its request: it is equal to the one that is known, not the same object.
            ((account, keys),) = prompts
            prompts = [(account, split(b"".join(keys[:-1]) + self._random.randbytes(KEY_BYTES)))]
        requests = pool.ready(prompts)
        begun_ns = time.process_time_ns()
        pool.serve(requests)
        return time.process_time_ns() - begun_ns

    def _prompts(self, name: str) -> list[Prompt]:
        if name != "accounts":
            return [(ACCOUNTS[0], self._keys(self._prompt_blocks))]
        blocks = self._prompt_blocks // len(ACCOUNTS)
        return [(account, self._keys(blocks)) for account in self._random.choices(ACCOUNTS, k=len(ACCOUNTS))]

    def _keys(self, count: int) -> list[bytes]:
        return split(self._random.randbytes(count * KEY_BYTES))

    def _bytes(self, blocks: int) -> float:
        """Of Python, the pool full of cached blocks, four times as many of which gave way before."""
        gc.collect()
        tracemalloc.start()
        pool: Side = self._side(blocks)
        for begin in range(0, 5 * blocks, 128):
            pool.serve(pool.ready([(ACCOUNTS[0], self._keys(min(128, 5 * blocks - begin)))]))
        gc.collect()
        size_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return size_bytes / blocks


def split(keys: bytes) -> list[bytes]:
    """As `cachestore.sequence.split_keys`, which the peer's Python cannot import."""
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


def main(name: str, prompt_blocks: str) -> None:
    bench = Bench(SIDES[name], int(prompt_blocks))
    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    for line in sys.stdin:
        print(bench.cost(line.strip()), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
