"""What a run leaves in its folder: at the start, while it trains, and when it has ended."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from ps.host.health import Finding
from ps.host.signals import Signals
from ps.host.stacks import stacks_path
from ps.host.timeouts import Deadline
from ps.job.build import build_basis, build_server
from ps.job.checkpoint import Checkpointer, Checkpoints, read
from ps.job.ending import Ending, Limits
from ps.job.preparation import prepare
from ps.job.report import report_without_server
from ps.job.rundir import RunDirectory, checkpoints_in, options_of
from ps.model.passes import Passes
from ps.protocol import Assignment
from ps.server.metrics import EpochRecord
from ps.server.roll import Outcome
from ps.settings.config import Config
from ps.settings.errors import LaunchError
from tests.helpers import Parts, run_threads, topology_of, train_all, until

TIMEOUT_S = 10.0
CAUSE = "server rank 0: it has been stopped for 3 s"
STOPPED = Finding(0, "it has been stopped for 3 s", 5, is_halted=True)
SIGTERM = Outcome("interrupted", 143, "stopped by SIGTERM")


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Requests:
    """In place of the signals that a process has once."""

    deadline: Deadline | None = None

    def left_s(self, at_most: float) -> float:
        return at_most if self.deadline is None else self.deadline.left_s(at_most)


class Slow(Checkpoints):
    """A disk that takes until it is let go."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self.begun, self.go = threading.Event(), threading.Event()

    def write(self, *args: Any) -> Path:
        self.begun.set()
        self.go.wait(TIMEOUT_S)
        return super().write(*args)


class Run:
    """A server with its run directory, in this process."""

    def __init__(
        self,
        folder: Path,
        world_size: int = 1,
        *,
        limits: Limits = Limits(),
        checkpoints: Checkpoints | None = None,
        **options: Any,
    ) -> None:
        self.path = folder / "run"
        config = Config(
            workload="tests.plugins:plain",
            run_dir=self.path,
            **{"threads": 1, "batch_size": 200, "epochs": 1, "checkpoint_every": "0"} | options,
        )
        argv = ["--run-dir", str(self.path), "--threads", "1"]
        argv += ["--resume", options["resume"]] if "resume" in options else []
        self.topology = topology_of(0, world_size, port=1)
        self.prepared = prepare(self.topology, config, argv)
        self.prepared.run_dir.close()  # another of this process may go on there
        config, source = self.prepared.config, self.prepared.resume_from
        self.basis = build_basis(self.topology, config, Checkpoints(source) if source else None)
        self.state = self.basis.state
        self.server = build_server(self.topology, config, self.basis, lambda version: None)
        self.checkpoints = checkpoints or Checkpoints(self.path, config.keep)
        self.requests = Requests()
        self.codes: list[int] = []
        self.ending = self.attempt(0, None, limits)

    def attempt(self, number: int, link: str | None, limits: Limits = Limits()) -> Ending:
        """The ending of that attempt of this job."""
        newest = self.state.resumed_from if self.prepared.is_in_place else None
        self.checkpointer = Checkpointer(self.checkpoints, self.state.snapshot, newest=newest)
        return Ending(
            topology_of(0, self.topology.world_size, port=1, attempt=number),
            *(self.prepared, self.basis, self.server, self.checkpointer, link),
            cast(Signals, self.requests),
            limits=limits,
            leave=self.codes.append,
        )

    def begin(self) -> Run:
        self.ending.begin()
        return self

    def update(self) -> None:
        store = self.state.store
        store.apply([torch.ones_like(weight) for weight in store.state_dict().values()])

    def train(self) -> None:
        """All trainers, to the end."""
        workload, passes = self.basis.workload, Passes.of(self.prepared.config, self.basis.workload)
        trainers, compute = self.topology.trainers, self.basis.compute
        train_all(Parts(self.server, self.state, compute, workload, passes, trainers))

    def finish(self, facts_of: Callable[[int], Mapping[str, Any]] = lambda rank: {}) -> Outcome:
        return self.ending.finish(facts_of)

    def end(self, outcome: Outcome = SIGTERM) -> Outcome:
        self.server.stop(outcome)
        return self.finish()

    @property
    def report(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.path / "report.json").read_text())
        return loaded

    @property
    def versions(self) -> list[int]:
        return [read(path)["store"]["version"] for path in checkpoints_in(self.path)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Of two trainers; it has begun."""
    run = Run(tmp_path, 3).begin()
    yield run
    run.server.stop(Outcome("failed", 1, "the test is over"))
    run.checkpointer.close(TIMEOUT_S)


def test_a_run_that_has_begun_says_so_and_leaves_its_options(tmp_path: Path) -> None:
    run = Run(tmp_path, epochs=3, log_level="debug").begin()
    options = options_of(run.path)
    assert (options["workload"], options["epochs"]) == ("tests.plugins:plain", 3)
    assert options.keys().isdisjoint({"run_dir", "resume", "log_level", "inject"})
    assert (run.report["status"], run.report["resumed_from"]) == ("running", None)
    run.end()


def test_a_run_that_goes_on_is_running_whatever_the_earlier_one_reported(tmp_path: Path) -> None:
    """So that --resume auto finds it if it is killed."""
    run = Run(tmp_path).begin()
    run.update()
    run.end(Outcome("done"))
    assert run.report["status"] == "done"
    [checkpoint] = checkpoints_in(run.path)
    again = Run(tmp_path, resume=str(run.path)).begin()
    assert (again.report["status"], again.report["resumed_from"]) == ("running", str(checkpoint))
    again.end()


@pytest.mark.parametrize(("keep", "left"), [(1, [2]), (2, [1, 2]), (9, [0, 1, 2])])
def test_the_last_state_is_saved_and_as_many_are_kept_as_was_said(
    tmp_path: Path, keep: int, left: list[int]
) -> None:
    run = Run(tmp_path, keep=keep).begin()
    for version in (0, 1):
        run.checkpointer.due()
        until(lambda: run.versions[-1:] == [version], TIMEOUT_S)  # noqa: B023
        run.update()
    run.end()
    assert run.versions == left
    assert run.report["checkpoint"] == str(checkpoints_in(run.path)[-1])


def test_a_run_that_goes_on_elsewhere_is_saved_there_before_it_is_the_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or what was there to go on from would be forgotten if it is killed soon."""
    first = Run(tmp_path).begin()
    first.update()
    first.end()
    found: list[int] = []
    publish = RunDirectory.publish

    def look(self: RunDirectory) -> None:
        found.append(len(checkpoints_in(self.path)))
        publish(self)

    monkeypatch.setattr(RunDirectory, "publish", look)
    run = Run(tmp_path / "second", resume=str(first.path)).begin()
    assert (found, run.versions) == ([1], [1])
    run.end()
    assert run.versions == [1]
    again = Run(tmp_path / "second", resume=str(run.path)).begin()
    assert found == [1, 1]
    again.end()


def test_a_later_attempt_tells_how_the_earlier_ones_ended(tmp_path: Path) -> None:
    """A run that goes on with one that is no attempt of its own job does not."""
    run = Run(tmp_path).begin()
    run.end(Outcome("failed", 4, "lost trainer rank 2: killed by SIGKILL"))
    assert run.report["earlier_attempts"] == []
    first = {"attempt": 0, "exit_code": 4, "cause": run.report["cause"], "updates": 0}
    run.attempt(1, "rpc").begin()
    assert run.report["earlier_attempts"] == [first]
    assert (run.report["link"], run.report["precision"]) == ("rpc", "float32")
    run.attempt(2, "rpc").begin()
    killed = {"attempt": 1, "exit_code": None, "cause": None, "updates": None}
    assert run.report["earlier_attempts"] == [first, killed]
    run.attempt(0, None).begin()
    assert (run.report["earlier_attempts"], run.report["link"]) == ([], None)


def test_a_folder_that_cannot_be_written_is_told_before_training(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.path.rmdir()
    run.path.touch()
    with pytest.raises(LaunchError, match=f"{run.path}.*File exists"):
        run.begin()


# --- the end


def test_a_run_that_is_done_leaves_its_weights_its_numbers_and_a_checkpoint(
    run: Run, said: list[str]
) -> None:
    run.train()
    assert run.finish() == Outcome("done")
    report = run.report
    assert (report["status"], report["exit_code"]) == ("done", 0)
    assert (report["cause"], report["failure"]) == (None, None)
    assert (report["updates"], report["samples_trained"]) == (2, 400)
    assert 0 < report["duration_s"] < TIMEOUT_S
    weights = torch.load(run.path / "model.pt", weights_only=True)
    assert all(value.equal(weights[n]) for n, value in run.state.store.state_dict().items())
    [checkpoint] = checkpoints_in(run.path)
    assert report["checkpoint"] == str(checkpoint)
    assert run.versions == [2]
    assert said[-1].startswith("done: 2 updates, 400 samples in ")
    assert str(run.path / "report.json") in said[-1]


def test_a_run_that_failed_leaves_the_cause_and_what_was_seen_of_who_holds_it(
    run: Run, warnings: pytest.LogCaptureFixture
) -> None:
    run.server.join(2, None)
    assignment = run.server.next_order(2, None).wait()
    assert isinstance(assignment, Assignment)
    run.server.report(Finding(2, "killed by SIGKILL", 4, is_gone=True))
    run.server.fail(1, "ValueError: boom", 1)
    outcome = run.finish(lambda rank: {"pid": rank + 100})
    assert (outcome.exit_code, outcome.rank) == (4, 2)
    report, cause = run.report, outcome.cause
    assert cause is not None and "rank 2" in cause and "SIGKILL" in cause
    assert (report["status"], report["exit_code"], report["cause"]) == ("failed", 4, cause)
    failure = report["failure"]
    assert (failure["rank"], failure["role"], failure["stacks"]) == (2, "trainer", None)
    assert failure["last_order"]["batch"] == 0
    assert failure["last_order"]["samples"] == list(getattr(assignment.order, "indices"))  # noqa: B009
    assert failure["doing"] == "works on an order"
    assert 0 <= failure["since_s"] < TIMEOUT_S
    assert failure["consequences"] == ["trainer rank 1: ValueError: boom"]
    assert failure["process"] == {"pid": 102}
    assert not (run.path / "model.pt").exists()
    assert report["checkpoint"] is not None
    last = warnings.messages[-1]
    assert cause in last and str(run.path / "report.json") in last


@pytest.mark.parametrize("begins", [False, True])
def test_a_run_that_ends_otherwise_is_reported_too_whether_it_had_begun_or_not(
    tmp_path: Path, begins: bool, warnings: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    if begins:
        run.begin()
    run.end(Outcome("interrupted", 130, "stopped by SIGINT"))
    assert (run.report["status"], run.report["exit_code"]) == ("interrupted", 130)
    assert (run.report["failure"]["rank"], run.report["failure"]["process"]) == (0, {})
    assert (run.report["checkpoint"] is not None) == begins
    assert "SIGINT" in warnings.messages[-1]


def test_the_end_is_told_once_by_whichever_thread_is_first(
    run: Run, warnings: pytest.LogCaptureFixture
) -> None:
    run.server.fail(1, "first", 1)
    outcomes = []
    run_threads(lambda _: outcomes.append(run.finish()), range(3))
    assert {outcome.cause for outcome in outcomes} == {"trainer rank 1: first"}
    assert len(warnings.records) == 1


def test_numbers_that_are_not_finite_are_null(run: Run) -> None:
    nan, inf = float("nan"), float("inf")
    run.state.metrics.history.append(EpochRecord(1, 2, nan, inf, 0.5))
    run.server.fail(1, "boom", 1)
    run.finish()
    [record] = run.report["history"]
    assert (record["train_loss"], record["test_loss"], record["test_accuracy"]) == (None, None, 0.5)


@pytest.mark.parametrize(("rank", "is_named"), [(1, True), (2, False)])
def test_stacks_of_the_cause_are_named_and_files_without_any_are_removed(
    run: Run, rank: int, is_named: bool
) -> None:
    for other, content in ((0, ""), (1, "Thread 0x1:\n"), (2, "")):
        stacks_path(run.path, other).write_text(content)
    run.server.report(Finding(rank, "it has made no progress", 5))
    run.finish()
    stacks = str(stacks_path(run.path, rank)) if is_named else None
    assert run.report["failure"]["stacks"] == stacks
    assert [path.name for path in run.path.glob("stacks-*")] == ["stacks-rank-1.txt"]


@pytest.mark.parametrize("is_saved", [False, True])
def test_the_results_are_written_though_the_run_directory_was_removed(
    run: Run, is_saved: bool
) -> None:
    run.train()
    if is_saved:
        run.checkpointer.due()
        until(lambda: run.checkpointer.newest is not None, TIMEOUT_S)
        time.sleep(0.05)
    shutil.rmtree(run.path)
    run.finish()
    assert run.report["status"] == "done"
    assert (run.path / "model.pt").exists()
    assert is_saved or run.versions == [2]


def test_where_the_report_cannot_be_written_the_last_line_tells_all_the_same(
    run: Run, warnings: pytest.LogCaptureFixture
) -> None:
    run.server.fail(1, "boom", 1)
    (run.path / "report.json").unlink()
    (run.path / "report.json").mkdir()
    assert run.finish().exit_code == 1
    assert "trainer rank 1: boom" in warnings.messages[-1]
    assert "Is a directory" in warnings.messages[-1]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (RuntimeError("No space left on device\nat line 7"), "No space left on device"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_a_run_whose_weights_cannot_be_written_has_failed(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def refuse(*args: object) -> None:
        raise error

    run.train()
    monkeypatch.setattr(torch, "save", refuse)
    assert run.finish().exit_code == 1
    assert "model.pt" in run.report["cause"] and run.report["cause"].endswith(words)
    assert (run.report["status"], run.report["samples_trained"]) == ("failed", 400)
    assert list(run.path.glob("*model*")) == []


def test_where_the_end_is_not_saved_the_newest_checkpoint_is_named_if_there_is_one(
    tmp_path: Path, warnings: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it is of the run that this one goes on with, in the same folder."""

    def fail(*args: object) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    first = Run(tmp_path / "kept").begin()
    first.update()
    first.end()
    [checkpoint] = checkpoints_in(first.path)
    monkeypatch.setattr(Checkpoints, "write", fail)
    for run, newest in (
        (Run(tmp_path / "kept", resume=str(first.path)), str(checkpoint)),
        (Run(tmp_path / "new"), None),
    ):
        warnings.clear()
        run.begin().end()
        assert run.report["checkpoint"] == newest
        assert "None" not in warnings.text
        assert newest is None or newest in warnings.text


def test_a_disk_that_is_read_only_by_then_keeps_nothing_from_ending(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    stacks_path(run.path, 1).touch()
    monkeypatch.setattr(Path, "unlink", refuse)
    outcome = Outcome("failed", 1, "boom")
    assert run.end(outcome) == outcome


# --- reports of trainers, whose server could not write one


def test_what_a_trainer_has_reported_stays_the_cause_if_the_server_goes_on_after_all(
    run: Run, warnings: pytest.LogCaptureFixture
) -> None:
    """As one that was stopped does, when torchrun ends it."""
    report_without_server(run.path, STOPPED, {"pid": 7})
    run.server.report(Finding(1, "ended with exit code 5", 4, is_gone=True))
    assert run.end() == Outcome("failed", 5, CAUSE)
    report = run.report
    assert (report["status"], report["exit_code"], report["cause"]) == ("failed", 5, CAUSE)
    assert (report["failure"]["rank"], report["failure"]["process"]) == (0, {"pid": 7})
    later = report["failure"]["consequences"]
    assert ["rank 1" in later[0], later[1:]] == [True, [SIGTERM.cause]]
    assert report["checkpoint"] is not None
    assert report["samples_trained"] == 0
    assert CAUSE in warnings.messages[-1]


def test_a_run_that_is_done_is_done_whatever_a_trainer_has_reported(run: Run) -> None:
    run.train()
    report_without_server(run.path, STOPPED, {})
    assert run.finish() == Outcome("done")
    assert (run.report["status"], run.report["failure"]) == ("done", None)


def test_the_failure_of_an_earlier_run_in_the_same_folder_is_not_that_of_this_one(run: Run) -> None:
    earlier = {"status": "failed", "pid": 1, "exit_code": 5, "cause": CAUSE}
    (run.path / "report.json").write_text(json.dumps(earlier | {"failure": {"rank": 0}}))
    assert run.end(Outcome("failed", 1, "OSError: no room")).cause == "OSError: no room"


# --- what takes too long


def test_a_server_whose_lock_is_never_given_back_tells_so_and_ends(tmp_path: Path) -> None:
    run = Run(tmp_path, 3, limits=Limits(lock_timeout_s=0.2)).begin()
    with run.state.lock:
        start = time.monotonic()
        run.ending.stop(Outcome("interrupted", 130, "stopped by SIGINT"))
        assert 0.2 <= time.monotonic() - start < 1.0
        assert run.codes == [130]
        assert "SIGINT" in run.report["cause"] and "lock" in run.report["cause"]
        assert (run.report["exit_code"], run.report["failure"]["rank"]) == (130, 0)
        stacks = Path(run.report["failure"]["stacks"]).read_text()
        assert "test_a_server_whose_lock_is_never_given_back" in stacks
    until(lambda: run.server.outcome is not None, TIMEOUT_S)
    run.checkpointer.close(TIMEOUT_S)


def test_the_lock_is_waited_for_no_longer_than_the_deadline_of_a_request_says(run: Run) -> None:
    """Also where it comes while the lock is waited for."""
    with run.state.lock:
        start = time.monotonic()

        def ask() -> None:
            run.requests.deadline = Deadline.after(0.2)

        threading.Timer(0.1, ask).start()
        run.ending.stop(SIGTERM)
        assert 0.3 <= time.monotonic() - start < 2.0
    assert run.codes == [143]


def test_a_lock_that_is_given_back_late_costs_neither_checkpoint_nor_report(run: Run) -> None:
    run.requests.deadline = Deadline.after(5.0)
    run.update()
    run.state.lock.acquire()
    threading.Timer(0.3, run.state.lock.release).start()
    run.ending.stop(SIGTERM)
    assert run.finish() == SIGTERM
    assert (run.codes, run.versions, run.report["exit_code"]) == ([], [1], 143)


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("asked", ["before", "meanwhile"])
def test_a_save_that_takes_long_leaves_time_for_the_report(
    tmp_path: Path, asked: str, is_done: bool, warnings: pytest.LogCaptureFixture
) -> None:
    slow = Slow(tmp_path / "run")
    run = Run(tmp_path, limits=Limits(report_timeout_s=0.5), checkpoints=slow).begin()
    if asked == "before":
        run.requests.deadline = Deadline.after(0.8)
    else:

        def ask() -> None:
            assert slow.begun.wait(TIMEOUT_S)
            run.requests.deadline = Deadline.after(0.8)

        threading.Thread(target=ask).start()
    outcome = Outcome("done") if is_done else SIGTERM
    start = time.monotonic()
    run.end(outcome)
    assert 0.3 <= time.monotonic() - start < 1.3
    assert run.report["status"] != "running"
    assert run.report["checkpoint"] is None
    assert "no checkpoint" in warnings.text
    slow.go.set()
    run.checkpointer.close(TIMEOUT_S)


@pytest.mark.parametrize("is_done", [False, True])
def test_a_report_or_weights_that_take_too_long_keep_nobody_from_ending(
    run: Run, is_done: bool, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    go, fsync, save = threading.Event(), os.fsync, torch.save

    def slow_fsync(handle: int) -> None:
        go.wait(TIMEOUT_S)
        fsync(handle)

    def slow_save(*args: Any) -> None:
        go.wait(TIMEOUT_S)
        save(*args)

    run.checkpointer.close(TIMEOUT_S)
    monkeypatch.setattr(os, "fsync", slow_fsync)
    monkeypatch.setattr(torch, "save", slow_save)
    run.requests.deadline = Deadline.after(0.4)
    start = time.monotonic()
    outcome = run.end(Outcome("done") if is_done else SIGTERM)
    assert time.monotonic() - start < 1.5
    assert outcome.exit_code == (1 if is_done else 143)
    assert "report" in warnings.messages[-1] and "in time" in warnings.messages[-1]
    go.set()
    until(lambda: run.report["status"] != "running", TIMEOUT_S)


def test_the_stuck_end_even_if_their_report_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, 3, limits=Limits(report_timeout_s=0.1)).begin()
    go, fsync = threading.Event(), os.fsync

    def slow_fsync(handle: int) -> None:
        go.wait(TIMEOUT_S)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", slow_fsync)
    run.ending.end_stuck(STOPPED, {})
    assert run.codes == [5]
    assert CAUSE in warnings.messages[-1]
    go.set()
    until(lambda: run.report.get("cause") == CAUSE, TIMEOUT_S)
    run.end()


def test_a_job_is_stopped_for_what_was_lost_before(run: Run) -> None:
    loss = Finding(2, "killed by SIGKILL", 4, is_gone=True)
    run.ending.stop(SIGTERM, loss=loss, abandoned={1})
    assert run.server.ended.is_set()
    outcome = run.finish()
    assert (outcome.exit_code, outcome.rank) == (4, 2)
    assert run.report["failure"]["consequences"] == [SIGTERM.cause]
