"""What earlier runs have left: ranks whose torchrun is gone, and half-written files."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from ps.host.files import PARTIALS
from ps.host.processes import Process
from ps.job.preflight import Judgement, count
from ps.job.rundir import PARENT
from ps.settings.config import Config
from ps.workloads.catalogue import FETCH_TIMEOUT_S

MAX_NAMED = 5


def leftover_processes(processes: Sequence[Process]) -> Judgement:
    """processes are all of this host, whoever they belong to."""
    by_pid = {process.pid: process for process in processes}
    left = [
        process
        for process in processes
        if process.is_own and runs_launch(process) and _is_orphan(process, by_pid)
    ]
    if not left:
        return "ok", "none"
    named = ", ".join(
        f"pid {process.pid} since {process.age_s / 60:.0f} min" for process in left[:MAX_NAMED]
    )
    pids = " ".join(str(process.pid) for process in left)
    return "warning", (
        f"{count(len(left), 'rank')} whose torchrun is gone ({named}"
        f"{', ...' if len(left) > MAX_NAMED else ''}); to end them: kill {pids}"
    )


def runs_launch(process: Process) -> bool:
    """Whether it is a rank: torchrun itself has launch.py among its arguments too."""
    script = next((word for word in process.command[1:] if not word.startswith("-")), "")
    return Path(script).name == "launch.py"


def _is_orphan(process: Process, by_pid: Mapping[int, Process]) -> bool:
    """Whether its parent has ended, so that pid 1 or the user's systemd has become its parent."""
    if process.parent == 0:
        return False
    parent = by_pid.get(process.parent)
    if parent is None:
        return True
    words = [Path(word).name for word in parent.command]
    if any(word.startswith(("torchrun", "torch.distributed")) for word in words):
        return False  # in a container it may be pid 1
    return parent.pid == 1 or words[:1] == ["systemd"]


def leftover_files(config: Config, now: float) -> Judgement:
    """now is of the clock of the files.

    A file that was written to lately may be in use and is not counted: the longest write is a
    data set that is fetched.
    """
    run_dirs = {path.resolve() for path in (PARENT, *PARENT.glob("*"), config.run_dir or PARENT)}
    found = {
        *(path for folder in run_dirs for path in folder.glob(PARTIALS)),
        *(path for folder in run_dirs for path in folder.glob(f"*/{PARTIALS}")),
        *(config.data_dir.resolve() / "MNIST" / "raw").glob(".fetch-*"),
    }
    left = sorted(path for path in found if _age_s(path, now) > FETCH_TIMEOUT_S)
    if not left:
        return "ok", "none"
    names = shlex.join(str(path) for path in left[:MAX_NAMED])
    more = f" (and {len(left) - MAX_NAMED} more)" if len(left) > MAX_NAMED else ""
    return "warning", (
        f"{count(len(left), 'half-written file')} of a run that was killed; "
        f"to remove them: rm -r {names}{more}"
    )


def _age_s(path: Path, now: float) -> float:
    try:
        return now - path.stat().st_mtime
    except OSError:  # it is gone by now
        return 0.0
