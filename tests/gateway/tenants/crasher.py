"""A course of a gateway from its first start to its end, in a process that dies: a helper of tests, and a program.

The process dies right before or after one of its commits or messages to the store, or at any moment at all. What it
passed and what it was answered until then it wrote to a pipe, line by line.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import msgspec
from sqlalchemy import Connection, select

from gateway.tenants import quotas as quotas_module
from gateway.tenants.database import Database
from gateway.tenants.directory import Directory
from gateway.tenants.fences import PendingFence
from gateway.tenants.ledger import Ask, Settlement
from gateway.tenants.limits import LimitRegistry
from gateway.tenants.quotas import Quotas
from gateway.tenants.registry import Registry
from gateway.tenants.tables import WrappedSecret

# Each of them is one commit or one message to the store.
FIRST_STEPS = ("schema", "instance secrets", "admin key")
STEPS = (
    *FIRST_STEPS,
    "heartbeat",
    "tenant",
    "key",
    "tenant limits",
    "key limits",
    "reserve",
    "submit",
    "reserve another",
    "settle",
    "rotate",
    "fence",
    "fence done",
    "delete",
    "fence of deletion",
    "fence of deletion done",
    "settle another",
    "end",
)
PROMPT_TOKENS, MOST, CACHED, OUTPUT = 60, 100, 50, 3


class Course(msgspec.Struct, frozen=True):
    """
    Attributes:
        name: of its tenant, and part of every id.
        die_at: `before` or `after` and a step; None for never.
        die_within: seconds from its start at which it is killed from outside; None for never.
    """

    url: str
    data_dir: str
    name: str
    die_at: str | None = None
    die_within: float | None = None


class Told(msgspec.Struct, frozen=True):
    """What a course wrote until its end.

    Attributes:
        ended: the process's status as `os.waitpid` has it.
        passed: `before` or `after` and a step, for each commit and each message to the store.
        answered: the steps that returned.
        destroyed: secrets, wrapped, that a rotation or a deletion was about to destroy.
        tenant_id, account, key: of its tenant, and the text of its key, once they were answered.
    """

    course: Course
    ended: int
    passed: list[str]
    answered: list[str]
    destroyed: list[bytes]
    tenant_id: str = ""
    account: bytes = b""
    key: bytes = b""

    @property
    def killed(self) -> bool:
        assert self.ended in (0, signal.SIGKILL), self
        return self.ended != 0

    def happened(self, step: str) -> bool | None:
        """Whether a step's commit is in the database; None if it was killed while it committed."""
        if f"after {step}" in self.passed or step in self.answered:
            return True
        began = f"before {step}" in self.passed and self.course.die_at != f"before {step}"
        return None if began else False


class Crasher:
    """Runs courses, each in a new process with everything imported already."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", __name__]
        self._program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._program.communicate()

    def run(self, course: Course) -> Told:
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        self._program.stdin.write(msgspec.json.encode(course) + b"\n")
        self._program.stdin.flush()
        told: dict[str, Any] = {"course": course, "passed": [], "answered": [], "destroyed": []}
        while "ended" not in told:
            for name, value in msgspec.json.decode(self._program.stdout.readline()).items():
                if name in ("passed", "answered", "destroyed"):
                    told[name].append(value)
                else:
                    told[name] = value
        return msgspec.convert(told, Told)


def _tell(**values: Any) -> None:
    os.write(1, msgspec.json.encode(values) + b"\n")


class _Steps:
    """Which one runs, and where it dies."""

    def __init__(self, die_at: str | None) -> None:
        self._die_at = die_at
        self._step = ""

    @asynccontextmanager
    async def step(self, name: str) -> AsyncIterator[None]:
        self._step = name
        yield
        _tell(answered=name)

    def moment(self, when: str) -> None:
        moment = f"{when} {self._step}"
        _tell(passed=moment)
        if moment == self._die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch_commits(self) -> None:
        commit: Any = Connection._commit_impl

        def committed(connection: Connection) -> None:
            writes = connection.get_execution_options().get("writes")
            if writes:
                self.moment("before")
            commit(connection)
            if writes:
                self.moment("after")

        Connection._commit_impl = committed  # type: ignore[method-assign]

    async def send(self) -> None:
        """A message to a store, which answers."""
        self.moment("before")
        await asyncio.sleep(0)
        self.moment("after")


async def _run(course: Course) -> None:
    quotas_module.BEAT_SECONDS = 3600.0  # or its commits would be among those of the steps
    steps = _Steps(course.die_at)
    steps.watch_commits()
    step = steps.step
    async with step("schema"):
        database = await Database.open(course.url)
    async with step("instance secrets"):
        directory = await Directory.open(database, Path(course.data_dir) / "kek")
    async with step("admin key"):
        await directory.ensure_first_admin_key(Path(course.data_dir))
    registry, limits = Registry(database, directory.keyring), LimitRegistry(database)
    quotas = Quotas(database)
    async with step("heartbeat"):
        await quotas.start()
    async with step("tenant"):
        tenant = await registry.create_tenant(course.name)
        _tell(tenant_id=tenant.id, account=tenant.account)
    async with step("key"):
        created = await registry.create_key(tenant.id, None, frozenset({"completions"}), None)
        assert created is not None
        key, text = created
        _tell(key=text.reveal())
    for name, key_id in (("tenant limits", None), ("key limits", key.id)):
        async with step(name):
            await limits.change(tenant.id, key_id, lambda values: {**values, "tokens_per_day": 1000})
    async with step("reserve"):
        await quotas.reserve(Ask(f"{course.name}_1", tenant.id, key.id, PROMPT_TOKENS, MOST, MOST))
    async with step("submit"):
        await steps.send()
    async with step("reserve another"):
        await quotas.reserve(Ask(f"{course.name}_2", tenant.id, key.id, PROMPT_TOKENS, MOST, MOST))
    async with step("settle"):
        await quotas.settle(_settlement(f"{course.name}_1", tenant.id, key.id))
    await _tell_secrets(database, tenant.id)
    async with step("rotate"):
        fence = await registry.rotate(tenant.id)
    await _drop(steps, directory, fence, "fence")
    await _tell_secrets(database, tenant.id)
    async with step("delete"):
        fence = await registry.delete_tenant(tenant.id)
    await _drop(steps, directory, fence, "fence of deletion")
    async with step("settle another"):
        await quotas.settle(_settlement(f"{course.name}_2", tenant.id, key.id))
    async with step("end"):
        await quotas.close()
    await database.close()


def _settlement(id: str, tenant_id: str, key_id: str) -> Settlement:
    return Settlement(id, tenant_id, key_id, "finished", PROMPT_TOKENS, CACHED, OUTPUT)


async def _drop(steps: _Steps, directory: Directory, fence: PendingFence | None, name: str) -> None:
    assert fence is not None
    async with steps.step(name):
        await steps.send()
    async with steps.step(f"{name} done"):
        await directory.fence_done(fence)


async def _tell_secrets(database: Database, tenant_id: str) -> None:
    async with database.read() as session:
        of_tenant = select(WrappedSecret.wrapped).where(WrappedSecret.tenant_id == tenant_id)
        for wrapped in (await session.scalars(of_tenant)).all():
            _tell(destroyed=wrapped)


def _main() -> None:
    for line in sys.stdin.buffer:
        course = msgspec.json.decode(line, type=Course)
        if not (child := os.fork()):
            asyncio.run(_run(course))
            os._exit(0)
        if course.die_within is not None:
            time.sleep(course.die_within)
            os.kill(child, signal.SIGKILL)
        _tell(ended=os.waitpid(child, 0)[1])


if __name__ == "__main__":
    _main()
