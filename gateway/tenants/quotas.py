"""Quotas, exact over all gateways of a database: reserve before a request runs, settle when it has ended.

Many requests are written in one transaction: whatever waits when a transaction ends goes into the next one. A
reservation is the proof that its request was counted, so it outlives any crash: it goes with its settlement, or, once
its gateway is dead, with the full amount booked as lost.

A gateway is dead when another one has seen its row unchanged in `SWEEPS_UNTIL_DEAD` readings, `BEAT_SECONDS` apart.
Readings are counted, not seconds: no clock has to be right, and while the database is locked, when nobody could have
written, nobody dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, select
from sqlalchemy.exc import IntegrityError

from gateway.http.errors import ApiError, Unauthorized
from gateway.tenants.database import Database, DatabaseUnavailable
from gateway.tenants.ledger import (
    DEFAULT_QUEUE_WAIT_SECONDS,
    Ask,
    Ledger,
    Refused,
    Reserved,
    Settlement,
    left_of,
    scope_of,
)
from gateway.tenants.minting import random_id
from gateway.tenants.quota_errors import QuotaExceeded
from gateway.tenants.tables import GatewayRow
from policies import rates
from policies.rates import Refusal

log = logging.getLogger("saltern.gateway")

BEAT_SECONDS = 2.0
SWEEPS_UNTIL_DEAD = 5
RETRY_SECONDS = 0.5
# Of one transaction: others of this process, and of other gateways, wait for it.
MOST_PER_TRANSACTION = 128
# For settlements that are waiting when the gateway ends.
CLOSE_SECONDS = 1.0
_ID_DIGITS = 20


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a tenant's limits say of a single request. None is unlimited; `models`: None is all.

    Attributes:
        reserved_tokens: of the cache, and nothing beside if `strict`.
    """

    max_context_tokens: int | None = None
    max_output_tokens: int | None = None
    models: tuple[str, ...] | None = None
    queue_wait_seconds: int = DEFAULT_QUEUE_WAIT_SECONDS
    reserved_tokens: int = 0
    strict: bool = False

    def allows(self, model: str) -> bool:
        return self.models is None or model in self.models


@dataclass(frozen=True, slots=True)
class _Asking:
    ask: Ask
    answer: asyncio.Future[Reserved | Refused | None]


@dataclass(frozen=True, slots=True)
class _Settling:
    settlement: Settlement
    done: asyncio.Future[None]


class Quotas:
    """Of one gateway. `start` before anything is reserved; `close` writes what is left.

    Attributes:
        gateway_id: of its reservations and its heartbeat.
        refusals: by kind of scope (tenant or key) and name of the limit.
        lost_reservations: how many of dead gateways were booked as lost by this one.
    """

    def __init__(self, database: Database, clock_ms: Callable[[], int] | None = None) -> None:
        self.gateway_id = "gw_" + random_id(_ID_DIGITS)
        self.refusals: Counter[tuple[str, str]] = Counter()
        self.lost_reservations = 0
        self._database = database
        self._ledger = Ledger(database.dialect, clock_ms)
        self._asking: deque[_Asking] = deque()
        self._settling: deque[_Settling] = deque()
        # Of all settlements that are not known to be booked, those in a transaction included.
        self._unsettled: set[asyncio.Future[None]] = set()
        self._work = asyncio.Event()
        self._most = MOST_PER_TRANSACTION
        # Of other gateways: what was last read of them, and how often it was the same.
        self._seen: dict[str, tuple[int, int]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Raises DatabaseUnavailable: nothing was started."""
        await self._beat()
        self._tasks = [asyncio.create_task(self._write_forever()), asyncio.create_task(self._live())]

    async def close(self) -> None:
        """What is not settled within a second is booked as lost by whoever sees this gateway dead."""
        if self._unsettled:
            await asyncio.wait(self._unsettled, timeout=CLOSE_SECONDS)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(DatabaseUnavailable):
            await self._database.transact(lambda connection: self._ledger.end(connection, self.gateway_id))

    async def look(self, tenant_id: str, key_id: str) -> Allowance:
        """What a request may be, and whether anything is exhausted already. Nothing is charged.

        Raises:
            QuotaExceeded: 429.
            DatabaseUnavailable: 503.
        """
        rows = await self._database.rows(self._ledger.look, self._ledger.look_values(tenant_id, key_id))
        if not rows:
            return Allowance()
        scopes, now_ms = [scope_of(row) for row in rows], rows[0].now_ms
        decision = rates.decide(scopes, 1, 1, now_ms)
        if isinstance(decision, Refusal):
            raise self._refused(tenant_id, Refused(decision, *left_of(scopes, now_ms)))
        return _allowance(rows, tenant_id)

    async def allowance(self, tenant_id: str) -> Allowance:
        """What a tenant's requests may be, whatever is exhausted. Raises DatabaseUnavailable."""
        rows = await self._database.rows(self._ledger.look, self._ledger.look_values(tenant_id, tenant_id))
        return _allowance(rows, tenant_id)

    async def reserve(self, ask: Ask) -> Reserved:
        """A place for a request, charged to all of its scopes; whoever gets it settles it, once.

        Key status, tenant status and epoch are read in the same transaction. A caller that is cancelled has nothing.

        Raises:
            QuotaExceeded: 429, and nothing was charged.
            Unauthorized: the key or its tenant is not active.
            DatabaseUnavailable: 503.
        """
        answer: asyncio.Future[Reserved | Refused | None] = asyncio.get_running_loop().create_future()
        self._asking.append(_Asking(ask, answer))
        self._work.set()
        try:
            outcome = await answer
        except asyncio.CancelledError:
            # It may have been answered already, and the caller cancelled before it was woken.
            if not answer.cancelled() and not answer.exception() and isinstance(answer.result(), Reserved):
                self._release(ask)
            raise
        if outcome is None:
            raise Unauthorized
        if isinstance(outcome, Refused):
            raise self._refused(ask.tenant_id, outcome)
        return outcome

    def settle(self, settlement: Settlement) -> asyncio.Future[None]:
        """Book what a request used, now or as soon as the database can be written; done once it is."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unsettled.add(done)
        done.add_done_callback(self._unsettled.discard)
        self._settling.append(_Settling(settlement, done))
        self._work.set()
        return done

    def _refused(self, tenant_id: str, refused: Refused) -> QuotaExceeded:
        error = QuotaExceeded(refused, of_tenant=refused.refusal.scope == tenant_id)
        self.refusals[error.scope, refused.refusal.name] += 1
        return error

    def _release(self, ask: Ask) -> None:
        """Settle what may have been reserved for a request that will not run."""
        self.settle(ask.settlement("refused"))

    async def _write_forever(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            while self._settling or self._asking:
                await self._write()

    async def _write(self) -> None:
        settling = [self._settling.popleft() for _ in range(min(self._most, len(self._settling)))]
        asking = [self._asking.popleft() for _ in range(min(self._most, len(self._asking)))]
        asking = [each for each in asking if not each.answer.done()]
        settlements, asks = [each.settlement for each in settling], [each.ask for each in asking]
        if not settlements and not asks:
            return
        try:
            try:
                answers = await self._transact(settlements, asks)
            except IntegrityError:
                # This gateway's row is gone: another one took it for dead.
                await self._beat()
                answers = await self._transact(settlements, asks)
        except asyncio.CancelledError:
            self._settling.extendleft(reversed(settling))
            raise
        except Exception as error:
            self._settling.extendleft(reversed(settling))
            await self._failed(error, asking)
            return
        self._most = min(2 * self._most, MOST_PER_TRANSACTION)
        for settled in settling:
            if not settled.done.done():
                settled.done.set_result(None)
        for each, answer in zip(asking, answers, strict=True):
            if not each.answer.done():
                each.answer.set_result(answer)
            elif isinstance(answer, Reserved):
                self._release(each.ask)

    async def _failed(self, error: Exception, asking: Sequence[_Asking]) -> None:
        """Nothing is known to be written. Settlements stay; requests are refused, those too that came meanwhile."""
        if not isinstance(error, DatabaseUnavailable):
            # Not its words: they may quote a row. Smaller transactions will find what can be written.
            log.error("quotas could not be written: %s", type(error).__name__)
            self._most = max(1, self._most // 2)
            self._settling.rotate(-1)
        answer = error if isinstance(error, ApiError) else DatabaseUnavailable()
        waiting = [*asking, *self._asking]
        self._asking.clear()
        for each in waiting:
            if not each.answer.done():
                each.answer.set_exception(answer)
        # A commit may have been lost on its way back.
        for each in asking:
            self._release(each.ask)
        await asyncio.sleep(RETRY_SECONDS)

    async def _transact(
        self, settlements: Sequence[Settlement], asks: Sequence[Ask]
    ) -> Sequence[Reserved | Refused | None]:
        return await self._database.transact(
            lambda connection: self._ledger.write(connection, self.gateway_id, settlements, asks)
        )

    async def _live(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            try:
                await self._beat()
                await self._sweep()
            except DatabaseUnavailable:
                continue
            except Exception as error:
                log.error("the heartbeat failed: %s", type(error).__name__)

    async def _beat(self) -> None:
        await self._database.transact(lambda connection: self._ledger.beat(connection, self.gateway_id))

    async def _sweep(self) -> None:
        async with self._database.read() as session:
            rows = (await session.execute(select(GatewayRow.id, GatewayRow.beats))).all()
        seen, self._seen = self._seen, {}
        for gateway_id, beats in rows:
            if gateway_id == self.gateway_id:
                continue
            before, times = seen.get(gateway_id, (beats, -1))
            times = times + 1 if before == beats else 0
            self._seen[gateway_id] = beats, times
            if times >= SWEEPS_UNTIL_DEAD:
                await self._bury(gateway_id, beats)

    async def _bury(self, gateway_id: str, beats: int) -> None:
        lost = await self._database.transact(lambda connection: self._ledger.lose(connection, gateway_id, beats))
        self.lost_reservations += lost
        if lost:
            log.warning("gateway %s ended without a word: %d reservations of it are booked as lost", gateway_id, lost)


def _allowance(rows: Sequence[Row[Any]], tenant_id: str) -> Allowance:
    for row in rows:
        if row.scope == tenant_id:
            # What does not fit in the tenant's part of the cache can't be computed.
            context_tokens = [most for most in (row.max_context_tokens, row.device_max_tokens) if most is not None]
            return Allowance(
                min(context_tokens, default=None),
                row.max_output_tokens,
                None if row.models is None else tuple(row.models),
                row.queue_wait_seconds,
                row.device_reserved_tokens,
                row.strict,
            )
    return Allowance()
