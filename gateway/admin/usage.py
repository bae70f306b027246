"""`GET …/tenants/{id}/usage` for administrators, `GET /v1/usage` for a tenant itself."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.ids import id_of, not_found
from gateway.http.body import convert
from gateway.http.errors import JSON, ApiError, bad_value
from gateway.http.routing import Route
from gateway.tenants.directory import Principal
from gateway.tenants.usage import Bucket, UsageReport, UsageSum

DEFAULT_DAYS = 30
# As many buckets as there are hours in two months, or days in four years.
MAX_BUCKETS = 1488

Query = TypeVar("Query", bound="OwnUsageQuery")
Moment = Annotated[datetime, Meta(tz=True)]


class OwnUsageQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Moments are RFC 3339; from 30 days before the end, and until now."""

    start: Moment | msgspec.UnsetType = msgspec.UNSET
    end: Moment | msgspec.UnsetType = msgspec.UNSET


class UsageQuery(OwnUsageQuery, frozen=True):
    bucket: Bucket = "day"


class UsageTotal(msgspec.Struct, frozen=True):
    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    cost: int


class UsageBucket(msgspec.Struct, frozen=True):
    """`start`: of the hour or day of UTC. `input_tokens` includes cached ones; `cost` is what budgets count."""

    start: Moment
    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    cost: int


class UsageBody(msgspec.Struct, frozen=True):
    """Buckets in which nothing was used are left out."""

    data: list[UsageBucket]
    total: UsageTotal


class UsageApi:
    def __init__(self, report: UsageReport) -> None:
        self._report = report

    def admin_routes(self, tenant: str) -> list[Route]:
        """
        Args:
            tenant: the path of one.
        """
        return [
            Route(
                "GET",
                tenant + "/usage",
                "admin:usage:read",
                self.tenant_usage,
                summary="What a tenant has used, by hour or day",
                query=UsageQuery,
                answers=UsageBody,
            )
        ]

    def tenant_routes(self) -> list[Route]:
        return [
            Route(
                "GET",
                "/v1/usage",
                "tenant:usage:read",
                self.own_usage,
                summary="What your tenant has used, by day",
                query=OwnUsageQuery,
                answers=UsageBody,
            )
        ]

    async def tenant_usage(self, request: Request) -> Response:
        asked = _query(request, UsageQuery)
        return await self._usage(id_of(request, "tenant_id"), asked, asked.bucket)

    async def own_usage(self, request: Request) -> Response:
        principal: Principal = request.state.principal
        return await self._usage(principal.tenant_id, _query(request, OwnUsageQuery), "day")

    async def _usage(self, tenant_id: str, asked: OwnUsageQuery, bucket: Bucket) -> Response:
        end = datetime.now(UTC) if isinstance(asked.end, msgspec.UnsetType) else asked.end
        start = end - timedelta(days=DEFAULT_DAYS) if isinstance(asked.start, msgspec.UnsetType) else asked.start
        if start >= end:
            raise bad_value("start", "start must lie before end.")
        if (end - start) / timedelta(**{f"{bucket}s": 1}) > MAX_BUCKETS:
            raise bad_value("start", f"From start to end are more than {MAX_BUCKETS} {bucket}s; ask for fewer.")
        found = await self._report.of(tenant_id, start, end, bucket)
        if found is None:
            raise not_found()
        body = UsageBody([UsageBucket(*_fields(each)) for each in found], _total(found))
        return Response(msgspec.json.encode(body), media_type=JSON)


def _query(request: Request, known: type[Query]) -> Query:
    """Raises ApiError: 400 for an unknown, repeated or bad parameter."""
    query = request.query_params.multi_items()
    if len({name for name, _ in query}) != len(query):
        raise ApiError(400, "A query parameter is given twice.")
    return convert(dict(query), known)


def _fields(each: UsageSum) -> tuple[datetime, int, int, int, int, int]:
    return each.start, each.requests, each.input_tokens, each.cached_tokens, each.output_tokens, each.cost


def _total(found: Sequence[UsageSum]) -> UsageTotal:
    columns = zip(*(_fields(each)[1:] for each in found), strict=True)
    return UsageTotal(*map(sum, columns)) if found else UsageTotal(0, 0, 0, 0, 0)
