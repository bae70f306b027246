"""What runs this step: admission, block growth, preemption, and the rows of the step.

Running decodes go first. What is left of the step's token budget goes to prompts, in chunks, of the account that is
furthest behind by `policies.fairness`: to one of its requests that runs, else to one of those that wait, if it can be
admitted. Admission takes every block that the prompt and the first output token need, or none: the plan is made first,
and a refused plan changes nothing, recency included.

A request whose next block is being filled by a running one of its account waits for that, holding nothing, and matches
afresh when the block is published or its filler stops, whatever the cause.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cachestore.blocks import BlockPool
from cachestore.sequence import Phase, Sequence
from policies.fairness import FairQueue, choose_victim

# Of accounts in a step: where so many have no room, the others will hardly have, but for what is reserved for them.
MOST_REFUSED = 16


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens [start, start + count) of a sequence are computed; `samples` when its last token is among them."""

    sequence: Sequence
    start: int
    count: int
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The rows of one step, the sequences that were admitted for the first time, and those that never can be."""

    rows: list[Row]
    started: list[Sequence]
    unfit: list[Sequence]


class Scheduler:
    """Owns the queue of waiting and the list of running sequences; asks the pool for their blocks.

    Args:
        reclaim: of ended requests that still wait for their last `Seal` and may give way to one of this account, or
            only those of the account itself, releases the blocks if that makes room for so many more, or changes
            nothing and says False; asked before a request is refused its blocks or preempted.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_tokens: int,
        step_tokens: int,
        max_running: int,
        reclaim: Callable[[bytes, int, bool], bool],
    ) -> None:
        if max_running > step_tokens:
            raise ValueError(f"max_running {max_running} is above step_tokens {step_tokens}: a step fits all decodes")
        self.pool = pool
        self.block_tokens = block_tokens
        self.step_tokens = step_tokens
        self.max_running = max_running
        self.waiting: FairQueue[Sequence] = FairQueue()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._reclaim = reclaim
        # Accounts that had no room in this step beside what others hold.
        self._refused = 0
        # Whether one had none for what would be within its share: nobody is let go beyond its own then.
        self._is_owed = False
        self._weights: float | None = None
        # Who waits for blocks that a running one is filling.
        self._followers: defaultdict[Sequence, list[Sequence]] = defaultdict(list)
        pool.shares.begun = self._begun

    @property
    def has_work(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    @property
    def queued(self) -> list[Sequence]:
        """All that wait, for room or for blocks."""
        return [*self.waiting, *(each for followers in self._followers.values() for each in followers)]

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def may_fit(self, sequence: Sequence) -> bool:
        """Whether it can run to its end, at least when nothing else does."""
        shares = self.pool.shares
        return self.blocks_for(sequence.final_tokens) <= shares.most(shares.account(sequence.account))

    def enqueue(self, sequence: Sequence) -> None:
        self.waiting.push(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a waiting or running sequence out; its blocks are the caller's to release."""
        if sequence.phase is Phase.RUNNING:
            self.running.remove(sequence)
            self.wake_followers(sequence)
            return
        for followers in self._followers.values():
            if sequence in followers:
                followers.remove(sequence)
                return
        self.waiting.remove(sequence)

    def wake_followers(self, sequence: Sequence) -> None:
        """It has published blocks, or fills no more: who waits for them matches afresh."""
        for follower in self._followers.pop(sequence, ()):
            self.waiting.push_back(follower)

    def plan(self) -> StepPlan:
        """Admit, grow and preempt, and say what is computed this step."""
        self.pool.grow_reservations()
        self._grow()
        self._weights = None
        step = [
            Row(sequence, sequence.computed_tokens, 1, samples=True)
            for sequence in self.running
            if sequence.pending_tokens == 1
        ]
        for row in step:
            self._charge(row, 1)
        prefills = [sequence for sequence in self.running if sequence.pending_tokens > 1]
        unfit: list[Sequence] = []
        budget = self.step_tokens - len(step)
        self._refused, self._is_owed = 0, False
        promised: list[bytes] | None = None
        while budget > 0:
            sequence = min(prefills, key=lambda each: self.waiting.service(each.account), default=None)
            if self._refused < MOST_REFUSED:
                account = self.waiting.first()
            else:
                promised = self._promised() if promised is None else promised
                account = promised[-1] if promised else None
            if account is not None and (sequence is None or self._is_behind(account, sequence)):
                if promised:
                    promised.pop()
                preemptions = self.preemptions
                sequence = self._admit_next(account)
                if self.preemptions > preemptions:
                    for row in step:
                        if row.sequence.phase is not Phase.RUNNING:
                            self._charge(row, -1)
                            budget += row.count
                    step = [row for row in step if row.sequence.phase is Phase.RUNNING]
                    prefills = [each for each in prefills if each.phase is Phase.RUNNING]
                if sequence is None:
                    if (head := self.waiting.head(account)) is not None and not self.may_fit(head):
                        unfit.append(head)
                    self.waiting.set_aside(account)
                    continue
            elif sequence is not None:
                prefills.remove(sequence)
            else:
                break
            count = min(sequence.pending_tokens, budget)
            samples = count == sequence.pending_tokens
            step.append(Row(sequence, sequence.computed_tokens, count, samples))
            self._charge(step[-1], 1)
            budget -= count
        self.waiting.restore()
        started = [row.sequence for row in step if not row.sequence.started_ns]
        return StepPlan(step, started, unfit)

    def _promised(self) -> list[bytes]:
        """Accounts that wait, were not asked and have less than is reserved for them, the furthest behind last."""
        behind = [each.name for each in self.pool.shares if each.held < each.reserved]
        return sorted(filter(self.waiting.may_be_next, behind), key=self.waiting.service, reverse=True)

    def _is_behind(self, account: bytes, sequence: Sequence) -> bool:
        """Whether the account's next request goes before this running one. Inside an account the running one does."""
        return account != sequence.account and self.waiting.service(account) < self.waiting.service(sequence.account)

    def _charge(self, row: Row, sign: int) -> None:
        """Prompt tokens that are computed, and the token that is sampled. What was cached is free."""
        sequence = row.sequence
        prompt_tokens = min(row.start + row.count, sequence.prompt_tokens) - min(row.start, sequence.prompt_tokens)
        weight = self.pool.shares.account(sequence.account).limits.weight
        self.waiting.charge(sequence.account, sign * (prompt_tokens + row.samples), weight)

    def _begun(self) -> Iterator[tuple[bytes, int]]:
        """Accounts of requests that are being answered, and the blocks that each needs for its end."""
        for sequence in (*self.running, *self.queued):
            if sequence.started_ns or sequence.phase is Phase.RUNNING:
                yield sequence.account, self.blocks_for(sequence.final_tokens)

    # --- growth

    def _grow(self) -> None:
        """Every running sequence gets the block its next token goes into; who can't have one preempts."""
        for sequence in list(self.running):
            while sequence.phase is Phase.RUNNING and self.blocks_for(len(sequence.tokens)) > len(sequence.table):
                if victim := self._in_the_way(sequence):
                    self.preempt(victim)
                else:
                    sequence.table += self.pool.allocate(sequence.account, 1)

    def _in_the_way(self, sequence: Sequence) -> Sequence | None:
        """Who has to be preempted before a running sequence can have one more block; None: nobody."""
        account = sequence.account
        if self.pool.above(account, (), 1) and not self._reclaim(account, 1, True):
            own = [each for each in self.running if each.account == account]
            # Where the limit was lowered below what they need, they go on to their end.
            if victim := choose_victim([each for each in own[1:] if self.may_fit(each)], self._over):
                return victim
        if self.pool.short(account, (), 1):
            self._reclaim(account, 1, False)
        # What was reclaimed may have gone to a reservation that was not yet wholly in force.
        if self.pool.short(account, (), 1):
            # Whoever is within its reservation is in nobody's way. A lone sequence always fits: one that never could
            # was rejected when it came.
            others = [each for each in self.running[1:] if each.account == account or self._over(each.account) > 0]
            victim = choose_victim(others, self._over)
            assert victim is not None
            return victim
        return None

    def _over(self, account: bytes) -> float:
        share = self.pool.shares.account(account)
        return (share.held - share.reserved) / share.limits.weight

    def preempt(self, sequence: Sequence) -> None:
        """Back to its place in the queue without its blocks, keeping its tokens and the names it was given."""
        self.running.remove(sequence)
        self.pool.release(sequence.account, sequence.table)
        sequence.table = []
        sequence.computed_tokens = sequence.published_blocks = 0
        sequence.preemptions += 1
        sequence.phase = Phase.WAITING
        self.preemptions += 1
        self.waiting.push_back(sequence)
        self.wake_followers(sequence)

    # --- admission

    def _admit_next(self, account: bytes) -> Sequence | None:
        """The first of the account's waiting requests, now running; None where it has to wait."""
        while (sequence := self.waiting.head(account)) is not None and self.may_fit(sequence):
            # At least one token is computed, or there would be no logits to sample from.
            reusable = (len(sequence.tokens) - 1) // self.block_tokens
            matched = self.pool.index.match(account, sequence.epoch, sequence.keys[:reusable])
            if len(matched) < reusable and (filler := self._filler(sequence, len(matched))):
                self.waiting.remove(sequence)
                self._followers[filler].append(sequence)
                continue
            needed = self.blocks_for(min(len(sequence.tokens) + 1, sequence.final_tokens)) - len(matched)
            evictions = self.pool.evictions
            if not self._make_room(account, matched, needed):
                return None
            if self.pool.evictions > evictions or not self.may_fit(sequence):
                # What was matched may be among what limits no longer left room for, and a reservation may have taken
                # what came free.
                continue
            self.waiting.remove(sequence)
            if not sequence.started_ns:
                sequence.miss = self.pool.miss(account, sequence.epoch, sequence.keys, matched)
            self.pool.share(account, matched)
            sequence.table = matched + self.pool.allocate(account, needed)
            sequence.published_blocks = len(matched)
            sequence.computed_tokens = len(matched) * self.block_tokens
            sequence.phase = Phase.RUNNING
            self.running.append(sequence)
            return sequence
        return None

    def _filler(self, sequence: Sequence, block: int) -> Sequence | None:
        """The running request that is about to fill this block of the sequence's prompt, under its name."""
        if block >= len(sequence.keys) or not self.pool.index.is_open(sequence.account, sequence.epoch):
            return None
        key = sequence.keys[block]
        for each in self.running:
            if (
                each.account == sequence.account
                and each.epoch == sequence.epoch
                and each.published_blocks <= block < each.prompt_tokens // self.block_tokens
                and each.keys[block] == key
            ):
                return each
        return None

    def _make_room(self, account: bytes, matched: list[int], needed: int) -> bool:
        """Whether a request with these blocks can be admitted, once who has to give way to it was preempted."""
        pool = self.pool
        if self._is_owed and not self._is_within_share(account, matched, needed):
            self._refused += 1
            return False
        above = pool.above(account, matched, needed)
        if above and not (self._reclaim(account, above, True) and not pool.above(account, matched, needed)):
            return False
        if short := pool.short(account, matched, needed):
            # What is reclaimed may be what was matched, and is no room then.
            self._reclaim(account, short, False)
            short = pool.short(account, matched, needed)
        victims: list[Sequence] = []
        if short and (is_within_share := self._is_within_share(account, matched, needed)):
            victims = self._block_victims(account, matched, needed, short)
        elif not short and len(self.running) == self.max_running:
            victims = self._slot_victims(account)
        for victim in victims:
            self.preempt(victim)
        if not pool.short(account, matched, needed) and len(self.running) < self.max_running:
            return True
        self._is_owed |= bool(short) and is_within_share
        self._refused += 1
        return False

    def _is_within_share(self, account: bytes, matched: list[int], needed: int) -> bool:
        """Whether a request with these blocks leaves the account within what is its own, reserved or by its weight."""
        shares = self.pool.shares
        mine = shares.account(account)
        held = mine.held + self.pool.revived(matched) + needed
        unreserved = shares.total - shares.reserved
        return held <= mine.reserved + mine.limits.weight / self._weight_with_work() * unreserved

    def _block_victims(self, account: bytes, matched: list[int], needed: int, short: int) -> list[Sequence]:
        """Who has to go so that an account gets what is its own; nobody, where that is not enough.

        All of those who give way have more than the requester, by their weights, until they gave it.
        """
        shares = self.pool.shares
        mine = shares.account(account)
        over = {each.account: self._over(each.account) for each in self.running}
        least = (mine.held + self.pool.revived(matched) + needed - mine.reserved) / mine.limits.weight
        others = [each for each in self.running[1:] if each.account != account]
        victims: list[Sequence] = []
        let_go: Counter[int] = Counter()
        while short > 0:
            candidates = [each for each in others if over[each.account] > max(least, 0)]
            if (victim := choose_victim(candidates, over.__getitem__)) is None:
                return []
            let_go.update(victim.table)
            # What several hold is free once the last of them has gone.
            freed = sum(let_go[block] == self.pool.references(block) for block in victim.table)
            over[victim.account] -= freed / shares.account(victim.account).limits.weight
            short -= freed
            others.remove(victim)
            victims.append(victim)
        return victims

    def _slot_victims(self, account: bytes) -> list[Sequence]:
        """Who has to go so that an account that has nothing running gets its share of the places in a step."""
        running = Counter(each.account for each in self.running)
        if running[account]:
            return []
        per_weight = {each: count / self.pool.shares.account(each).limits.weight for each, count in running.items()}
        mine = 1 / self.pool.shares.account(account).limits.weight
        candidates = [each for each in self.running[1:] if per_weight[each.account] > mine]
        victim = choose_victim(candidates, per_weight.__getitem__)
        return [] if victim is None else [victim]

    def _weight_with_work(self) -> float:
        """Of all accounts that have something running or waiting."""
        if self._weights is None:
            accounts = {each.account for each in (*self.running, *self.queued)}
            self._weights = sum(self.pool.shares.account(each).limits.weight for each in accounts)
        return self._weights
