"""Whole jobs that are stopped or lose a rank, and go on: nothing is lost and nothing done twice."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from ps.job.checkpoint import Checkpoints, read
from ps.job.rundir import checkpoints_in, has_checkpoints, is_done
from tests.helpers import COMPUTE, assert_equal, until
from tests.jobs import Done, Job
from tests.whole.test_job import assert_ended

pytestmark = pytest.mark.torchrun

EPOCHS = 50
SAMPLES = EPOCHS * 400
UPDATES = EPOCHS * 25
"""Of two trainers in step, with batches of 8."""
PLAIN = (
    *("--workload", "tests.plugins:plain", "--batch-size", "8", "--epochs", str(EPOCHS)),
    *("--threads", "1"),
)
IN_STEP = (*PLAIN, "--max-lag", "0", "--momentum", "0.9", "--lr-schedule", "linear")

Run = Callable[[str], Done]


def stopped(job: Job, after: str) -> Done:
    """By SIGTERM once a line holds `after`, as by a scheduler."""
    job.wait_for(after)
    ranks = job.ranks()
    job.send(signal.SIGTERM)
    assert_ended(ranks.values(), within_s=10.0)
    job.kill()
    done = job.wait()
    report = done.report
    assert (report["status"], report["exit_code"]) == ("interrupted", 143)
    return done


def newest_version(done: Done) -> int:
    version: int = read(Checkpoints(done.run_dir).paths()[-1])["store"]["version"]
    return version


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    kept: dict[str, Done] = {}

    def run(compute: str) -> Done:
        if compute not in kept:
            folder = tmp_path_factory.mktemp("whole")
            kept[compute] = Job(folder, *IN_STEP, "--compute", compute).wait()
            assert kept[compute].exit_code == 0, kept[compute].text
        return kept[compute]

    return run


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    kept: dict[str, Done] = {}

    def run(compute: str) -> Done:
        if compute not in kept:
            job = Job(tmp_path_factory.mktemp("stopped"), *IN_STEP, "--compute", compute)
            kept[compute] = stopped(job, f"epoch 5/{EPOCHS} evaluated")
        return kept[compute]

    return run


@pytest.mark.parametrize("compute", COMPUTE)
def test_a_job_that_is_stopped_saves_what_it_has_applied(interrupted: Run, compute: str) -> None:
    done = interrupted(compute)
    report = done.report
    assert report["checkpoint"] == str(Checkpoints(done.run_dir).paths()[-1])
    assert newest_version(done) == report["updates"] < UPDATES
    assert report["samples_trained"] == 16 * report["updates"]
    assert not (done.run_dir / "model.pt").exists()


@pytest.mark.parametrize("compute", COMPUTE)
def test_a_stopped_job_in_step_ends_bit_for_bit_as_one_that_was_not(
    tmp_path: Path, uninterrupted: Run, interrupted: Run, compute: str
) -> None:
    """Without an option but --resume: the others are those of the job that was stopped."""
    first, whole = interrupted(compute), uninterrupted(compute)
    done = Job(tmp_path, "--resume", str(first.run_dir)).wait()
    assert done.exit_code == 0, done.text
    updates = first.report["updates"]
    assert f"after {updates} of {UPDATES} updates" in done.text
    assert_equal(done.model, whole.model, within=0)
    assert done.report["resumed_from"] == first.report["checkpoint"]
    for key in ("updates", "samples_trained", "history", "test_accuracy", "compute", "max_lag"):
        assert done.report[key] == whole.report[key]
    assert (done.report["updates"], done.report["samples_trained"]) == (UPDATES, SAMPLES)


def test_a_stopped_job_goes_on_with_another_number_of_trainers(
    tmp_path: Path, interrupted: Run
) -> None:
    first = interrupted("server")
    done = Job(tmp_path, "--resume", str(first.run_dir), world_size=4).wait()
    assert done.exit_code == 0, done.text
    report = done.report
    assert report["samples_trained"] == SAMPLES
    assert set(report["trainers"]) == {"1", "2", "3"}
    assert sum(trainer["samples"] for trainer in report["trainers"].values()) == SAMPLES
    assert len(report["history"]) == EPOCHS
    updates = [0, *(record["updates"] for record in report["history"])]
    of_an_epoch = [after - before for before, after in pairwise(updates)]
    assert (of_an_epoch[0], of_an_epoch[-1]) == (25, 17)
    assert report["updates"] == updates[-1]


def test_further_epochs_of_a_job_that_is_done_are_trained_alone(
    tmp_path: Path, uninterrupted: Run
) -> None:
    whole = uninterrupted("trainer")
    shutil.copytree(whole.run_dir, tmp_path / "run", ignore=shutil.ignore_patterns("torchrun"))
    job = Job(tmp_path, "--resume", str(tmp_path / "run"), "--epochs", str(EPOCHS + 20))
    job.wait_for("going on from")
    assert not is_done(job.run_dir)  # if it is killed now, --resume auto goes on from here
    done = job.wait()
    assert done.exit_code == 0, done.text
    assert f"after {UPDATES} of {UPDATES + 500} updates" in done.text
    report = done.report
    assert (report["status"], report["updates"]) == ("done", UPDATES + 500)
    assert report["samples_trained"] == SAMPLES + 8000
    assert report["history"][:EPOCHS] == whole.report["history"]
    assert len(report["history"]) == EPOCHS + 20


def test_a_job_that_is_done_and_is_started_again_is_done_at_once(
    tmp_path: Path, uninterrupted: Run
) -> None:
    whole = uninterrupted("server")
    shutil.copytree(whole.run_dir, tmp_path / "run", ignore=shutil.ignore_patterns("torchrun"))
    again = ("--resume", "auto", "--run-dir", str(tmp_path / "run"))
    done = Job(tmp_path, *again).wait()
    assert done.exit_code == 0, done.text
    for key in ("status", "updates", "samples_trained", "history", "test_accuracy"):
        assert done.report[key] == whole.report[key]
    assert all(value.equal(done.model[name]) for name, value in whole.model.items())


def test_one_process_is_stopped_and_goes_on_by_itself_in_its_folder(tmp_path: Path) -> None:
    args = (*PLAIN, "--resume", "auto")
    first = stopped(Job(tmp_path, *args, world_size=1), f"epoch 5/{EPOCHS} evaluated")
    assert "there is no unfinished run with a checkpoint, starting from scratch" in first.text
    version = newest_version(first)
    assert first.report["samples_trained"] == 8 * version
    done = Job(tmp_path, *args, world_size=1).wait()
    assert done.exit_code == 0, done.text
    assert f"after {version} of {2 * UPDATES} updates" in done.text
    assert done.report["samples_trained"] == SAMPLES
    assert [record["epoch"] for record in done.report["history"]] == [*range(1, EPOCHS + 1)]


@pytest.mark.parametrize(("rank", "compute", "every"), [(2, "server", "0"), (0, "trainer", "50")])
def test_after_a_killed_rank_torchrun_starts_all_again_and_they_go_on(
    tmp_path: Path, rank: int, compute: str, every: str
) -> None:
    """What the server had applied is saved when a trainer is lost. When the server is, what came
    since the last checkpoint is done again."""
    args = (*PLAIN, "--compute", compute, "--checkpoint-every", every)
    job = Job(tmp_path, *args, restarts=2)
    job.wait_for(f"epoch 5/{EPOCHS} evaluated")
    if rank == 0:
        until(lambda: has_checkpoints(job.run_dir), 10.0)
    job.ranks()[rank].kill()
    done = job.wait()
    assert done.exit_code == 0, done.text
    assert "server rank 0 | going on from " in done.text
    report = done.report
    assert (report["status"], report["attempt"]) == ("done", 1)
    [earlier] = report["earlier_attempts"]
    lost = f"lost {'trainer' if rank else 'server'} rank {rank}: killed by SIGKILL"
    assert (earlier["attempt"], earlier["exit_code"], earlier["cause"]) == (0, 4, lost)
    assert (report["updates"], report["samples_trained"]) == (2 * UPDATES, SAMPLES)
    assert sum(trainer["samples"] for trainer in report["trainers"].values()) == SAMPLES
    assert [record["updates"] for record in report["history"]] == [*range(50, 2 * UPDATES + 1, 50)]
    resumed_from = Path(report["resumed_from"])
    assert resumed_from.parent == done.run_dir / "checkpoints"
    assert len(checkpoints_in(done.run_dir)) == 2
    assert int(resumed_from.name.split("-")[2]) >= (250 if rank else 50)
