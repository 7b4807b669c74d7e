"""What is wrong with the options is told once: later attempts of a job end at once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ps.job.rundir import refuse, refused
from tests.jobs import ROOT


def error_file(folder: Path, attempt: int = 0, rank: int = 0, job: str = "job_x7") -> str:
    """As torchrun makes them; it makes their folders too."""
    path = folder / job / f"attempt_{attempt}" / str(rank) / "error.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    return str(path)


def launch(path: str | None, *args: str, rank: int = 0) -> subprocess.CompletedProcess[str]:
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    variables |= {"MASTER_PORT": "1"} | ({"TORCHELASTIC_ERROR_FILE": path} if path else {})
    return subprocess.run(
        [sys.executable, "launch.py", *args],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )


def test_a_refusal_is_known_to_every_rank_of_every_attempt_of_the_job(tmp_path: Path) -> None:
    assert refused(error_file(tmp_path)) is None
    refuse(error_file(tmp_path), 7)
    for attempt in (0, 1, 2):
        for rank in (0, 1):
            assert refused(error_file(tmp_path, attempt, rank)) == 7
    assert refused(error_file(tmp_path, job="another")) is None


def test_without_torchruns_log_nothing_is_refused() -> None:
    refuse(None, 2)
    assert refused(None) is None


@pytest.mark.parametrize("path", ["/error.json", "/no/error.json", "/proc/no/such/error.json"])
def test_a_log_in_which_nothing_can_be_left_refuses_nothing(path: str) -> None:
    refuse(path, 2)
    assert refused(path) is None


def test_a_damaged_refusal_is_none(tmp_path: Path) -> None:
    refuse(error_file(tmp_path), 2)
    [path] = tmp_path.rglob("refused")
    path.write_text("")
    assert refused(error_file(tmp_path)) is None


def test_a_bad_option_is_told_by_the_first_attempt_alone(tmp_path: Path) -> None:
    first = launch(error_file(tmp_path), "--epochs", "0")
    assert first.returncode == 2
    assert first.stderr == "server rank 0 | error: --epochs must be 1 or more, got 0\n"
    start = time.monotonic()
    for rank in (0, 1):
        later = launch(error_file(tmp_path, 1, rank), "--epochs", "0", rank=rank)
        assert (later.returncode, later.stdout + later.stderr) == (2, "")
    assert time.monotonic() - start < 5


def test_what_rank_0_has_not_found_wrong_may_be_tried_again(tmp_path: Path) -> None:
    """It alone knows whether the whole job is refused."""
    launch(error_file(tmp_path, rank=1), "--epochs", "0", rank=1)
    assert refused(error_file(tmp_path)) is None
