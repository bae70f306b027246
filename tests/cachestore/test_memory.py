"""What can still be allocated: the machine's memory or the tightest control group, whichever is less."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachestore.memory import GroupMemory, available_memory_bytes, parse_group, parse_memberships, parse_meminfo

MEMINFO = "MemTotal:       16000000 kB\nMemFree:         1000000 kB\nMemAvailable:    8000000 kB\nHugePages_Total: 0\n"
MACHINE_BYTES = 8_000_000 * 1024


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, content in ({"proc/meminfo": MEMINFO} | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def _v2(group: str, limit: str, used: str = "0", stat: str = "") -> dict[str, str]:
    base = f"sys/fs/cgroup/{group}"
    return {f"{base}memory.max": limit, f"{base}memory.current": used, f"{base}memory.stat": stat}


def test_a_machine_without_groups_gives_what_the_kernel_says(tmp_path: Path) -> None:
    assert available_memory_bytes(_write(tmp_path, {})) == MACHINE_BYTES
    assert parse_meminfo(MEMINFO) == MACHINE_BYTES


def test_a_v2_limit_counts_less_what_is_used_and_more_what_can_be_dropped(tmp_path: Path) -> None:
    stat = "anon 500\nactive_file 70\ninactive_file 30\nshmem 9\n"
    files = {"proc/self/cgroup": "0::/\n"} | _v2("", "1000\n", "600\n", stat)
    assert available_memory_bytes(_write(tmp_path, files)) == 1000 - 600 + 100


def test_the_tightest_group_above_us_decides(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/outer/inner\n"}
    files |= _v2("outer/inner/", "max\n", "100\n") | _v2("outer/", "5000\n", "1000\n") | _v2("", "max\n")
    assert available_memory_bytes(_write(tmp_path, files)) == 4000


def test_a_v1_limit_counts_with_the_groups_below_it(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/memory/"
    files = {
        "proc/self/cgroup": "9:cpu,cpuacct:/other\n4:memory:/docker/abc\n0::/\n",
        f"{base}memory.limit_in_bytes": "2000\n",
        f"{base}memory.usage_in_bytes": "1500\n",
        f"{base}memory.stat": "active_file 1\ninactive_file 1\ntotal_active_file 100\ntotal_inactive_file 200\n",
    }
    assert available_memory_bytes(_write(tmp_path, files)) == 2000 - 1500 + 300


@pytest.mark.parametrize("limit", ["max\n", "9223372036854771712\n"])
def test_a_group_without_a_limit_changes_nothing(tmp_path: Path, limit: str) -> None:
    files = {"proc/self/cgroup": "0::/\n"} | _v2("", limit, "1000\n")
    assert available_memory_bytes(_write(tmp_path, files)) == MACHINE_BYTES


def test_a_group_over_its_limit_has_nothing_left() -> None:
    assert parse_group("100", "150", "inactive_file 20") == GroupMemory(100, 150, 20)
    assert GroupMemory(100, 150, 20).available_bytes == 0
    assert GroupMemory(100, 50, 20).available_bytes == 70


def test_only_memory_memberships_are_followed() -> None:
    text = "9:name=systemd:/a\n4:cpu,memory:/b:c\n1:cpu:/d\n0::/e\n"
    assert parse_memberships(text) == [("v1", "/b:c"), ("v2", "/e")]


def test_this_machine_has_memory() -> None:
    assert available_memory_bytes() > 1 << 26
