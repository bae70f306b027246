"""`GET …/tenants/{id}/usage` for administrators, `GET /v1/usage` for a tenant itself."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.ids import id_of, not_found
from gateway.admin.query import query_values
from gateway.http.body import convert
from gateway.http.errors import JSON, bad_value
from gateway.http.routing import Route
from gateway.tenants.directory import Principal
from gateway.tenants.usage import Bucket, UsageReport, UsageSum

DEFAULT_DAYS = 30
EARLIEST_END = datetime(2000, 1, 1, tzinfo=UTC)
# As many buckets as there are hours in two months, or days in four years.
MAX_BUCKETS = 1488

Moment = Annotated[datetime, Meta(tz=True)]


class OwnUsageQuery(msgspec.Struct, frozen=True):
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


class UsageBody(msgspec.Struct, frozen=True):
    """Buckets in which nothing was used are left out."""

    data: list[UsageSum]
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
        asked = convert(query_values(request, UsageQuery), UsageQuery)
        return await self._usage(id_of(request, "tenant_id"), asked, asked.bucket)

    async def own_usage(self, request: Request) -> Response:
        principal: Principal = request.state.principal
        asked = convert(query_values(request, OwnUsageQuery), OwnUsageQuery)
        return await self._usage(principal.tenant_id, asked, "day")

    async def _usage(self, tenant_id: str, asked: OwnUsageQuery, bucket: Bucket) -> Response:
        end = datetime.now(UTC) if isinstance(asked.end, msgspec.UnsetType) else asked.end
        if end < EARLIEST_END:
            raise bad_value("end", f"end must lie after {EARLIEST_END:%Y-%m-%d}: nothing was used before.")
        start = end - timedelta(days=DEFAULT_DAYS) if isinstance(asked.start, msgspec.UnsetType) else asked.start
        if start >= end:
            raise bad_value("start", "start must lie before end.")
        if (end - start) / timedelta(**{f"{bucket}s": 1}) > MAX_BUCKETS:
            raise bad_value("start", f"From start to end are more than {MAX_BUCKETS} {bucket}s; ask for fewer.")
        found = await self._report.of(tenant_id, start, end, bucket)
        if found is None:
            raise not_found()
        total = UsageTotal(*(sum(getattr(each, name) for each in found) for name in UsageTotal.__struct_fields__))
        return Response(msgspec.json.encode(UsageBody(found, total)), media_type=JSON)
