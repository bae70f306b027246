"""How much memory this process can still have: the machine's, or less where a control group says so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """One control group's memory: its limit, what it uses, and what of that are file pages the kernel can drop."""

    limit_bytes: int
    used_bytes: int
    droppable_bytes: int

    @property
    def available_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes + self.droppable_bytes)


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that can be allocated without swapping or meeting a limit (Linux; control groups v1 and v2).

    Args:
        root: where `proc` and `sys` are found.

    Raises:
        OSError: there is no `/proc/meminfo`.
    """
    machine_bytes = parse_meminfo((root / "proc/meminfo").read_text())
    return min([machine_bytes, *(group.available_bytes for group in _groups(root))])


def parse_meminfo(text: str) -> int:
    """`MemAvailable` of a `/proc/meminfo` in bytes."""
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024


def parse_memberships(text: str) -> list[tuple[str, str]]:
    """(hierarchy, path) of the memory groups in a `/proc/self/cgroup`; the hierarchy is `v1` or `v2`."""
    memberships = []
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            memberships.append(("v2", path))
        elif "memory" in controllers.split(","):
            memberships.append(("v1", path))
    return memberships


def parse_group(limit: str, used: str, stat: str) -> GroupMemory | None:
    """A group's memory from its files, None when it has no limit. In v1 the `total_` lines count the groups below."""
    if limit.strip() == "max":
        return None
    lines = dict(line.split() for line in stat.splitlines())
    droppable = sum(
        int(lines.get(f"total_{kind}", lines.get(kind, 0))) for kind in ("active_file", "inactive_file")
    )
    return GroupMemory(int(limit), int(used), droppable)


_FILES = {
    "v1": ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    "v2": ("sys/fs/cgroup", "memory.max", "memory.current"),
}


def _groups(root: Path) -> Iterator[GroupMemory]:
    """The limited groups we are in, up to the top: each of them can stop us.

    In a container the path may be the host's and lead nowhere; the top of the mount is then the container's own.
    """
    try:
        memberships = parse_memberships((root / "proc/self/cgroup").read_text())
    except OSError:
        return
    for hierarchy, path in memberships:
        mount, limit_file, used_file = _FILES[hierarchy]
        relative = PurePosixPath(path.lstrip("/"))
        for level in (relative, *relative.parents):
            directory = root / mount / level
            try:
                texts = [(directory / name).read_text() for name in (limit_file, used_file, "memory.stat")]
            except OSError:
                continue
            if (group := parse_group(*texts)) is not None:
                yield group
