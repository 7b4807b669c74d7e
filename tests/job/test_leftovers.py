"""What earlier runs have left is named, with what to type, and stays."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ps.host.processes import Process, list_processes
from ps.job.leftovers import leftover_files, leftover_processes, runs_launch
from ps.settings.config import Config
from tests.helpers import until

PYTHON, TORCHRUN = "/usr/bin/python3", ("/usr/bin/python3", "/usr/bin/torchrun", "launch.py")


def process(pid: int, parent: int, *words: str, age_s: float = 120, is_own: bool = True) -> Process:
    return Process(pid, parent, words, age_s, is_own)


INIT = process(1, 0, "/sbin/init", is_own=False)
RANK = (PYTHON, "-u", "launch.py", "--epochs", "3")


@pytest.mark.parametrize(
    "processes",
    [
        [INIT, process(7, 1, *RANK)],
        [INIT, process(7, 6, *RANK)],
        [INIT, process(5, 1, "/usr/lib/systemd/systemd", "--user"), process(7, 5, *RANK)],
        [INIT, process(7, 1, PYTHON, "-u", "/home/me/ps/launch.py")],
    ],
    ids=["under pid 1", "parent gone", "under the user's systemd", "with a whole path"],
)
def test_a_rank_whose_torchrun_is_gone_is_named_with_what_to_type(
    processes: list[Process],
) -> None:
    status, text = leftover_processes(processes)
    assert status == "warning"
    assert "pid 7 since 2 min)" in text
    assert text.endswith("kill 7")


@pytest.mark.parametrize(
    "processes",
    [
        [INIT, process(6, 3, *TORCHRUN), process(7, 6, *RANK)],
        [process(1, 0, *TORCHRUN), process(7, 1, *RANK)],
        [INIT, process(6, 1, *TORCHRUN)],
        [INIT, process(6, 1, PYTHON, "-m", "torch.distributed.run", "launch.py")],
        [INIT, process(7, 1, *RANK, is_own=False)],
        [INIT, process(7, 1, "vim", "-R", "notes", "launch.py")],
        [INIT, process(7, 0, *RANK)],
        [INIT, process(7, 1)],
    ],
    ids=[
        *("torchrun runs", "torchrun is pid 1", "torchrun itself", "torchrun as a module"),
        *("another user's", "another program", "started from outside the container", "no command"),
    ],
)
def test_what_is_no_rank_or_has_its_torchrun_is_left_unnamed(processes: list[Process]) -> None:
    assert leftover_processes(processes) == ("ok", "none")


def test_many_ranks_are_counted_and_the_command_has_all_of_them() -> None:
    status, text = leftover_processes([process(pid, 1, *RANK) for pid in range(10, 18)])
    assert status == "warning"
    assert text.startswith("8 ranks ")
    assert "pid 14 since 2 min, ...)" in text
    assert text.endswith("kill 10 11 12 13 14 15 16 17")


@pytest.fixture
def orphan(tmp_path: Path) -> Iterator[int]:
    """A process that sleeps in a file named launch.py, and whose parent has ended."""
    script = tmp_path / "launch.py"
    script.write_text("import time\ntime.sleep(60)\n")
    shell = f"{sys.executable} -u {script} >/dev/null 2>&1 & echo $!"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True)
    pid = int(done.stdout)
    sleeper = psutil.Process(pid)
    yield pid
    sleeper.kill()
    sleeper.wait(10)


@pytest.mark.slow
def test_a_real_rank_without_parent_is_found_and_goes_on_running(orphan: int) -> None:
    def look() -> str:
        seen = list_processes()
        others = [one for one in seen if one.pid == orphan or not runs_launch(one)]
        return leftover_processes(others)[1]

    until(lambda: look() != "none", 10.0)
    assert look().endswith(f"kill {orphan}")
    assert psutil.Process(orphan).is_running()


def aged(path: Path, age_s: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.utime(path, (time.time() - age_s, time.time() - age_s))
    return path


def test_half_written_files_of_killed_runs_are_named_and_left_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = Config(data_dir=Path("my data"), run_dir=Path("mine"))
    assert leftover_files(config, time.time()) == ("ok", "none")
    old = [
        aged(tmp_path / "mine" / ".model.pt.partial", 700),
        aged(tmp_path / "my data" / "MNIST" / "raw" / ".fetch-x", 700),
        aged(tmp_path / "runs" / "a" / "checkpoints" / ".checkpoint.7-0123abcd.partial", 700),
    ]
    (tmp_path / "runs" / "latest").symlink_to("a")
    aged(tmp_path / "runs" / "b" / "checkpoints" / ".checkpoint.8-0123abcd.partial", 30)  # in use
    aged(tmp_path / "runs" / "b" / "checkpoints" / "000001-update-5-0123456789abcdef.pt", 700)
    status, text = leftover_files(config, time.time())
    assert status == "warning"
    assert text.startswith("3 half-written files ")
    assert text.endswith(f"rm -r {old[0]} '{old[1]}' {old[2]}")
    assert all(path.exists() for path in old)


def test_of_many_half_written_files_some_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(7):
        aged(tmp_path / "runs" / "a" / f".{number}.partial", 700)
    text = leftover_files(Config(data_dir=Path("data")), time.time())[1]
    assert text.startswith("7 half-written files ")
    assert text.endswith(".4.partial (and 2 more)")
