"""What a store is asked to drop, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PendingFence:
    """A drop that no store has confirmed yet.

    Attributes:
        id: of the row that is deleted once it is confirmed.
        account: the 16 bytes that stores know the tenant by.
        epoch: everything older goes; None: the whole account goes.
    """

    id: str
    account: bytes
    epoch: int | None


@dataclass(frozen=True, slots=True)
class Dropped:
    """What left a store's index."""

    blocks: int
    bytes: int
