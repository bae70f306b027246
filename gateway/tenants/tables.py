"""The tables of tenants, their keys and their secrets. Times are UTC; ids are random and say nothing.

tenants ──< api_keys          deleted with their tenant
   └──────< epochs            one row per salt there ever was, deleted with its tenant
admin_keys                    keys of the admin API; a tenant key is never one
wrapped_secrets               everything the key-encryption key has wrapped: by purpose, tenant and epoch
pending_fences                what stores still have to drop; outlives its tenant
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, DateTime, ForeignKey, LargeBinary, MetaData, String
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

NAMING_CONVENTION = {
    "ix": "ix_%(column_0_label)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


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
    __tablename__ = "api_keys"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), index=True)


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
