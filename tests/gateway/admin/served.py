"""The admin API on a real database, with a store link that answers what a test says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from gateway.admin.routes import admin_routes
from gateway.http.errors import Unavailable
from gateway.http.routing import Router
from gateway.tenants.cache_limits import AccountCache, CacheLimits
from gateway.tenants.fences import Dropped, PendingFence
from tests.gateway.tenants.opened import Opened, opened

TENANTS = "/admin/v1/tenants"


@dataclass
class Link:
    """`answer` None is a store that cannot be reached."""

    answer: Dropped | None = field(default_factory=lambda: Dropped(blocks=3, bytes=4096))
    asked: list[tuple[bytes, int | None]] = field(default_factory=list)
    limits: list[CacheLimits] = field(default_factory=list)

    async def drop(self, fence: PendingFence) -> Dropped | None:
        self.asked.append((fence.account, fence.epoch))
        return self.answer

    async def set_limits(self, limits: CacheLimits) -> None:
        self.limits.append(limits)

    async def flush(self, account: bytes) -> Dropped:
        if self.answer is None:
            raise Unavailable("gone")
        self.asked.append((account, None))
        return self.answer

    async def account_cache(self, account: bytes) -> AccountCache:
        if self.answer is None:
            raise Unavailable("gone")
        self.asked.append((account, None))
        return AccountCache(3, 48, 4096, 32, None, 100, 20)


@dataclass
class Served:
    door: Opened
    link: Link
    app: Router
    client: httpx.AsyncClient
    admin_key: str

    async def tenant(self, name: str) -> dict[str, Any]:
        answer = await self.client.post(TENANTS, json={"name": name})
        assert answer.status_code == 201
        body: dict[str, Any] = answer.json()
        return body


@asynccontextmanager
async def served(data_dir: Path) -> AsyncIterator[Served]:
    link = Link()
    async with opened(data_dir) as door:
        directory = door.directory
        app = Router(
            admin_routes(directory, link),
            authenticate_tenant=directory.authenticate,
            authenticate_admin=directory.authenticate_admin,
        )
        key = (await directory.ensure_first_admin_key(data_dir)).read_text().strip()
        headers = {"authorization": f"Bearer {key}"}
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://admin", headers=headers) as client:
            yield Served(door, link, app, client, key)
