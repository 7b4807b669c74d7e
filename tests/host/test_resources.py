"""What the machine offers, read from made-up cgroup folders, and how it is divided."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ps.host.libc import end_with_parent, keep_freed_memory
from ps.host.resources import available_memory_bytes, limit_spinning, threads_per_pass, usable_cores

GIB = 1 << 30
UNLIMITED_IN_VERSION_1 = 2**63 - 4096


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def version_2(folder: Path, text: str) -> Path:
    (folder / "cpu.max").write_text(text)
    return folder


def version_1(folder: Path, quota: str, period: str) -> Path:
    (folder / "cpu").mkdir()
    (folder / "cpu" / "cpu.cfs_quota_us").write_text(quota)
    (folder / "cpu" / "cpu.cfs_period_us").write_text(period)
    return folder


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("max 100000\n", 8),
        ("100000 100000\n", 1),
        ("150000 100000\n", 2),
        ("300000 100000\n", 3),
        ("50000 100000\n", 1),
        ("1 100000\n", 1),
        ("6400000 100000\n", 8),
    ],
)
def test_a_version_2_quota_limits_the_cores_rounded_up(
    tmp_path: Path, text: str, cores: int
) -> None:
    assert usable_cores(version_2(tmp_path, text)) == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1\n", 8), ("250000\n", 3), ("100000\n", 1)])
def test_a_version_1_quota_limits_the_cores_rounded_up(
    tmp_path: Path, quota: str, cores: int
) -> None:
    assert usable_cores(version_1(tmp_path, quota, "100000\n")) == cores


@pytest.mark.parametrize(("one", "two"), [("300000", "400000"), ("400000", "300000")])
def test_the_tighter_quota_of_both_versions_decides(tmp_path: Path, one: str, two: str) -> None:
    version_1(tmp_path, f"{one}\n", "100000\n")
    assert usable_cores(version_2(tmp_path, f"{two} 100000\n")) == 3


@pytest.mark.parametrize(
    ("membership", "own"),
    [
        ("0::/a/b\n", "a/b"),
        ("0::/a/b\n", "a"),
        ("0::/a/b\n", "unified/a/b"),
        ("3:cpuset:/x\n4:cpuacct,cpu:/a/b\n0::/\n", "cpu/a/b"),
        ("4:cpu:/a/b\n0::/\n", "cpu/a"),
    ],
)
def test_the_cgroup_this_process_is_in_counts_and_those_around_it(
    tmp_path: Path, membership: str, own: str
) -> None:
    (tmp_path / "membership").write_text(membership)
    (tmp_path / "cgroup" / own).mkdir(parents=True)
    version_2(tmp_path / "cgroup" / own, "300000 100000\n")
    assert usable_cores(tmp_path / "cgroup", tmp_path / "membership") == 3


def test_the_cgroup_of_another_controller_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "membership").write_text("3:cpuset:/a\n")
    (tmp_path / "cgroup" / "cpu" / "a").mkdir(parents=True)
    version_2(tmp_path / "cgroup" / "cpu" / "a", "300000 100000\n")
    assert usable_cores(tmp_path / "cgroup", tmp_path / "membership") == 8


def test_memory_is_limited_by_the_cgroup_this_process_is_in(tmp_path: Path) -> None:
    (tmp_path / "membership").write_text("7:blkio:/\n4:memory:/a/b\n0::/\n")
    folder = tmp_path / "cgroup" / "memory" / "a" / "b"
    folder.mkdir(parents=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    memory_files(folder, names, str(4 * GIB), 3 * GIB, None)
    host = meminfo(tmp_path, 60 * GIB)
    assert available_memory_bytes(tmp_path / "cgroup", host, tmp_path / "membership") == GIB


def test_a_cpu_max_that_says_nothing_leaves_the_question_to_version_1(tmp_path: Path) -> None:
    version_1(tmp_path, "200000\n", "100000\n")
    assert usable_cores(version_2(tmp_path, "")) == 2


def test_without_a_quota_the_affinity_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert usable_cores(tmp_path) == 8
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    assert usable_cores(tmp_path / "absent") == 2


def test_a_quota_above_the_affinity_adds_no_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert usable_cores(version_2(tmp_path, "600000 100000\n")) == 2


def test_without_affinity_the_count_of_the_host_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cores(tmp_path) == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores(tmp_path) == 1


@pytest.mark.parametrize(
    ("cores", "num_trainers", "threads"),
    [(8, 1, 8), (8, 2, 4), (8, 3, 2), (2, 3, 1), (1, 1, 1), (16, 15, 1)],
)
def test_the_cores_are_divided_among_the_trainers_and_none_goes_without(
    cores: int, num_trainers: int, threads: int
) -> None:
    assert threads_per_pass(cores, num_trainers) == threads


def meminfo(folder: Path, available_bytes: int) -> Path:
    path = folder / "meminfo"
    path.write_text(
        "MemTotal:       65536000 kB\nMemFree:          123456 kB\n"
        f"MemAvailable:   {available_bytes // 1024:8d} kB\nBuffers:            1234 kB\n"
    )
    return path


def memory_files(
    folder: Path, names: tuple[str, str], limit: str, used: int, stat: str | None
) -> None:
    folder.mkdir(exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    if stat is not None:
        (folder / "memory.stat").write_text(stat)


def stat_of(inactive_file: int) -> str:
    """The keys that look alike are those of the kernel's own file."""
    return (
        f"anon 1000\nfile 2000\nactive_file 77777\ninactive_file {inactive_file}\n"
        "unevictable 0\ntotal_inactive_file 99999\nworkingset_refault_file 5\n"
    )


def memory_2(folder: Path, limit: str, used: int, *, inactive_file: int = 0) -> Path:
    names = ("memory.max", "memory.current")
    memory_files(folder, names, limit, used, stat_of(inactive_file))
    return folder


def memory_1(folder: Path, limit: str, used: int, *, inactive_file: int = 0) -> Path:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    memory_files(folder / "memory", names, limit, used, stat_of(inactive_file))
    return folder


@pytest.mark.parametrize("version", [memory_1, memory_2])
def test_a_cgroup_leaves_what_is_below_its_limit(
    tmp_path: Path, version: Callable[..., Path]
) -> None:
    cgroup = version(tmp_path, str(4 * GIB), 3 * GIB)
    assert available_memory_bytes(cgroup, meminfo(tmp_path, 60 * GIB)) == GIB


@pytest.mark.parametrize("version", [memory_1, memory_2])
def test_cached_files_that_nobody_uses_do_not_count_as_taken(
    tmp_path: Path, version: Callable[..., Path]
) -> None:
    cgroup = version(tmp_path, str(4 * GIB), 3 * GIB, inactive_file=2 * GIB)
    assert available_memory_bytes(cgroup, meminfo(tmp_path, 60 * GIB)) == 3 * GIB


@pytest.mark.parametrize("version", [memory_1, memory_2])
def test_a_host_with_less_than_the_cgroup_allows_decides(
    tmp_path: Path, version: Callable[..., Path]
) -> None:
    cgroup = version(tmp_path, str(40 * GIB), GIB)
    assert available_memory_bytes(cgroup, meminfo(tmp_path, 2 * GIB)) == 2 * GIB


@pytest.mark.parametrize(
    ("version", "limit"), [(memory_2, "max"), (memory_1, str(UNLIMITED_IN_VERSION_1))]
)
def test_without_a_limit_the_host_decides(
    tmp_path: Path, version: Callable[..., Path], limit: str
) -> None:
    cgroup = version(tmp_path, limit, 3 * GIB)
    assert available_memory_bytes(cgroup, meminfo(tmp_path, 5 * GIB)) == 5 * GIB


def test_without_a_cgroup_the_host_decides(tmp_path: Path) -> None:
    host = meminfo(tmp_path, 7 * GIB)
    assert available_memory_bytes(tmp_path, host) == 7 * GIB
    assert available_memory_bytes(tmp_path / "absent", host) == 7 * GIB


def test_the_tighter_of_two_cgroup_versions_decides(tmp_path: Path) -> None:
    host = meminfo(tmp_path, 60 * GIB)
    memory_1(tmp_path, str(4 * GIB), 3 * GIB)
    assert available_memory_bytes(memory_2(tmp_path, str(8 * GIB), GIB), host) == GIB
    assert available_memory_bytes(memory_2(tmp_path, str(2 * GIB), 3 * GIB // 2), host) == GIB // 2


@pytest.mark.parametrize("version", [memory_1, memory_2])
def test_more_taken_than_allowed_leaves_nothing_and_not_less(
    tmp_path: Path, version: Callable[..., Path]
) -> None:
    cgroup = version(tmp_path, str(GIB), 2 * GIB)
    assert available_memory_bytes(cgroup, meminfo(tmp_path, 60 * GIB)) == 0


def test_a_limit_counts_though_the_cache_is_not_told(tmp_path: Path) -> None:
    host = meminfo(tmp_path, 60 * GIB)
    names = ("memory.max", "memory.current")
    memory_files(tmp_path, names, str(4 * GIB), 3 * GIB, "anon 1000\n")
    assert available_memory_bytes(tmp_path, host) == GIB
    (tmp_path / "memory.stat").unlink()
    assert available_memory_bytes(tmp_path, host) == GIB


def test_a_host_that_does_not_tell_leaves_the_answer_to_the_cgroup(tmp_path: Path) -> None:
    silent = tmp_path / "meminfo"
    silent.write_text("MemTotal: 65536000 kB\n")
    assert available_memory_bytes(memory_2(tmp_path, str(4 * GIB), GIB), silent) == 3 * GIB


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


def test_freed_memory_is_left_to_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("ps.host.libc.ctypes.CDLL", lambda name: pytest.fail("libc was opened"))
    keep_freed_memory()


def test_a_libc_without_mallopt_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("ps.host.libc.ctypes.CDLL", lambda name: opened.append(name) or object())
    keep_freed_memory()
    assert opened == [None]


@pytest.mark.parametrize(
    ("takes_large", "calls"),
    [
        (True, [(-3, 1 << 30), (-1, 1 << 30), (-8, 1)]),
        (False, [(-3, 1 << 30), (-3, 1 << 25), (-1, 1 << 30), (-8, 1)]),
    ],
)
def test_an_old_glibc_is_asked_for_as_much_as_it_takes(
    monkeypatch: pytest.MonkeyPatch, takes_large: bool, calls: list[tuple[int, int]]
) -> None:
    made: list[tuple[int, int]] = []

    class Libc:
        @staticmethod
        def mallopt(parameter: int, value: int) -> int:
            made.append((parameter, value))
            return int(takes_large or value < 1 << 30)

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("ps.host.libc.ctypes.CDLL", lambda name: Libc())
    keep_freed_memory()
    assert made == calls


class Prctl:
    """A C library that notes what prctl is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []

    def prctl(self, *args: int) -> int:
        self.calls.append(args)
        return 0


@pytest.fixture
def prctl(monkeypatch: pytest.MonkeyPatch) -> Prctl:
    library = Prctl()
    monkeypatch.setattr("ps.host.libc.ctypes.CDLL", lambda name: library)
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail(f"it ended with {code}"))
    monkeypatch.setattr(os, "getppid", lambda: 4711)
    monkeypatch.setattr(sys, "platform", "linux")
    return library


def test_the_kernel_is_told_to_kill_this_process_when_its_parent_ends(prctl: Prctl) -> None:
    end_with_parent(4711)
    assert prctl.calls == [(1, 9, 0, 0, 0)]  # PR_SET_PDEATHSIG, SIGKILL


def test_a_process_whose_parent_has_ended_before_that_ends_itself(
    prctl: Prctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    end_with_parent(4712)
    assert codes == [1]


def test_on_other_systems_a_process_outlives_its_parent(
    prctl: Prctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    end_with_parent(4712)
    assert prctl.calls == []
