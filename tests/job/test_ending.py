"""What a run leaves in its folder: at the start, while it trains, and when it has ended."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from ps.job.parts import ServerParts, server_parts
from ps.job.run import _after_update

from ps.host.gate import Gate
from ps.host.health import Activity, Finding
from ps.host.monitors import Limits
from ps.host.processes import Identity, Peer
from ps.host.signals import Signals
from ps.host.stacks import stacks_path
from ps.host.watch import Watch
from ps.job.checkpoint import Checkpointer, Checkpoints, read
from ps.job.ending import Ending
from ps.job.preparation import Prepared, prepare
from ps.job.report import report_without_server
from ps.job.rundir import RunDirectory, checkpoints_in, options_of
from ps.protocol import Train
from ps.server.metrics import EpochRecord
from ps.server.server import Outcome
from ps.settings.config import Config
from ps.settings.errors import LaunchError
from ps.trainer.trainer import train
from tests.helpers import (
    Parts,
    has_ended,
    peer_of,
    run_threads,
    server_of,
    sleeper,
    topology_of,
    until,
)
from tests.plugins import perceptron

ALONE = topology_of(port=1)
BOUND_S = 10.0
CAUSE = "server rank 0: it has been stopped for 3 s"
STOPPED = Finding(0, "it has been stopped for 3 s", 5, is_halted=True)


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Run:
    """One at world size 1 that has begun."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder / "run"
        config = Config(workload="tests.plugins:plain", run_dir=self.folder, threads=1, **options)
        argv = ["--run-dir", str(self.folder), "--threads", "1"]
        argv += ["--resume", options["resume"]] if "resume" in options else []
        prepared = prepare(ALONE, config, argv)
        prepared.run_dir.close()  # another of this process may go on there
        earlier = Checkpoints(prepared.resume_from) if prepared.resume_from else None
        self.job: ServerParts = server_parts(ALONE, prepared.config, earlier)
        self.ending = Ending(self.job, ALONE, prepared, None)
        self.ending.begin()

    def update(self) -> None:
        parameters = self.job.store._parameters
        self.job.store.apply([torch.ones_like(parameter) for parameter in parameters])

    def end(self, outcome: Outcome | None = None) -> None:
        self.job.server.stop(outcome or Outcome("interrupted", 143, "stopped by SIGTERM"))
        self.ending.finish()

    @property
    def report(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.folder / "report.json").read_text())
        return loaded

    @property
    def versions(self) -> list[int]:
        return [read(path)["store"]["version"] for path in checkpoints_in(self.folder)]


def test_a_run_that_has_begun_says_so_and_leaves_its_options(tmp_path: Path) -> None:
    run = Run(tmp_path, epochs=3, log_level="debug")
    options = options_of(run.folder)
    assert (options["workload"], options["epochs"]) == ("tests.plugins:plain", 3)
    assert options.keys().isdisjoint({"run_dir", "resume", "log_level", "inject"})
    assert (run.report["status"], run.report["resumed_from"]) == ("running", None)
    run.end()


def test_a_run_that_goes_on_is_running_whatever_the_earlier_one_reported(tmp_path: Path) -> None:
    """So that --resume auto finds it if it is killed."""
    run = Run(tmp_path)
    run.update()
    run.end(Outcome("done"))
    assert run.report["status"] == "done"
    [checkpoint] = checkpoints_in(run.folder)
    again = Run(tmp_path, resume=str(run.folder))
    assert (again.report["status"], again.report["resumed_from"]) == ("running", str(checkpoint))
    again.end()


@pytest.mark.parametrize(("keep", "left"), [(1, [2]), (2, [1, 2]), (9, [0, 1, 2])])
def test_the_last_state_is_saved_and_as_many_are_kept_as_was_said(
    tmp_path: Path, keep: int, left: list[int]
) -> None:
    run = Run(tmp_path, keep=keep, checkpoint_every="0")
    for version in (0, 1):
        run.ending.checkpointer.due()
        until(lambda: run.versions[-1:] == [version], BOUND_S)  # noqa: B023
        run.update()
    run.end()
    assert run.versions == left
    assert run.report["checkpoint"] == str(checkpoints_in(run.folder)[-1])


@pytest.mark.slow
def test_it_is_saved_by_the_clock_where_seconds_were_said(tmp_path: Path) -> None:
    run = Run(tmp_path, checkpoint_every="1s")
    run.update()
    assert until(lambda: run.versions == [1], BOUND_S) > 0.5
    run.end()


@pytest.mark.parametrize(
    ("every", "at"), [("3", [3, 6, 9]), ("1", [*range(1, 11)]), ("0", []), ("1s", [])]
)
def test_it_is_saved_after_so_many_updates_where_a_number_was_said(
    every: str, at: list[int]
) -> None:
    told: list[int] = []

    class Listening:
        def due(self) -> None:
            told.append(version)

    config = Config(checkpoint_every=every)
    act = _after_update(ALONE, config, cast(Checkpointer, Listening()))
    for version in range(1, 11):
        act(version)
    assert told == at


def test_a_run_that_goes_on_elsewhere_is_saved_there_before_it_is_the_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or what was there to go on from would be forgotten if it is killed soon."""
    first = Run(tmp_path)
    first.update()
    first.end()
    found: list[int] = []
    publish = RunDirectory.publish
    second = tmp_path / "second"

    def look(self: RunDirectory) -> None:
        found.append(len(checkpoints_in(self.path)))
        publish(self)

    monkeypatch.setattr(RunDirectory, "publish", look)
    run = Run(second, resume=str(first.folder))
    assert (found, run.versions) == ([1], [1])
    run.end()
    assert run.versions == [1]
    again = Run(second, resume=str(run.folder))
    assert found == [1, 1]
    again.end()


def test_a_later_attempt_tells_how_the_earlier_ones_ended(tmp_path: Path) -> None:
    """A run that goes on with one that is no attempt of its own job does not."""
    run = Run(tmp_path)
    run.end(Outcome("failed", 4, "lost trainer rank 2: killed by SIGKILL"))
    assert run.report["earlier_attempts"] == []
    first = {"attempt": 0, "exit_code": 4, "cause": run.report["cause"], "updates": 0}
    prepared = run.ending._prepared
    second = Ending(run.job, topology_of(0, 3, port=1, attempt=1), prepared, "rpc")
    second.begin()
    assert run.report["earlier_attempts"] == [first]
    assert (run.report["link"], run.report["precision"]) == ("rpc", "float32")
    third = Ending(run.job, topology_of(0, 3, port=1, attempt=2), prepared, "rpc")
    killed = {"attempt": 1, "exit_code": None, "cause": None, "updates": None}
    third.begin()
    assert run.report["earlier_attempts"] == [first, killed]
    again = Ending(run.job, ALONE, prepared, None)
    again.begin()
    assert (run.report["earlier_attempts"], run.report["link"]) == ([], None)


# --- of a server with two trainers


@dataclass
class Started:
    """A server of two trainers with its run directory, in this process."""

    ending: Ending
    parts: Parts

    @property
    def path(self) -> Path:
        return self.ending.run_dir.path

    @property
    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.path / "report.json").read_text())
        return report

    def begin(self) -> None:
        self.ending.begin()

    def train(self) -> None:
        """Both trainers, to the end."""
        run_threads(
            lambda trainer: train(trainer, self.parts.link(trainer), self.parts.worker(trainer)),
            self.parts.trainers,
        )

    def take_order(self, trainer: int) -> Train:
        self.parts.server.join(trainer, None)
        order = self.parts.server.next_order(trainer, None).wait()
        assert isinstance(order, Train)
        return order

    def look_at(self, peers: Mapping[int, Peer], limits: Limits = Limits()) -> None:
        self.ending.watch_ranks(peers, Watch(Signals()), limits)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Started]:
    parts = server_of(perceptron(num_train=16), trainers=(1, 2))
    job = ServerParts(
        workload=parts.workload,
        plan=parts.plan,
        threads=1,
        lr=0.1,
        store=parts.store,
        orders=parts.orders,
        compute=parts.compute,
        server=parts.server,
        resumed_from=None,
    )
    topology = topology_of(0, 3, port=1)
    prepared = Prepared(
        started_at=time.monotonic() - 100,
        gate=Gate(topology),
        run_dir=RunDirectory.create(tmp_path / "run", None),
        job="a job",
        resume_from=None,
        config=Config(epochs=3, run_dir=tmp_path / "run", checkpoint_every="0"),
    )
    run = Started(Ending(job, topology, prepared, "local"), parts)
    yield run
    run.parts.server.stop(Outcome("failed", 1, "the test is over"))
    run.ending.checkpointer.close(BOUND_S)


def test_a_run_that_is_done_leaves_its_weights_its_numbers_and_a_checkpoint(
    run: Started, said: list[str]
) -> None:
    run.begin()
    run.train()
    assert run.ending.finish() == Outcome("done")
    report = run.report
    assert (report["status"], report["exit_code"]) == ("done", 0)
    assert (report["cause"], report["failure"]) == (None, None)
    assert (report["updates"], report["samples_trained"]) == (2, 16)
    assert 100 < report["duration_s"] < 200
    weights = torch.load(run.path / "model.pt", weights_only=True)
    assert all(value.equal(weights[n]) for n, value in run.parts.store.state_dict().items())
    [checkpoint] = Checkpoints(run.path).paths()
    assert report["checkpoint"] == str(checkpoint)
    assert read(checkpoint)["store"]["version"] == 2
    assert said[-1].startswith("done: 2 updates, 16 samples in 100.")
    assert said[-1].endswith(f"; see {run.path / 'report.json'}")


def test_a_run_that_failed_leaves_the_cause_and_what_was_seen_of_who_holds_it(
    run: Started, warnings: pytest.LogCaptureFixture
) -> None:
    run.begin()
    with sleeper() as process, sleeper() as other:
        me = Peer(Identity.of(os.getpid()))
        run.look_at({0: me, 1: peer_of(other), 2: peer_of(process)})
        order = run.take_order(2)
        assert run.ending.side is not None
        run.ending.side.look()
        process.kill()
        until(lambda: has_ended(process), BOUND_S)
        run.ending.side.look()
        run.parts.server.fail(1, "ValueError: boom", 1)
        outcome = run.ending.finish()
    cause = "lost trainer rank 2: killed by SIGKILL"
    assert (outcome.exit_code, outcome.cause, outcome.rank) == (4, cause, 2)
    report = run.report
    assert (report["status"], report["exit_code"], report["cause"]) == ("failed", 4, cause)
    failure = report["failure"]
    assert (failure["rank"], failure["role"], failure["stacks"]) == (2, "trainer", None)
    samples = list(order.indices)
    assert failure["last_order"] == {"epoch": 1, "batch": 0, "samples": samples}
    assert failure["doing"] == "works on an order"
    assert 0 <= failure["since_s"] < BOUND_S
    assert failure["consequences"] == ["trainer rank 1: ValueError: boom"]
    seen = failure["process"]
    assert (seen["pid"], seen["ended"]) == (process.pid, "killed by SIGKILL")
    assert seen["last_seen_alive"]["state"] == "sleeping"
    assert not (run.path / "model.pt").exists()
    assert report["checkpoint"] is not None
    last = warnings.records[-1].getMessage()
    assert last == f"failed: {cause}; see {run.path / 'report.json'}"


def test_a_run_that_was_interrupted_says_so(
    run: Started, warnings: pytest.LogCaptureFixture
) -> None:
    run.begin()
    run.parts.server.stop(Outcome("interrupted", 130, "stopped by SIGINT"))
    run.ending.finish()
    assert (run.report["status"], run.report["exit_code"]) == ("interrupted", 130)
    assert run.report["failure"]["rank"] == 0
    assert run.report["failure"]["process"] == {}
    assert warnings.records[-1].getMessage().startswith("interrupted: stopped by SIGINT; see ")


def test_a_run_that_failed_before_it_had_begun_is_reported_too(run: Started) -> None:
    run.parts.server.stop(Outcome("failed", 1, "OSError: no room"))
    run.ending.finish()
    assert (run.report["cause"], run.report["checkpoint"]) == ("OSError: no room", None)


def test_the_end_is_told_once_by_whichever_thread_is_first(
    run: Started, warnings: pytest.LogCaptureFixture
) -> None:
    run.begin()
    run.parts.server.fail(1, "first", 1)
    outcomes = []
    run_threads(lambda _: outcomes.append(run.ending.finish()), range(3))
    assert {outcome.cause for outcome in outcomes} == {"trainer rank 1: first"}
    assert len(warnings.records) == 1


def test_numbers_that_are_not_finite_are_null(run: Started) -> None:
    run.begin()
    nan, inf = float("nan"), float("inf")
    run.parts.metrics.history.append(EpochRecord(1, 2, nan, inf, 0.5))
    run.parts.server.fail(1, "boom", 1)
    run.ending.finish()
    assert run.report["history"] == [
        {"epoch": 1, "updates": 2, "train_loss": None, "test_loss": None, "test_accuracy": 0.5}
    ]
    assert run.report["test_loss"] is None


def test_stacks_are_named_and_files_without_any_are_removed(run: Started) -> None:
    run.begin()
    for rank, content in ((0, ""), (1, "Thread 0x1:\n"), (2, "")):
        stacks_path(run.path, rank).write_text(content)
    run.parts.server.report(Finding(1, "it has made no progress", 5))
    run.ending.finish()
    assert run.report["failure"]["stacks"] == str(stacks_path(run.path, 1))
    assert [path.name for path in run.path.glob("stacks-*")] == ["stacks-rank-1.txt"]


def test_stacks_of_another_rank_are_not_those_of_the_cause(run: Started) -> None:
    run.begin()
    stacks_path(run.path, 1).write_text("Thread 0x1:\n")
    stacks_path(run.path, 2).write_text("")
    run.parts.server.report(Finding(2, "it has made no progress", 5))
    run.ending.finish()
    assert run.report["failure"]["stacks"] is None


def test_the_results_are_written_though_the_run_directory_was_removed(run: Started) -> None:
    run.begin()
    run.train()
    shutil.rmtree(run.path)
    run.ending.finish()
    assert run.report["status"] == "done"
    assert (run.path / "model.pt").exists()
    assert len(Checkpoints(run.path).paths()) == 1


def test_the_results_are_written_though_all_was_saved_when_the_run_directory_was_removed(
    run: Started,
) -> None:
    run.begin()
    run.train()
    run.ending.checkpointer.due()
    until(lambda: run.ending.checkpointer.newest is not None, BOUND_S)
    time.sleep(0.05)
    shutil.rmtree(run.path)
    run.ending.finish()
    assert run.report["status"] == "done"
    assert (run.path / "model.pt").exists()


def test_where_the_report_cannot_be_written_the_last_line_tells_all_the_same(
    run: Started, warnings: pytest.LogCaptureFixture
) -> None:
    run.begin()
    run.parts.server.fail(1, "boom", 1)
    (run.path / "report.json").unlink()
    (run.path / "report.json").mkdir()
    assert run.ending.finish().exit_code == 1
    last = warnings.records[-1].getMessage()
    assert "trainer rank 1: boom" in last
    assert "Is a directory" in last


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (RuntimeError("No space left on device\nat line 7"), "No space left on device"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_a_run_whose_weights_cannot_be_written_has_failed(
    run: Started, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def refuse(*args: object) -> None:
        raise error

    run.begin()
    run.train()
    monkeypatch.setattr("ps.job.ending.torch.save", refuse)
    outcome = run.ending.finish()
    assert outcome.exit_code == 1
    cause = f"trained to the end, but model.pt could not be written: {words}"
    assert run.report["cause"] == cause
    assert (run.report["status"], run.report["samples_trained"]) == ("failed", 16)
    assert list(run.path.glob("*model*")) == []


# --- reports of trainers, whose server could not write one


def test_what_a_trainer_has_reported_stays_the_cause_if_the_server_goes_on_after_all(
    run: Started, warnings: pytest.LogCaptureFixture
) -> None:
    """As one that was stopped does, when torchrun ends it."""
    run.begin()
    run.take_order(1)
    report_without_server(run.path, STOPPED, {"pid": 7})
    run.parts.server.report(Finding(1, "ended with exit code 5", 4, is_gone=True))
    run.parts.server.stop(Outcome("interrupted", 143, "stopped by SIGTERM"))
    outcome = run.ending.finish()
    assert outcome == Outcome("failed", 5, CAUSE)
    report = run.report
    assert (report["status"], report["exit_code"], report["cause"]) == ("failed", 5, CAUSE)
    assert (report["failure"]["rank"], report["failure"]["process"]) == (0, {"pid": 7})
    assert report["failure"]["consequences"] == [
        "lost trainer rank 1: ended with exit code 5",
        "stopped by SIGTERM",
    ]
    assert report["checkpoint"] is not None
    assert report["samples_trained"] == 0
    assert warnings.records[-1].getMessage().startswith(f"failed: {CAUSE}; see ")


def test_a_run_that_is_done_is_done_whatever_a_trainer_has_reported(run: Started) -> None:
    run.begin()
    run.train()
    report_without_server(run.path, STOPPED, {})
    assert run.ending.finish() == Outcome("done")
    assert (run.report["status"], run.report["failure"]) == ("done", None)


def test_the_failure_of_an_earlier_run_in_the_same_folder_is_not_that_of_this_one(
    run: Started,
) -> None:
    earlier = {"status": "failed", "pid": 1, "exit_code": 5, "cause": CAUSE}
    earlier["failure"] = {"rank": 0}
    (run.path / "report.json").write_text(json.dumps(earlier))
    run.parts.server.stop(Outcome("failed", 1, "OSError: no room"))
    assert run.ending.finish().cause == "OSError: no room"


@pytest.mark.slow
def test_a_server_whose_lock_is_never_given_back_tells_so_and_ends(
    run: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update that hangs, as the watching thread finds it."""
    codes: list[int] = []
    monkeypatch.setattr("ps.job.ending.leave", codes.append)
    run.begin()
    with sleeper() as process, sleeper() as other:
        me = Peer(Identity.of(os.getpid()))
        run.look_at({0: me, 1: peer_of(process), 2: peer_of(other)}, Limits(lock_timeout_s=0.7))
        assert run.ending.side is not None
        run.take_order(1)
        run.ending.side.look()
        with run.parts.store.lock:
            run.parts.server._does(1, Activity.SERVED, time.monotonic() - 400)
            run.ending.side.look()
            assert codes == []
            run.ending.side.look()
    assert codes == [5]
    assert run.report["cause"].startswith("server rank 0: a call of trainer rank 1 has made no p")
    assert run.report["failure"]["process"]["state"] in ("running", "sleeping")
    assert run.report["failure"]["stacks"] == str(stacks_path(run.path, 0))


def test_a_job_that_cannot_be_stopped_as_the_lock_is_held_ends_with_its_stacks(
    run: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    monkeypatch.setattr("ps.job.ending.leave", codes.append)
    run.begin()
    with run.parts.store.lock:
        start = time.monotonic()
        run.ending.stop(Outcome("interrupted", 130, "stopped by SIGINT"), bound_s=0.2)
        assert 0.2 <= time.monotonic() - start < 1.0
        assert codes == [130]
        cause = "server rank 0: stopped by SIGINT, and its lock was not given back for 0 s"
        assert (run.report["cause"], run.report["exit_code"]) == (cause, 130)
        stacks = Path(run.report["failure"]["stacks"]).read_text()
        assert "test_a_job_that_cannot_be_stopped_as_the_lock_is_held" in stacks
    until(lambda: run.parts.server.outcome is not None, BOUND_S)


def test_a_job_is_stopped_for_what_was_lost_before(run: Started) -> None:
    run.begin()
    loss = Finding(2, "killed by SIGKILL", 4, is_gone=True)
    run.ending.stop(Outcome("interrupted", 143, "stopped by SIGTERM"), loss=loss, abandoned={1})
    assert run.parts.server.ended.is_set()
    assert run.ending.finish().cause == "lost trainer rank 2: killed by SIGKILL"
    assert run.report["failure"]["consequences"] == ["stopped by SIGTERM"]


def test_a_folder_that_cannot_be_written_is_told_before_training(run: Started) -> None:
    run.path.rmdir()
    run.path.touch()
    with pytest.raises(LaunchError, match=r"run cannot be written: File exists$"):
        run.begin()
    run.path.unlink()


def test_where_the_end_is_not_saved_the_newest_checkpoint_is_named_if_there_is_one(
    tmp_path: Path, warnings: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it is of the run that this one goes on with, in the same folder."""

    def fail(*args: object) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    first = Run(tmp_path / "kept")
    first.update()
    first.end()
    [checkpoint] = checkpoints_in(first.folder)
    monkeypatch.setattr(Checkpoints, "write", fail)
    for run, newest in (
        (Run(tmp_path / "kept", resume=str(first.folder)), str(checkpoint)),
        (Run(tmp_path / "new"), None),
    ):
        warnings.clear()
        run.end()
        assert run.report["checkpoint"] == newest
        assert [message for message in warnings.messages if "None" in message] == []
        assert newest is None or any(newest in message for message in warnings.messages)


def test_a_disk_that_is_read_only_by_then_keeps_nothing_from_ending(
    run: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    run.begin()
    stacks_path(run.path, 1).touch()
    run.parts.server.stop(Outcome("failed", 1, "boom"))
    monkeypatch.setattr(Path, "unlink", refuse)
    assert run.ending.finish() == Outcome("failed", 1, "boom")


# --- the ranks of a run


def test_from_when_all_have_arrived_the_server_looks_at_them_and_knows_why_they_end(
    run: Started,
) -> None:
    watch = Watch(Signals())
    with sleeper() as process, sleeper() as other:
        me = Peer(Identity.of(os.getpid()))
        run.ending.watch_ranks({0: me, 1: peer_of(process), 2: peer_of(other)}, watch)
        process.send_signal(signal.SIGKILL)
        until(lambda: has_ended(process), BOUND_S)
        explained = run.parts.server.explain(1)
        assert explained == Finding(1, "killed by SIGKILL", 4, is_gone=True)
        watch.look_now()
    assert run.parts.outcome.cause == "lost trainer rank 1: killed by SIGKILL"


@pytest.mark.parametrize(
    ("finding", "line"),
    [
        (STOPPED, CAUSE),
        (Finding(0, "killed by SIGKILL", 4, is_gone=True), "lost server rank 0: killed by SIGKILL"),
        (
            Finding(3, "killed by SIGKILL", 4, is_gone=True),
            "lost trainer rank 3: killed by SIGKILL",
        ),
        (Finding(2, "it lacks memory", 6), "trainer rank 2: it lacks memory"),
    ],
)
def test_a_finding_is_told_in_one_line(finding: Finding, line: str) -> None:
    assert finding.cause == line
