"""The tables of tenants, their keys, their secrets and their quotas. Times are UTC; ids are random and say nothing.

tenants ──< api_keys          deleted with their tenant
   ├──────< epochs            one row per salt there ever was, deleted with its tenant
   ├──────< quotas            limits of a scope: a tenant, or one of its keys; a scope without limits has no row
   └──────< quota_states      what a scope has used; a key's exists while it has limits
gateways ─< reservations      what running requests hold; outlive their tenant, and keep their gateway's row
usage                         what each request used, written when its reservation goes; outlives its tenant
usage_hours                   the same, summed by tenant and hour
admin_keys                    keys of the admin API; a tenant key is never one
wrapped_secrets               everything the key-encryption key has wrapped: by purpose, tenant and epoch
pending_fences                what stores still have to drop; outlives its tenant
stores                        one row: the size of the store that was last seen, which reservations have to fit in

What every request writes counts time in ms since 1970: one clock for rates, windows and rows, and nothing to convert.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, DateTime, ForeignKey, Index, LargeBinary, MetaData, String
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

from policies.rates import Meter

NAMING_CONVENTION = {
    "ix": "ix_%(column_0_label)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


LONG_AGO = datetime(1, 1, 1, tzinfo=UTC)


def utc_now() -> datetime:
    return datetime.now(UTC)


class UtcDateTime(TypeDecorator[datetime]):
    """An instant. SQLite keeps no zone, so it is UTC going in and says so coming out."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: Any | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.replace(tzinfo=UTC)

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], datetime | None] | None:
        """What SQLite has there and is no time was long ago: whatever ends then has ended."""
        convert = super().result_processor(dialect, coltype)
        if convert is None:
            return None

        def converted(value: Any) -> datetime | None:
            try:
                return convert(value)
            except (TypeError, ValueError):
                return LONG_AGO

        return converted


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=NAMING_CONVENTION)
    type_annotation_map = {  # noqa: RUF012  # SQLAlchemy declares it so
        datetime: UtcDateTime(),
        bytes: LargeBinary(),
        list[str]: JSON(),
        int: BigInteger(),
    }


class Tenant(Base):
    """`account`: the 16 bytes that stores know it by. `epoch`: that of its current secrets, from 1 up."""

    __tablename__ = "tenants"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    name: Mapped[str] = mapped_column(String(64), unique=True)
    status: Mapped[str] = mapped_column(String(16))
    account: Mapped[bytes] = mapped_column(unique=True)
    epoch: Mapped[int]
    created_at: Mapped[datetime]
    updated_at: Mapped[datetime]


class KeyColumns:
    """What the database knows of an API key: never its secret, only HMAC-SHA256(pepper, secret)."""

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    name: Mapped[str | None] = mapped_column(String(64))
    digest: Mapped[bytes]
    pepper_version: Mapped[int]
    last4: Mapped[str] = mapped_column(String(4))
    scopes: Mapped[list[str]]
    status: Mapped[str] = mapped_column(String(16))
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]


def is_active(status: str, expires_at: datetime | None, now: datetime) -> bool:
    """Whether a key of that status, and until then, opens anything now."""
    return status == "active" and (expires_at is None or now < expires_at)


class ApiKey(KeyColumns, Base):
    """`previous_digest`: of the secret before the last rotation, which opens until `previous_until`."""

    __tablename__ = "api_keys"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), index=True)
    last_used_at: Mapped[datetime | None]
    previous_digest: Mapped[bytes | None]
    previous_pepper_version: Mapped[int | None]
    previous_until: Mapped[datetime | None]


class AdminKey(KeyColumns, Base):
    __tablename__ = "admin_keys"


class Epoch(Base):
    """That a tenant had a salt of this epoch, and since when; the salt itself is a wrapped secret.

    `dropped_at`: when a store confirmed that nothing of the epoch is left.
    """

    __tablename__ = "epochs"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), primary_key=True)
    epoch: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    created_at: Mapped[datetime]
    dropped_at: Mapped[datetime | None]


class WrappedSecret(Base):
    """32 secret bytes, opened only by the key-encryption key `kek_id` in the place that the primary key names.

    `tenant_id` is empty and `epoch` a version for secrets of the instance, so it is no foreign key.
    """

    __tablename__ = "wrapped_secrets"

    purpose: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(32), primary_key=True)
    epoch: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    kek_id: Mapped[str] = mapped_column(String(16))
    wrapped: Mapped[bytes]


class Fence(Base):
    """`epoch`: drop everything older; NULL: drop the account."""

    __tablename__ = "pending_fences"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    account: Mapped[bytes] = mapped_column(index=True)
    epoch: Mapped[int | None]
    created_at: Mapped[datetime]


class ScopeColumns:
    """A scope is what has limits: a tenant, or one of its keys. `scope` is the id of either."""

    scope: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), index=True)
    key_id: Mapped[str | None] = mapped_column(ForeignKey("api_keys.id", ondelete="CASCADE"), index=True)


class Quota(ScopeColumns, Base):
    """Limits; NULL is none. `cached_token_weight` in thousandths. A key has rates, budgets and concurrency only.

    `device_reserved_tokens` to `strict` are what stores are told of the tenant's account; `revision` rises by one when
    they change, and is 0 as long as they never did.
    """

    __tablename__ = "quotas"

    requests_per_minute: Mapped[int | None]
    tokens_per_minute: Mapped[int | None]
    concurrent_requests: Mapped[int | None]
    tokens_per_day: Mapped[int | None]
    tokens_per_month: Mapped[int | None]
    time_zone: Mapped[str] = mapped_column(String(64))
    max_context_tokens: Mapped[int | None]
    max_output_tokens: Mapped[int | None]
    models: Mapped[list[str] | None]
    cached_token_weight: Mapped[int]
    device_reserved_tokens: Mapped[int]
    device_max_tokens: Mapped[int | None]
    weight: Mapped[float]
    strict: Mapped[bool]
    queue_wait_seconds: Mapped[int]
    revision: Mapped[int]


class QuotaState(ScopeColumns, Base):
    """The columns of `policies.rates.Meter`."""

    __tablename__ = "quota_states"

    requests_level: Mapped[int]
    tokens_level: Mapped[int]
    at_ms: Mapped[int]
    tokens_charged: Mapped[int]
    day: Mapped[int]
    day_used: Mapped[int]
    month: Mapped[int]
    month_used: Mapped[int]


def unused_state(tenant_id: str, key_id: str | None = None) -> QuotaState:
    """Of a tenant, or of one of its keys, that has used nothing."""
    return QuotaState(scope=key_id or tenant_id, tenant_id=tenant_id, key_id=key_id, **dataclasses.asdict(Meter()))


class GatewayRow(Base):
    """A gateway that has reservations, or may have. `beats` changes as long as it lives."""

    __tablename__ = "gateways"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    beats: Mapped[int]


class Reservation(Base):
    """A running request: its place among the concurrent ones, and `amount`, the most that it can cost.

    `tenant_mark`, `key_mark`: where the charge stands in the meter of the scope; NULL where that has no token rate.
    """

    __tablename__ = "reservations"
    __table_args__ = (
        Index("ix_reservations_tenant_id", "tenant_id", "amount"),
        Index("ix_reservations_key_id", "key_id", "amount"),
    )

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    gateway_id: Mapped[str] = mapped_column(ForeignKey("gateways.id"), index=True)
    tenant_id: Mapped[str] = mapped_column(String(32))
    key_id: Mapped[str] = mapped_column(String(32))
    prompt_tokens: Mapped[int]
    amount: Mapped[int]
    tenant_mark: Mapped[int | None]
    key_mark: Mapped[int | None]


class UsageColumns:
    """Tokens as they were counted; `cost` in tokens as budgets count them, cached ones at their weight."""

    input_tokens: Mapped[int]
    cached_tokens: Mapped[int]
    output_tokens: Mapped[int]
    cost: Mapped[int]


class Usage(UsageColumns, Base):
    """`id` is that of the reservation. `outcome`: finished, cancelled, refused, failed or lost."""

    __tablename__ = "usage"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(32))
    key_id: Mapped[str] = mapped_column(String(32))
    at_ms: Mapped[int]
    outcome: Mapped[str] = mapped_column(String(16))


class UsageHour(UsageColumns, Base):
    __tablename__ = "usage_hours"

    tenant_id: Mapped[str] = mapped_column(String(32), primary_key=True)
    hour_ms: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    requests: Mapped[int]


class Store(Base):
    """Of the store that was last seen. There is one of a deployment, and one row, `id` 1."""

    __tablename__ = "stores"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    blocks: Mapped[int]
    block_tokens: Mapped[int]
