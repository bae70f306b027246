"""Random histories of the engine: whatever gateways do, nothing is lost, nothing is read that another wrote."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from policies.eviction import LeastRecentlyUsed, Order
from policies.lifetimes import Lifetimes
from tests.cachestore.contrary import Contrary
from tests.cachestore.support import ALICE, BOB, Answer, Harness, expected_answer

ACCOUNTS = (ALICE, BOB)
# Prompts that share a beginning of 0, 4, 8 … tokens with each other, and end at and around the ends of blocks.
# Rare events happen at one value of a die, so that histories grow between them.
DIE = st.integers(0, 19)
PROMPTS = [[1] * shared + [word] * rest for shared in (0, 4, 8, 9) for word in (2, 3) for rest in (1, 3, 4, 5, 12)]


class EngineMachine(RuleBasedStateMachine):
    """`Harness` checks the engine after each call: its state, the order of events, and what every step reads."""

    def make_order(self, lifetimes: Lifetimes) -> Order:
        return LeastRecentlyUsed(lifetimes)

    def __init__(self) -> None:
        super().__init__()
        self.harness = Harness(
            blocks=14,
            block_tokens=4,
            step_tokens=12,
            max_running=4,
            max_context_tokens=48,
            make_order=self.make_order,
        )
        self.epochs = dict.fromkeys(ACCOUNTS, 1)
        self.dropped: set[bytes] = set()
        self.revision = 0
        self.connections = [1, 2]
        self.answers: list[Answer] = []

    @rule(
        account=st.sampled_from(ACCOUNTS),
        prompts=st.lists(st.sampled_from(PROMPTS), min_size=1, max_size=4),
        max_tokens=st.sampled_from([1, 4, 9, 24, 40]),
        which=st.integers(0, 1),
        wait_seconds=st.sampled_from([60, 60, 0.2]),
        ttl_seconds=st.sampled_from([0, 0, 0, 3]),
    )
    def submit(
        self,
        account: bytes,
        prompts: list[list[int]],
        max_tokens: int,
        which: int,
        wait_seconds: float,
        ttl_seconds: int,
    ) -> None:
        for prompt in prompts:
            answer = self.harness.submit(
                prompt,
                account=account,
                epoch=self.epochs[account],
                connection=self.connections[which],
                max_tokens=max_tokens,
                wait_seconds=wait_seconds,
                ttl_seconds=ttl_seconds,
            )
            if account in self.dropped:
                assert answer.rejected
                assert answer.rejected.code == "unknown_account"
            elif not answer.over:
                self.answers.append(answer)

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        self.harness.step(count)
        # Those that were waiting when a limit was lowered may have been refused.
        self.answers = [answer for answer in self.answers if not answer.rejected]

    @precondition(lambda self: self.answers)
    @rule(choice=st.integers(0, 99))
    def seal(self, choice: int) -> None:
        answer = self.answers[choice % len(self.answers)]
        if answer.over:
            self.harness.seal(answer)
            self.answers.remove(answer)
        elif answer.started:
            self.harness.seal(answer, last=False)

    @precondition(lambda self: self.answers)
    @rule(choice=st.integers(0, 99), die=DIE)
    def abort(self, choice: int, die: int) -> None:
        if die < 10:
            return
        self.harness.abort(self.answers[choice % len(self.answers)])

    @rule(which=st.integers(0, 1), die=DIE)
    def disconnect(self, which: int, die: int) -> None:
        if die != 13:
            return
        gone = self.connections[which]
        self.harness.disconnect(gone)
        assert not [key for key in self.harness.engine._sequences if key[0] == gone]
        self.connections[which] = max(self.connections) + 1
        self.answers = [answer for answer in self.answers if answer.connection != gone]

    @rule(account=st.sampled_from(ACCOUNTS), die=DIE)
    def fence(self, account: bytes, die: int) -> None:
        if die not in (5, 13):
            return
        self.epochs[account] += 1
        before = self.harness.cached_blocks(account)
        assert self.harness.fence(account, self.epochs[account]).blocks == before
        assert self.harness.cached_blocks(account) == 0

    @rule(
        account=st.sampled_from(ACCOUNTS),
        die=DIE,
        reserved=st.integers(0, 8),
        more=st.integers(0, 8),
        weight=st.sampled_from([1.0, 3.0]),
    )
    def limit(self, account: bytes, die: int, reserved: int, more: int, weight: float) -> None:
        if die < 14:
            return
        limits = [
            {},
            {"reserved_blocks": reserved},
            {"reserved_blocks": reserved, "max_blocks": reserved + more},
            {"reserved_blocks": reserved + 2, "max_blocks": reserved + 2, "strict": True},
        ][die % 4]
        self.revision += 1
        self.harness.open(account, self.epochs[account], revision=self.revision, weight=weight, **limits)
        self.answers = [answer for answer in self.answers if not answer.rejected]

    @rule(account=st.sampled_from(ACCOUNTS), die=DIE)
    def flush(self, account: bytes, die: int) -> None:
        if die == 13:
            self.harness.flush(account)

    @rule(account=st.sampled_from(ACCOUNTS), prompt=st.sampled_from(PROMPTS))
    def probe(self, account: bytes, prompt: list[int]) -> None:
        """What it says is there is what a request would find."""
        result = self.harness.probe(prompt, account=account, epoch=self.epochs[account])
        assert (result.miss_block is None) == (result.device_blocks == len(prompt) // 4)
        assert result.miss_block in (None, result.device_blocks)
        assert not (account in self.dropped and result.device_blocks)

    @rule(account=st.sampled_from(ACCOUNTS), die=DIE)
    def drop(self, account: bytes, die: int) -> None:
        if die != 13:
            return
        self.harness.drop(account)
        self.dropped.add(account)
        assert self.harness.cached_blocks(account) == 0

    @rule(seconds=st.sampled_from([0.1, 0.9, 1.5]))
    def expire(self, seconds: float) -> None:
        self.harness.expire(seconds)
        for sequence in self.harness.engine._ended.values():
            assert self.harness.clock.ns - sequence.finished_ns < 1_000_000_000
        self.answers = [answer for answer in self.answers if not answer.rejected]

    @rule(die=DIE)
    def fail(self, die: int) -> None:
        if die != 13:
            return
        self.harness.remembering.fault = RuntimeError("planted")
        self.harness.step()
        self.harness.remembering.fault = None

    def teardown(self) -> None:
        """All that was begun ends; what was answered is right; nothing is held."""
        for number in range(10_000):
            if not self.harness.engine.has_work:
                break
            self.harness.step()
            if number % 100 == 99:
                # A reservation may wait for blocks that ended requests hold.
                self.harness.expire(1.1)
        else:
            raise AssertionError(f"it does not end: {self.harness.engine.scheduler.queued}")
        self.harness.expire(2)
        assert self.harness.engine.pool.held == 0
        for answer in self.harness.answers.values():
            if answer.connection in self.connections:
                assert answer.over
            assert answer.tokens == expected_answer(answer.prompt, len(answer.tokens))
            if answer.reason == "length":
                assert answer.finished is not None
                assert answer.finished.counts.output_tokens == len(answer.tokens)


# Well over 1,000 operations, with a check after each.
TestEngineStates = EngineMachine.TestCase
TestEngineStates.settings = settings(max_examples=300, stateful_step_count=60, derandomize=True, deadline=None)


class ReuseEngineMachine(EngineMachine):
    """The same, where it is learnt who gives way, and the wrong is learnt."""

    def make_order(self, lifetimes: Lifetimes) -> Order:
        return Contrary(14, lifetimes)


TestReuseEngineStates = ReuseEngineMachine.TestCase
TestReuseEngineStates.settings = settings(TestEngineStates.settings, max_examples=60)


@pytest.mark.once
@pytest.mark.parametrize("examples", [2_000, 11_000])
def test_histories_that_nobody_has_seen(examples: int) -> None:
    """Longer than those above: a hundred operations each, or a few less; the second time more than a million in all."""

    class Counted(EngineMachine):
        operations = 0

        @invariant()
        def count(self) -> None:
            Counted.operations += 1

    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Counted, settings=settings(max_examples=examples, stateful_step_count=100, deadline=None, database=None)
    )
    print(f"{Counted.operations} operations")
    assert Counted.operations >= 90 * examples
