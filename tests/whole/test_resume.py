"""Whole jobs that are stopped and go on: nothing is lost and nothing done twice."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from ps.job.rundir import is_done
from tests.helpers import COMPUTE, assert_equal
from tests.jobs import Done, Ranks, run_ranks
from tests.whole.expect import expect_done, expect_interrupted

pytestmark = pytest.mark.slow

EPOCHS = 30
SAMPLES = EPOCHS * 400
UPDATES = EPOCHS * 25
"""Of two trainers in step, with batches of 8."""
PLAIN = (
    *("--workload", "tests.plugins:plain", "--batch-size", "8", "--epochs", str(EPOCHS)),
    *("--threads", "1"),
)
IN_STEP = (*PLAIN, "--staleness", "0", "--momentum", "0.9", "--lr-schedule", "linear")

Run = Callable[[str], Done]
by_compute = [
    pytest.param(compute, marks=pytest.mark.xdist_group(f"resume-{compute}")) for compute in COMPUTE
]
share_server_jobs = pytest.mark.xdist_group("resume-server")
share_trainer_jobs = pytest.mark.xdist_group("resume-trainer")


def stopped(job: Ranks, after: str) -> Done:
    """By SIGTERM once a line holds `after`, as by a scheduler."""
    job.wait_for(after)
    job.send(signal.SIGTERM)
    done = job.wait(bound_s=10.0)
    expect_interrupted(done, 143)
    return done


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    kept: dict[str, Done] = {}

    def run(compute: str) -> Done:
        if compute not in kept:
            folder = tmp_path_factory.mktemp("whole")
            kept[compute] = run_ranks(folder, *IN_STEP, "--compute", compute)
            expect_done(kept[compute])
        return kept[compute]

    return run


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    kept: dict[str, Done] = {}

    def run(compute: str) -> Done:
        if compute not in kept:
            job = Ranks(tmp_path_factory.mktemp("stopped"), *IN_STEP, "--compute", compute)
            kept[compute] = stopped(job, f"epoch 5/{EPOCHS} evaluated")
        return kept[compute]

    return run


@pytest.mark.parametrize("compute", by_compute)
def test_a_stopped_job_in_step_ends_bit_for_bit_as_one_that_was_not(
    tmp_path: Path, uninterrupted: Run, interrupted: Run, compute: str
) -> None:
    """Without an option but --resume: the others are those of the job that was stopped."""
    first, whole = interrupted(compute), uninterrupted(compute)
    assert first.report["updates"] < UPDATES
    assert first.report["samples_trained"] == 16 * first.report["updates"]
    done = run_ranks(tmp_path, "--resume", str(first.run_dir))
    report = expect_done(done)
    updates = first.report["updates"]
    assert f"after {updates} of {UPDATES} updates" in done.text
    assert_equal(done.model, whole.model, within=0)
    assert report["resumed_from"] == first.report["checkpoint"]
    for key in ("updates", "samples_trained", "history", "test_accuracy", "compute", "max_lag"):
        assert report[key] == whole.report[key]
    assert (report["updates"], report["samples_trained"]) == (UPDATES, SAMPLES)


@share_server_jobs
def test_a_stopped_job_goes_on_with_another_number_of_trainers(
    tmp_path: Path, interrupted: Run
) -> None:
    first = interrupted("server")
    report = expect_done(run_ranks(tmp_path, "--resume", str(first.run_dir), world_size=4))
    assert report["samples_trained"] == SAMPLES
    assert set(report["trainers"]) == {"1", "2", "3"}
    assert sum(trainer["samples"] for trainer in report["trainers"].values()) == SAMPLES
    assert len(report["history"]) == EPOCHS
    updates = [0, *(record["updates"] for record in report["history"])]
    of_an_epoch = [after - before for before, after in pairwise(updates)]
    assert (of_an_epoch[0], of_an_epoch[-1]) == (25, 17)
    assert report["updates"] == updates[-1]


@share_trainer_jobs
def test_further_epochs_of_a_job_that_is_done_are_trained_alone(
    tmp_path: Path, uninterrupted: Run
) -> None:
    whole = uninterrupted("trainer")
    shutil.copytree(whole.run_dir, tmp_path / "run")
    job = Ranks(tmp_path, "--resume", str(tmp_path / "run"), "--epochs", str(EPOCHS + 10))
    job.wait_for("going on from")
    assert not is_done(job.run_dir)  # if it is killed now, --resume auto goes on from here
    done = job.wait()
    report = expect_done(done)
    assert f"after {UPDATES} of {UPDATES + 250} updates" in done.text
    assert (report["updates"], report["samples_trained"]) == (UPDATES + 250, SAMPLES + 4000)
    assert report["history"][:EPOCHS] == whole.report["history"]
    assert len(report["history"]) == EPOCHS + 10


@share_server_jobs
def test_a_job_that_is_done_and_is_started_again_is_done_at_once(
    tmp_path: Path, uninterrupted: Run
) -> None:
    whole = uninterrupted("server")
    shutil.copytree(whole.run_dir, tmp_path / "run")
    done = run_ranks(tmp_path, "--resume", "auto", "--run-dir", str(tmp_path / "run"))
    report = expect_done(done)
    for key in ("status", "updates", "samples_trained", "history", "test_accuracy"):
        assert report[key] == whole.report[key]
    assert all(value.equal(done.model[name]) for name, value in whole.model.items())


def test_one_process_is_stopped_and_goes_on_by_itself_in_its_folder(tmp_path: Path) -> None:
    args = (*PLAIN, "--resume", "auto")
    first = stopped(Ranks(tmp_path, *args, world_size=1), f"epoch 5/{EPOCHS} evaluated")
    version = first.report["updates"]
    assert first.report["samples_trained"] == 8 * version
    done = run_ranks(tmp_path, *args, world_size=1)
    report = expect_done(done)
    assert f"after {version} of {2 * UPDATES} updates" in done.text
    assert report["samples_trained"] == SAMPLES
    assert [record["epoch"] for record in report["history"]] == [*range(1, EPOCHS + 1)]
