"""What the Makefile passes on, without running it."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.jobs import ROOT

NO_INSTALL = ("-o", ".venv/.run", "-o", ".venv/.dev")
"""However old they are: a test changes no environment, which others may share."""


def make(*args: str) -> str:
    done = subprocess.run(["make", *args], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def test_make_alone_prints_every_target() -> None:
    text = make()
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    targets = phony[1].split()
    assert {"train", "test"} < set(targets)
    for target in targets:
        assert f"make {target} " in text, target


def test_train_passes_world_data_and_args_through() -> None:
    text = make("-n", "train", "WORLD=5", "DATA_DIR=/my data", "ARGS=--lr 0.5 --epochs 2")
    assert "--standalone --local-addr=127.0.0.1" in text
    assert "--nproc_per_node=5" in text
    assert "--data-dir='/my data' --lr 0.5 --epochs 2" in text


def test_restarts_are_torchruns_and_none_without_being_asked_for() -> None:
    assert "--max-restarts=3 " in make("-n", "train", "RESTARTS=3")
    assert "--max-restarts=0 " in make("-n", "train")


def test_the_doctor_looks_with_the_options_of_the_run() -> None:
    text = make("-n", "doctor", "WORLD=5", "DATA_DIR=/my data", "ARGS=--compute trainer")
    assert "-m ps doctor --world-size 5 --data-dir '/my data' --compute trainer" in text


@pytest.mark.parametrize(
    ("args", "run_dir"),
    [
        (["RUN_DIR=out/a"], "out/a"),
        (["ARGS=--epochs 0 --run-dir out/b"], "out/b"),
        (["ARGS=--run-dir=out/c --epochs 0"], "out/c"),
        (["ARGS=--run-dir 'my runs/d' --epochs 0"], "my runs/d"),
    ],
)
def test_the_log_of_torchrun_lies_in_the_run_directory(args: list[str], run_dir: str) -> None:
    """With echo in the place of torchrun, so that the shell's part is run as well."""
    text = make(*NO_INSTALL, "train", "BIN=tests/bin", "WORLD=2", *args)
    assert f"--log-dir={run_dir}/torchrun launch.py --run-dir={run_dir} " in text


def test_a_second_call_installs_nothing() -> None:
    assert "pip install" not in make("-n", "train")
    assert "pip install" not in make("-n", "test")


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.timed
def test_smoke_reaches_90_percent_within_40_s(tmp_path: Path) -> None:
    start = time.monotonic()
    text = make(*NO_INSTALL, "smoke", f"RUN_DIR={tmp_path / 'run'}")
    assert time.monotonic() - start < 40
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert (report["world_size"], report["workload"]) == (2, "digits")
    assert report["test_accuracy"] >= 0.90
    assert f"test_accuracy {report['test_accuracy']:.4f}, 0.90 or more was required" in text
