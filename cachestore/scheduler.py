"""What runs this step: admission, block growth, preemption, and the rows of the step.

Running decodes go first, then chunks of prefill in order of admission, up to the step's token budget. Admission takes
every block that the prompt and the first output token need, or none: the plan is made first, and a refused plan
changes nothing, recency included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cachestore.blocks import BlockPool
from cachestore.sequence import Phase, Sequence
from policies.fairness import FirstComeFirstServed, choose_victim


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens [start, start + count) of a sequence are computed; `samples` when its last token is among them."""

    sequence: Sequence
    start: int
    count: int
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The rows of one step, and the sequences that were admitted for the first time."""

    rows: list[Row]
    started: list[Sequence]


class Scheduler:
    """Owns the queue of waiting and the list of running sequences; asks the pool for their blocks.

    Args:
        reclaim: makes room for so many more blocks from ended requests that still wait for their last `Seal`, or
            changes nothing and says False; asked before a request is refused its blocks or preempted.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_tokens: int,
        step_tokens: int,
        max_running: int,
        reclaim: Callable[[int], bool],
    ) -> None:
        if max_running > step_tokens:
            raise ValueError(f"max_running {max_running} is above step_tokens {step_tokens}: a step fits all decodes")
        self.pool = pool
        self.block_tokens = block_tokens
        self.step_tokens = step_tokens
        self.max_running = max_running
        self.waiting: FirstComeFirstServed[Sequence] = FirstComeFirstServed()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._reclaim = reclaim

    @property
    def has_work(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def enqueue(self, sequence: Sequence) -> None:
        self.waiting.push(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a waiting or running sequence out; its blocks are the caller's to release."""
        if sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)

    def plan(self) -> StepPlan:
        """Admit, grow and preempt, and say what is computed this step."""
        self._grow()
        rows: list[Row] = []
        budget = self.step_tokens
        for sequence in self.running:
            if sequence.pending_tokens == 1:
                rows.append(Row(sequence, sequence.computed_tokens, 1, samples=True))
                budget -= 1
        for sequence in self.running:
            if sequence.pending_tokens > 1 and budget > 0:
                rows.append(self._chunk(sequence, budget))
                budget -= rows[-1].count
        started: list[Sequence] = []
        while budget > 0 and len(self.running) < self.max_running and (head := self.waiting.head()) is not None:
            if not self._admit(head):
                break
            if not head.preemptions:
                started.append(head)
            rows.append(self._chunk(head, budget))
            budget -= rows[-1].count
        return StepPlan(rows, started)

    def _chunk(self, sequence: Sequence, budget: int) -> Row:
        count = min(sequence.pending_tokens, budget)
        return Row(sequence, sequence.computed_tokens, count, samples=count == sequence.pending_tokens)

    def _grow(self) -> None:
        """Every running sequence gets the block its next token goes into; who can't have one preempts."""
        for sequence in list(self.running):
            while sequence.phase is Phase.RUNNING and self.blocks_for(len(sequence.tokens)) > len(sequence.table):
                if not self.pool.short(sequence.account, (), 1) or self._reclaim(1):
                    sequence.table += self.pool.allocate(sequence.account, 1)
                else:
                    # A lone sequence always fits: one that never could was rejected when it came.
                    victim = choose_victim(self.running)
                    assert victim is not None
                    self._preempt(victim)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue without its blocks, keeping its tokens and the names it was given."""
        self.running.remove(sequence)
        self.pool.release(sequence.account, sequence.table)
        sequence.table = []
        sequence.computed_tokens = sequence.published_blocks = sequence.adopted_blocks = 0
        sequence.preemptions += 1
        sequence.phase = Phase.WAITING
        self.preemptions += 1
        self.waiting.push_back_to_head(sequence)

    def _admit(self, sequence: Sequence) -> bool:
        # At least one token is computed, or there would be no logits to sample from.
        reusable = (len(sequence.tokens) - 1) // self.block_tokens
        matched = self.pool.index.match(sequence.account, sequence.epoch, sequence.keys[:reusable])
        needed = self.blocks_for(min(len(sequence.tokens) + 1, sequence.final_tokens)) - len(matched)
        if short := self.pool.short(sequence.account, matched, needed):
            # What is reclaimed may be what was matched, and is no room then.
            if not self._reclaim(short) or self.pool.short(sequence.account, matched, needed):
                return False
        self.pool.share(sequence.account, matched)
        sequence.table = matched + self.pool.allocate(sequence.account, needed)
        sequence.adopted_blocks = sequence.published_blocks = len(matched)
        sequence.computed_tokens = len(matched) * self.block_tokens
        sequence.phase = Phase.RUNNING
        self.waiting.remove(sequence)
        self.running.append(sequence)
        return True
