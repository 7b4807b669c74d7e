"""The checks of every start: what each says of good and bad readings, and how they are made."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import pytest

from ps.host import resources
from ps.job import preflight
from ps.job.preflight import Check, CheckResult, preflight_checks, require, worst
from ps.settings.config import Config
from ps.settings.errors import LaunchError
from tests.jobs import ROOT

MIB, GIB = 1 << 20, 1 << 30
NOT_OF_THIS_HOST = "192.0.2.1"  # reserved for documentation
NAMES = ["platform", "loopback", "open files", "memory", "disk"]


def made(check: Check, timeout_s: float = 10.0) -> CheckResult:
    [result] = preflight.make({"some": check}, timeout_s)
    return result


@pytest.mark.parametrize(
    ("name", "status"), [("linux", "ok"), ("darwin", "ok"), ("win32", "failed")]
)
def test_a_system_without_rpc_is_named_with_what_to_use(name: str, status: str) -> None:
    seen, text = preflight.system(name)
    assert seen == status
    assert name in text
    assert status == "ok" or "WSL" in text


def test_an_address_that_cannot_be_bound_is_named_with_what_to_type() -> None:
    assert preflight.loopback()[0] == "ok"
    status, text = preflight.loopback(NOT_OF_THIS_HOST)
    assert status == "failed"
    assert text.startswith(NOT_OF_THIS_HOST)
    assert "ip link set lo up" in text


@pytest.mark.parametrize(
    ("soft", "hard", "world_size", "status", "typed"),
    [
        (None, None, 3, "ok", ""),
        (112, 112, 3, "ok", ""),
        (111, None, 3, "failed", "ulimit -n 112"),
        (111, 112, 3, "failed", "ulimit -n 112"),
        (64, 111, 3, "failed", "docker run --ulimit nofile=112)"),
        (1024, 1024, 100, "failed", "docker run --ulimit nofile=1664)"),
    ],
)
def test_open_files_must_do_for_every_rank(
    soft: int | None, hard: int | None, world_size: int, status: str, typed: str
) -> None:
    seen, text = preflight.open_files(soft, hard, world_size)
    assert seen == status
    assert text.endswith(typed)


@pytest.mark.parametrize(
    ("needed", "available", "status"),
    [
        (80 * MIB, 100 * MIB, "ok"),
        (81 * MIB, 100 * MIB, "warning"),
        (100 * MIB, 100 * MIB, "warning"),
        (101 * MIB, 100 * MIB, "failed"),
        (MIB, 0, "failed"),
    ],
)
def test_memory_and_disk_warn_when_it_gets_tight_and_fail_when_it_is_not_enough(
    needed: int, available: int, status: str
) -> None:
    checked = [
        preflight.memory(needed, available, None, "3 ranks"),
        preflight.disk(needed, available, "files", Path("runs")),
    ]
    for (seen, text), advice in zip(checked, ("docker run --memory", "--run-dir"), strict=True):
        assert seen == status
        assert (advice in text) == (status != "ok")


def test_memory_and_disk_are_given_in_units_for_people() -> None:
    memory = preflight.memory(750 * MIB, 3 * GIB // 2, None, "3 ranks")[1]
    disk = preflight.disk(2 * GIB, 5 * GIB, "3 checkpoints", Path("runs"))[1]
    for text, parts in (
        (memory, ("750.0 MiB", "3 ranks", "1.5 GiB")),
        (disk, ("2.0 GiB", "3 checkpoints", "5.0 GiB")),
    ):
        assert all(part in text for part in parts)


@pytest.mark.parametrize("available", [GIB, None])
def test_a_limit_on_memory_must_do_for_the_ranks(available: int | None) -> None:
    status, text = preflight.memory(750 * MIB - 1, available, 700 * MIB, "3 ranks")
    assert status == "failed"
    assert "--memory-limit allows 700.0 MiB; type --memory-limit 750MiB" in text
    assert "750.0 MiB for 3 ranks" in text
    assert preflight.memory(700 * MIB, GIB, 700 * MIB, "3 ranks")[0] == "ok"
    with pytest.raises(LaunchError, match="--memory-limit"):
        require(preflight_checks(Config(memory_limit="499MiB"), 2))
    require(preflight_checks(Config(memory_limit="500MiB"), 2))


def test_the_disk_is_that_of_the_run_directory_which_need_not_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    usage = shutil.disk_usage(tmp_path)

    def note(folder: Path) -> object:
        asked.append(folder)
        return usage

    monkeypatch.setattr(shutil, "disk_usage", note)
    monkeypatch.chdir(tmp_path)
    preflight.run_disk(Config(run_dir=tmp_path / "a" / "b"), MIB, "files")
    preflight.run_disk(Config(), MIB, "files")
    (tmp_path / "runs").mkdir()
    preflight.run_disk(Config(), MIB, "files")
    assert asked == [tmp_path, tmp_path, Path("runs")]
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    status, text = preflight.run_disk(Config(run_dir=tmp_path / "run"), MIB, "files")
    assert status == "failed"
    assert text.startswith(str(tmp_path))
    assert "--run-dir" in text


# How checks are made


def test_a_check_that_raises_has_failed_with_the_reason_in_one_line() -> None:
    def fail() -> NoReturn:
        raise ZeroDivisionError("by\nzero")

    result = made(fail)
    assert (result.name, result.status) == ("some", "failed")
    assert result.text.endswith("ZeroDivisionError: by zero")
    assert made(lambda: sys.exit("bye")).text.endswith("SystemExit: bye")


def test_a_check_that_hangs_has_failed_when_its_time_is_up() -> None:
    started_at = time.monotonic()
    result = made(lambda: ("ok", str(time.sleep(3))), 0.05)
    assert time.monotonic() - started_at < 1
    assert result.status == "failed"
    assert "0.05 s" in result.text


def test_a_file_name_that_is_no_text_can_be_printed() -> None:
    assert made(lambda: ("ok", os.fsdecode(b"data-\xff"))).text.encode() == rb"data-\udcff"


OK, WARNING, FAILED = (
    CheckResult("first", "ok", "good"),
    CheckResult("the second", "warning", "so so"),
    CheckResult("third", "failed", "bad; type: that"),
)


def test_the_first_failure_ends_a_launch_and_a_warning_does_not() -> None:
    require([OK, WARNING])
    with pytest.raises(LaunchError, match=r"^third: bad; type: that$") as caught:
        require([WARNING, FAILED, CheckResult("last", "failed", "worse")])
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("results", "status"),
    [([], "ok"), ([OK], "ok"), ([WARNING, OK], "warning"), ([FAILED, WARNING], "failed")],
)
def test_the_worst_status_counts(results: list[CheckResult], status: str) -> None:
    assert worst(results) == status


# All of them


@pytest.mark.slow
def test_they_take_milliseconds_and_do_not_load_torch() -> None:
    program = """
import sys, time
from ps.settings.config import Config
from ps.job.preflight import preflight_checks
times_s = []
for _ in range(5):
    started_at = time.perf_counter()
    print([result.name for result in preflight_checks(Config(), 3)])
    times_s.append(time.perf_counter() - started_at)
assert min(times_s) < 0.05, times_s
assert "torch" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(NAMES)] * 5


def test_a_host_without_memory_for_the_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "available_memory_bytes", lambda: 600 * MIB)
    require(preflight_checks(Config(), 2))
    with pytest.raises(LaunchError, match=r"^memory: .* 750\.0 MiB for 3 ranks"):
        require(preflight_checks(Config(), 3))


def test_a_low_limit_of_open_files_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, resource.RLIM_INFINITY))
    with pytest.raises(LaunchError, match=r"^open files: .*ulimit -n 112$"):
        require(preflight_checks(Config(), 3))


def test_a_host_without_a_loopback_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> NoReturn:
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(socket.socket, "bind", fail)
    with pytest.raises(LaunchError, match=r"^loopback: "):
        require(preflight_checks(Config(), 3))


def test_a_system_that_does_not_tell_its_memory_is_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> NoReturn:
        raise FileNotFoundError("/proc/meminfo")

    monkeypatch.setattr(resources, "available_memory_bytes", fail)
    results = {result.name: result for result in preflight_checks(Config(), 3)}
    require(results.values())
    assert results["memory"].status == "warning"
