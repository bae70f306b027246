"""The two listeners' applications, and what they share while they run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from gateway.admin.routes import admin_routes
from gateway.admin.usage import UsageApi
from gateway.completions import Completions
from gateway.http.openapi import described
from gateway.http.routing import Route, Router
from gateway.store_link import StoreLink, StoreUnavailable
from gateway.telemetry.telemetry import Telemetry
from gateway.tenants.database import Database
from gateway.tenants.directory import Directory
from gateway.tenants.quotas import Quotas
from gateway.tenants.usage import UsageReport


@dataclass(frozen=True, slots=True)
class Gateway:
    """Everything of a running gateway. `tenant_app` and `admin_app` are ASGI applications, one per listener."""

    directory: Directory
    quotas: Quotas
    link: StoreLink
    completions: Completions
    tenant_app: Router
    admin_app: Router


@asynccontextmanager
async def open_gateway(
    *,
    database_url: str,
    kek_file: Path,
    socket_path: Path,
    model_dir: Path | None = None,
    model_name: str | None = None,
    telemetry: Telemetry,
) -> AsyncIterator[Gateway]:
    """A gateway that keeps itself connected to the store at `socket_path` until the block ends.

    Raises:
        CannotOpen, VaultError: the database or the key-encryption key can't be used.
    """
    database = await Database.open(database_url)
    try:
        directory = await Directory.open(database, kek_file)
        link = StoreLink(socket_path, directory, model_dir=model_dir, model_name=model_name)
        quotas = Quotas(database)
        await quotas.start()
        telemetry.observe_gateway(
            report=lambda: link.report,
            missing_blocks=lambda: link.missing_blocks,
            totals=link.totals,
            unwrap_failures=lambda: directory.keyring.unwrap_failures,
            quota_refusals=lambda: quotas.refusals,
            lost_reservations=lambda: quotas.lost_reservations,
        )
        completions = Completions(directory, quotas, link)
        health = Health(link, completions)
        tenant_routes = [*health.routes(), *completions.routes(), *UsageApi(UsageReport(database)).tenant_routes()]
        background = [asyncio.create_task(link.run()), asyncio.create_task(directory.last_used.run())]
        try:
            yield Gateway(
                directory,
                quotas,
                link,
                completions,
                tenant_app=_router(
                    described(tenant_routes, "/openapi.json", "Saltern"),
                    directory,
                    telemetry,
                ),
                admin_app=_router(
                    described(
                        [*health.routes(), *telemetry.routes(), *admin_routes(directory, link)],
                        "/admin/openapi.json",
                        "Saltern, administration",
                    ),
                    directory,
                    telemetry,
                ),
            )
        finally:
            for task in background:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            completions.close()
            await quotas.close()
            await directory.last_used.write()
    finally:
        await database.close()


def _router(routes: list[Route], directory: Directory, telemetry: Telemetry) -> Router:
    return Router(
        routes,
        authenticate_tenant=directory.authenticate,
        authenticate_admin=directory.authenticate_admin,
        observe=telemetry.observe,
    )


class Health:
    """`/livez`: this process answers. `/readyz`: requests would be served. Neither says anything of a tenant.

    `/readyz?verbose` adds the sizes that it serves with; a block is the smallest prefix that is reused. Of reservations
    it says only that they are not wholly in force: tenants read it, and how many blocks that are is in the metrics.
    """

    def __init__(self, link: StoreLink, completions: Completions) -> None:
        self._link = link
        self._completions = completions

    def routes(self) -> list[Route]:
        return [
            Route("GET", "/livez", "public", self.live, summary="Whether this process answers", answers=str),
            Route(
                "GET",
                "/readyz",
                "public",
                self.ready,
                summary="Whether requests would be served",
                answers=str,
                statuses=(200, 503),
            ),
        ]

    async def live(self, request: Request) -> Response:
        return PlainTextResponse("live\n")

    async def ready(self, request: Request) -> Response:
        trouble = "draining" if self._completions.draining else self._link.trouble()
        lines = [trouble or "ready"]
        if "verbose" in request.query_params:
            lines += [f"step_age_ms {self._link.step_age_ms}", *self._sizes()]
            if self._link.missing_blocks:
                lines.append("reservations partly_in_force")
        return PlainTextResponse("".join(f"{line}\n" for line in lines), 503 if trouble else 200)

    def _sizes(self) -> list[str]:
        try:
            store = self._link.connection().model.store
        except StoreUnavailable:
            return []
        block_tokens = store.geometry.block_tokens
        return [
            f"block_tokens {block_tokens}",
            f"cache_tokens {store.limits.blocks * block_tokens}",
            f"context_tokens {store.limits.max_context_tokens}",
        ]
