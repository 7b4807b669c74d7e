"""report.json: what it says at the end, and that one of many ranks writes it."""

from __future__ import annotations

import fcntl
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ps.host.health import Finding
from ps.host.stacks import stacks_path
from ps.job.report import (
    End,
    earlier_attempts,
    final_report,
    finite,
    head_of,
    report_without_server,
    respecting,
    write_end,
)
from ps.settings.config import Config
from tests.helpers import run_threads, topology_of
from tests.jobs import ROOT

STOPPED = Finding(0, "it has been stopped for 3 s", 5, is_halted=True)
PID = 7
FAILURE = {"rank": 0, "process": {"pid": PID}}
REPORTED = {"status": "failed", "pid": PID, "exit_code": 5, "cause": "x", "failure": FAILURE}
LOST = End(status="failed", exit_code=4, cause="y", failure={"rank": 2, "consequences": ["z"]})
DONE = End(status="done", exit_code=0)


@pytest.fixture
def running(tmp_path: Path) -> Path:
    """A run directory with the report of a server that runs."""
    put(tmp_path, {"status": "running", "pid": PID, "lr": 0.1})
    return tmp_path


def put(run_dir: Path, report: dict[str, Any]) -> None:
    (run_dir / "report.json").write_text(json.dumps(report))


def report_in(run_dir: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((run_dir / "report.json").read_text())
    return report


# What it says


def test_it_tells_from_the_start_what_runs_and_at_the_end_how_that_ended() -> None:
    head = head_of(
        Config(epochs=3, compute="trainer", max_lag="0"),
        topology_of(0, 4, port=1, attempt=2),
        pid=PID,
        earlier_attempts=[],
        link="local",
        threads=2,
        lr=0.1,
        resumed_from=Path("runs/a/checkpoints/x.pt"),
        versions={"torch": "2.9"},
    )
    assert (head["status"], head["pid"], head["attempt"]) == ("running", PID, 2)
    assert (head["world_size"], head["compute"], head["max_lag"]) == (4, "trainer", "0")
    assert (head["link"], head["resumed_from"]) == ("local", "runs/a/checkpoints/x.pt")
    numbers = {"updates": 12}
    report = final_report(head, LOST, checkpoint=Path("c.pt"), numbers=numbers, duration_s=1.5)
    assert report == {
        **head,
        "status": "failed",
        "exit_code": 4,
        "cause": "y",
        "failure": LOST.failure,
        "checkpoint": "c.pt",
        "updates": 12,
        "duration_s": 1.5,
    }
    report = final_report(head, DONE, checkpoint=None, numbers=numbers, duration_s=1.5)
    assert (report["status"], report["failure"], report["checkpoint"]) == ("done", None, None)


def test_attempts_are_listed_as_far_as_they_have_said_how_they_ended() -> None:
    first = {"attempt": 0, "exit_code": 4, "cause": "x", "updates": 3}
    killed = {"attempt": 1, "exit_code": None, "cause": None, "updates": None}
    assert earlier_attempts({}) == []
    assert earlier_attempts({**first, "status": "failed"}) == [first]
    assert earlier_attempts({"attempt": 1, "earlier_attempts": [first]}) == [first, killed]


def test_numbers_that_json_does_not_know_are_null_at_any_depth() -> None:
    value = {"a": [1, 2.5, math.nan, (math.inf, {"b": -math.inf})], "c": "nan"}
    assert finite(value) == {"a": [1, 2.5, None, [None, {"b": None}]], "c": "nan"}


# The server's last word


def test_what_a_rank_has_reported_of_this_server_is_the_cause() -> None:
    assert respecting(REPORTED, LOST, PID) == End(
        status="failed",
        exit_code=5,
        cause="x",
        failure={**FAILURE, "consequences": ["y", "z"]},
    )


@pytest.mark.parametrize(
    ("reported", "end"),
    [
        ({}, LOST),
        ({**REPORTED, "status": "running"}, LOST),
        ({**REPORTED, "pid": 8}, LOST),
        ({**REPORTED, "failure": None}, LOST),
        (REPORTED, DONE),
    ],
    ids=["none", "running", "of an earlier run", "no failure", "done all the same"],
)
def test_else_the_server_knows_how_it_ended(reported: dict[str, Any], end: End) -> None:
    assert respecting(reported, end, PID) is end


def test_the_server_writes_what_it_ends_with_and_says_where(running: Path) -> None:
    end, seen = write_end(running, LOST, PID, lambda end: {"cause": end.cause, "loss": math.nan})
    assert end is LOST
    assert str(running / "report.json") in seen
    assert report_in(running) == {"cause": "y", "loss": None}
    put(running, REPORTED)
    end, _ = write_end(running, LOST, PID, lambda end: {"cause": end.cause})
    assert (end.exit_code, report_in(running)) == (5, {"cause": "x"})


def test_a_report_that_cannot_be_written_is_said_with_the_reason(
    tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "report.json").mkdir()
    end, seen = write_end(tmp_path, LOST, PID, lambda end: {})
    assert end is LOST
    assert "Is a directory" in seen
    report_without_server(tmp_path, STOPPED, {})
    [line] = warnings.messages
    assert STOPPED.cause in line
    assert "Is a directory" in line


@pytest.fixture
def stopped_writer(running: Path) -> Iterator[None]:
    """A rank that was stopped while it held the lock."""
    with (running / "report.json").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.mark.usefixtures("stopped_writer")
def test_a_rank_that_was_stopped_while_it_wrote_keeps_the_server_alone_from_nothing(
    running: Path, warnings: pytest.LogCaptureFixture
) -> None:
    report_without_server(running, STOPPED, {}, timeout_s=0.05)
    assert report_in(running)["status"] == "running"
    assert STOPPED.cause in warnings.text
    write_end(running, DONE, PID, lambda end: {"status": end.status}, timeout_s=0.05)
    assert report_in(running) == {"status": "done"}


# Of a rank, whose server cannot write it


def test_a_rank_reports_what_its_server_cannot(
    running: Path, warnings: pytest.LogCaptureFixture
) -> None:
    stacks_path(running, 0).write_text("Thread 0x1:\n")
    report_without_server(running, STOPPED, {"pid": PID, "cpu_s": math.nan})
    [line] = warnings.messages
    assert STOPPED.cause in line
    assert str(running / "report.json") in line
    assert report_in(running) == {
        "status": "failed",
        "pid": PID,
        "lr": 0.1,
        "exit_code": 5,
        "cause": STOPPED.cause,
        "failure": {
            "rank": 0,
            "role": "server",
            "stacks": str(stacks_path(running, 0)),
            "process": {"pid": PID, "cpu_s": None},
        },
    }


@pytest.mark.parametrize(("content", "age_s"), [("", 0), ("Thread 0x1:\n", 60), (None, 0)])
def test_stacks_that_are_empty_or_of_an_earlier_attempt_are_not_named(
    running: Path, content: str | None, age_s: float
) -> None:
    if content is not None:
        stacks_path(running, 0).write_text(content)
        os.utime(stacks_path(running, 0), (time.time() - age_s,) * 2)
    report_without_server(running, STOPPED, {})
    assert report_in(running)["failure"]["stacks"] is None


@pytest.mark.parametrize(
    ("status", "pid"), [("done", PID), ("failed", PID), ("interrupted", PID), ("running", PID + 1)]
)
def test_an_end_that_was_reported_already_and_the_report_of_a_later_server_stay(
    running: Path, status: str, pid: int, warnings: pytest.LogCaptureFixture
) -> None:
    put(running, {"status": status, "pid": pid})
    report_without_server(running, STOPPED, {"pid": PID})
    assert report_in(running) == {"status": status, "pid": pid}
    assert warnings.messages == []


@pytest.mark.parametrize("content", [None, "", "{", "[]", "{}", "7"])
def test_where_the_report_of_the_server_is_gone_a_rank_writes_its_own(
    tmp_path: Path, content: str | None
) -> None:
    run_dir = tmp_path / "run"
    if content is not None:
        run_dir.mkdir()
        (run_dir / "report.json").write_text(content)
    report_without_server(run_dir, STOPPED, {})
    report = report_in(run_dir)
    assert (report["status"], report["cause"]) == ("failed", STOPPED.cause)


def report_as(run_dir: Path, writer: int) -> None:
    """As one of many ranks that find out at the same time."""
    report_without_server(run_dir, Finding(0, "x" * 9_999, writer), {}, timeout_s=10.0)


class Reader:
    """Reads the report again and again while it is written."""

    def __init__(self, run_dir: Path) -> None:
        self.statuses: set[str] = set()
        self._run_dir = run_dir
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def _read(self) -> None:
        while not self._end.is_set():
            self.statuses.add(report_in(self._run_dir)["status"])

    def __enter__(self) -> Reader:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()


@pytest.mark.parametrize("fsync_s", [0.0, 0.1])
def test_of_many_threads_that_report_at_once_one_does(
    running: Path,
    warnings: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    fsync_s: float,
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: time.sleep(fsync_s))
    with Reader(running) as reader:
        run_threads(lambda writer: report_as(running, writer), range(50))
    assert len(warnings.messages) == 1
    assert reader.statuses <= {"running", "failed"}
    assert report_in(running)["status"] == "failed"
    assert [path.name for path in running.iterdir()] == ["report.json"]


WRITERS = """
import os, sys, threading, time
from pathlib import Path
from ps.host.health import Finding
from ps.job.report import report_without_server
from ps.settings import log

log.configure("trainer", 1)
run_dir, first, fsync_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
fsync = os.fsync
os.fsync = lambda handle: (time.sleep(fsync_s), fsync(handle))

def report(writer):
    report_without_server(run_dir, Finding(0, "x" * 9_999, writer), {}, timeout_s=10.0)

threads = [threading.Thread(target=report, args=(first + number,)) for number in range(25)]
print("ready", flush=True)
sys.stdin.readline()
for thread in threads:
    thread.start()
"""


def writers(run_dir: Path, number: int, fsync_s: float) -> subprocess.Popen[str]:
    """A process of 25 that report at a word, each of which prints a line if it has."""
    args = [str(run_dir), str(25 * number), str(fsync_s)]
    process = subprocess.Popen(
        [sys.executable, "-c", WRITERS, *args],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.slow
@pytest.mark.parametrize("fsync_s", [0.0, 0.2])
def test_of_two_hundred_writers_in_processes_and_threads_one_reports(
    running: Path, warnings: pytest.LogCaptureFixture, fsync_s: float
) -> None:
    processes = [writers(running, number, fsync_s) for number in range(4)]
    with Reader(running) as reader:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        run_threads(lambda writer: report_as(running, 100 + writer), range(100))
        said = [process.communicate(timeout=20)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert "".join(said).count("failed: ") + len(warnings.messages) == 1
    assert reader.statuses <= {"running", "failed"}
    report = report_in(running)
    assert (report["status"], report["cause"]) == ("failed", f"server rank 0: {'x' * 9_999}")
    assert [path.name for path in running.iterdir()] == ["report.json"]
