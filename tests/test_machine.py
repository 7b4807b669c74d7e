"""The cores this process may use, read from made-up cgroup folders, and how they are divided."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ps.machine import keep_freed_memory, limit_spinning, threads_per_pass, usable_cores


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


def test_version_2_is_asked_before_version_1(tmp_path: Path) -> None:
    version_1(tmp_path, "100000\n", "100000\n")
    assert usable_cores(version_2(tmp_path, "400000 100000\n")) == 4


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
    monkeypatch.setattr("ps.machine.ctypes.CDLL", lambda name: pytest.fail("libc was opened"))
    keep_freed_memory()


def test_a_libc_without_mallopt_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("ps.machine.ctypes.CDLL", lambda name: opened.append(name) or object())
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
    monkeypatch.setattr("ps.machine.ctypes.CDLL", lambda name: Libc())
    keep_freed_memory()
    assert made == calls
