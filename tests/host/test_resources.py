"""What the machine offers, read from made-up cgroup folders, and how it is divided."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ps.host.resources import (
    available_memory_bytes,
    limit_spinning,
    shared_memory_bytes,
    threads_per_pass,
    usable_cores,
)

GIB = 1 << 30
UNLIMITED_IN_VERSION_1 = 2**63 - 4096


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def write(folder: Path, **files: str) -> Path:
    """Dots in the names of files are given as double underscores."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


# --- cores


def cores_2(folder: Path, text: str) -> Path:
    return write(folder, cpu__max=text)


def cores_1(folder: Path, quota: str) -> Path:
    write(folder / "cpu", cpu__cfs_quota_us=quota, cpu__cfs_period_us="100000\n")
    return folder


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("max 100000\n", 8),
        ("100000 100000\n", 1),
        ("150000 100000\n", 2),
        ("1 100000\n", 1),
        ("6400000 100000\n", 8),
    ],
)
def test_a_version_2_quota_limits_the_cores_rounded_up(
    tmp_path: Path, text: str, cores: int
) -> None:
    assert usable_cores(cores_2(tmp_path, text)) == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1\n", 8), ("250000\n", 3), ("100000\n", 1)])
def test_a_version_1_quota_limits_the_cores_rounded_up(
    tmp_path: Path, quota: str, cores: int
) -> None:
    assert usable_cores(cores_1(tmp_path, quota)) == cores


@pytest.mark.parametrize(
    ("one", "two", "cores"),
    [("300000", "400000 100000", 3), ("400000", "300000 100000", 3), ("200000", "", 2)],
)
def test_the_tighter_quota_of_both_versions_decides(
    tmp_path: Path, one: str, two: str, cores: int
) -> None:
    cores_1(tmp_path, one)
    assert usable_cores(cores_2(tmp_path, two)) == cores


@pytest.mark.parametrize(
    ("membership", "own", "cores"),
    [
        ("0::/a/b\n", "a/b", 3),
        ("0::/a/b\n", "a", 3),
        ("0::/a/b\n", "unified/a/b", 3),
        ("3:cpuset:/x\n4:cpuacct,cpu:/a/b\n0::/\n", "cpu/a/b", 3),
        ("4:cpu:/a/b\n0::/\n", "cpu/a", 3),
        ("3:cpuset:/a\n", "cpu/a", 8),  # of another controller
    ],
)
def test_the_cgroup_this_process_is_in_counts_and_those_around_it(
    tmp_path: Path, membership: str, own: str, cores: int
) -> None:
    write(tmp_path, membership=membership)
    cores_2(tmp_path / "cgroup" / own, "300000 100000\n")
    assert usable_cores(tmp_path / "cgroup", tmp_path / "membership") == cores


def test_without_a_quota_the_affinity_decides_or_the_count_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert usable_cores(tmp_path / "absent") == 8
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    assert usable_cores(tmp_path) == usable_cores(cores_2(tmp_path, "600000 100000\n")) == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    for count, cores in ((6, 6), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda: count)  # noqa: B023
        assert usable_cores(tmp_path / "absent") == cores


@pytest.mark.parametrize(
    ("cores", "num_trainers", "threads"),
    [(8, 1, 8), (8, 2, 4), (8, 3, 2), (2, 3, 1), (1, 1, 1), (16, 15, 1)],
)
def test_the_cores_are_divided_among_the_trainers_and_none_goes_without(
    cores: int, num_trainers: int, threads: int
) -> None:
    assert threads_per_pass(cores, num_trainers) == threads


# --- memory


def meminfo(folder: Path, available_bytes: int) -> Path:
    text = (
        f"MemTotal: 65536000 kB\nMemAvailable:   {available_bytes // 1024:8d} kB\nBuffers: 1 kB\n"
    )
    return write(folder, meminfo=text) / "meminfo"


def stat(inactive_file: int) -> str:
    """The keys that look alike are those of the kernel's own file."""
    return (
        f"anon 1000\nfile 2000\nactive_file 77777\ninactive_file {inactive_file}\n"
        "unevictable 0\ntotal_inactive_file 99999\nworkingset_refault_file 5\n"
    )


def memory_2(folder: Path, limit: object, used: int, cached: int = 0) -> Path:
    files = {"memory__max": f"{limit}\n", "memory__current": f"{used}\n"}
    return write(folder, **files, memory__stat=stat(cached))


def memory_1(folder: Path, limit: object, used: int, cached: int = 0) -> Path:
    files = {"memory__limit_in_bytes": f"{limit}\n", "memory__usage_in_bytes": f"{used}\n"}
    write(folder / "memory", **files, memory__stat=stat(cached))
    return folder


@pytest.mark.parametrize("version", [memory_1, memory_2])
@pytest.mark.parametrize(
    ("limit", "used", "cached", "host", "available"),
    [
        (4 * GIB, 3 * GIB, 0, 60 * GIB, GIB),
        (4 * GIB, 3 * GIB, 2 * GIB, 60 * GIB, 3 * GIB),  # cached files give way
        (40 * GIB, GIB, 0, 2 * GIB, 2 * GIB),  # the host has less
        (GIB, 2 * GIB, 0, 60 * GIB, 0),  # and not less than nothing
        ("max", 3 * GIB, 0, 5 * GIB, 5 * GIB),
        (UNLIMITED_IN_VERSION_1, 3 * GIB, 0, 5 * GIB, 5 * GIB),
    ],
)
def test_a_cgroup_leaves_what_is_below_its_limit(
    tmp_path: Path,
    version: Callable[..., Path],
    limit: object,
    used: int,
    cached: int,
    host: int,
    available: int,
) -> None:
    cgroup = version(tmp_path, limit, used, cached)
    assert available_memory_bytes(cgroup, meminfo(tmp_path, host)) == available


def test_memory_is_limited_by_the_cgroup_this_process_is_in(tmp_path: Path) -> None:
    write(tmp_path, membership="7:blkio:/\n4:memory:/a/b\n0::/\n")
    files = {"memory__limit_in_bytes": str(4 * GIB), "memory__usage_in_bytes": str(3 * GIB)}
    write(tmp_path / "cgroup" / "memory" / "a" / "b", **files)  # which does not tell its cache
    host = meminfo(tmp_path, 60 * GIB)
    assert available_memory_bytes(tmp_path / "cgroup", host, tmp_path / "membership") == GIB


def test_the_tighter_of_two_cgroup_versions_decides_and_without_one_the_host(
    tmp_path: Path,
) -> None:
    host = meminfo(tmp_path, 60 * GIB)
    assert available_memory_bytes(tmp_path / "absent", host) == 60 * GIB
    memory_1(tmp_path, 4 * GIB, 3 * GIB)
    assert available_memory_bytes(memory_2(tmp_path, 8 * GIB, GIB), host) == GIB
    assert available_memory_bytes(memory_2(tmp_path, 2 * GIB, 3 * GIB // 2), host) == GIB // 2


def test_what_is_not_told_is_left_out(tmp_path: Path) -> None:
    silent = write(tmp_path, meminfo="MemTotal: 65536000 kB\n") / "meminfo"
    cgroup = memory_2(tmp_path, 4 * GIB, GIB)
    write(cgroup, memory__stat="anon 1000\n")
    assert available_memory_bytes(cgroup, silent) == 3 * GIB
    with pytest.raises(OSError, match="absent"):
        available_memory_bytes(cgroup, tmp_path / "absent")


def test_shared_memory_is_read_where_the_kernel_tells_it(tmp_path: Path) -> None:
    status = write(tmp_path, status="VmRSS:\t 99 kB\nRssShmem:\t   12 kB\n") / "status"
    assert shared_memory_bytes(status) == 12 << 10
    write(tmp_path, status="VmRSS:\t 99 kB\n")
    assert shared_memory_bytes(status) == shared_memory_bytes(tmp_path / "absent") == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_this_machine_has_some_memory_left() -> None:
    assert 0 < available_memory_bytes() < 1 << 50


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"GOMP_SPINCOUNT": "100000"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
    ],
)
def test_spinning_is_limited_unless_the_user_has_said_otherwise(
    before: dict[str, str], after: dict[str, str]
) -> None:
    limit_spinning(before)
    assert before == after
