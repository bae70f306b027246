"""The gateway's connection to a store: made again whenever it is lost, fences and limits before requests.

Fences and limits go over a connection from its first moment, requests only after every pending fence was acknowledged
on it and all limits were sent. What commits while these are read is sent by whoever changed it: none falls between. A
change of limits whose gateway ended before it sent them is found in the database within a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from pathlib import Path

from cachestore.client import StoreClient, StoreLost, StoreRefused
from cachestore.protocol import OpenAccount, StatsReport
from gateway.http.errors import ApiError, Unavailable
from gateway.prompt.model_files import ModelFilesError
from gateway.served_model import ServedModel
from gateway.telemetry.store_totals import StoreTotals, Totals
from gateway.tenants import cache_limits
from gateway.tenants.cache_limits import AccountCache, CacheLimits, Pool
from gateway.tenants.database import DatabaseUnavailable
from gateway.tenants.directory import Directory
from gateway.tenants.fences import Dropped, PendingFence

log = logging.getLogger("saltern.gateway")

FIRST_RETRY_SECONDS = 0.05
LAST_RETRY_SECONDS = 1.0
# An engine with work that made no step for this long is not ready for more.
STEP_AGE_LIMIT_MS = 10_000
# How long limits that were changed and not sent may be unknown to the store.
LIMITS_SECONDS = 1.0


# A store that dies this soon after it was reached, twice in a row, may be killed by what it is asked.
EARLY_LOSS_SECONDS = 10.0


class StoreUnavailable(Unavailable):
    """503: no store can take the request now."""


@dataclass(frozen=True, slots=True)
class Connection:
    """A store that takes requests, and the model it serves.

    Attributes:
        since: monotonic seconds, when it began to take requests.
        early_losses: how many stores in a row were lost early before this one.
    """

    client: StoreClient
    model: ServedModel
    since: float
    early_losses: int

    @property
    def lost_early(self) -> bool:
        return time.monotonic() - self.since < EARLY_LOSS_SECONDS

    def lost(self) -> StoreUnavailable:
        """What a request is answered that ran when this store went away."""
        if self.lost_early and self.early_losses:
            message = "The model's process ended while it answered, twice in a row soon after its start."
            return StoreUnavailable(f"{message} This request may be the cause.", retry=False)
        return StoreUnavailable("The model's process ended while it answered. Send the request again.")


class StoreLink:
    """Keeps one connection to the store at `socket_path`.

    Args:
        model_dir: where the tokenizer files are, when not in the store's own directory.
        model_name: what clients call the model; None for the directory's name.
    """

    def __init__(
        self, socket_path: Path, directory: Directory, *, model_dir: Path | None = None, model_name: str | None = None
    ) -> None:
        self.connected = asyncio.Event()
        self._socket_path = socket_path
        self._directory = directory
        self._model_dir = model_dir
        self._model_name = model_name
        # Takes commands, and not requests before `_connection` is there.
        self._commanded: StoreClient | None = None
        self._connection: Connection | None = None
        self._model: ServedModel | None = None
        self._early_losses = 0
        # The last one there was, gone or not.
        self._client: StoreClient | None = None
        self._totals = StoreTotals()
        # What all tenants have reserved, which may be more than the store has, and what that has.
        self._booked_blocks = (0, 0)

    @property
    def heard_at(self) -> float:
        """Monotonic seconds, when a store was last heard of; 0 before the first."""
        return self._client.heard_at if self._client else 0.0

    def connection(self) -> Connection:
        """Raises StoreUnavailable when no store takes requests."""
        if self._connection is None or self._connection.client.closed.is_set():
            raise _unavailable()
        return self._connection

    @property
    def step_age_ms(self) -> int:
        """How long ago a store with work made its last step, also when it has been lost since; 0 without work."""
        return self._client.step_age_ms if self._client else 0

    async def first_model(self) -> ServedModel:
        """The model of the first store that takes requests, once there was one."""
        await self.connected.wait()
        assert self._model is not None
        return self._model

    def trouble(self) -> str | None:
        """Why requests would not be served now; None when they would."""
        if self._connection is None or self._connection.client.closed.is_set():
            return "no store is connected"
        if self.step_age_ms > STEP_AGE_LIMIT_MS:
            return "the store has work and makes no steps"
        return None

    @property
    def report(self) -> StatsReport | None:
        """What the connected store last said of itself, at most a second ago; None without one."""
        return None if self._client is None or self._client.closed.is_set() else self._client.report

    @property
    def missing_blocks(self) -> int:
        """What reservations lack to be wholly in force: the store has not so many, or they are not free yet."""
        if (report := self.report) is None:
            return 0
        reserved, total = self._booked_blocks
        return max(0, reserved - total) + report.missing_blocks

    def most_tokens(self, reserved_tokens: int, *, strict: bool) -> int:
        """What an account with this reservation can have of the cache for one request, as others have reserved it.

        By the store's last report, at most a second old. Raises StoreUnavailable when no store takes requests.
        """
        pool, (booked, _) = _pool(self.connection().client), self._booked_blocks
        own = cache_limits.part_blocks(reserved_tokens, booked, pool)
        reserved = min(booked, pool.blocks) if (report := self.report) is None else report.reserved_blocks
        return (own if strict else min(pool.blocks, pool.blocks - reserved + own)) * pool.block_tokens

    def totals(self) -> Totals:
        """What all stores that there were have counted."""
        if self._client is not None and (report := self._client.report):
            self._totals.take(self._client.welcome.store, report)
        return self._totals.totals

    async def drop(self, fence: PendingFence) -> Dropped | None:
        """What the fence asks for has left the index when this returns; None: nobody answered."""
        if self._commanded is None:
            return None
        try:
            return await _send_fence(self._commanded, fence)
        except StoreLost:
            return None

    async def set_limits(self, changed: CacheLimits) -> None:
        """They are in force when this returns, where a store answers; others get them before its first request."""
        if (client := self._commanded) is None:
            return
        # Without the database they are found there within a second of its return.
        with contextlib.suppress(DatabaseUnavailable, StoreLost):
            for limits in await self._limits(client):
                if limits.account == changed.account:
                    client.open_account(_opening(limits, _pool(client)))
                    # Answered once they are in force; and the last report knows of them.
                    await client.stats()

    async def flush(self, account: bytes) -> Dropped:
        """All that is cached of the account has left the index when this returns.

        Raises:
            StoreUnavailable: nobody answered.
        """
        try:
            flushed = await self._commanded_now().flush(account)
        except StoreLost:
            raise _unavailable() from None
        return Dropped(flushed.blocks, flushed.bytes)

    async def account_cache(self, account: bytes) -> AccountCache:
        """
        Raises:
            StoreUnavailable: nobody answered.
        """
        client = self._commanded_now()
        try:
            report = await client.account_report(account)
        except StoreLost:
            raise _unavailable() from None
        blocks, block_tokens = report.held_blocks + report.cached_blocks, client.welcome.geometry.block_tokens
        return AccountCache(
            blocks,
            blocks * block_tokens,
            report.bytes,
            report.reserved_blocks * block_tokens,
            None if report.max_blocks is None else report.max_blocks * block_tokens,
            report.hit_tokens,
            report.miss_tokens,
        )

    def _commanded_now(self) -> StoreClient:
        if self._commanded is None:
            raise _unavailable()
        return self._commanded

    async def run(self) -> None:
        """Connect, and connect again. Ends only by cancellation."""
        retry_seconds = FIRST_RETRY_SECONDS
        complaint = ""
        while True:
            try:
                client = self._client = await StoreClient.connect(self._socket_path)
                try:
                    await self._serve(client)
                    retry_seconds, complaint = FIRST_RETRY_SECONDS, ""
                    log.warning("the store's connection was lost")
                finally:
                    if self._connection is not None:
                        self._early_losses = self._early_losses + 1 if self._connection.lost_early else 0
                    self._commanded = self._connection = None
                    self.totals()
                    self.connected.clear()
                    client.close()
            except StoreLost:
                pass
            except (StoreRefused, ModelFilesError, ApiError) as error:
                # Once, not with every try.
                if complaint != (complaint := str(error)):
                    log.error("the store can't be used: %s", complaint)
            except Exception as error:
                # Whatever a store or its model's files made go wrong: the next try may find another.
                log.error("the store can't be used", exc_info=error)
            await asyncio.sleep(retry_seconds)
            retry_seconds = min(2 * retry_seconds, LAST_RETRY_SECONDS)

    async def _serve(self, client: StoreClient) -> None:
        model = await self._open_model(client)
        self._commanded = client
        for fence in await self._directory.pending_fences():
            await _send_fence(client, fence)
            await self._directory.fence_done(fence)
        await cache_limits.remember_pool(self._directory.database, _pool(client))
        mark = await self._send_limits(client)
        if client.closed.is_set():
            raise StoreLost("the store went away before it took requests")
        self._connection = Connection(client, model, time.monotonic(), self._early_losses)
        self.connected.set()
        log.info("connected to store %s, which serves %s", client.welcome.store, model.name)
        while not await _is_set_within(client.closed, LIMITS_SECONDS):
            try:
                if mark != await cache_limits.mark(self._directory.database):
                    mark = await self._send_limits(client)
            except (DatabaseUnavailable, StoreLost):
                continue
            except Exception as error:
                log.error("limits could not be read: %s", type(error).__name__)

    async def _send_limits(self, client: StoreClient) -> tuple[object, ...]:
        """All of them; answers what `cache_limits.mark` was before they were read. Raises StoreLost."""
        mark = await cache_limits.mark(self._directory.database)
        for limits in await self._limits(client):
            client.open_account(_opening(limits, _pool(client)))
            await client.drain()
        return mark

    async def _limits(self, client: StoreClient) -> list[CacheLimits]:
        """Those of all tenants, as far as they fit in the store."""
        limits, pool = await cache_limits.read_limits(self._directory.database), _pool(client)
        reserved_blocks = cache_limits.reserved_blocks(limits, pool)
        before, self._booked_blocks = self._booked_blocks, (reserved_blocks, pool.blocks)
        if reserved_blocks > pool.blocks and self._booked_blocks != before:
            log.warning(
                "tenants have reserved %d blocks and the cache has %d: every reservation is scaled down to that",
                reserved_blocks,
                pool.blocks,
            )
        return cache_limits.fit(limits, pool)

    async def _open_model(self, client: StoreClient) -> ServedModel:
        """The model of this store: the one in hand, conversations and all, when nothing of it has changed."""
        store = client.welcome
        model = self._model.on(store) if self._model else None
        if model is None:
            directory = self._model_dir or Path(store.model_dir)
            model = await asyncio.to_thread(ServedModel.open, store, directory, self._model_name)
        self._model = model
        return model


def _unavailable() -> StoreUnavailable:
    return StoreUnavailable("The model is not available at the moment. Try again in a second.")


def _pool(client: StoreClient) -> Pool:
    return Pool(client.welcome.limits.blocks, client.welcome.geometry.block_tokens)


def _opening(limits: CacheLimits, pool: Pool) -> OpenAccount:
    return OpenAccount(
        account=limits.account,
        epoch=limits.epoch,
        revision=limits.revision,
        reserved_blocks=pool.blocks_for(limits.reserved_tokens),
        max_blocks=None if limits.max_tokens is None else pool.blocks_for(limits.max_tokens),
        weight=limits.weight,
        strict=limits.strict,
    )


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()


async def _send_fence(client: StoreClient, fence: PendingFence) -> Dropped:
    if fence.epoch is None:
        fenced = await client.drop_account(fence.account)
    else:
        fenced = await client.fence(fence.account, fence.epoch)
    return Dropped(fenced.blocks, fenced.bytes)
