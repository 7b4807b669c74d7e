"""What a job has left on the host: processes, shared memory, sockets, temporary files."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

MARK = "PS_LEFTOVERS"
BOUND_S = 5.0
TORCH_CACHE = "torchinductor_"
"""A folder that torch makes for itself when some of its modules are imported."""


class Leftovers:
    """What is there that was not when this was made."""

    def __init__(self, mark: str, temporary: Path) -> None:
        """mark is the value of the environment variable MARK that the job's processes carry, and
        temporary the folder that is theirs for temporary files."""
        self._mark = mark
        self._temporary = temporary
        self._before = set(self._things())

    def found(self) -> list[str]:
        """Waits for up to BOUND_S, as a process may be about to end."""
        until = time.monotonic() + BOUND_S
        while (left := self._now()) and time.monotonic() < until:
            time.sleep(0.1)
        return left

    def _now(self) -> list[str]:
        processes = [f"process {process.pid}" for process in _marked(self._mark)]
        things = sorted(set(self._things()) - self._before)
        return processes + [thing for thing in things if not _is_mapped(thing)]

    def _things(self) -> Iterator[str]:
        """Sockets without a name in a file system end with their process."""
        for folder in (Path("/dev/shm"), self._temporary):
            with suppress(OSError):
                yield from (
                    str(folder / name)
                    for name in os.listdir(folder)
                    if not name.startswith(TORCH_CACHE)
                )


def _is_mapped(path: str) -> bool:
    """Whether some process uses this shared memory: then it is that of another program, as the
    processes of the job have ended, or are found themselves. By its number, as a semaphore has
    another name when it is mapped."""
    with suppress(OSError):
        number = str(os.stat(path).st_ino)
        for maps in Path("/proc").glob("[0-9]*/maps"):
            with suppress(OSError):
                lines = (line.split(None, 5) for line in maps.read_text().splitlines())
                if any(len(it) > 5 and it[4] == number and "/dev/shm/" in it[5] for it in lines):
                    return True
    return False


def _marked(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                yield process
