"""What the tests of whole jobs have in common: how a job has ended, and what it has left."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import psutil

from ps.job.checkpoint import Checkpoints, read
from tests.jobs import Done

SIGKILLED = -9


def expect_done(done: Done) -> dict[str, Any]:
    """Every process has ended well; gives the report."""
    assert done.exit_code == 0, done.text
    report = done.report
    assert (report["status"], report["exit_code"], report["cause"]) == ("done", 0, None)
    return report


def expect_failed(done: Done, rank: int, exit_code: int) -> dict[str, Any]:
    """The report and the last lines say who is to blame; gives the report's `failure`."""
    assert done.exit_code != 0
    report = done.report
    assert (report["status"], report["exit_code"]) == ("failed", exit_code), report
    failure: dict[str, Any] = report["failure"]
    role = "trainer" if rank else "server"
    assert (failure["role"], failure["rank"]) == (role, rank)
    assert f"{role} rank {rank}" in report["cause"]
    last = [line for line in done.lines_of_ranks()[-3:] if report["cause"] in line]
    assert last and str(done.run_dir / "report.json") in last[0], done.text
    assert not (done.run_dir / "model.pt").exists()
    return failure


def expect_interrupted(done: Done, exit_code: int) -> None:
    report = done.report
    assert (report["status"], report["exit_code"]) == ("interrupted", exit_code), done.text
    assert saved_version(done) == report["updates"]
    assert not (done.run_dir / "model.pt").exists()


def expect_ended(ranks: Iterable[psutil.Process], within_s: float) -> None:
    """The ranks, not torchrun: a signal that meets it looking at a rank leaves it with a lock
    held, and then it waits a minute for ranks that have ended."""
    until = time.monotonic() + within_s
    left = [rank for rank in ranks if _is_at_work(rank)]
    while left and time.monotonic() < until:
        time.sleep(0.05)
        left = [rank for rank in left if _is_at_work(rank)]
    assert not left


def wait_until_idle(process: psutil.Process) -> None:
    """Until it has used no time of a core for half a second."""

    def cpu_s() -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    before = -1.0
    while cpu_s() > before:
        before = cpu_s()
        time.sleep(0.5)


def _is_at_work(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def saved_version(done: Done) -> int:
    """Of the newest checkpoint, which the report names."""
    newest = Checkpoints(done.run_dir).paths()[-1]
    assert done.report["checkpoint"] == str(newest)
    version: int = read(newest)["store"]["version"]
    return version
