"""launch.py without torchrun: it answers at once, and without loading torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.jobs import ROOT

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
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr == (
        "server rank 0 | error: not started by torchrun (RANK, WORLD_SIZE, MASTER_ADDR, "
        "MASTER_PORT not set); type: torchrun --standalone --nproc_per_node=4 launch.py "
        "--epochs 2 --run-dir 'my runs/a'\n"
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--epochs", "0"], "--epochs must be 1 or more, got 0"),
        (["--lr", "fast"], "argument --lr: invalid number value: 'fast'; see: "),
        (["--bogus"], "unrecognized arguments: --bogus; see: python launch.py --help"),
    ],
)
def test_a_bad_option_is_one_line_and_exit_code_2(args: list[str], message: str) -> None:
    done = launch(*args)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith(f"server rank 0 | error: {message}")


def test_contradicting_variables_are_named() -> None:
    env = {"RANK": "5", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = launch(env=env)
    assert done.returncode == 3
    assert "RANK must be below WORLD_SIZE, got RANK=5 WORLD_SIZE=2" in done.stderr


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named_and_the_start_is_bounded(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    from tests.helpers import free_port

    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    run_dir = tmp_path_factory.mktemp("job") / "run"
    done = launch(
        *("--workload", "tests.plugins:plain", "--start-timeout", "10", "--run-dir", str(run_dir)),
        env=env | {"RANK": "0", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 3
    assert "gave up waiting for rank 1 to arrive after 10 s (--start-timeout)" in done.stderr
