"""Files and folders that are whole or not there."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path


def make_directories(path: Path, mode: int = 0o777) -> list[Path]:
    """Make a folder and its parents; returns those that were not there, innermost first.

    Raises:
        OSError: it cannot be made; none of its parents is left either.
    """
    created = [p for p in (path, *path.parents) if not p.exists()]
    try:
        path.mkdir(mode=mode, parents=True, exist_ok=True)
    except OSError:
        remove_empty(created)
        raise
    return created


def remove_empty(directories: Sequence[Path]) -> None:
    """Take back what make_directories made, as far as nothing has been put there."""
    for directory in directories:
        with suppress(OSError):
            directory.rmdir()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write to the yielded path; at the end it takes the place of `path` in one step."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Have the names in a folder, renamed ones too, survive a crash of the host."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot
            raise
    finally:
        os.close(handle)
