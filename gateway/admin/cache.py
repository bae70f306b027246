"""`…/cache` of tenants: what the store has of one, and to drop it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.ids import id_of, not_found
from gateway.admin.link import StoreLink
from gateway.admin.shapes import CacheBody, DeviceCacheBody, DroppedBody, json_response
from gateway.http.routing import Route
from gateway.tenants.registry import Registry


class CacheApi:
    def __init__(self, registry: Registry, link: StoreLink) -> None:
        self._registry = registry
        self._link = link

    def routes(self, tenant: str) -> list[Route]:
        """
        Args:
            tenant: the path of one.
        """
        path = tenant + "/cache"
        return [
            Route(
                "GET",
                path,
                "admin:cache:read",
                self.get_cache,
                summary="What the store has of a tenant, and how much of its prompts it found",
                answers=CacheBody,
            ),
            Route(
                "DELETE",
                path,
                "admin:cache:write",
                self.flush_cache,
                summary="Drop all that is cached of a tenant; running requests go on",
                answers=DroppedBody,
            ),
        ]

    async def get_cache(self, request: Request) -> Response:
        has = await self._link.account_cache(await self._account(request))
        device = DeviceCacheBody(has.blocks, has.tokens, has.bytes, has.reserved_tokens, has.max_tokens)
        return json_response(CacheBody(device, has.hit_tokens, has.miss_tokens))

    async def flush_cache(self, request: Request) -> Response:
        dropped = await self._link.flush(await self._account(request))
        return json_response(DroppedBody(dropped.blocks, dropped.bytes))

    async def _account(self, request: Request) -> bytes:
        tenant = await self._registry.tenant(id_of(request, "tenant_id"))
        if tenant is None:
            raise not_found()
        return tenant.account
