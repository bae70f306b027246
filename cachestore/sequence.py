"""One request's state in the store."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum

from cachestore.protocol import KEY_BYTES, Counts, MissReason, Sampling, Stamps, Submit


class Phase(Enum):
    WAITING = "waiting"  # holds no block
    RUNNING = "running"  # holds every block its next step needs
    ENDED = "ended"  # `Finished` is sent; full blocks stay until the last `Seal`


@dataclass(slots=True, eq=False)
class Sequence:
    """A request from `Submit` to its last `Seal`.

    Attributes:
        connection: the gateway's connection; request ids are unique within it.
        arrival: rises with the order in which requests came.
        tokens: prompt and generated tokens.
        keys: names for its full blocks, from the first on; names wait here until their block is full.
        table: its block numbers, in order.
        computed_tokens: how many leading tokens have their KV in the blocks of `table`.
        published_blocks: how many leading blocks of `table` bear their names.
        miss: position and reason of the first full block of the prompt that was not found when it was admitted.
    """

    connection: int
    request: int
    arrival: int
    account: bytes
    epoch: int
    tokens: array[int]
    prompt_tokens: int
    keys: list[bytes]
    sampling: Sampling
    stop_token_ids: frozenset[int]
    max_tokens: int
    queue_deadline_ns: int
    queued_ns: int
    ttl_ns: int = 0
    phase: Phase = Phase.WAITING
    table: list[int] = field(default_factory=list)
    computed_tokens: int = 0
    published_blocks: int = 0
    miss: tuple[int, MissReason] | None = None
    cached_tokens: int = 0
    written_blocks: int = 0
    written_until_block: int = 0
    preemptions: int = 0
    steps: int = 0
    total_computed_tokens: int = 0
    started_ns: int = 0
    first_token_ns: int = 0
    finished_ns: int = 0

    @classmethod
    def from_submit(cls, connection: int, submit: Submit, arrival: int, now_ns: int) -> Sequence:
        tokens: array[int] = array("I")
        tokens.frombytes(submit.tokens)
        return cls(
            connection=connection,
            request=submit.request,
            arrival=arrival,
            account=submit.account,
            epoch=submit.epoch,
            tokens=tokens,
            prompt_tokens=len(tokens),
            keys=split_keys(submit.keys),
            sampling=submit.sampling,
            stop_token_ids=frozenset(submit.sampling.stop_token_ids),
            max_tokens=submit.max_tokens,
            queue_deadline_ns=submit.queue_deadline_ns,
            ttl_ns=submit.ttl_seconds * 1_000_000_000,
            queued_ns=now_ns,
        )

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def pending_tokens(self) -> int:
        """Tokens whose KV is still to be computed; exactly one while it decodes."""
        return len(self.tokens) - self.computed_tokens

    @property
    def final_tokens(self) -> int:
        """The most tokens that can ever need KV: the last sampled one never does."""
        return self.prompt_tokens + self.max_tokens - 1

    @property
    def asked(self) -> str:
        """Its size, for a refusal."""
        return f"{self.prompt_tokens} prompt tokens and at most {self.max_tokens} new ones"

    @property
    def stamps(self) -> Stamps:
        return Stamps(
            queued_ns=self.queued_ns,
            started_ns=self.started_ns,
            first_token_ns=self.first_token_ns,
            finished_ns=self.finished_ns,
        )

    @property
    def counts(self) -> Counts:
        return Counts(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            computed_tokens=self.total_computed_tokens,
            written_blocks=self.written_blocks,
            preemptions=self.preemptions,
            steps=self.steps,
        )


def split_keys(keys: bytes) -> list[bytes]:
    """Concatenated keys as a list; their length is a multiple of 32 bytes."""
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
