"""How fast the store computes: its engine and model alone, without sockets, gateway or text.

    OMP_WAIT_POLICY=PASSIVE python -m benchmarks.store [--dtype bf16] [--rounds 5] [--model DIR]

The environment is what `saltern store` sets for itself.

Two models of the same weights, as transformers makes it and as `cachestore.fuse` leaves it, take turns in one process,
so that what else the machine does meets both. Printed are the best over all rounds, since others can only slow it, of

    cold    seconds from a prompt of 1,024 tokens to its first token, nothing cached
    warm    milliseconds of the same prompt with 16 new tokens behind it
    decode  tokens per second of one request after its first token
    eight   tokens per second of eight requests at once, 64 tokens each after 16 of their own and 768 in common:
            cold when the common ones are not cached, warm when they are

and how many times as fast the second is: the median over the rounds, both of a round having run one after the other.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import statistics
import time
from array import array
from pathlib import Path

import torch

from cachestore import default_model
from cachestore.checkpoint import ELEMENT_BYTES, Checkpoint
from cachestore.cli import physical_cores
from cachestore.engine import Engine
from cachestore.geometry import BlockLayout
from cachestore.model import KVCache, Model, ModelRunner
from cachestore.protocol import DType, Limits, Message, OpenAccount, Sampling, Seal, Submit, Tokens

ACCOUNT = b"benchmarks.store"
BLOCK_TOKENS = 16
BLOCKS = 1024
HOUR_NS = 3_600_000_000_000
PROMPT_TOKENS, NEW_TOKENS = 1024, 16
DECODED_TOKENS = 48
REQUESTS, COMMON_TOKENS, ANSWER_TOKENS = 8, 768, 64


class Bench:
    """An engine and the moments at which it hands out tokens."""

    def __init__(self, runner: ModelRunner, vocabulary_tokens: int, step_tokens: int) -> None:
        limits = Limits(
            blocks=BLOCKS,
            max_context_tokens=BLOCKS * BLOCK_TOKENS,
            max_running=32,
            step_tokens=step_tokens,
            vocabulary_tokens=vocabulary_tokens,
        )
        self.engine = Engine(
            runner,
            limits=limits,
            block_tokens=BLOCK_TOKENS,
            block_bytes=runner.cache.storage.shape[1],
            emit=self._heard,
            clock_ns=time.monotonic_ns,
        )
        self.engine.open_account(OpenAccount(account=ACCOUNT, epoch=0))
        self.submitted = 0
        self.heard: list[float] = []

    def _heard(self, connection: int, message: Message) -> None:
        if isinstance(message, Tokens):
            self.heard += [time.perf_counter()] * len(message.entries)

    def ask(self, prompts: list[list[int]], answer_tokens: int) -> list[float]:
        """Seconds from submitting all prompts to each of their tokens."""
        self.heard = []
        begun = time.perf_counter()
        first = self.submitted
        for prompt in prompts:
            submit = Submit(
                request=self.submitted,
                account=ACCOUNT,
                epoch=0,
                tokens=array("I", prompt).tobytes(),
                keys=_keys(prompt),
                sampling=Sampling(temperature=0),
                max_tokens=answer_tokens,
                queue_deadline_ns=time.monotonic_ns() + HOUR_NS,
            )
            self.submitted += 1
            self.engine.submit(0, submit)
        while self.engine.has_work:
            self.engine.step()
        for request, prompt in enumerate(prompts, first):
            named = len(prompt) // BLOCK_TOKENS
            self.engine.seal(0, Seal(request=request, first_block=named, keys=b"", last=True))
        return [at - begun for at in self.heard]

    def measure(self, what: str, draw: random.Random) -> float:
        def tokens(count: int) -> list[int]:
            return [draw.randrange(self.engine.limits.vocabulary_tokens) for _ in range(count)]

        if what in ("cold s", "warm ms"):
            prompt = tokens(PROMPT_TOKENS)
            cold = self.ask([prompt], 1)[0]
            return cold if what == "cold s" else 1000 * self.ask([prompt + tokens(NEW_TOKENS)], 1)[0]
        if what == "decode tok/s":
            first, *_, last = self.ask([tokens(NEW_TOKENS)], 1 + DECODED_TOKENS)
            return DECODED_TOKENS / (last - first)
        common = tokens(COMMON_TOKENS)
        if what == "eight warm tok/s":
            self.ask([common], 1)
        prompts = [common + tokens(NEW_TOKENS) for _ in range(REQUESTS)]
        return REQUESTS * ANSWER_TOKENS / self.ask(prompts, ANSWER_TOKENS)[-1]


FIGURES = ("cold s", "warm ms", "decode tok/s", "eight cold tok/s", "eight warm tok/s")


def _keys(prompt: list[int]) -> bytes:
    key, keys = b"", []
    for start in range(0, len(prompt) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        key = hashlib.sha256(key + array("I", prompt[start : start + BLOCK_TOKENS]).tobytes()).digest()
        keys.append(key)
    return b"".join(keys)


def bench(folder: Path, dtype: DType, fused: bool, step_tokens: int) -> Bench:
    checkpoint = Checkpoint.open(folder)
    layout = BlockLayout(
        layers=checkpoint.layers,
        kv_heads=checkpoint.kv_heads,
        key_dim=checkpoint.head_dim,
        value_dim=checkpoint.value_dim,
        block_tokens=BLOCK_TOKENS,
        element_bytes=ELEMENT_BYTES[dtype],
    )
    model = Model(folder, dtype=dtype, device=torch.device("cpu"), max_context_tokens=checkpoint.max_position_tokens)
    if fused:
        model.fuse()
    cache = KVCache(layout, BLOCKS, model.dtype, model.device)
    return Bench(ModelRunner(model, cache, BLOCK_TOKENS), checkpoint.vocabulary_tokens, step_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder in Hugging Face format (default: the default model)")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--step-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = options.model or default_model.ensure()
    kinds = [bench(folder, options.dtype, fused, options.step_tokens) for fused in (False, True)]
    print(f"{folder.name}, {options.dtype}, {options.threads} threads, {options.step_tokens} tokens a step", flush=True)
    for what in FIGURES:
        rate = what.endswith("tok/s")
        pairs = []
        for number in range(1 + options.rounds):
            pairs.append([kind.measure(what, random.Random(number)) for kind in kinds])
        del pairs[0]  # warm-up
        plain, fused = (max(figures) if rate else min(figures) for figures in zip(*pairs, strict=True))
        ratio = statistics.median(after / before if rate else before / after for before, after in pairs)
        print(f"{what:18} plain {plain:8.2f}   fused {fused:8.2f}   {ratio:.2f} times as fast", flush=True)


if __name__ == "__main__":
    main()
