"""What the server and the trainers find when they look: made-up processes, real clocks."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from ps.host import resources
from ps.host.findings import HEALTH_FILE
from ps.host.health import Activity, Finding, Mark
from ps.host.monitors import JobMonitor, Limits, ServerMonitor
from ps.host.processes import Peer, Reading
from ps.host.stacks import stacks_path
from tests.helpers import until

TIMEOUT_S = 5.0
MIB = 1 << 20
LIMITS = Limits(patience_s=0.2, stacks_timeout_s=0.2, report_timeout_s=TIMEOUT_S)
KILLED, TERMINATED = int(signal.SIGKILL), int(signal.SIGTERM)


class Process:
    """In place of a Peer."""

    def __init__(self, stacks: Path | None = None) -> None:
        self.reading = Reading(7, "sleeping", 1.0, MIB)
        self.asked: list[str] = []
        self._stacks = stacks

    def read(self) -> Reading:
        return self.reading

    def end(self, status: int) -> None:
        self.reading = Reading(7, "gone", status=status)

    def stop(self) -> None:
        self.reading = Reading(7, "stopped", 1.0, MIB)

    def show_stacks(self) -> None:
        self.asked.append("stacks")
        if self._stacks is not None:
            with self._stacks.open("a") as file:
                file.write("Thread 0x1:\n")

    def resume(self) -> None:
        self.asked.append("resume")


def working(for_s: float = 0.0) -> Mark:
    return Mark(Activity.WORKING, time.monotonic() - for_s)


def served(for_s: float = 0.0) -> Mark:
    return Mark(Activity.SERVED, time.monotonic() - for_s)


class Job:
    """A server with two trainers, and its monitor."""

    def __init__(self, run_dir: Path, limits: Limits = LIMITS, **options: Any) -> None:
        self.marks: dict[int, Mark] = {1: working(), 2: working()}
        self.findings: list[Finding] = []
        self.stuck: list[tuple[Finding, Mapping[str, Any]]] = []
        self.on_report: Callable[[], object] = lambda: None
        self.run_dir = run_dir
        self.processes = {0: Process(), 1: Process(stacks_path(run_dir, 1)), 2: Process()}
        self.monitor = JobMonitor(
            self,
            cast(Mapping[int, Peer], self.processes),
            0,
            run_dir,
            stall_timeout_s=options.get("stall_timeout_s", 60.0),
            memory_limit_bytes=options.get("memory_limit_bytes"),
            on_stuck=lambda finding, facts: self.stuck.append((finding, facts)),
            limits=limits,
        )

    def progress(self) -> Mapping[int, Mark]:
        return self.marks

    def report(self, finding: Finding) -> None:
        self.on_report()
        self.findings.append(finding)

    def look(self) -> list[int]:
        """The ranks that were reported in this look."""
        before = len(self.findings)
        self.monitor.look()
        return [finding.rank for finding in self.findings[before:]]

    def records(self) -> list[Any]:
        lines = (self.run_dir / HEALTH_FILE).read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


# --- the server's look


def test_a_killed_trainer_is_reported_once_and_nothing_else(job: Job) -> None:
    assert job.look() == []
    job.processes[2].end(KILLED)
    assert (job.look(), job.look()) == ([2], [])
    assert job.findings == [Finding(2, "killed by SIGKILL", 4, is_gone=True)]
    assert [process.asked for process in job.processes.values()] == [[], [], []]


def test_a_trainer_that_has_not_joined_or_has_left_is_not_looked_at(job: Job) -> None:
    del job.marks[2]
    for rank in (1, 2):
        job.processes[rank].end(KILLED)
    assert job.look() == [1]
    del job.marks[1]
    assert job.look() == []


def test_a_trainer_that_was_asked_to_end_is_reported_after_a_while_and_holds_nobody_up(
    job: Job,
) -> None:
    """Unless this rank is asked meanwhile."""
    job.processes[1].end(TERMINATED)
    start = time.monotonic()
    assert job.look() == []
    job.processes[2].end(KILLED)
    assert job.look() == [2]
    assert time.monotonic() - start < LIMITS.patience_s
    time.sleep(LIMITS.patience_s)
    assert (job.look(), job.look()) == ([1], [])


def test_a_trainer_without_progress_has_shown_its_stacks_when_it_is_reported(job: Job) -> None:
    seen: list[str] = []
    job.on_report = lambda: seen.append(stacks_path(job.run_dir, 1).read_text())
    job.marks[1] = working(for_s=70)
    start = time.monotonic()
    assert job.look() == [1]
    assert time.monotonic() - start < LIMITS.stacks_timeout_s
    assert seen == ["Thread 0x1:\n"]
    job.look()
    assert job.processes[1].asked == ["stacks"]


def test_a_trainer_that_shows_no_stacks_holds_nobody_up(tmp_path: Path) -> None:
    job = Job(tmp_path / ("x" * 300))  # nor can they be looked for
    job.marks[2] = working(for_s=70)
    start = time.monotonic()
    assert job.look() == [2]
    assert LIMITS.stacks_timeout_s <= time.monotonic() - start < 1.0


def test_a_call_that_is_not_answered_shows_the_stacks_of_the_server(job: Job) -> None:
    job.marks[1] = served(for_s=70)
    assert job.look() == [0]
    stacks = stacks_path(job.run_dir, 0).read_text()
    assert "test_a_call_that_is_not_answered_shows_the_stacks_of_the_server" in stacks
    assert job.processes[1].asked == []


def test_a_server_that_takes_no_findings_stops_nobody_from_looking(tmp_path: Path) -> None:
    """Its lock is held. Each look tries again, and never two at once; in the end this one ends."""
    job = Job(tmp_path, Limits(report_timeout_s=0.02, lock_timeout_s=0.2))
    lock, tries = threading.Lock(), list[float]()

    def wait() -> None:
        tries.append(time.monotonic())
        with lock:
            pass

    job.on_report = wait
    job.processes[1].end(KILLED)
    with lock:
        job.look()
        job.processes[2].end(KILLED)
        job.look()
        assert (len(tries), job.findings, job.stuck) == (1, [], [])
        time.sleep(0.2)
        job.look()
        job.marks = {1: working(), 2: served(for_s=70)}
        job.look()
    (held, facts), (call, _) = job.stuck
    assert (held.rank, held.exit_code, facts["pid"]) == (0, 5, 7)
    assert (call.rank, call.exit_code, "rank 2" in call.text) == (0, 5, True)
    until(lambda: len(job.findings) == 1, TIMEOUT_S)
    time.sleep(0.02)
    job.look()
    until(lambda: [finding.rank for finding in job.findings] == [1, 2, 0], TIMEOUT_S)
    time.sleep(0.02)
    assert (job.look(), len(job.stuck)) == ([], 2)


def test_a_stopped_trainer_is_reported_after_the_timeout_and_then_goes_on(tmp_path: Path) -> None:
    """So that it takes the signal of torchrun, and shows where it was."""
    job = Job(tmp_path, stall_timeout_s=0.1)
    job.marks[1] = Mark(Activity.WAITING, 0.0)
    del job.marks[2]
    job.processes[1].stop()
    assert (job.look(), job.processes[1].asked) == ([], [])
    while not job.findings:
        time.sleep(0.04)
        job.look()
    assert (job.findings[0].rank, job.findings[0].is_halted) == (1, True)
    assert job.processes[1].asked == ["stacks", "resume"]


def test_a_server_that_could_not_run_itself_is_the_cause(tmp_path: Path) -> None:
    """The others have left for that, as the first one tells."""
    job = Job(tmp_path, stall_timeout_s=0.1)
    job.marks = {1: Mark(Activity.WAITING, 0.0)}
    job.look()
    assert job.monitor.lost_before() is None
    job.processes[1].end(KILLED)
    time.sleep(0.1)
    for cause in (job.monitor.explain(1), job.monitor.lost_before()):
        assert cause is not None and (cause.rank, cause.exit_code) == (0, 5)
    assert job.look() == [0, 1]


@pytest.mark.parametrize(
    ("is_known", "limit_mib", "exit_codes"), [(True, 1, [6]), (True, 5.4, [0]), (False, 1, [])]
)
def test_memory_is_judged_where_that_of_the_host_is_known(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_known: bool,
    limit_mib: float,
    exit_codes: list[int],
) -> None:
    def available() -> int:
        if not is_known:
            raise FileNotFoundError("/proc/meminfo")
        return 700 * MIB

    monkeypatch.setattr(resources, "available_memory_bytes", available)
    monkeypatch.setattr(resources, "shared_memory_bytes", lambda: 2 * MIB)
    limit = round(limit_mib * MIB)
    job = Job(tmp_path, memory_limit_bytes=limit)
    job.look()
    assert [finding.exit_code for finding in job.findings] == exit_codes
    expected = {"used_bytes": 5 * MIB, "free_bytes": limit - 5 * MIB}
    assert job.records()[0]["memory"] == (expected if is_known else None)


def test_what_was_seen_is_recorded_now_and_then_and_with_every_finding(tmp_path: Path) -> None:
    job = Job(tmp_path, Limits(record_interval_s=0.2))
    job.look()
    job.look()
    [first] = job.records()
    time.sleep(0.2)
    job.look()
    assert len(job.records()) == 2
    job.processes[1].end(KILLED)
    job.look()
    assert len(job.records()) == 3
    last = job.records()[-1]
    assert first.keys() == {"time", "ranks", "memory", "findings"}
    assert first["ranks"]["1"] == Process().reading.facts()
    assert first["memory"].keys() == {"used_bytes", "free_bytes"}
    assert (first["findings"], last["findings"]) == ([], ["rank 1: killed by SIGKILL"])
    assert last["ranks"]["1"]["ended"] == "killed by SIGKILL"


def test_where_nothing_can_be_written_it_is_looked_all_the_same(tmp_path: Path) -> None:
    job = Job(tmp_path / "removed")
    job.processes[2].end(KILLED)
    job.marks[1] = served(for_s=70)
    assert job.look() == [2, 0]


def test_what_was_seen_last_of_a_rank_is_both_alive_and_now(job: Job) -> None:
    assert job.monitor.facts(1)["last_seen_alive"] is None
    job.look()
    job.processes[1].end(KILLED)
    job.look()
    facts = job.monitor.facts(1)
    assert facts["ended"] == "killed by SIGKILL"
    assert facts["last_seen_alive"] == Process().reading.facts()
    assert job.monitor.facts(9) == {"last_seen_alive": None}


# --- a connection that has closed, and a signal


def test_why_a_connection_closed_is_how_its_trainer_ended(job: Job) -> None:
    job.processes[1].end(KILLED)
    start = time.monotonic()
    job.monitor.disconnected(1, "the connection has closed")
    assert time.monotonic() - start < LIMITS.patience_s
    assert job.findings == [Finding(1, "killed by SIGKILL", 4, is_gone=True)]


def test_a_trainer_may_end_a_moment_after_its_connection(job: Job) -> None:
    threading.Timer(0.05, job.processes[1].end, (3 << 8,)).start()
    job.monitor.disconnected(1, "the connection has closed")
    assert job.findings == [Finding(1, "ended with exit code 3", 4, is_gone=True)]


@pytest.mark.parametrize("was_asked", [False, True])
def test_one_that_lives_on_and_one_that_was_asked_to_end_are_waited_for_a_moment(
    job: Job, was_asked: bool
) -> None:
    if was_asked:
        job.processes[1].end(TERMINATED)
    start = time.monotonic()
    job.monitor.disconnected(1, "the connection has closed")
    assert LIMITS.patience_s <= time.monotonic() - start < 1.0
    text = "killed by SIGTERM" if was_asked else "the connection has closed"
    assert job.findings == [Finding(1, text, 4, is_gone=True)]


def test_where_another_rank_is_the_reason_the_loss_of_the_trainer_follows(tmp_path: Path) -> None:
    job = Job(tmp_path, stall_timeout_s=0.05)
    job.look()
    time.sleep(0.05)
    job.monitor.disconnected(1, "the connection has closed")
    assert [(f.rank, f.exit_code) for f in job.findings] == [(0, 5), (1, 4)]
    assert job.findings[1].text == "the connection has closed"


def test_the_connection_of_a_trainer_that_has_left_may_close(job: Job) -> None:
    del job.marks[1]
    job.processes[1].end(KILLED)
    job.monitor.disconnected(1, "the connection has closed")
    assert job.findings == []


def test_a_rank_that_was_lost_before_this_one_was_asked_to_end_is_the_cause(job: Job) -> None:
    job.processes[1].end(TERMINATED)
    assert job.monitor.lost_before() is None
    job.processes[2].end(KILLED)
    loss = Finding(2, "killed by SIGKILL", 4, is_gone=True)
    assert job.monitor.lost_before() == loss
    del job.marks[2]
    assert job.monitor.lost_before() is None


# --- a trainer's look


class Trainer:
    """Rank 2, and its monitor."""

    def __init__(self, **options: Any) -> None:
        self.findings: list[Finding] = []
        self.facts: list[Mapping[str, Any]] = []
        self.server, self.me = Process(), Process()
        self.monitor = ServerMonitor(
            cast(Peer, self.server),
            cast(Peer, self.me),
            2,
            self.report,
            stall_timeout_s=options.get("stall_timeout_s", 60.0),
            memory_limit_bytes=options.get("memory_limit_bytes"),
            patience_s=0.1,
        )

    def report(self, finding: Finding, facts: Mapping[str, Any]) -> None:
        self.findings.append(finding)
        self.facts.append(facts)

    def look(self, times: int = 1) -> list[tuple[int, int]]:
        for _ in range(times):
            self.monitor.look()
            time.sleep(0.02)
        return [(finding.rank, finding.exit_code) for finding in self.findings]


@pytest.mark.parametrize("looks_before", [0, 1])
def test_a_trainer_finds_its_server_gone_and_tells_what_it_saw_of_it(looks_before: int) -> None:
    trainer = Trainer()
    assert trainer.look(looks_before) == []
    trainer.server.end(KILLED)
    assert trainer.look() == [(0, 4)]
    assert trainer.facts[0]["ended"] == "killed by SIGKILL"
    seen = Process().reading.facts() if looks_before else None
    assert trainer.facts[0]["last_seen_alive"] == seen


def test_a_server_that_was_asked_to_end_is_not_found_gone_at_once() -> None:
    """As the trainer is asked too, in a moment."""
    trainer = Trainer()
    trainer.server.end(TERMINATED)
    assert trainer.look(2) == []
    time.sleep(0.1)
    assert trainer.look() == [(0, 4)]


def test_a_trainer_finds_its_server_stopped_and_lets_it_go_on() -> None:
    """Once that is reported; then the server can take the signal of torchrun."""
    trainer = Trainer(stall_timeout_s=0.1)
    trainer.server.stop()
    trainer.monitor.expect_end()  # it may end, but not stand still
    assert (trainer.look(), trainer.server.asked) == ([], [])
    time.sleep(0.1)
    assert trainer.look() == [(0, 5)]
    assert (trainer.findings[0].is_halted, trainer.facts[0]["state"]) == (True, "stopped")
    assert trainer.server.asked == ["resume"]


def test_a_server_may_end_when_it_is_expected_to() -> None:
    trainer = Trainer()
    trainer.monitor.expect_end()
    trainer.server.end(KILLED)
    assert trainer.look() == []


def test_a_trainer_counts_its_own_memory_alone_and_reports_the_worst_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A warning is left to the server."""
    monkeypatch.setattr(resources, "shared_memory_bytes", lambda: 0)
    trainer = Trainer(memory_limit_bytes=100 * MIB)
    trainer.server.reading = Reading(1, "running", 1.0, 5000 * MIB)
    trainer.me.reading = Reading(2, "running", 1.0, 92 * MIB)
    assert trainer.look() == []
    trainer.me.reading = Reading(2, "running", 1.0, 99 * MIB)
    assert trainer.look() == [(2, 6)]
    assert "99 MiB" in trainer.findings[0].text
    trainer.server.end(KILLED)
    assert trainer.look() == [(2, 6), (0, 4)]
