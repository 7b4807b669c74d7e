"""Jobs under a real torchrun: how they start, what signals and restarts do, whom it blames.

What is said of the same jobs without it stands in the tests beside this one.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from ps.job.rundir import checkpoints_in
from tests.helpers import until
from tests.jobs import Done, Job
from tests.whole.conftest import StartJob
from tests.whole.expect import (
    expect_done,
    expect_ended,
    expect_failed,
    expect_interrupted,
    saved_version,
    wait_until_idle,
)
from tests.whole.test_faults import BEFORE, OVER_S, PLAIN, seconds_after

pytestmark = [pytest.mark.slow, pytest.mark.torchrun]


def stopped(job: Job, number: signal.Signals, within_s: float) -> Done:
    """By a signal to torchrun, as from a terminal or a scheduler."""
    ranks = list(job.ranks().values())
    job.send(number)
    expect_ended(ranks, within_s)
    job.kill()
    return job.wait()


def test_a_clean_run_prints_only_lines_with_role_and_rank(torchrun: StartJob) -> None:
    done = torchrun("--workload", "tests.plugins:plain", "--batch-size", "8").wait()
    report = expect_done(done)
    assert (report["updates"], report["samples_trained"], report["world_size"]) == (50, 400, 3)
    assert [line for _, line in done.output] == done.lines_of_ranks()
    assert all(line.startswith("server rank 0 | ") for line in done.lines_of_ranks())
    assert "warning" not in done.text


def test_without_an_option_digits_are_trained_where_mnist_cannot_be_had_until_ctrl_c(
    torchrun: StartJob, tmp_path: Path
) -> None:
    data_dir = tmp_path / "data"
    where = ("--data-dir", str(data_dir), "--data-mirror", "http://127.0.0.1:9/mnist")
    job = torchrun(*where)
    job.wait_for("updates 1/")
    done = stopped(job, signal.SIGINT, within_s=OVER_S)
    expect_interrupted(done, 130)
    assert done.report["workload"] == "digits"
    [line] = [line for line in done.lines_of_ranks() if "warning" in line]
    assert "NOT MNIST" in line and "train-images-idx3-ubyte" in line
    assert not data_dir.exists()
    assert "terminate called" not in done.text
    assert "launch.py" not in done.text  # no frame of a traceback of ours


def test_ctrl_c_during_the_start_ends_it_at_once_and_leaves_what_the_readme_names(
    torchrun: StartJob,
) -> None:
    """Wherever the ranks are then, which load torch at the time."""
    job = torchrun(*PLAIN)
    until(lambda: len(psutil.Process(job.process.pid).children()) == 3, 30.0)
    time.sleep(1.0)
    done = stopped(job, signal.SIGINT, within_s=5.0)
    assert "launch.py" not in done.text
    left = {path.name for path in done.run_dir.iterdir()}
    assert left <= {"torchrun", "report.json", "config.json", "checkpoints", "health.jsonl"}


def test_when_the_terminal_is_closed_the_server_saves(torchrun: StartJob) -> None:
    job = torchrun(*PLAIN, "--compute", "trainer")
    job.wait_for(BEFORE)
    expect_interrupted(stopped(job, signal.SIGHUP, within_s=OVER_S), 129)


def test_when_torchrun_is_killed_the_server_saves_and_every_rank_ends(torchrun: StartJob) -> None:
    job = torchrun(*PLAIN, "--compute", "trainer")
    job.wait_for(BEFORE)
    done = stopped(job, signal.SIGKILL, within_s=5.0)
    report = done.report
    assert (report["status"], report["exit_code"]) == ("failed", 9)
    assert saved_version(done) == report["updates"]


def test_a_trainer_that_raises_is_the_root_cause_with_its_traceback(torchrun: StartJob) -> None:
    done = torchrun("--workload", "tests.plugins:raising", *PLAIN[2:]).wait()
    expect_failed(done, rank=2, exit_code=1)
    assert "ValueError: boom in the loss" in done.report["cause"]
    assert done.root_cause == 2
    assert done.duration_s - done.time_of("boom in the loss") < OVER_S
    assert done.text.count("Traceback (most recent call last):\n    File") == 1


def test_a_trainer_that_is_killed_is_the_root_cause(torchrun: StartJob) -> None:
    done = torchrun(*PLAIN, "--inject", "kill:2@60").wait()
    expect_failed(done, rank=2, exit_code=4)
    assert seconds_after(done) < OVER_S
    assert done.root_cause == 2
    assert "exitcode  : -9" in done.text


def test_a_server_that_is_killed_is_reported_by_a_trainer(torchrun: StartJob) -> None:
    done = torchrun(*PLAIN, "--compute", "trainer", "--inject", "kill:0@60").wait()
    failure = expect_failed(done, rank=0, exit_code=4)
    assert seconds_after(done) < OVER_S
    assert done.root_cause == 0
    assert failure["process"]["last_seen_alive"]["cpu_s"] > 0
    assert done.lines_of_ranks()[-1].startswith("trainer rank ")


def test_a_bad_option_is_told_once_and_not_tried_again(torchrun: StartJob) -> None:
    began = time.monotonic()
    done = torchrun("--epochs", "0", restarts=2).wait()
    assert done.exit_code != 0
    [line] = done.lines_of_ranks()
    assert line.startswith("server rank 0 | error: --epochs ")
    assert "exitcode  : 2" in done.text
    assert time.monotonic() - began < 2 * OVER_S


def test_bad_input_that_is_found_late_is_one_line_of_rank_0_and_leaves_nothing(
    torchrun: StartJob,
) -> None:
    workload = ("--workload", "tests.plugins:with_sparse_gradients", "--compute", "trainer")
    done = torchrun(*workload).wait()
    assert done.exit_code != 0
    [line] = done.lines_of_ranks()
    assert line.startswith("server rank 0 | error: ") and "sparse gradients" in line
    assert done.root_cause == 0
    assert "exitcode  : 2" in done.text
    assert not done.run_dir.exists() or [path.name for path in done.run_dir.iterdir()] == [
        "torchrun"
    ]


def test_a_job_that_is_stopped_while_its_lock_is_held_says_so_and_shows_where(
    torchrun: StartJob,
) -> None:
    job = torchrun(*PLAIN, "--inject", "hang:0@60")
    job.wait_for(BEFORE)
    wait_until_idle(job.ranks()[0])
    job.send(signal.SIGTERM)
    done = job.wait()
    failure = expect_failed(done, rank=0, exit_code=143)
    assert "SIGTERM" in done.report["cause"]
    assert "lock" in done.report["cause"]
    assert "in _hang" in Path(failure["stacks"]).read_text()


EPOCHS, UPDATES, SAMPLES = 20, 1000, 8000
TWICE = ("--workload", "tests.plugins:plain", "--batch-size", "8", "--epochs", str(EPOCHS))


@pytest.mark.parametrize(("rank", "compute", "every"), [(2, "server", "0"), (0, "trainer", "50")])
def test_after_a_killed_rank_torchrun_starts_all_again_and_they_go_on(
    torchrun: StartJob, rank: int, compute: str, every: str
) -> None:
    """What the server had applied is saved when a trainer is lost. When the server is, what came
    since the last checkpoint is done again."""
    fault = ("--inject", f"kill:{rank}@600")
    args = (*TWICE, "--compute", compute, "--checkpoint-every", every, "--staleness", "10")
    job = torchrun(*args, *fault, restarts=2)
    done = job.wait()
    report = expect_done(done)
    assert "server rank 0 | going on from " in done.text
    assert report["attempt"] == 1
    [earlier] = report["earlier_attempts"]
    assert (earlier["attempt"], earlier["exit_code"]) == (0, 4)
    assert f"rank {rank}" in earlier["cause"]
    assert (report["updates"], report["samples_trained"]) == (UPDATES, SAMPLES)
    assert sum(trainer["samples"] for trainer in report["trainers"].values()) == SAMPLES
    assert [record["updates"] for record in report["history"]] == [*range(50, UPDATES + 1, 50)]
    resumed_from = Path(report["resumed_from"])
    assert resumed_from.parent == done.run_dir / "checkpoints"
    assert len(checkpoints_in(done.run_dir)) == 2
    assert int(resumed_from.name.split("-")[2]) >= (600 if rank else 50)
