"""The bodies of the admin API. Unknown fields are errors; so is a salt, which is never set from outside."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.responses import Response

from gateway.http.errors import JSON
from gateway.secret import Secret
from gateway.tenants.ledger import DEFAULT_CACHED_WEIGHT, DEFAULT_QUEUE_WAIT_SECONDS
from policies.rates import MAX_LIMIT as MAX_LIMIT_VALUE

DEFAULT_LIMIT = 50
MAX_LIMIT = 200
MAX_GRACE_SECONDS = 7 * 24 * 3600
MAX_QUEUE_WAIT_SECONDS = 600
# Of one tenant to another's: a million to one says all that there is to say.
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0
TENANT_NAME = r"[a-z0-9-]{1,64}"
KEY_NAME = r"[^\x00-\x1f\x7f-\x9f]{1,64}"

# The handlers check them, to say what a name may hold.
TenantName = Annotated[str, Meta(extra_json_schema={"pattern": f"^{TENANT_NAME}$"})]
KeyName = Annotated[str, Meta(extra_json_schema={"pattern": f"^{KEY_NAME}$"})]
Moment = Annotated[datetime, Meta(tz=True)]
TenantStatus = Annotated[str, Meta(extra_json_schema={"enum": ["active", "suspended"]})]
KeyStatus = Annotated[str, Meta(extra_json_schema={"enum": ["active", "disabled", "revoked", "expired"]})]
TenantScope = Literal["completions", "cache:read", "usage:read"]
TENANT_SCOPES: tuple[TenantScope, ...] = ("completions", "cache:read", "usage:read")


class Input(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of what clients send."""


class TenantInput(Input, frozen=True):
    name: TenantName


class KeyInput(Input, frozen=True):
    name: KeyName | None = None
    scopes: Annotated[tuple[TenantScope, ...], Meta(min_length=1)] = TENANT_SCOPES
    expires_at: Moment | None = None


class KeyPatch(Input, frozen=True):
    """What is left out stays. `name`, `expires_at`: null for none."""

    name: KeyName | UnsetType | None = UNSET
    scopes: Annotated[tuple[TenantScope, ...], Meta(min_length=1)] | UnsetType = UNSET
    status: Literal["active", "disabled"] | UnsetType = UNSET
    expires_at: Moment | UnsetType | None = UNSET


class KeyRotateInput(Input, frozen=True):
    """`grace_seconds`: how long the secret before this one still opens."""

    grace_seconds: Annotated[int, Meta(ge=0, le=MAX_GRACE_SECONDS)] = 0


Limit = Annotated[int, Meta(ge=1, le=MAX_LIMIT_VALUE)]


class KeyQuotas(Input, frozen=True):
    """Of a key, within its tenant's. None is unlimited; days and months are those of the time zone."""

    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    concurrent_requests: Limit | None = None
    tokens_per_day: Limit | None = None
    tokens_per_month: Limit | None = None
    time_zone: Annotated[str, Meta(min_length=1, max_length=64)] = "UTC"


class TenantQuotas(KeyQuotas, frozen=True):
    """
    Attributes:
        models: None is all.
        cached_token_weight: what a cached prompt token costs, in thousandths of a token.
        device_reserved_tokens: of the cache, for this tenant alone; lent to others as long as it has no use for it.
        device_max_tokens: of the cache, and so of a request; None is all of it.
        weight: of the tenant's part in what nobody has reserved.
        strict: neither lends nor borrows; needs device_reserved_tokens = device_max_tokens.
        queue_wait_seconds: how long a request may wait to be admitted.
    """

    max_context_tokens: Limit | None = None
    max_output_tokens: Limit | None = None
    models: list[Annotated[str, Meta(min_length=1, max_length=256)]] | None = None
    cached_token_weight: Annotated[int, Meta(ge=0, le=1000)] = DEFAULT_CACHED_WEIGHT
    device_reserved_tokens: Annotated[int, Meta(ge=0, le=MAX_LIMIT_VALUE)] = 0
    device_max_tokens: Limit | None = None
    weight: Annotated[float, Meta(ge=MIN_WEIGHT, le=MAX_WEIGHT)] = 1.0
    strict: bool = False
    queue_wait_seconds: Annotated[int, Meta(ge=1, le=MAX_QUEUE_WAIT_SECONDS)] = DEFAULT_QUEUE_WAIT_SECONDS


class KeyQuotasBody(KeyQuotas, frozen=True):
    """Its answer, which has every field."""


class TenantQuotasBody(TenantQuotas, frozen=True):
    """Its answer, which has every field."""


class RotateInput(Input, frozen=True):
    pass


class PageQuery(msgspec.Struct, frozen=True):
    """The query parameters of a list. `cursor` is a `next_cursor` of it."""

    limit: Annotated[int, Meta(ge=1, le=MAX_LIMIT)] = DEFAULT_LIMIT
    cursor: str | UnsetType = UNSET


class TenantsQuery(PageQuery, frozen=True):
    name: TenantName | UnsetType = UNSET


class TenantBody(msgspec.Struct, frozen=True):
    """`normalisation` and `alignment` cannot be changed yet; "off" is what happens."""

    id: str
    name: str
    status: TenantStatus
    created_at: Moment
    updated_at: Moment
    normalisation: str = "off"
    alignment: str = "off"


class KeyBody(msgspec.Struct, frozen=True):
    """`secret` is there in the answer that creates the key, and never again."""

    id: str
    name: str | None
    last4: str
    scopes: list[str]
    status: KeyStatus
    created_at: Moment
    expires_at: Moment | None
    last_used_at: Moment | None = None
    secret: Secret | UnsetType = UNSET


class SaltBody(msgspec.Struct, frozen=True):
    """`blocks`, `bytes`: what stores hold under this salt; None: not known."""

    epoch: int
    created_at: Moment
    state: Literal["active", "dropping", "dropped"]
    blocks: int | None
    bytes: int | None


class DroppedBody(msgspec.Struct, frozen=True):
    blocks: int
    bytes: int


class DeviceCacheBody(msgspec.Struct, frozen=True):
    """`reserved_tokens`, `max_tokens`: as they are in force, in whole blocks."""

    blocks: int
    tokens: int
    bytes: int
    reserved_tokens: int
    max_tokens: int | None


class CacheBody(msgspec.Struct, frozen=True):
    """`hit_tokens`, `miss_tokens`: of the tenant's prompts since the store was started."""

    device: DeviceCacheBody
    hit_tokens: int
    miss_tokens: int


class RotateBody(msgspec.Struct, frozen=True):
    """`dropped` is None when no store confirmed it: it follows as soon as one is reached, before any new request."""

    epoch: int
    dropped: DroppedBody | None


T = TypeVar("T")


class Page(msgspec.Struct, Generic[T], frozen=True):
    data: list[T]
    next_cursor: str | None


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body, enc_hook=_reveal), status, headers, JSON)


def _reveal(value: Any) -> str:
    if isinstance(value, Secret):
        return value.reveal().decode("ascii")
    raise TypeError(f"{type(value).__name__} has no JSON form")
