"""Faults in whole jobs: what is reported, how soon it is over, what is left."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from ps.host.findings import HEALTH_FILE
from ps.host.monitors import LOCK_TIMEOUT_S
from ps.host.stacks import stacks_path
from ps.host.watch import GIL_GRACE_S
from tests.helpers import COMPUTE
from tests.jobs import Done
from tests.whole.conftest import StartRanks
from tests.whole.expect import (
    SIGKILLED,
    expect_done,
    expect_failed,
    expect_interrupted,
    wait_until_idle,
)
from tests.whole.expect import saved_version as saved

pytestmark = pytest.mark.slow

ENDLESS = ("--epochs", "1000", "--batch-size", "8", "--staleness", "10")
"""No trainer runs through an epoch alone."""
PLAIN = ("--workload", "tests.plugins:plain", *ENDLESS)
BEFORE = "epoch 1/1000 evaluated"
"""The line before a fault that is due at update 60."""
OVER_S = 10.0
STALL_S = 3.0
STALL = ("--stall-timeout", str(STALL_S))


def seconds_after(done: Done, line: str = BEFORE) -> float:
    return done.duration_s - done.time_of(line)


def test_a_trainer_that_is_killed_is_named_with_its_order_and_all_is_saved(
    start: StartRanks,
) -> None:
    where = ("--compute", "trainer", "--link", "rpc")
    done = start(*PLAIN, *where, "--inject", "kill:1@60").wait()
    failure = expect_failed(done, rank=1, exit_code=4)
    assert (done.root_cause, done.codes[1], done.codes[0]) == (1, SIGKILLED, 4)
    assert seconds_after(done) < OVER_S
    assert len(failure["last_order"]["samples"]) == 8
    assert "SIGKILL" in failure["process"]["ended"]
    assert saved(done) == done.report["updates"] >= 60


def test_a_server_that_raises_is_the_cause_and_its_trainers_are_not(start: StartRanks) -> None:
    done = start(*PLAIN, "--inject", "raise:0@60").wait()
    failure = expect_failed(done, rank=0, exit_code=1)
    assert "RuntimeError" in done.report["cause"]
    assert done.codes[0] == 1
    assert seconds_after(done) < OVER_S
    assert all("trainer rank " in text for text in failure["consequences"])
    assert saved(done) == done.report["updates"] >= 60


@pytest.mark.parametrize("compute", COMPUTE)
def test_a_trainer_that_raises_ends_the_job_and_is_the_cause(
    start: StartRanks, compute: str
) -> None:
    done = start(*PLAIN, "--compute", compute, "--inject", "raise:2@60").wait()
    expect_failed(done, rank=2, exit_code=1)
    assert "RuntimeError" in done.report["cause"]
    assert (done.root_cause, done.codes[2]) == (2, 1)
    assert seconds_after(done) < OVER_S
    assert done.text.count("Traceback (most recent call last):") == 1


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_ends_as_if_all_were_well_ends_the_job(start: StartRanks, rank: int) -> None:
    done = start(*PLAIN, "--inject", f"exit0:{rank}@60").wait()
    expect_failed(done, rank=rank, exit_code=4)
    assert done.codes[rank] == 0
    assert 4 in done.codes.values()
    assert seconds_after(done) < (OVER_S if rank else OVER_S / 2)


def test_a_trainer_that_is_stopped_is_found_after_the_timeout(start: StartRanks) -> None:
    done = start(*PLAIN, *STALL, "--compute", "trainer", "--inject", "stop:2@60").wait()
    expect_failed(done, rank=2, exit_code=5)
    assert STALL_S < seconds_after(done) < STALL_S + OVER_S
    assert "in run_trainer" in stacks_path(done.run_dir, 2).read_text()
    assert saved(done) >= 60


def test_a_server_that_is_stopped_is_found_by_a_trainer_and_saves_when_it_goes_on(
    start: StartRanks,
) -> None:
    done = start(*PLAIN, *STALL, "--inject", "stop:0@60").wait()
    failure = expect_failed(done, rank=0, exit_code=5)
    assert STALL_S < seconds_after(done) < STALL_S + OVER_S
    assert failure["process"]["state"] == "stopped"
    assert failure["consequences"]
    assert saved(done) == done.report["updates"] >= 60


def test_a_trainer_that_holds_the_gil_is_found_and_shows_where(start: StartRanks) -> None:
    done = start(*PLAIN, *STALL, "--inject", "deadlock:2@60").wait()
    failure = expect_failed(done, rank=2, exit_code=5)
    assert "--stall-timeout" in done.report["cause"]
    assert "deadlock" in done.report["cause"]
    assert STALL_S < seconds_after(done) < STALL_S + OVER_S
    assert failure["stacks"] == str(stacks_path(done.run_dir, 2))
    assert "in hold_gil" in stacks_path(done.run_dir, 2).read_text()
    assert saved(done) >= 60
    health = [json.loads(line) for line in (done.run_dir / HEALTH_FILE).read_text().splitlines()]
    findings = [finding for record in health for finding in record["findings"]]
    assert findings[0] in done.report["cause"]


def test_a_server_that_holds_the_gil_ends_by_itself_and_shows_where(start: StartRanks) -> None:
    done = start(*PLAIN, *STALL, "--inject", "deadlock:0@60").wait()
    failure = expect_failed(done, rank=0, exit_code=4)
    assert STALL_S + GIL_GRACE_S - 1 < seconds_after(done) < STALL_S + GIL_GRACE_S + OVER_S
    assert (done.root_cause, done.codes[0]) == (0, 1)
    assert failure["stacks"] == str(stacks_path(done.run_dir, 0))
    assert "in hold_gil" in stacks_path(done.run_dir, 0).read_text()


def test_a_rank_that_leaks_is_named_before_the_memory_is_gone(start: StartRanks) -> None:
    done = start(*PLAIN, "--memory-limit", "3GiB", "--inject", "leak:2@600").wait()
    expect_failed(done, rank=2, exit_code=6)
    assert "of 3072 MiB" in done.report["cause"]
    assert seconds_after(done, "a fault will be injected") < 5 + OVER_S
    assert saved(done) == done.report["updates"]


@pytest.mark.parametrize("compute", COMPUTE)
def test_a_loss_that_is_not_finite_ends_the_job_and_its_samples_are_named(
    start: StartRanks, compute: str
) -> None:
    done = start(*PLAIN, "--inject", "nan:1@60", "--compute", compute).wait()
    failure = expect_failed(done, rank=1, exit_code=8)
    assert "epoch 2, batch " in done.report["cause"]
    assert "nan" in done.report["cause"]
    assert seconds_after(done) < OVER_S
    assert len(failure["last_order"]["samples"]) == 8
    assert saved(done) == done.report["updates"] >= 60


def test_a_loss_that_is_not_finite_can_be_left_out_and_the_job_is_done(start: StartRanks) -> None:
    args = ("--workload", "tests.plugins:plain", "--epochs", "2", "--batch-size", "8")
    skip = ("--staleness", "10", "--on-nonfinite", "skip", "--inject", "nan:1@60")
    done = start(*args, *skip).wait()
    report = expect_done(done)
    assert (report["updates"], report["samples_trained"]) == (99, 792)
    assert (report["orders_skipped"], report["samples_skipped"]) == (1, 8)
    [skipped] = report["skipped"]
    assert (skipped["epoch"], skipped["trainer"]) == (2, 1)
    assert "nan" in skipped["cause"]
    assert done.model.keys()


def test_an_update_that_hangs_with_the_servers_lock_is_found_and_shows_where(
    start: StartRanks,
) -> None:
    done = start(*PLAIN, *STALL, "--inject", "hang:0@60").wait()
    failure = expect_failed(done, rank=0, exit_code=5)
    assert "--stall-timeout" in done.report["cause"]
    bound_s = STALL_S + LOCK_TIMEOUT_S
    assert bound_s < seconds_after(done) < bound_s + OVER_S / 2
    assert "in _hang" in Path(failure["stacks"]).read_text()
    assert done.root_cause == 0


def test_one_process_in_a_step_that_does_not_end_saves_when_it_is_stopped(
    start: StartRanks,
) -> None:
    job = start(*PLAIN, "--inject", "hang:0@60", world_size=1)
    job.wait_for(BEFORE)
    wait_until_idle(job.ranks()[0])
    job.send(signal.SIGTERM)
    done = job.wait()
    expect_interrupted(done, 143)
    assert done.report["updates"] == 60
