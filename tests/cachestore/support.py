"""What tests of the store share: names, a clock, a runner that computes nothing, a harness around the engine."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cachestore.blocks import BlockPool
from cachestore.engine import Engine, Runner, Sampled
from cachestore.index import BlockName, PrefixIndex
from cachestore.protocol import (
    Abort,
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
    Rejected,
    Sampling,
    Seal,
    Started,
    Submit,
    TokenLogprobs,
    Tokens,
)
from cachestore.scheduler import Row
from cachestore.sequence import Sequence as StoreSequence
from policies.eviction import LeastRecentlyUsed, Order
from policies.lifetimes import Lifetimes

ALICE, BOB, CAROL = b"A" * 16, b"B" * 16, b"C" * 16
GREEDY = Sampling(temperature=0)
VOCABULARY_TOKENS = 997


def token_bytes(tokens: Iterable[int]) -> bytes:
    return array("I", tokens).tobytes()


def make_sequence(
    tokens: Sequence[int], sampling: Sampling = GREEDY, *, prompt_tokens: int = 1, table: Sequence[int] = ()
) -> StoreSequence:
    """A request as the engine holds it, of which only these matter."""
    return StoreSequence(
        connection=1,
        request=1,
        arrival=1,
        account=ALICE,
        epoch=1,
        tokens=array("I", tokens),
        prompt_tokens=prompt_tokens,
        keys=[],
        sampling=sampling,
        stop_token_ids=frozenset(sampling.stop_token_ids),
        max_tokens=10,
        queue_deadline_ns=0,
        queued_ns=0,
        table=list(table),
    )


def chain_keys(account: bytes, epoch: int, tokens: Sequence[int], block_tokens: int) -> list[bytes]:
    """Names for the full blocks of `tokens`: digests of account, epoch, the name before and the block's tokens."""
    key = hashlib.sha256(struct.pack(">16sQ", account, epoch)).digest()
    keys = []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        key = hashlib.sha256(key + token_bytes(tokens[start : start + block_tokens])).digest()
        keys.append(key)
    return keys


def assert_prefix_closed(index: PrefixIndex, parents: dict[bytes, bytes | None]) -> None:
    """Whoever is indexed has its parent indexed: nothing cached is out of reach."""
    indexed = {name.key for name, _ in index.names()}
    for key in indexed:
        parent = parents[key]
        assert parent is None or parent in indexed, "a block is indexed and its parent is not"


class Clock:
    """Stands in for CLOCK_MONOTONIC."""

    def __init__(self) -> None:
        self.ns = 1_000_000_000

    def __call__(self) -> int:
        return self.ns

    def advance(self, seconds: float) -> None:
        self.ns += int(seconds * 1e9)


class RememberingRunner:
    """Stands in for the model: each slot remembers who wrote what there; the next token is a digest of the context.

    Every row reads its whole context back through its block table. What it finds there must be what its own account
    and epoch wrote for these very tokens, or it is noted in `mistakes`.

    Attributes:
        steps: the rows of each step: (request, start, count).
        fault: raised by the next launch, once.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.steps: list[list[tuple[int, int, int]]] = []
        self.fault: Exception | None = None
        self.mistakes: list[str] = []
        self._slots: dict[int, bytes] = {}

    def launch(self, rows: Sequence[Row]) -> list[Sampled]:
        self.steps.append([(row.sequence.request, row.start, row.count) for row in rows])
        if fault := self.fault:
            self.fault = None
            raise fault
        try:
            tokens = self._compute(rows)
        except Exception as error:
            # The engine outlives a failing step: only `mistakes` tells that this one was not planted.
            self.mistakes.append(repr(error))
            raise
        sampling = [row.sequence.sampling for row in rows if row.samples]
        return [Sampled(token, scripted_logprobs(token, s)) for token, s in zip(tokens, sampling, strict=True)]

    def _compute(self, rows: Sequence[Row]) -> Sequence[int | None]:
        if not all(row.count >= 1 for row in rows):
            self.mistakes.append("a row computes nothing")
        contents = [self._contents(row) for row in rows]
        for row, content in zip(rows, contents, strict=True):
            for position in range(row.start, row.start + row.count):
                self._slots[self._slot(row.sequence, position)] = content[position]
        for row, content in zip(rows, contents, strict=True):
            for position, expected in enumerate(content):
                if self._slots.get(self._slot(row.sequence, position)) != expected:
                    self.mistakes.append(f"request {row.sequence.request} read something else at {position}")
        return [next_token(row.sequence.tokens) for row in rows if row.samples]

    def collect(self, in_flight: list[Sampled]) -> list[Sampled]:
        return in_flight

    def _slot(self, sequence: StoreSequence, position: int) -> int:
        return sequence.table[position // self.block_tokens] * self.block_tokens + position % self.block_tokens

    def _contents(self, row: Row) -> list[bytes]:
        """What each slot of the row's context holds: a digest of its owner and all tokens up to it."""
        digest = hashlib.sha256(struct.pack(">16sQ", row.sequence.account, row.sequence.epoch))
        contents = []
        for token in row.sequence.tokens[: row.start + row.count]:
            digest.update(struct.pack(">I", token))
            contents.append(digest.digest())
        return contents


def scripted_logprobs(token: int | None, sampling: Sampling) -> TokenLogprobs | None:
    """What `RememberingRunner` tells with a token: that one is the likeliest, and the ids after it follow."""
    if token is None or sampling.logprobs is None:
        return None
    top = [((token + rank) % VOCABULARY_TOKENS, -0.5 - rank) for rank in range(sampling.logprobs)]
    return TokenLogprobs(-0.5, top)


def next_token(tokens: Iterable[int]) -> int:
    """What `RememberingRunner` answers to a context."""
    return int.from_bytes(hashlib.sha256(token_bytes(tokens)).digest()[:4], "big") % VOCABULARY_TOKENS


def expected_answer(prompt: Sequence[int], count: int) -> list[int]:
    """`count` tokens as `RememberingRunner` continues a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclass
class Answer:
    """What a gateway knows of one request."""

    connection: int
    request: int
    account: bytes
    epoch: int
    prompt: list[int]
    named_blocks: int
    started: Started | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finished: Finished | None = None
    rejected: Rejected | None = None
    sealed: bool = False

    @property
    def over(self) -> bool:
        return self.finished is not None or self.rejected is not None

    @property
    def cached_tokens(self) -> int:
        assert self.started is not None, "the request was not admitted"
        return self.started.cached_tokens

    @property
    def reason(self) -> str | None:
        return self.finished.reason if self.finished else None


class Harness:
    """An engine, and what a gateway does with it. Checks after every call that all of the engine's state agrees.

    It also holds the engine to the order of events: Started once and first, Tokens after it, one Finished and nothing
    after that, or one Rejected.
    """

    def __init__(
        self,
        runner: Runner | None = None,
        *,
        blocks: int = 32,
        block_tokens: int = 4,
        step_tokens: int = 64,
        max_running: int = 8,
        max_context_tokens: int = 100_000,
        vocabulary_tokens: int = VOCABULARY_TOKENS,
        make_order: Callable[[Lifetimes], Order] = LeastRecentlyUsed,
        prefix_cache: bool = True,
    ) -> None:
        self.remembering = RememberingRunner(block_tokens)
        self.clock = Clock()
        self.block_tokens = block_tokens
        self.engine = Engine(
            runner or self.remembering,
            limits=Limits(
                blocks=blocks,
                max_context_tokens=max_context_tokens,
                max_running=max_running,
                step_tokens=step_tokens,
                vocabulary_tokens=vocabulary_tokens,
            ),
            block_tokens=block_tokens,
            block_bytes=512,
            emit=self._take,
            clock_ns=self.clock,
            make_order=make_order,
            prefix_cache=prefix_cache,
        )
        self.fenced: list[Fenced] = []
        self.flushed: list[Flushed] = []
        self.probed: list[ProbeResult] = []
        self.answers: dict[tuple[int, int], Answer] = {}
        self.parents: dict[bytes, bytes | None] = {}
        self._requests = 0
        self._gone: set[int] = set()

    def open(self, account: bytes = ALICE, epoch: int = 1, **limits: Any) -> None:
        self._call(lambda: self.engine.open_account(OpenAccount(account=account, epoch=epoch, **limits)))

    def submit(
        self,
        prompt: Sequence[int],
        *,
        account: bytes = ALICE,
        epoch: int = 1,
        connection: int = 1,
        max_tokens: int = 4,
        sampling: Sampling = GREEDY,
        wait_seconds: float = 60,
        keys: list[bytes] | None = None,
        ttl_seconds: int = 0,
    ) -> Answer:
        """Opens the account unless the engine knows it or has dropped it, as a gateway's client does."""
        if self.engine.index.epoch(account) is None:
            self.open(account, epoch)
        self._requests += 1
        if keys is None:
            keys = self._keys(account, epoch, list(prompt))
        self.parents.update(zip(keys, [None, *keys], strict=False))
        answer = Answer(connection, self._requests, account, epoch, list(prompt), len(keys))
        self.answers[connection, answer.request] = answer
        submit = Submit(
            request=answer.request,
            account=account,
            epoch=epoch,
            tokens=token_bytes(prompt),
            keys=b"".join(keys),
            sampling=sampling,
            max_tokens=max_tokens,
            queue_deadline_ns=self.clock.ns + int(wait_seconds * 1e9),
            ttl_seconds=ttl_seconds,
        )
        self._call(lambda: self.engine.submit(connection, submit))
        return answer

    def seal(self, answer: Answer, *, last: bool = True) -> None:
        """Name every block that the answer has filled since the last call."""
        keys = self._keys(answer.account, answer.epoch, answer.prompt + answer.tokens)[answer.named_blocks :]
        seal = Seal(request=answer.request, first_block=answer.named_blocks, keys=b"".join(keys), last=last)
        answer.named_blocks += len(keys)
        answer.sealed = answer.sealed or last
        self._call(lambda: self.engine.seal(answer.connection, seal))

    def abort(self, answer: Answer) -> None:
        self._call(lambda: self.engine.abort(answer.connection, Abort(request=answer.request)))

    def disconnect(self, connection: int) -> None:
        self._gone.add(connection)
        self._call(lambda: self.engine.disconnect(connection))

    def fence(self, account: bytes, epoch: int) -> Fenced:
        self._call(lambda: self.engine.fence(1, Fence(account=account, epoch=epoch)))
        return self.fenced[-1]

    def drop(self, account: bytes) -> Fenced:
        self._call(lambda: self.engine.drop_account(1, DropAccount(account=account)))
        return self.fenced[-1]

    def flush(self, account: bytes) -> Flushed:
        """Held to: what is held keeps its name, and all else of the account is gone."""
        self._call(lambda: self.engine.flush(1, Flush(account=account)))
        assert not len(self.engine.pool.shares.account(account).cached)
        return self.flushed[-1]

    def probe(self, prompt: Sequence[int], *, account: bytes = ALICE, epoch: int = 1) -> ProbeResult:
        """Held to: nothing has changed, not even who gives way first."""
        keys = b"".join(self._keys(account, epoch, list(prompt)))
        before = pool_state(self.engine.pool)
        self._call(lambda: self.engine.probe(1, Probe(account=account, epoch=epoch, keys=keys)))
        assert pool_state(self.engine.pool) == before
        return self.probed[-1]

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self._call(self.engine.step)

    def expire(self, after_seconds: float) -> None:
        self.clock.advance(after_seconds)
        self._call(self.engine.expire)

    def run(self, *answers: Answer) -> None:
        """Step until all these are over."""
        for _ in range(10_000):
            if all(answer.over for answer in answers):
                return
            self.step()
        raise AssertionError("the requests don't end")

    def complete(self, prompt: Sequence[int], **options: Any) -> Answer:
        """Submit, run to the end, and seal."""
        answer = self.complete_unsealed(prompt, **options)
        if answer.finished:
            self.seal(answer)
        return answer

    def complete_unsealed(self, prompt: Sequence[int], **options: Any) -> Answer:
        answer = self.submit(prompt, **options)
        self.run(answer)
        return answer

    def sequence(self, answer: Answer) -> StoreSequence:
        return self.engine._sequences[answer.connection, answer.request]

    def cached_blocks(self, account: bytes) -> int:
        return sum(name.account == account for name, _ in self.engine.index.names())

    def check(self) -> None:
        self.engine.check()
        assert_prefix_closed(self.engine.index, self.parents)
        assert not self.remembering.mistakes, self.remembering.mistakes

    def _keys(self, account: bytes, epoch: int, tokens: list[int]) -> list[bytes]:
        keys = chain_keys(account, epoch, tokens, self.block_tokens)
        self.parents.update(zip(keys, [None, *keys], strict=False))
        return keys

    def _call(self, act: Callable[[], None]) -> None:
        act()
        self.check()

    def _take(self, connection: int, message: Message) -> None:
        assert isinstance(message, Fenced | Flushed | ProbeResult | Started | Tokens | Finished | Rejected)
        if isinstance(message, Fenced):
            self.fenced.append(message)
            return
        if isinstance(message, Flushed):
            self.flushed.append(message)
            return
        if isinstance(message, ProbeResult):
            self.probed.append(message)
            return
        if connection in self._gone:
            return
        if isinstance(message, Tokens):
            for request, tokens, logprobs in message.entries:
                answer = self.answers[connection, request]
                assert answer.started
                assert not answer.over
                answer.tokens += tokens
                answer.logprobs += logprobs
            return
        answer = self.answers[connection, message.request]
        assert not answer.over, "something came after the end"
        if isinstance(message, Started):
            assert answer.started is None, "Started came twice"
            answer.started = message
        elif isinstance(message, Finished):
            answer.finished = message
        else:
            assert answer.started is None, "a request was rejected after it was admitted"
            answer.rejected = message


def pool_state(pool: BlockPool) -> object:
    """All that a refused call must leave as it was, order of eviction and of the free list included."""
    accounts = [(account.name, account.held, list(account.cached)) for account in pool.shares]
    return accounts, list(pool._free), list(pool._references), list(pool._keys), pool.evictions


def name_of(account: bytes, epoch: int, word: int | str) -> BlockName:
    """A name for tests of pool and index alone."""
    return BlockName(account, epoch, hashlib.sha256(str(word).encode()).digest())
