"""launch.py without torchrun: mistakes are answered at once, requests to end within bounds."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ps.job.checkpoint import read
from ps.job.rundir import checkpoints_in
from ps.settings.config import Config
from ps.workload import Workload
from tests.helpers import until
from tests.host.test_watch import exit_code_of, orphan_of
from tests.jobs import ROOT, Ranks, free_port, rank_variables
from tests.plugins import perceptron, wide

END_WITHIN_S = 25.0
MILLION = 1_000_000
PROGRAM = """
import runpy, sys
sys.argv = ["launch.py", *sys.argv[1:]]
try:
    runpy.run_path("launch.py", run_name="__main__")
finally:
    assert "torch" not in sys.modules, "torch was loaded"
"""


def launch(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "launch.py", *args],
        cwd=ROOT,
        env={"PATH": ""} | (env or {}),
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_help_needs_neither_torchrun_nor_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: torchrun --standalone --nproc_per_node=WORLD_SIZE")
    assert "--lr-schedule" in done.stdout


def test_without_torchrun_the_command_to_type_is_printed_with_the_arguments() -> None:
    done = launch("--epochs", "2", "--run-dir", "my runs/a")
    assert (done.returncode, done.stdout) == (3, "")
    [line] = done.stderr.splitlines()
    assert all(name in line for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    assert line.endswith("launch.py --epochs 2 --run-dir 'my runs/a'")
    assert "torchrun --standalone --nproc_per_node=" in line


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--epochs", "0"], ["--epochs", "got 0"]),
        (["--lr", "fast"], ["--lr", "'fast'"]),
        (["--bogus"], ["--bogus", "python launch.py --help"]),
    ],
)
def test_a_bad_option_is_one_line_and_exit_code_2(args: list[str], parts: list[str]) -> None:
    done = launch(*args)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("server rank 0 | error: ")
    assert all(part in line for part in parts)


def test_contradicting_variables_are_named() -> None:
    env = {"RANK": "5", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = launch(env=env)
    assert done.returncode == 3
    assert "RANK=5" in done.stderr and "WORLD_SIZE=2" in done.stderr


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named_and_the_start_is_bounded(tmp_path: Path) -> None:
    args = ("--workload", "tests.plugins:plain", "--start-timeout", "10")
    env = rank_variables(0, 2, free_port()) | {"PYTHONPATH": str(ROOT)}
    done = launch(*args, "--run-dir", str(tmp_path / "run"), env=env)
    assert done.returncode == 3
    assert "rank 1" in done.stderr and "10 s (--start-timeout)" in done.stderr


WAITS = """
import sys
import launch

print("ready", flush=True)
sys.exit(launch.main({args!r}, {environ!r}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_who_is_orphaned_while_it_waits_for_another_rank_ends_with_9(
    rank: int, tmp_path: Path
) -> None:
    """Rank 0 has begun then, and says so in its report."""
    run_dir = tmp_path / "run"
    args = ["--workload", "tests.plugins:plain", "--run-dir", str(run_dir)]
    code = WAITS.format(args=args, environ=rank_variables(rank, 2, free_port()))
    with orphan_of(code) as (parent, child):
        if rank == 0:
            until((run_dir / "report.json").exists, 30.0)
        time.sleep(0.5)
        parent.kill()
        assert exit_code_of(child, 5.0) == 9
    if rank == 0:
        report = json.loads((run_dir / "report.json").read_text())
        assert report["exit_code"] == 9
        assert "torchrun" in report["cause"] and "SIGTERM" not in report["cause"]


# --- from SIGTERM to the last process gone


def large(config: Config) -> Workload:
    """Weights, and so checkpoints, of 100 MB."""
    return wide(5_000, num_train=1_000)


class Many:
    """15 million samples of which only one is in memory."""

    def __len__(self) -> int:
        return 15 * MILLION

    def batch(self, indices: Any) -> tuple[Tensor, Tensor]:
        return torch.ones(1, 1).expand(len(indices), 1), torch.zeros(1).expand(len(indices))


def many(config: Config) -> Workload:
    few = torch.utils.data.TensorDataset(torch.ones(4, 1), torch.zeros(4))
    model = lambda: nn.Linear(1, 1)  # noqa: E731
    loss = lambda outputs, targets: outputs.mean()  # noqa: E731
    samples: Any = Many()
    return replace(perceptron(), model=model, loss=loss, train=samples, test=few)


def end(job: Ranks) -> dict[str, Any]:
    """Ask all ranks to end; the report, once they have."""
    asked_at = job.now()
    job.send(signal.SIGTERM)
    done = job.wait()
    assert done.duration_s - asked_at < END_WITHIN_S
    assert 143 in done.codes.values()
    report = done.report
    assert report["status"] != "running"
    return report


def saved_version(job: Ranks) -> int:
    version: int = read(checkpoints_in(job.run_dir)[-1])["store"]["version"]
    return version


@pytest.mark.slow
def test_a_job_whose_lock_is_never_given_back_is_over_in_time(tmp_path: Path) -> None:
    args = ("--workload", "tests.plugins:plain", "--batch-size", "8", "--epochs", "1000")
    job = Ranks(tmp_path, *args, "--inject", "hang:0@51", world_size=2)
    job.wait_for("epoch 1/1000 evaluated")
    time.sleep(1.0)  # in update 51 it hangs
    report = end(job)
    assert (report["exit_code"], report["failure"]["rank"]) == (143, 0)
    assert "in _hang" in Path(report["failure"]["stacks"]).read_text()


@pytest.mark.slow
def test_a_job_with_a_large_checkpoint_is_saved_in_time(tmp_path: Path) -> None:
    args = ("--workload", f"{__name__}:large", "--batch-size", "1", "--checkpoint-every", "1")
    job = Ranks(tmp_path, *args, "--epochs", "10", world_size=2)
    until(lambda: bool(checkpoints_in(job.run_dir)), 60.0)
    report = end(job)
    assert report["status"] == "interrupted"
    assert saved_version(job) == report["updates"] > 0


@pytest.mark.slow
def test_a_job_of_many_samples_is_saved_whenever_it_is_asked_to_end(tmp_path: Path) -> None:
    """In an epoch, while the next one is shuffled; and where one has just ended."""
    args = ("--workload", f"{__name__}:many", "--batch-size", "500_000", "--epochs", "9")
    for moment, seconds in (("updates ", 0.1), ("epoch 1/9 evaluated", 0.0)):
        job = Ranks(tmp_path / moment.strip().replace("/", "-"), *args, world_size=2)
        job.wait_for(moment)
        time.sleep(seconds)
        report = end(job)
        assert report["status"] == "interrupted"
        assert saved_version(job) == report["updates"] > 0
