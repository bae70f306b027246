"""`…/quotas` of tenants and of their keys."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.ids import id_of, not_found
from gateway.admin.link import StoreLink
from gateway.admin.shapes import KeyQuotas, KeyQuotasBody, TenantQuotas, TenantQuotasBody, json_response
from gateway.http.body import MERGE_PATCH, convert, read_object
from gateway.http.errors import JSON, ApiError, bad_value
from gateway.http.routing import Route
from gateway.tenants.cache_limits import Overbooked
from gateway.tenants.limits import LimitRegistry

#: Known, and refused until the store keeps to them.
NOT_BUILT = ("host_reserved_tokens", "host_max_tokens")

Shape = TenantQuotas | KeyQuotas
Body = Mapping[str, Any]


class QuotaApi:
    def __init__(self, limits: LimitRegistry, link: StoreLink) -> None:
        self._limits = limits
        self._link = link

    def routes(self, tenant: str) -> list[Route]:
        """
        Args:
            tenant: the path of one.
        """
        made = []
        of_tenant = self.get_tenant_quotas, self.put_tenant_quotas, self.patch_tenant_quotas
        of_key = self.get_key_quotas, self.put_key_quotas, self.patch_key_quotas
        for owner, shape, body, what, (get, put, patch), refusals in (
            (tenant, TenantQuotas, TenantQuotasBody, "a tenant", of_tenant, (409, 412)),
            (tenant + "/keys/{key_id}", KeyQuotas, KeyQuotasBody, "a key", of_key, (412,)),
        ):
            path = owner + "/quotas"
            made += [
                Route("GET", path, "admin:quotas:read", get, summary=f"The limits of {what}", answers=body),
                Route(
                    "PUT",
                    path,
                    "admin:quotas:write",
                    put,
                    summary=f"Set all limits of {what}; what is left out is unlimited",
                    reads=shape,
                    answers=body,
                    refusals=refusals,
                ),
                Route(
                    "PATCH",
                    path,
                    "admin:quotas:write",
                    patch,
                    summary=f"Change some limits of {what} (JSON Merge Patch); null is unlimited",
                    reads=shape,
                    answers=body,
                    refusals=refusals,
                ),
            ]
        return made

    async def get_tenant_quotas(self, request: Request) -> Response:
        return await self._get(request, TenantQuotas)

    async def put_tenant_quotas(self, request: Request) -> Response:
        return await self._put(request, TenantQuotas)

    async def patch_tenant_quotas(self, request: Request) -> Response:
        return await self._patch(request, TenantQuotas)

    async def get_key_quotas(self, request: Request) -> Response:
        return await self._get(request, KeyQuotas)

    async def put_key_quotas(self, request: Request) -> Response:
        return await self._put(request, KeyQuotas)

    async def patch_key_quotas(self, request: Request) -> Response:
        return await self._patch(request, KeyQuotas)

    async def _get(self, request: Request, shape: type[Shape]) -> Response:
        values = await self._limits.get(*_scope(request))
        if values is None:
            raise not_found()
        return _answer(_shaped(values, shape))

    async def _put(self, request: Request, shape: type[Shape]) -> Response:
        body = await read_object(request)
        return await self._change(request, shape, lambda before: body)

    async def _patch(self, request: Request, shape: type[Shape]) -> Response:
        body = await read_object(request, (JSON, MERGE_PATCH))
        return await self._change(request, shape, lambda before: msgspec.to_builtins(before) | body)

    async def _change(
        self, request: Request, shape: type[Shape], wanted: Callable[[Shape], dict[str, Any]]
    ) -> Response:
        expected = {tag.strip() for line in request.headers.getlist("if-match") for tag in line.split(",")}

        def change(values: Body) -> Body:
            before = _shaped(values, shape)
            if expected and not expected & {"*", _etag(before)}:
                raise ApiError(412, "These limits have changed since they were read: read them again.")
            return {**values, **msgspec.to_builtins(_read(wanted(before), shape))}

        try:
            changed = await self._limits.change(*_scope(request), change)
        except Overbooked as refused:
            raise ApiError(409, _overbooked(refused), param="device_reserved_tokens") from None
        if changed is None:
            raise not_found()
        if changed.cache is not None:
            await self._link.set_limits(changed.cache)
        return _answer(_shaped(changed.values, shape))


def _scope(request: Request) -> tuple[str, str | None]:
    return id_of(request, "tenant_id"), id_of(request, "key_id") if "key_id" in request.path_params else None


def _read(body: Body, shape: type[Shape]) -> Shape:
    """Raises ApiError: 400, naming the field."""
    for name in body:
        if name in NOT_BUILT:
            raise bad_value(name, f"{name} is not built yet; leave it out.")
        if shape is KeyQuotas and name in TenantQuotas.__struct_fields__ and name not in KeyQuotas.__struct_fields__:
            raise bad_value(name, f"{name} is a limit of tenants; set it in the tenant's quotas.")
    read = convert(body, shape)
    try:
        ZoneInfo(read.time_zone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise bad_value("time_zone", "time_zone must be a name of the IANA database, such as Europe/Berlin.") from None
    if isinstance(read, TenantQuotas):
        _check_cache(read)
    return read


def _check_cache(wanted: TenantQuotas) -> None:
    """Raises ApiError: 409 for a reservation above the maximum, 400 for a strict tenant's below it."""
    reserved_tokens, max_tokens = wanted.device_reserved_tokens, wanted.device_max_tokens
    if max_tokens is not None and reserved_tokens > max_tokens:
        message = f"device_reserved_tokens is {reserved_tokens} and device_max_tokens {max_tokens}: reserve no more."
        raise ApiError(409, message, param="device_reserved_tokens")
    if wanted.strict and reserved_tokens != max_tokens:
        most = "unlimited" if max_tokens is None else max_tokens
        message = (
            f"strict needs device_reserved_tokens = device_max_tokens; they are {reserved_tokens} and {most}: "
            "set both, or leave strict out."
        )
        raise bad_value("strict", message)


def _overbooked(refused: Overbooked) -> str:
    pool = refused.pool
    return (
        f"device_reserved_tokens takes {refused.wanted_tokens} tokens in whole blocks of {pool.block_tokens}; of the "
        f"{pool.tokens} in the cache other tenants' reservations leave {refused.free_tokens}. Reserve no more than "
        "that, or lower theirs."
    )


def _shaped(values: Body, shape: type[Shape]) -> Shape:
    return shape(**{name: values[name] for name in shape.__struct_fields__})


def _etag(quotas: Shape) -> str:
    return f'"{hashlib.sha256(msgspec.json.encode(quotas)).hexdigest()[:16]}"'


def _answer(quotas: Shape) -> Response:
    return json_response(quotas, headers={"etag": _etag(quotas)})
