"""Where the stacks of a process are written."""

from __future__ import annotations

import faulthandler  # noqa: TID251
from contextlib import suppress
from pathlib import Path


def dump_stacks(run_dir: Path, rank: int) -> None:
    """Those of all threads of this process, which is that rank."""
    with suppress(OSError), stacks_path(run_dir, rank).open("a") as file:
        faulthandler.dump_traceback(file, all_threads=True)


def size_of(path: Path) -> int:
    """0 if that is not known."""
    with suppress(OSError):
        return path.stat().st_size
    return 0


def stacks_path(run_dir: Path, rank: int) -> Path:
    return run_dir / f"stacks-rank-{rank}.txt"
