"""The admin REST API: tenants, their keys and their salts. Handlers are thin; `tenants.registry` does it."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from gateway.admin import pages
from gateway.admin.cache import CacheApi
from gateway.admin.ids import id_of, not_found
from gateway.admin.link import StoreLink
from gateway.admin.quotas import QuotaApi
from gateway.admin.shapes import (
    KEY_NAME,
    TENANT_NAME,
    DroppedBody,
    KeyBody,
    KeyInput,
    KeyPatch,
    KeyRotateInput,
    Page,
    PageQuery,
    RotateBody,
    RotateInput,
    SaltBody,
    TenantBody,
    TenantInput,
    TenantsQuery,
    json_response,
)
from gateway.admin.usage import UsageApi
from gateway.http.body import MERGE_PATCH, read_struct
from gateway.http.errors import JSON, ApiError, bad_value
from gateway.http.routing import Route
from gateway.secret import Secret
from gateway.tenants.directory import Directory
from gateway.tenants.fences import Dropped, PendingFence
from gateway.tenants.limits import LimitRegistry
from gateway.tenants.registry import NameTaken, Registry, SaltHistory
from gateway.tenants.tables import ApiKey, Tenant, is_active
from gateway.tenants.usage import UsageReport

PREFIX = "/admin/v1/tenants"

_NEVER = datetime(9999, 12, 30, tzinfo=UTC)
_TENANT_NAME = re.compile(TENANT_NAME)
_KEY_NAME = re.compile(KEY_NAME)


def admin_routes(directory: Directory, link: StoreLink) -> list[Route]:
    registry = Registry(directory.database, directory.keyring, directory.clock)
    api = AdminApi(directory, registry, link)
    tenant = PREFIX + "/{tenant_id}"
    key = tenant + "/keys/{key_id}"
    return [
        Route(
            "POST",
            PREFIX,
            "admin:tenants:write",
            api.create_tenant,
            summary="Create a tenant",
            reads=TenantInput,
            answers=TenantBody,
            statuses=(201,),
            refusals=(409,),
        ),
        Route(
            "GET",
            PREFIX,
            "admin:tenants:read",
            api.list_tenants,
            summary="All tenants",
            query=TenantsQuery,
            answers=Page[TenantBody],
        ),
        Route("GET", tenant, "admin:tenants:read", api.get_tenant, summary="One tenant", answers=TenantBody),
        Route(
            "DELETE",
            tenant,
            "admin:tenants:write",
            api.delete_tenant,
            summary="Delete a tenant, its keys, its salts and what is cached of it",
            statuses=(204,),
        ),
        Route(
            "POST",
            tenant + "/keys",
            "admin:keys:write",
            api.create_key,
            summary="Create a key; its secret is shown this once",
            reads=KeyInput,
            answers=KeyBody,
            statuses=(201,),
        ),
        Route(
            "GET",
            tenant + "/keys",
            "admin:keys:read",
            api.list_keys,
            summary="A tenant's keys, without their secrets",
            query=PageQuery,
            answers=Page[KeyBody],
        ),
        Route("GET", key, "admin:keys:read", api.get_key, summary="One key, without its secret", answers=KeyBody),
        Route(
            "PATCH",
            key,
            "admin:keys:write",
            api.change_key,
            summary="Change a key's name, scopes, expiry, or whether it is active (JSON Merge Patch)",
            reads=KeyPatch,
            answers=KeyBody,
        ),
        Route(
            "POST",
            key + "/rotate",
            "admin:keys:write",
            api.rotate_key,
            summary="Give a key a new secret, shown this once; the old one opens for the grace period",
            reads=KeyRotateInput,
            may_be_empty=True,
            answers=KeyBody,
        ),
        Route(
            "DELETE",
            key,
            "admin:keys:write",
            api.delete_key,
            summary="Delete a key; the next request with it is refused",
            statuses=(204,),
        ),
        Route(
            "GET",
            tenant + "/salts",
            "admin:salts:read",
            api.list_salts,
            summary="A tenant's epochs and their state, never a salt",
            query=PageQuery,
            answers=Page[SaltBody],
        ),
        Route(
            "POST",
            tenant + "/salts/rotate",
            "admin:salts:write",
            api.rotate_salt,
            summary="Begin a new epoch: nothing cached before is reachable any more",
            reads=RotateInput,
            may_be_empty=True,
            answers=RotateBody,
        ),
        *QuotaApi(LimitRegistry(directory.database), link).routes(tenant),
        *CacheApi(registry, link).routes(tenant),
        *UsageApi(UsageReport(directory.database)).admin_routes(tenant),
    ]


class AdminApi:
    def __init__(self, directory: Directory, registry: Registry, link: StoreLink) -> None:
        self._directory = directory
        self._clock = directory.clock
        self._registry = registry
        self._link = link

    async def create_tenant(self, request: Request) -> Response:
        body = await read_struct(request, TenantInput)
        _check_tenant_name(body.name)
        try:
            tenant = await self._registry.create_tenant(body.name)
        except NameTaken:
            message = f"There is a tenant {body.name!r} already: use it, or choose another name."
            raise ApiError(409, message, param="name") from None
        return json_response(_tenant_body(tenant), 201, {"location": f"{PREFIX}/{tenant.id}"})

    async def list_tenants(self, request: Request) -> Response:
        asked = pages.window(request, TenantsQuery)
        name = request.query_params.get("name")
        if name is not None:
            _check_tenant_name(name)
        rows = await self._registry.tenants(asked.limit + 1, pages.after_row(asked), name)
        return json_response(pages.page(rows, asked.limit, _tenant_body, _row_position))

    async def get_tenant(self, request: Request) -> Response:
        tenant = await self._registry.tenant(id_of(request, "tenant_id"))
        if tenant is None:
            raise not_found()
        return json_response(_tenant_body(tenant))

    async def delete_tenant(self, request: Request) -> Response:
        fence = await self._registry.delete_tenant(id_of(request, "tenant_id"))
        if fence is None:
            raise not_found()
        await self._drop(fence)
        return Response(status_code=204)

    async def create_key(self, request: Request) -> Response:
        tenant_id = id_of(request, "tenant_id")
        body = await read_struct(request, KeyInput)
        self._check_key(body.name, body.expires_at)
        created = await self._registry.create_key(tenant_id, body.name, frozenset(body.scopes), body.expires_at)
        if created is None:
            raise not_found()
        row, text = created
        headers = {"location": f"{PREFIX}/{tenant_id}/keys/{row.id}", "cache-control": "no-store"}
        return json_response(_key_body(row, self._clock(), text), 201, headers)

    async def list_keys(self, request: Request) -> Response:
        asked = pages.window(request)
        rows = await self._registry.keys(id_of(request, "tenant_id"), asked.limit + 1, pages.after_row(asked))
        if rows is None:
            raise not_found()
        now = self._clock()
        return json_response(pages.page(rows, asked.limit, lambda row: _key_body(row, now), _row_position))

    async def get_key(self, request: Request) -> Response:
        row = await self._registry.key(id_of(request, "tenant_id"), id_of(request, "key_id"))
        if row is None:
            raise not_found()
        return json_response(_key_body(row, self._clock()))

    async def change_key(self, request: Request) -> Response:
        tenant_id, key_id = id_of(request, "tenant_id"), id_of(request, "key_id")
        body = await read_struct(request, KeyPatch, (JSON, MERGE_PATCH))
        self._check_key(
            None if body.name is UNSET else body.name, None if body.expires_at is UNSET else body.expires_at
        )
        values = {name: value for name in body.__struct_fields__ if (value := getattr(body, name)) is not UNSET}
        if "scopes" in values:
            values["scopes"] = sorted(set(values["scopes"]))
        row = await self._registry.change_key(tenant_id, key_id, values)
        if row is None:
            raise not_found()
        return json_response(_key_body(row, self._clock()))

    async def rotate_key(self, request: Request) -> Response:
        tenant_id, key_id = id_of(request, "tenant_id"), id_of(request, "key_id")
        body = await read_struct(request, KeyRotateInput) if _has_body(request) else KeyRotateInput()
        rotated = await self._registry.rotate_key(tenant_id, key_id, timedelta(seconds=body.grace_seconds))
        if rotated is None:
            raise not_found()
        row, text = rotated
        return json_response(_key_body(row, self._clock(), text), headers={"cache-control": "no-store"})

    def _check_key(self, name: str | None, expires_at: datetime | None) -> None:
        if name is not None and not _KEY_NAME.fullmatch(name):
            raise bad_value("name", "A key's name is 1 to 64 characters, none of them a control character.")
        if expires_at is not None and not self._clock() < expires_at < _NEVER:
            raise bad_value("expires_at", f"expires_at must lie between now and {_NEVER:%Y-%m-%d}.")

    async def delete_key(self, request: Request) -> Response:
        if not await self._registry.delete_key(id_of(request, "tenant_id"), id_of(request, "key_id")):
            raise not_found()
        return Response(status_code=204)

    async def list_salts(self, request: Request) -> Response:
        asked = pages.window(request)
        rows = await self._registry.salts(id_of(request, "tenant_id"), asked.limit + 1, pages.after_number(asked))
        if rows is None:
            raise not_found()
        return json_response(pages.page(rows, asked.limit, _salt_body, lambda row: str(row.epoch)))

    async def rotate_salt(self, request: Request) -> Response:
        tenant_id = id_of(request, "tenant_id")
        if _has_body(request):
            await read_struct(request, RotateInput)
        fence = await self._registry.rotate(tenant_id)
        if fence is None or fence.epoch is None:
            raise not_found()
        dropped = await self._drop(fence)
        counts = None if dropped is None else DroppedBody(dropped.blocks, dropped.bytes)
        return json_response(RotateBody(fence.epoch, counts))

    async def _drop(self, fence: PendingFence) -> Dropped | None:
        """Ask the store now; where none answers, the fence stays pending."""
        dropped = await self._link.drop(fence)
        if dropped is not None:
            await self._directory.fence_done(fence)
        return dropped


def _has_body(request: Request) -> bool:
    return request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers


def _check_tenant_name(name: str) -> None:
    if not _TENANT_NAME.fullmatch(name):
        raise bad_value("name", "A tenant's name is 1 to 64 of a-z, 0-9 and -.")


def _tenant_body(row: Tenant) -> TenantBody:
    return TenantBody(row.id, row.name, row.status, row.created_at, row.updated_at)


def _key_body(row: ApiKey, now: datetime, text: Secret | UnsetType = UNSET) -> KeyBody:
    status = row.status if row.status != "active" or is_active(row.status, row.expires_at, now) else "expired"
    return KeyBody(
        row.id,
        row.name,
        row.last4,
        row.scopes,
        status,
        row.created_at,
        row.expires_at,
        row.last_used_at,
        secret=text,
    )


def _salt_body(row: SaltHistory) -> SaltBody:
    left = 0 if row.state == "dropped" else None
    return SaltBody(row.epoch, row.created_at, row.state, blocks=left, bytes=left)


def _row_position(row: Tenant | ApiKey) -> str:
    return pages.row_position(row.created_at, row.id)
