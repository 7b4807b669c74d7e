"""Where the stacks of a process are written, and when. The only door to faulthandler."""

from __future__ import annotations

import faulthandler  # noqa: TID251
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from ps.host.processes import SHOW_STACKS


def stacks_path(run_dir: Path, rank: int) -> Path:
    """The file for the stacks of that rank."""
    return run_dir / f"stacks-rank-{rank}.txt"


def size_of(path: Path) -> int:
    """In bytes; 0 if that is not known."""
    with suppress(OSError):
        return path.stat().st_size
    return 0


def dump_stacks(run_dir: Path, rank: int) -> None:
    """Write the stacks of all threads of this process, which is that rank. Errors are ignored."""
    with suppress(OSError), stacks_path(run_dir, rank).open("a") as file:
        faulthandler.dump_traceback(file, all_threads=True)


def show_on_request(file: TextIO) -> None:
    """When Peer.show_stacks() asks, write the stacks of all threads there: at once, and also
    while a thread holds the GIL. The file must stay open."""
    faulthandler.register(SHOW_STACKS, file, all_threads=True)


def end_after(timeout_s: float, file: TextIO) -> None:
    """Unless this is called again or cancelled in time, write the stacks there and end the
    process with exit code 1, even if no Python code can run."""
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=file)


def cancel_end() -> None:
    """Do not end any more, see end_after()."""
    faulthandler.cancel_dump_traceback_later()
