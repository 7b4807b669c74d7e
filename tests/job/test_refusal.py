"""A job that every attempt would end in the same way says so once: later attempts end at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ps.job.rundir import is_final, refuse_if_final, refused
from tests.helpers import end_processes, free_port, until
from tests.jobs import ROOT

DIFFERING = """
from tests.plugins import RANK, perceptron

def build(config):
    return perceptron(hidden=16 + RANK)
"""


def error_file(folder: Path, attempt: int = 0, rank: int = 0, job: str = "job_x7") -> str:
    """As torchrun makes them; it makes their folders too."""
    path = folder / job / f"attempt_{attempt}" / str(rank) / "error.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    return str(path)


def start(path: str, *args: str, rank: int = 0, port: int = 1) -> subprocess.Popen[str]:
    """A rank with torchrun's variables, but without torchrun."""
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    variables |= {"MASTER_PORT": str(port), "TORCHELASTIC_ERROR_FILE": path}
    python_path = os.pathsep.join([str(ROOT), str(Path(path).parents[3])])
    return subprocess.Popen(
        [sys.executable, "launch.py", *args],
        cwd=ROOT,
        env=os.environ | variables | {"PYTHONPATH": python_path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def launch(path: str, *args: str, rank: int = 0) -> tuple[int, str]:
    """Exit code and output."""
    process = start(path, *args, rank=rank)
    output, _ = process.communicate(timeout=20)
    return process.returncode, output


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 130, 143, -9])
def test_what_is_wrong_with_options_or_checkpoints_is_final_and_nothing_else(
    code: int, tmp_path: Path
) -> None:
    assert is_final(code) == (code in (2, 7))
    assert refused(error_file(tmp_path)) is None
    refuse_if_final(error_file(tmp_path), code)
    for attempt in (0, 1, 2):
        for rank in (0, 1):
            seen = refused(error_file(tmp_path, attempt, rank))
            assert seen == (code if is_final(code) else None)
    assert refused(error_file(tmp_path, job="another")) is None


@pytest.mark.parametrize("path", [None, "/error.json", "/no/a/b/e.json", "/proc/no/such/e.json"])
def test_a_log_in_which_nothing_can_be_left_refuses_nothing(path: str | None) -> None:
    refuse_if_final(path, 2)
    assert refused(path) is None


def test_a_refusal_is_complete_or_not_there_and_a_damaged_one_is_none(tmp_path: Path) -> None:
    path = error_file(tmp_path)
    refuse_if_final(path, 2)
    assert [entry.name for entry in Path(path).parents[2].glob("*efused*")] == ["refused"]
    (tmp_path / "job_x7" / "refused").write_text("")
    assert refused(path) is None


@pytest.mark.slow
def test_a_bad_option_is_said_by_the_first_attempt_of_rank_0_alone(tmp_path: Path) -> None:
    launch(error_file(tmp_path, rank=1), "--epochs", "0", rank=1)
    assert refused(error_file(tmp_path)) is None  # only rank 0 knows of the whole job
    code, output = launch(error_file(tmp_path), "--epochs", "0")
    assert code == 2
    assert "--epochs" in output
    for rank in (0, 1):
        assert launch(error_file(tmp_path, 1, rank), "--epochs", "0", rank=rank) == (2, "")


@pytest.mark.slow
def test_what_a_trainer_finds_wrong_while_the_job_runs_is_refused_too(tmp_path: Path) -> None:
    """Rank 0 does not raise it, and torchrun may end rank 0 before that returns the code."""
    (tmp_path / "differing.py").write_text(DIFFERING)
    port, run_dir = free_port(), str(tmp_path / "run")
    options = ("--workload", "differing:build", "--compute", "trainer", "--run-dir", run_dir)
    ranks = [start(error_file(tmp_path, 0, r), *options, rank=r, port=port) for r in (0, 1)]
    try:
        until(lambda: refused(error_file(tmp_path)) == 2, 60.0)
        assert ranks[0].wait(20) == 2
    finally:
        end_processes(*ranks)
