"""What a repeated prefix gives: the same tokens, and as many of them cached as the rule says."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cachestore import cli
from cachestore.batch import Batch
from cachestore.engine import Engine, Runner
from cachestore.model import ModelRunner
from cachestore.protocol import KVDType, Limits, Message, Sampling, Welcome
from cachestore.scheduler import Row
from cachestore.sequence import Sequence as StoreSequence
from gateway.cli import app
from policies.eviction import LeastRecentlyUsed
from policies.reuse import LearntReuse
from tests.cachestore.conftest import MakeRunner
from tests.cachestore.small_models import SIZES
from tests.cachestore.support import ALICE, BOB, VOCABULARY_TOKENS, Harness, expected_answer

SMALL_VOCABULARY_TOKENS = SIZES["vocab_size"]


def random_prompt(seed: int, count: int, vocabulary_tokens: int = SMALL_VOCABULARY_TOKENS) -> list[int]:
    return random.Random(seed).choices(range(vocabulary_tokens), k=count)


def small_store(make_small_runner: MakeRunner, blocks: int = 64, block_tokens: int = 16) -> Harness:
    return Harness(
        make_small_runner(blocks, block_tokens),
        blocks=blocks,
        block_tokens=block_tokens,
        step_tokens=256,
        vocabulary_tokens=SMALL_VOCABULARY_TOKENS,
    )


class Observing(ModelRunner):
    """Keeps the logits and the batch of the last step."""

    def launch(self, rows: Sequence[Row]) -> Any:
        in_flight = super().launch(rows)
        self.batch = Batch.from_rows(rows, self.block_tokens, self.model.device)
        # Computing a step again writes the same keys and values into the same slots.
        self.logits = self.model.logits(self.batch, self.cache, self.batch.sample_rows)
        self.rows: list[StoreSequence] = [row.sequence for row in rows]
        return in_flight


def test_b003_the_chain_of_names_survives_a_prompt_that_was_cached_whole(make_runner: MakeRunner) -> None:
    store = Harness(make_runner(16), blocks=16, block_tokens=16, step_tokens=256, vocabulary_tokens=49_152)
    prompt = random_prompt(3, 64, 49_152)
    answers = [store.complete(prompt[:length], max_tokens=4) for length in (48, 48, 64, 64)]
    assert [answer.cached_tokens for answer in answers] == [0, 32, 48, 48]
    assert answers[0].tokens == answers[1].tokens
    assert answers[2].tokens == answers[3].tokens


def test_b011_hits_and_misses_in_one_step_are_as_each_alone(make_runner: MakeRunner) -> None:
    x, y = random_prompt(1, 60, 49_152), random_prompt(2, 20, 49_152)
    alone = []
    for prompt in (x, y):
        runner = _observing(make_runner(16))
        store = Harness(runner, blocks=16, block_tokens=16, step_tokens=256, vocabulary_tokens=49_152)
        if prompt is x:
            store.complete(x[:49], max_tokens=1)
        answer = store.complete_unsealed(prompt, max_tokens=1)
        assert answer.cached_tokens == (48 if prompt is x else 0)
        alone.append(runner.logits[0])
    runner = _observing(make_runner(16))
    store = Harness(runner, blocks=16, block_tokens=16, step_tokens=256, vocabulary_tokens=49_152)
    store.complete(x[:49], max_tokens=1)
    first, second = store.submit(x, max_tokens=2), store.submit(y, max_tokens=2)
    store.step()
    assert (first.cached_tokens, second.cached_tokens) == (48, 0)
    assert len(runner.rows) == 2
    for together, single in zip(runner.logits, alone, strict=True):
        assert together.argmax() == single.argmax()
        # In fp32: closer by far than the 2e-2 that 16 bits would need.
        assert (together - single).abs().max() < 1e-3
    table = store.sequence(second).table
    assert runner.batch.block_tables[1].tolist() == [*table, -1, -1]
    assert len(table) == 2
    assert not set(table) & set(store.sequence(first).table)


def _observing(runner: ModelRunner) -> Observing:
    return Observing(runner.model, runner.cache, runner.block_tokens)


def test_b012_an_answer_from_cache_is_the_cold_answer_at_every_length(make_small_runner: MakeRunner) -> None:
    store = small_store(make_small_runner)
    different = set()
    for length in range(1, 81):
        prompt = random_prompt(length, length)
        cold = store.complete(prompt, max_tokens=8)
        warm = store.complete(prompt, max_tokens=8)
        assert cold.cached_tokens == 0
        assert warm.cached_tokens == 16 * ((length - 1) // 16)
        assert warm.tokens == cold.tokens
        assert len(cold.tokens) == 8
        different.add(tuple(cold.tokens))
    # The model does not answer everything alike.
    assert len(different) > 70


def test_b015_blocks_of_64_tokens_cache_whole_blocks_only(make_small_runner: MakeRunner) -> None:
    store = small_store(make_small_runner, blocks=16, block_tokens=64)
    short, long = random_prompt(50, 50), random_prompt(70, 70)
    assert [store.complete(prompt).cached_tokens for prompt in (short, short, long, long)] == [0, 0, 0, 64]


def test_b015_the_start_up_line_tells_the_smallest_prefix_that_is_reused(
    default_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits = Limits(blocks=10, max_context_tokens=640, max_running=1, step_tokens=1, vocabulary_tokens=1)

    async def serve(*_: object) -> None:
        pass

    monkeypatch.setattr(cli, "_load", lambda *_: (None, limits, "cpu"))
    monkeypatch.setattr(cli, "_serve", serve)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    options = cli.StoreOptions(
        model=str(default_model), socket=tmp_path / "store.sock", block_tokens=64, cache_memory_bytes=64 << 20
    )
    with caplog.at_level(logging.INFO, "saltern.store"):
        assert cli.run_store(options, "1.2.3") == 0
    assert "10 blocks of 64, the smallest prefix that is reused" in caplog.text


MakeEngine = Callable[[Callable[[int, Message], None]], Engine]


@pytest.fixture
def store_engine(
    default_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[list[str], Runner | None], MakeEngine]:
    """`store_engine(options, runner)`: what `saltern store` with these options makes its engine with, over a runner."""
    limits = Limits(
        blocks=10, max_context_tokens=160, max_running=1, step_tokens=64, vocabulary_tokens=VOCABULARY_TOKENS
    )
    made: list[MakeEngine] = []

    class NoServer:
        def __init__(self, _socket: Path, _welcome: Welcome, make_engine: MakeEngine) -> None:
            made.append(make_engine)

        async def serve(self, _: object) -> None:
            pass

    monkeypatch.setattr(cli, "StoreServer", NoServer)
    monkeypatch.setattr(cli, "check_socket", lambda _: None)
    monkeypatch.setattr("gateway.cli._configure_logging", lambda _: None)
    monkeypatch.setattr("gateway.cli._end", lambda status: status)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")

    def make(chosen: list[str], runner: Runner | None = None) -> MakeEngine:
        monkeypatch.setattr(cli, "_load", lambda *_: (runner, limits, 0))
        sizes = ["--cache-memory", "64MiB", "--data-dir", str(tmp_path / "data")]
        done = CliRunner().invoke(app, ["store", "--model", str(default_model), *sizes, *chosen])
        assert (done.exit_code, done.exception) == (0, None)
        return made.pop()

    return make


@pytest.mark.parametrize(("chosen", "order"), [([], LeastRecentlyUsed), (["--eviction", "reuse"], LearntReuse)])
def test_the_operator_chooses_which_cached_blocks_give_way(
    store_engine: Callable[..., MakeEngine], chosen: list[str], order: type
) -> None:
    engine = store_engine(chosen)(lambda *_: None)
    assert type(engine.pool.shares.account(ALICE).cached) is order
    assert type(engine.pool.shares.account(BOB).cached) is order


@pytest.mark.parametrize(("chosen", "cached_tokens"), [([], 32), (["--no-prefix-cache"], 0)])
def test_an_operator_who_measures_serves_without_reuse(
    store_engine: Callable[..., MakeEngine], chosen: list[str], cached_tokens: int
) -> None:
    store = Harness(block_tokens=16)
    store.engine = store_engine(chosen, store.remembering)(store._take)
    prompt = random_prompt(1, 40)
    answers = [store.complete(prompt, max_tokens=12) for _ in range(2)]
    assert [answer.cached_tokens for answer in answers] == [0, cached_tokens]
    assert [answer.tokens for answer in answers] == [expected_answer(prompt, 12)] * 2
    # The answer's block has a name as well.
    stats = store.engine.stats(pushed=False)
    assert (stats.cached_blocks, stats.held_blocks) == ((3, 0) if cached_tokens else (0, 0))
    assert store.engine.account_report(ALICE).cached_blocks == stats.cached_blocks


def test_b017_layers_with_a_window_reuse_the_blocks_before_the_one_that_differs(
    make_windowed_runner: MakeRunner, make_small_runner: MakeRunner
) -> None:
    first = random_prompt(17, 160)
    second = first[:150] + random_prompt(18, 20)
    store, fresh = small_store(make_windowed_runner), small_store(make_windowed_runner)
    store.complete(first, max_tokens=1)
    warm, cold = store.complete(second, max_tokens=8), fresh.complete(second, max_tokens=8)
    assert (warm.cached_tokens, cold.cached_tokens) == (144, 0)
    assert warm.tokens == cold.tokens
    # The window tells: with all of the same prompt in sight the answer is another.
    assert small_store(make_small_runner).complete(second, max_tokens=8).tokens != cold.tokens


def test_b202_another_tenants_prefix_saves_nothing() -> None:
    store = Harness(blocks=200, block_tokens=16, step_tokens=256)
    warm, other = random_prompt(1, 512), random_prompt(2, 512)
    store.complete(warm, max_tokens=1)

    def computed(prompt: list[int], account: bytes) -> tuple[int, int]:
        before = store.engine.computed_tokens
        answer = store.complete(prompt, account=account, max_tokens=1)
        return answer.cached_tokens, store.engine.computed_tokens - before

    assert computed(warm, BOB) == (0, 512)
    assert computed(other, BOB) == (0, 512)
    assert computed(warm, ALICE) == (496, 16)


def test_line_09_a_prompt_that_differs_inside_a_block_shares_nothing_of_it() -> None:
    for differs_at in range(16, 32):
        store = Harness(blocks=16, block_tokens=16)
        prompt = random_prompt(1, 40)
        other = [*prompt]
        other[differs_at] = (other[differs_at] + 1) % SMALL_VOCABULARY_TOKENS
        store.complete(prompt, max_tokens=1)
        before = store.engine.computed_tokens
        answer = store.complete(other, max_tokens=1)
        assert answer.cached_tokens == 16
        assert store.engine.computed_tokens - before == 40 - 16
        assert store.complete(prompt, max_tokens=1).cached_tokens == 32


class Poisoning(ModelRunner):
    """Before each step, everything outside the blocks that the pool has in use is NaN."""

    store: Harness
    also_held = False

    def launch(self, rows: Sequence[Row]) -> Any:
        blocks = list(self.store.engine.pool._free)
        for row in rows:
            sequence = row.sequence
            filled = -(-row.start // self.block_tokens)
            blocks += sequence.table if self.also_held else sequence.table[filled:]
        self.cache.storage[blocks] = 0xFF  # NaN in every float dtype
        return super().launch(rows)


@pytest.mark.parametrize(("block_tokens", "kv_dtype"), [(8, "fp32"), (32, "fp32"), (16, "int8"), (16, "fp8")])
def test_line_30_what_lies_in_free_blocks_reaches_no_answer(
    make_small_runner: MakeRunner, block_tokens: int, kv_dtype: KVDType
) -> None:
    """Free blocks, and those just taken, are poisoned before every step; the pool is small enough to preempt."""
    prompts = [random_prompt(seed, length) for seed, length in enumerate((3, 17, 33, 40, 17))]
    blocks = 128 // block_tokens

    def answers(make: type[ModelRunner], also_held: bool = False) -> list[list[int]]:
        plain = make_small_runner(blocks, block_tokens, kv_dtype)
        runner = make(plain.model, plain.cache, block_tokens)
        store = Harness(
            runner,
            blocks=blocks,
            block_tokens=block_tokens,
            step_tokens=24,
            vocabulary_tokens=SMALL_VOCABULARY_TOKENS,
        )
        if isinstance(runner, Poisoning):
            runner.store, runner.also_held = store, also_held
        pending = [store.submit(prompt, max_tokens=24) for prompt in prompts]
        store.run(*pending)
        # What reads NaN has no token and ends, so there is room for the others.
        assert also_held or store.engine.scheduler.preemptions
        return [answer.tokens for answer in pending]

    clean = answers(ModelRunner)
    assert answers(Poisoning) == clean
    assert answers(Poisoning, also_held=True) != clean


def test_line_31_a_request_takes_nothing_over_from_the_one_whose_place_it_takes(make_small_runner: MakeRunner) -> None:
    first, second = random_prompt(1, 20), random_prompt(2, 24)
    wanted = Sampling(temperature=1.0, top_p=0.9, seed=7, stop_token_ids=[3])

    def alone(sampling: Sampling) -> list[int]:
        return small_store(make_small_runner, blocks=4).complete(second, max_tokens=24, sampling=sampling).tokens

    # A pool for one request: the second gets the blocks, and the row of the batch, that the first has left.
    store = small_store(make_small_runner, blocks=4)
    strict = Sampling(temperature=2.0, top_k=1, seed=99, stop_token_ids=list(range(100, 211)))
    store.complete(first, max_tokens=24, sampling=strict)
    assert store.complete(second, max_tokens=24, sampling=wanted).tokens == alone(wanted)
    # What is its own does tell: another seed, another filter, other stop tokens.
    assert alone(wanted) != alone(Sampling(temperature=1.0, top_p=0.9, seed=99, stop_token_ids=[3]))
    assert alone(wanted) != alone(Sampling(temperature=1.0, top_k=1, seed=7, stop_token_ids=[3]))
    assert alone(wanted) != alone(Sampling(temperature=1.0, top_p=0.9, seed=7, stop_token_ids=list(range(100, 211))))
