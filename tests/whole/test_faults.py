"""Faults in whole jobs under a real torchrun: what is told, how soon it is over, what is left."""

from __future__ import annotations

import json
import re
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.jobs import Done, Job
from benchmarks.leftovers import MARK, Leftovers
from ps.host.findings import HEALTH_FILE
from ps.host.monitors import LOCK_TIMEOUT_S
from ps.host.stacks import stacks_path
from ps.host.watch import GIL_GRACE_S
from ps.job.checkpoint import Checkpoints, read
from tests.helpers import COMPUTE
from tests.whole.test_job import assert_ended

pytestmark = pytest.mark.torchrun

ENDLESS = ("--epochs", "1000", "--batch-size", "8", "--staleness", "10")
"""No trainer runs through an epoch alone."""
PLAIN = ("--workload", "tests.plugins:plain", *ENDLESS)
BEFORE = "epoch 1/1000 evaluated"
"""The line before a fault that is due at update 60."""
OVER_S = 10.0
STALL_S = 3.0
STALL = ("--stall-timeout", str(STALL_S))

StartJob = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartJob]:
    """Starts a job that leaves nothing behind but its run directory."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    before = Leftovers(mark, temporary)
    jobs: list[Job] = []

    def start(*args: str, **options: Any) -> Job:
        jobs.append(Job(tmp_path, *args, **options))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()
    assert before.found() == []


def assert_told(done: Done, rank: int, exit_code: int, cause: str) -> dict[str, Any]:
    """The job has failed, and the report and the last line of a rank say why; gives `failure`."""
    assert done.exit_code != 0
    report = done.report
    told = (report["status"], report["exit_code"], report["failure"]["rank"])
    assert told == ("failed", exit_code, rank), report
    assert report["failure"]["role"] == ("trainer" if rank else "server")
    assert report["cause"].startswith(cause)
    line = f"| error: failed: {report['cause']}; see {done.run_dir / 'report.json'}"
    assert any(told.endswith(line) for told in done.lines_of_ranks()[-3:]), done.text
    assert not (done.run_dir / "model.pt").exists()
    failure: dict[str, Any] = report["failure"]
    return failure


def assert_root_cause(done: Done, rank: int) -> None:
    """In torchrun's own report."""
    assert f"rank      : {rank}" in done.text[done.text.index("Root Cause") :]


def seconds_after(done: Done, line: str = BEFORE) -> float:
    return done.duration_s - done.time_of(line)


def saved_version(done: Done) -> int:
    """Of the newest checkpoint, which the report names."""
    newest = Checkpoints(done.run_dir).paths()[-1]
    assert done.report["checkpoint"] == str(newest)
    version: int = read(newest)["store"]["version"]
    return version


@pytest.mark.parametrize(
    ("compute", "link", "rank"), [("server", "local", 2), ("trainer", "rpc", 1)]
)
def test_a_trainer_that_is_killed_is_named_with_its_order_and_all_is_saved(
    start: StartJob, compute: str, link: str, rank: int
) -> None:
    where = ("--compute", compute, "--link", link)
    done = start(*PLAIN, *where, "--inject", f"kill:{rank}@60").wait()
    failure = assert_told(done, rank, 4, f"lost trainer rank {rank}: killed by SIGKILL")
    assert seconds_after(done) < OVER_S
    assert_root_cause(done, rank)
    assert "exitcode  : -9" in done.text
    assert len(failure["last_order"]["samples"]) == 8
    assert failure["doing"] == "works on an order"
    assert failure["process"]["ended"] == "killed by SIGKILL"
    assert saved_version(done) == done.report["updates"] >= 60


def test_a_server_that_is_killed_is_reported_by_a_trainer(start: StartJob) -> None:
    done = start(*PLAIN, "--compute", "trainer", "--inject", "kill:0@60").wait()
    failure = assert_told(done, 0, 4, "lost server rank 0: killed by SIGKILL")
    assert seconds_after(done) < OVER_S
    assert_root_cause(done, 0)
    assert failure["process"]["last_seen_alive"]["cpu_s"] > 0
    assert done.lines_of_ranks()[-1].startswith("trainer rank ")


def test_a_server_that_raises_is_the_cause_and_its_trainers_are_not(start: StartJob) -> None:
    done = start(*PLAIN, "--inject", "raise:0@60").wait()
    cause = "server rank 0: RuntimeError: a fault was injected: raise"
    failure = assert_told(done, 0, 1, cause)
    assert seconds_after(done) < OVER_S
    assert all(text.startswith("trainer rank ") for text in failure["consequences"])
    assert saved_version(done) == done.report["updates"] >= 60


def test_a_trainer_that_ends_as_if_all_were_well_ends_the_job(start: StartJob) -> None:
    done = start(*PLAIN, "--inject", "exit0:2@60").wait()
    assert_told(done, 2, 4, "lost trainer rank 2: ended with exit code 0")
    assert seconds_after(done) < OVER_S
    assert_root_cause(done, 0)  # torchrun sees nothing wrong with the other


def test_a_trainer_that_is_stopped_is_found_after_the_timeout(start: StartJob) -> None:
    done = start(*PLAIN, *STALL, "--compute", "trainer", "--inject", "stop:2@60").wait()
    failure = assert_told(done, 2, 5, "trainer rank 2: it has been stopped for 3 s")
    assert STALL_S < seconds_after(done) < STALL_S + OVER_S
    assert failure["doing"] == "works on an order"
    assert "in run_trainer" in stacks_path(done.run_dir, 2).read_text()
    assert saved_version(done) >= 60


def test_a_server_that_is_stopped_is_found_by_a_trainer_and_saves_when_it_goes_on(
    start: StartJob,
) -> None:
    done = start(*PLAIN, *STALL, "--inject", "stop:0@60").wait()
    failure = assert_told(done, 0, 5, "server rank 0: it has been stopped for 3 s")
    assert STALL_S < seconds_after(done) < STALL_S + OVER_S
    assert failure["process"]["state"] == "stopped"
    assert failure["consequences"]
    assert saved_version(done) == done.report["updates"] >= 60


def test_a_trainer_that_holds_the_gil_is_found_and_shows_where(start: StartJob) -> None:
    done = start(*PLAIN, *STALL, "--inject", "deadlock:2@60").wait()
    cause = "trainer rank 2: it has made no progress for 3 s (--stall-timeout); it used 0.0"
    failure = assert_told(done, 2, 5, cause)
    assert done.report["cause"].endswith("so it waits for something: a deadlock?")
    assert STALL_S < seconds_after(done) < STALL_S + OVER_S
    assert failure["stacks"] == str(stacks_path(done.run_dir, 2))
    assert "in hold_gil" in stacks_path(done.run_dir, 2).read_text()
    assert saved_version(done) >= 60
    health = [json.loads(line) for line in (done.run_dir / HEALTH_FILE).read_text().splitlines()]
    findings = [finding for record in health for finding in record["findings"]]
    assert findings[0] == done.report["cause"].removeprefix("trainer ")


def test_a_server_that_holds_the_gil_ends_by_itself_and_shows_where(start: StartJob) -> None:
    done = start(*PLAIN, *STALL, "--inject", "deadlock:0@60").wait()
    failure = assert_told(done, 0, 4, "lost server rank 0: ended with exit code 1")
    assert STALL_S + GIL_GRACE_S - 1 < seconds_after(done) < STALL_S + GIL_GRACE_S + OVER_S
    assert_root_cause(done, 0)
    assert failure["stacks"] == str(stacks_path(done.run_dir, 0))
    assert "in hold_gil" in stacks_path(done.run_dir, 0).read_text()


def test_a_rank_that_leaks_is_named_before_the_memory_is_gone(start: StartJob) -> None:
    done = start(*PLAIN, "--memory-limit", "3GiB", "--inject", "leak:2@600").wait()
    assert_told(done, 2, 6, "trainer rank 2: memory is short")
    assert "of 3072 MiB" in done.report["cause"]
    assert seconds_after(done, "a fault will be injected") < 5 + OVER_S
    assert saved_version(done) == done.report["updates"]


@pytest.mark.parametrize("compute", COMPUTE)
def test_a_loss_that_is_not_finite_ends_the_job_and_its_samples_are_told(
    start: StartJob, compute: str
) -> None:
    done = start(*PLAIN, "--inject", "nan:1@60", "--compute", compute).wait()
    failure = assert_told(done, 1, 8, "trainer rank 1, epoch 2, batch ")
    assert done.report["cause"].endswith(": the loss is nan")
    assert seconds_after(done) < OVER_S
    assert len(failure["last_order"]["samples"]) == 8
    assert saved_version(done) == done.report["updates"] >= 60


def test_a_loss_that_is_not_finite_can_be_left_out_and_the_job_is_done(start: StartJob) -> None:
    args = ("--workload", "tests.plugins:plain", "--epochs", "2", "--batch-size", "8")
    skip = ("--staleness", "10", "--on-nonfinite", "skip", "--inject", "nan:1@60")
    done = start(*args, *skip).wait()
    assert done.exit_code == 0, done.text
    report = done.report
    assert (report["status"], report["updates"], report["samples_trained"]) == ("done", 99, 792)
    assert (report["orders_skipped"], report["samples_skipped"]) == (1, 8)
    [skipped] = report["skipped"]
    assert (skipped["epoch"], skipped["trainer"], skipped["cause"]) == (2, 1, "the loss is nan")
    assert done.model.keys()


def test_when_torchrun_is_killed_the_server_saves_and_every_rank_ends(start: StartJob) -> None:
    job = start(*PLAIN, "--compute", "trainer")
    job.wait_for(BEFORE)
    ranks = job.ranks()
    job.send(signal.SIGKILL)
    assert_ended(ranks.values(), within_s=5.0)
    done = job.wait()
    assert_told(done, 0, 9, "torchrun, the parent of all ranks, is gone")
    assert saved_version(done) == done.report["updates"]


def test_when_the_terminal_is_closed_the_server_saves(start: StartJob) -> None:
    job = start(*PLAIN)
    job.wait_for(BEFORE)
    ranks = job.ranks()
    job.send(signal.SIGHUP)
    assert_ended(ranks.values(), within_s=OVER_S)
    job.kill()
    done = job.wait()
    assert (done.report["status"], done.report["exit_code"]) == ("interrupted", 129)
    assert saved_version(done) == done.report["updates"]


def test_a_bad_option_is_told_once_and_not_tried_again(start: StartJob) -> None:
    began = time.monotonic()
    done = start("--epochs", "0", restarts=2).wait()
    assert done.exit_code != 0
    assert done.lines_of_ranks() == ["server rank 0 | error: --epochs must be 1 or more, got 0"]
    assert "exitcode  : 2" in done.text
    assert time.monotonic() - began < 2 * OVER_S


def test_a_server_that_ends_as_if_all_were_well_ends_the_job(start: StartJob) -> None:
    done = start(*PLAIN, "--inject", "exit0:0@60").wait()
    assert_told(done, 0, 4, "lost server rank 0: ended with exit code 0")
    assert seconds_after(done) < OVER_S / 2


def test_an_update_that_hangs_with_the_servers_lock_is_found_and_shows_where(
    start: StartJob,
) -> None:
    done = start(*PLAIN, *STALL, "--inject", "hang:0@60").wait()
    failure = assert_told(done, 0, 5, "server rank 0: a call of trainer rank ")
    assert re.search(r"no progress for 1[345] s \(--stall-timeout\)", done.report["cause"])
    bound_s = STALL_S + LOCK_TIMEOUT_S
    assert bound_s < seconds_after(done) < bound_s + OVER_S / 2
    assert "in _hang" in Path(failure["stacks"]).read_text()
    assert_root_cause(done, 0)


def test_one_process_in_a_step_that_does_not_end_saves_when_it_is_stopped(
    start: StartJob,
) -> None:
    job = start(*PLAIN, "--inject", "hang:0@60", world_size=1)
    job.wait_for(BEFORE)
    time.sleep(0.5)
    job.send(signal.SIGTERM)
    done = job.wait()
    assert (done.report["status"], done.report["exit_code"]) == ("interrupted", 143)
    assert saved_version(done) == done.report["updates"] == 60


def test_a_job_that_is_stopped_while_its_lock_is_held_says_so_and_shows_where(
    start: StartJob,
) -> None:
    job = start(*PLAIN, "--inject", "hang:0@60")
    job.wait_for(BEFORE)
    time.sleep(0.5)
    job.send(signal.SIGTERM)
    done = job.wait()
    cause = "server rank 0: stopped by SIGTERM, which torchrun sends when it is stopped or another"
    failure = assert_told(done, 0, 143, cause)
    assert "its lock was not given back for 10 s" in done.report["cause"]
    assert "in _hang" in Path(failure["stacks"]).read_text()
