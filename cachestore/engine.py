"""The step loop: commands in, events out, one thread, no sockets.

Between steps commands are applied; a step is plan → launch → collect → account. What the engine has to say is handed to
`emit(connection, message)`, which never blocks.

A block is published when it has a name, the step that wrote it has been collected, and its account and epoch are
open; publication comes before the `Tokens` message of that step.
"""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, Protocol

from cachestore.blocks import BlockPool
from cachestore.index import PrefixIndex
from cachestore.protocol import (
    KEY_BYTES,
    TOKEN_BYTES,
    Abort,
    AccountReport,
    DropAccount,
    Fence,
    Fenced,
    Finished,
    Flush,
    Flushed,
    Limits,
    Message,
    OpenAccount,
    Probe,
    ProbeResult,
    ProtocolError,
    Rejected,
    Seal,
    Started,
    StatsReport,
    Submit,
    TokenLogprobs,
    Tokens,
)
from cachestore.scheduler import Row, Scheduler, StepPlan
from cachestore.sequence import Phase, Sequence, split_keys
from policies.eviction import AccountLimits, LeastRecentlyUsed, Order
from policies.lifetimes import Lifetimes

log = logging.getLogger("saltern.store")

# How long an ended request keeps its full blocks for the names that the gateway still owes it.
SEAL_WAIT_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a row was sampled to; `token` None: its logits leave no token."""

    token: int | None
    logprobs: TokenLogprobs | None = None


class Runner(Protocol):
    """Computes a step. `launch` starts it, `collect` waits for it: "completed" always means collected."""

    def launch(self, rows: List[Row]) -> Any: ...

    def collect(self, in_flight: Any) -> list[Sampled]:
        """One for each row that samples, in order of the rows."""
        ...


class Engine:
    """All state of the store but the tensors. Not thread-safe: one thread calls everything."""

    def __init__(
        self,
        runner: Runner,
        *,
        limits: Limits,
        block_tokens: int,
        block_bytes: int,
        emit: Callable[[int, Message], None],
        clock_ns: Callable[[], int],
        make_order: Callable[[Lifetimes], Order] = LeastRecentlyUsed,
        prefix_cache: bool = True,
    ) -> None:
        self.runner = runner
        self.limits = limits
        self.block_tokens = block_tokens
        self.block_bytes = block_bytes
        self.index = PrefixIndex(takes_names=prefix_cache)
        self.pool = BlockPool(limits.blocks, self.index, make_order, clock_ns)
        self.scheduler = Scheduler(
            self.pool,
            block_tokens=block_tokens,
            step_tokens=limits.step_tokens,
            max_running=limits.max_running,
            reclaim=self._reclaim_ended,
        )
        self.steps = 0
        self.step_ns = 0
        self.computed_tokens = 0
        self.draining = False
        self._arrivals = 0
        # The last of its limits that each account was given.
        self._revisions: dict[bytes, int] = {}
        self._hit_tokens: Counter[bytes] = Counter()
        self._miss_tokens: Counter[bytes] = Counter()
        self._emit = emit
        self._clock_ns = clock_ns
        self._sequences: dict[tuple[int, int], Sequence] = {}
        # In order of ending, so the first is the first whose wait is over.
        self._ended: dict[tuple[int, int], Sequence] = {}

    # --- commands

    def open_account(self, message: OpenAccount) -> None:
        """Raises ProtocolError for limits that contradict each other."""
        try:
            limits = AccountLimits(
                message.reserved_blocks, message.max_blocks, message.weight, message.strict
            )
        except ValueError as error:
            raise ProtocolError(str(error)) from None
        self._open(message.account, message.epoch)
        if self.index.epoch(message.account) is None or message.revision < self._revisions.get(message.account, 0):
            return
        self._revisions[message.account] = message.revision
        shares, account = self.pool.shares, self.pool.shares.account(message.account)
        most, reserved = shares.most(account), shares.reserved
        self.pool.set_limits(message.account, limits)
        if shares.most(account) < most or shares.reserved > reserved:
            for sequence in self.scheduler.queued:
                if not self.scheduler.may_fit(sequence):
                    self._give_up(sequence)

    def _open(self, account: bytes, epoch: int) -> int:
        """Everything older than the epoch leaves the index; answers how many blocks that were."""
        before = self.index.epoch(account)
        dropped = self.index.raise_epoch(account, epoch)
        if self.index.epoch(account) != before:
            self.pool.forget(account, dropped)
        return len(dropped)

    def _give_up(self, sequence: Sequence) -> None:
        """A request that waits and can't fit any more; one that has begun ends with what it has."""
        if sequence.started_ns:
            self._finish(sequence, "length")
            return
        self.scheduler.remove(sequence)
        del self._sequences[sequence.connection, sequence.request]
        self._emit(sequence.connection, self._over_capacity(sequence))

    def flush(self, connection: int, message: Flush) -> None:
        """All that is cached of the account leaves the index; requests that run keep the blocks they hold."""
        blocks = self.pool.flush(message.account) if self.index.epoch(message.account) is not None else 0
        self._emit(connection, Flushed(account=message.account, blocks=blocks, bytes=blocks * self.block_bytes))

    def fence(self, connection: int, message: Fence) -> None:
        """Everything older than the epoch leaves the index; requests that run keep the blocks they hold."""
        blocks = self._open(message.account, message.epoch)
        self._emit(connection, self._fenced(message.account, message.epoch, blocks))

    def drop_account(self, connection: int, message: DropAccount) -> None:
        """All of the account leaves the index and its requests are aborted; it never comes back."""
        for sequence in [s for s in self._sequences.values() if s.account == message.account]:
            self._abort(sequence)
        dropped = self.index.drop(message.account)
        self.pool.drop(message.account, dropped)
        self.scheduler.waiting.forget(message.account)
        for each in (self._revisions, self._hit_tokens, self._miss_tokens):
            each.pop(message.account, None)
        self._emit(connection, self._fenced(message.account, None, len(dropped)))

    def _fenced(self, account: bytes, epoch: int | None, blocks: int) -> Fenced:
        return Fenced(account=account, epoch=epoch, blocks=blocks, bytes=blocks * self.block_bytes)

    def submit(self, connection: int, message: Submit) -> None:
        """Queue a request, or answer `Rejected`.

        Raises:
            ProtocolError: the id is in use, the tokens are no whole ids of the vocabulary, the sampling names ids
                outside it or biases one twice, or the keys don't cover exactly the prompt's full blocks, each with
                a key of its own.
        """
        if (connection, message.request) in self._sequences:
            raise ProtocolError("a request id is used twice at once")
        if not message.tokens or len(message.tokens) % TOKEN_BYTES:
            raise ProtocolError(f"{len(message.tokens)} bytes are no list of 4-byte token ids")
        sequence = Sequence.from_submit(connection, message, self._arrivals, self._clock_ns())
        biased = [token for token, _ in message.sampling.logit_bias]
        if max(chain(sequence.tokens, biased, sequence.stop_token_ids)) >= self.limits.vocabulary_tokens:
            raise ProtocolError("a token id is outside the vocabulary")
        if len(set(biased)) != len(biased):
            raise ProtocolError("a token is biased twice")
        if len(message.keys) != sequence.prompt_tokens // self.block_tokens * KEY_BYTES:
            raise ProtocolError("a prompt needs one key for each of its full blocks")
        _check_distinct(sequence.keys)
        if rejection := self._rejection(sequence):
            self._emit(connection, rejection)
            return
        self._open(message.account, message.epoch)
        self._arrivals += 1
        self._sequences[connection, message.request] = sequence
        self.scheduler.enqueue(sequence)

    def _rejection(self, sequence: Sequence) -> Rejected | None:
        def rejected(
            code: Literal["too_long", "stale_epoch", "unknown_account", "draining"], detail: str
        ) -> Rejected:
            return Rejected(request=sequence.request, code=code, detail=detail)

        epoch = self.index.epoch(sequence.account)
        if epoch is None:
            return rejected("unknown_account", "the account is not open")
        if sequence.epoch < epoch:
            return rejected("stale_epoch", f"epoch {sequence.epoch} is older than {epoch}")
        if self.draining:
            return rejected("draining", "the store is draining")
        if sequence.prompt_tokens + sequence.max_tokens > self.limits.max_context_tokens:
            limit = f"exceed the context of {self.limits.max_context_tokens}"
            return rejected("too_long", f"{sequence.asked} {limit}")
        return None if self.scheduler.may_fit(sequence) else self._over_capacity(sequence)

    def _over_capacity(self, sequence: Sequence) -> Rejected:
        shares = self.pool.shares
        most = shares.most(shares.account(sequence.account))
        of_whom = "the cache" if most == shares.total else "the account's part of the cache,"
        detail = f"{sequence.asked} exceed {of_whom} of {most * self.block_tokens} tokens"
        return Rejected(request=sequence.request, code="over_capacity", detail=detail)

    def seal(self, connection: int, message: Seal) -> None:
        """Take names for generated blocks; the last `Seal` ends the request's hold on its blocks.

        Raises:
            ProtocolError: the names don't follow the last one given, name blocks that no token was sent for, or
                name two blocks alike.
        """
        sequence = self._sequences.get((connection, message.request))
        if sequence is None:
            return
        if message.first_block != len(sequence.keys) or len(message.keys) % KEY_BYTES:
            raise ProtocolError(f"a Seal at block {message.first_block} where block {len(sequence.keys)} is next")
        keys = split_keys(message.keys)
        if len(sequence.keys) + len(keys) > len(sequence.tokens) // self.block_tokens:
            raise ProtocolError("a Seal names blocks that are not full")
        if message.last and sequence.phase is not Phase.ENDED:
            raise ProtocolError("the last Seal came before Finished")
        _check_distinct(sequence.keys + keys)
        sequence.keys += keys
        self._publish(sequence)
        if message.last:
            self._release_ended(sequence)

    def abort(self, connection: int, message: Abort) -> None:
        if sequence := self._sequences.get((connection, message.request)):
            self._abort(sequence)

    def disconnect(self, connection: int) -> None:
        """The gateway is gone: its requests end and hold nothing."""
        for sequence in [s for s in self._sequences.values() if s.connection == connection]:
            self._abort(sequence)
            self._release_ended(sequence)

    def probe(self, connection: int, message: Probe) -> None:
        """Raises ProtocolError for what is no list of keys."""
        if len(message.keys) % KEY_BYTES:
            raise ProtocolError(f"{len(message.keys)} bytes are no list of {KEY_BYTES}-byte keys")
        keys = split_keys(message.keys)
        found = self.index.match(message.account, message.epoch, keys)
        miss_block, miss_reason = self.pool.miss(message.account, message.epoch, keys, found) or (None, None)
        result = ProbeResult(
            account=message.account,
            epoch=message.epoch,
            device_blocks=len(found),
            miss_block=miss_block,
            miss_reason=miss_reason,
        )
        self._emit(connection, result)

    def stats(self, *, pushed: bool) -> StatsReport:
        return StatsReport(
            pushed=pushed,
            total_blocks=self.pool.total,
            free_blocks=self.pool.free,
            held_blocks=self.pool.held,
            cached_blocks=self.pool.cached,
            reserved_blocks=self.pool.shares.reserved,
            missing_blocks=self.pool.shares.missing,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.queued),
            ended=len(self._ended),
            steps=self.steps,
            step_ns=self.step_ns,
            computed_tokens=self.computed_tokens,
            preemptions=self.scheduler.preemptions,
            evictions=self.pool.evictions,
            limit_evictions=self.pool.limit_evictions,
        )

    def account_report(self, account: bytes) -> AccountReport:
        if self.index.epoch(account) is None:
            return AccountReport(account=account)
        share = self.pool.shares.account(account)
        return AccountReport(
            account=account,
            held_blocks=share.held,
            cached_blocks=len(share.cached),
            bytes=share.used * self.block_bytes,
            reserved_blocks=share.reserved,
            max_blocks=share.limits.max,
            hit_tokens=self._hit_tokens[account],
            miss_tokens=self._miss_tokens[account],
            evictions=share.evictions,
        )

    # --- steps

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def next_deadline_ns(self) -> int | None:
        """When `expire` next has something to do, apart from steps."""
        first = next(iter(self._ended.values()), None)
        return first.finished_ns + SEAL_WAIT_NS if first else None

    def expire(self) -> None:
        """End what has waited too long: queued requests past their deadline, ended ones without their last `Seal`."""
        now_ns = self._clock_ns()
        for sequence in [s for s in self._ended.values() if s.finished_ns + SEAL_WAIT_NS <= now_ns]:
            self._release_ended(sequence)
        # A preempted request was admitted once: its client is already being answered.
        for sequence in [s for s in self.scheduler.queued if not s.started_ns and s.queue_deadline_ns <= now_ns]:
            self.scheduler.remove(sequence)
            del self._sequences[sequence.connection, sequence.request]
            waited = (now_ns - sequence.queued_ns) / 1e9
            detail = f"waited {waited:.1f} s for {self.scheduler.blocks_for(len(sequence.tokens))} blocks"
            self._emit(sequence.connection, Rejected(request=sequence.request, code="queue_timeout", detail=detail))

    def step(self) -> None:
        """Compute one step, if there is anything to compute."""
        self.compute(self.plan())

    def plan(self) -> StepPlan:
        """Decide what the next step computes, and say which requests it admits."""
        plan = self.scheduler.plan()
        for sequence in plan.unfit:
            self._give_up(sequence)
        self._announce(plan)
        return plan

    def compute(self, plan: StepPlan) -> None:
        """Run a step that was planned, with nothing between."""
        if not plan.rows:
            return
        began_ns = self._clock_ns()
        try:
            sampled = self.runner.collect(self.runner.launch(plan.rows))
        except Exception as error:
            # The blocks of this step hold nothing that can be trusted; those published before it do. The text of the
            # exception is not logged: it may quote a token.
            where = traceback.extract_tb(error.__traceback__)[-1]
            kind = type(error).__name__
            log.error("a step of %d rows failed: %s at %s:%s", len(plan.rows), kind, where.filename, where.lineno)
            for row in plan.rows:
                self._finish(row.sequence, "error", "step_failed")
                self._release_ended(row.sequence)
            return
        self.steps += 1
        self.step_ns += self._clock_ns() - began_ns
        self._account(plan.rows, sampled)

    def _announce(self, plan: StepPlan) -> None:
        for sequence in plan.started:
            sequence.started_ns = self._clock_ns()
            sequence.cached_tokens = sequence.computed_tokens
            self._hit_tokens[sequence.account] += sequence.cached_tokens
            self._miss_tokens[sequence.account] += sequence.prompt_tokens - sequence.cached_tokens
            miss_block, miss_reason = sequence.miss or (None, None)
            started = Started(
                request=sequence.request,
                cached_tokens=sequence.cached_tokens,
                miss_block=miss_block,
                miss_reason=miss_reason,
                stamps=sequence.stamps,
            )
            self._emit(sequence.connection, started)

    def _account(self, rows: list[Row], sampled: list[Sampled]) -> None:
        tokens: dict[int, list[tuple[int, list[int], list[TokenLogprobs]]]] = {}
        ended: list[tuple[Sequence, Literal["stop", "length", "error"]]] = []
        samples = iter(sampled)
        for row in rows:
            sequence = row.sequence
            sequence.computed_tokens += row.count
            sequence.total_computed_tokens += row.count
            sequence.steps += 1
            self.computed_tokens += row.count
            self._publish(sequence)
            if not row.samples:
                continue
            sample = next(samples)
            if (token := sample.token) is None:
                ended.append((sequence, "error"))
                continue
            sequence.tokens.append(token)
            sequence.first_token_ns = sequence.first_token_ns or self._clock_ns()
            logprobs = [sample.logprobs] if sample.logprobs else []
            tokens.setdefault(sequence.connection, []).append((sequence.request, [token], logprobs))
            if token in sequence.stop_token_ids:
                ended.append((sequence, "stop"))
            elif sequence.output_tokens == sequence.max_tokens:
                ended.append((sequence, "length"))
        for connection, entries in tokens.items():
            self._emit(connection, Tokens(entries=entries))
        for sequence, reason in ended:
            self._finish(sequence, reason, "no_token" if reason == "error" else None)

    def _publish(self, sequence: Sequence) -> None:
        full = min(sequence.computed_tokens // self.block_tokens, len(sequence.keys))
        if full <= sequence.published_blocks or not self.index.is_open(sequence.account, sequence.epoch):
            return
        begin = sequence.published_blocks
        mine = sequence.table[begin:full]
        parent = sequence.table[begin - 1] if begin else None
        kept = self.pool.publish(sequence.account, sequence.epoch, mine, sequence.keys[begin:full], parent)
        sequence.table[begin:full] = kept
        # After a preemption a block is written again, but it was paid for once.
        for position, (block, held) in enumerate(zip(mine, kept, strict=True), begin):
            if block == held and position >= sequence.written_until_block:
                sequence.written_until_block = position + 1
                sequence.written_blocks += position < sequence.prompt_tokens // self.block_tokens
        sequence.published_blocks = full
        self.scheduler.wake_followers(sequence)

    # --- endings

    def _abort(self, sequence: Sequence) -> None:
        if sequence.phase is not Phase.ENDED:
            self._finish(sequence, "aborted")

    def _finish(
        self,
        sequence: Sequence,
        reason: Literal["stop", "length", "aborted", "error"],
        error: Literal["step_failed", "no_token"] | None = None,
    ) -> None:
        """Say `Finished` and keep the full blocks, whole chain, until their names have come.

        The chain stays whole so that a name that comes late never names a block whose parent was evicted.
        """
        self.scheduler.remove(sequence)
        full = sequence.computed_tokens // self.block_tokens
        self.pool.release(sequence.account, sequence.table[full:])
        del sequence.table[full:]
        sequence.phase = Phase.ENDED
        sequence.finished_ns = self._clock_ns()
        self._ended[sequence.connection, sequence.request] = sequence
        finished = Finished(
            request=sequence.request, reason=reason, error=error, stamps=sequence.stamps, counts=sequence.counts
        )
        self._emit(sequence.connection, finished)

    def _release_ended(self, sequence: Sequence) -> None:
        if sequence.ttl_ns:
            self.pool.keep(sequence.table, sequence.ttl_ns)
        self.pool.release(sequence.account, sequence.table)
        sequence.table = []
        del self._ended[sequence.connection, sequence.request]
        del self._sequences[sequence.connection, sequence.request]

    def _reclaim_ended(self, account: bytes, blocks: int, own: bool) -> bool:
        """Release what ended requests hold, if so many blocks can be used then that can't be now.

        Those of the account itself, or of all that hold more than is reserved for them: the rest is no room for others.
        """
        shares = self.pool.shares
        holders: dict[bytes, Counter[int]] = {}
        ended = []
        for sequence in self._ended.values():
            if not sequence.table:
                # Nor may its account be there any more.
                continue
            if sequence.account != account and (own or not shares.account(sequence.account).beyond):
                continue
            ended.append(sequence)
            holders.setdefault(sequence.account, Counter()).update(sequence.table)
        room = 0
        for name, table in holders.items():
            freed = sum(self.pool.references(block) == count for block, count in table.items())
            room += freed if name == account else min(freed, shares.account(name).beyond)
        if room < blocks:
            return False
        for sequence in ended:
            self._release_ended(sequence)
        return True

    def check(self) -> None:
        """Raise AssertionError unless blocks, index, tables and phases agree. For tests."""
        self.pool.check((sequence.account, sequence.table) for sequence in self._sequences.values())
        waiting, running = self.scheduler.queued, self.scheduler.running
        assert len(waiting) + len(running) + len(self._ended) == len(self._sequences)
        for sequence in waiting:
            assert sequence.phase is Phase.WAITING
            assert not sequence.table
        for sequence in running:
            assert sequence.phase is Phase.RUNNING
            assert len(sequence.table) * self.block_tokens >= sequence.computed_tokens
        for sequence in self._ended.values():
            assert sequence.phase is Phase.ENDED
        for sequence in self._sequences.values():
            if self.index.is_open(sequence.account, sequence.epoch):
                for position in range(sequence.published_blocks):
                    key = self.pool.key(sequence.table[position]) if sequence.table else None
                    assert not sequence.table or key == sequence.keys[position]


def _check_distinct(keys: list[bytes]) -> None:
    """Blocks of one request with one name would become one block, held twice by one table."""
    if len(set(keys)) != len(keys):
        raise ProtocolError("two blocks of a request have the same key")
