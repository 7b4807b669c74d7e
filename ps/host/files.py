"""Files that are complete or not there, and locks on files; the door to fcntl's locks.

An unfinished file is hidden and ends in ".partial". Its name is its writer's own, so that two
writers never share one. What a killed writer leaves, remove_partials() takes away.
"""

from __future__ import annotations

import errno
import fcntl  # noqa: TID251
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ps.settings.log import log

PARTIALS = ".*.partial"
LOCK_INTERVAL_S = 0.01

_PARTIAL_NAME = re.compile(r"\..+\.[0-9]+-[0-9a-f]{8}\.partial")


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
    """Remove what make_directories() made, except folders that are in use by now."""
    for directory in directories:
        with suppress(OSError):
            directory.rmdir()


@contextmanager
def partial_file(path: Path) -> Iterator[Path]:
    """A name in the folder of `path` that no other writer uses, for a file that becomes `path`.

    At the end the file of that name is removed, if it is still there.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        yield partial
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write to the yielded path; at the end that file replaces `path` in one step."""
    with partial_file(path) as partial:
        yield partial
        os.replace(partial, path)


def write_file(path: Path, content: bytes) -> None:
    """Replace `path` in one step. Blocks until content and name are on the disk.

    Raises:
        OSError: it could not be written; `path` is as it was.
    """
    with replacing(path) as partial:
        _write_synced(partial, content)
    sync_directory(path.parent)


def update_file(
    path: Path,
    change: Callable[[bytes | None], bytes | None],
    *,
    timeout_s: float,
    must_write: bool = False,
) -> bool:
    """Replace `path` by what `change` makes of its content, one writer at a time.

    Several processes and threads may call this at once: each sees what the one before it wrote.
    The lock is on the file that is there, so that no other file is left. `change` gets None where
    there is no file, and returns None to leave all as it is. It is called again if a writer that
    takes no lock was faster.

    Blocks until content and name are on the disk, and before that for timeout_s while another
    writer holds the lock. That writer may have been stopped: must_write then writes without the
    lock, and the other one will find that it came too late.

    Returns whether `path` was replaced.

    Raises:
        TimeoutError: another writer holds the lock for longer than timeout_s.
        OSError: it could not be written; `path` is as it was.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        with _opened(path) as handle:
            if handle is not None and not lock(handle, deadline - time.monotonic()):
                if not must_write:
                    raise TimeoutError(f"another process has locked {path} for {timeout_s:g} s")
                log.debug("%s is written without its lock, which another process holds", path)
            if not _is_at(handle, path):
                continue
            content = change(None if handle is None else _content(handle))
            if content is None:
                return False
            if _put(path, content, handle):
                return True


@contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    """A handle of the file, None if there is none; its lock is given back at the end."""
    try:
        handle = os.open(path, os.O_RDWR)  # a lock over NFS asks for a handle that may write
    except FileNotFoundError:
        yield None
        return
    try:
        yield handle
    finally:
        with suppress(OSError):  # closing is not enough: a process forked meanwhile has a copy
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _is_at(handle: int | None, path: Path) -> bool:
    """Whether this open file is still the one of that name; for None, whether there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return handle is None
    return handle is not None and os.path.samestat(os.fstat(handle), found)


def _content(handle: int) -> bytes:
    with os.fdopen(handle, "rb", closefd=False) as file:
        return file.read()


def _put(path: Path, content: bytes, handle: int | None) -> bool:
    """Whether the content replaced the open file; not if another writer has done so before."""
    with partial_file(path) as partial:
        _write_synced(partial, content)
        if not _is_at(handle, path):
            return False
        if handle is None:
            try:
                os.link(partial, path)  # unlike a rename, this replaces no file of another writer
            except FileExistsError:
                return False
        else:
            os.replace(partial, path)
    sync_directory(path.parent)
    return True


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def remove_partials(folder: Path) -> None:
    """Remove what killed writers left there. Only for the one process that writes there."""
    for partial in folder.glob(PARTIALS):
        with suppress(OSError):
            partial.unlink()


def is_partial(path: Path) -> bool:
    """Whether partial_file() gave that name, and not somebody else."""
    return _PARTIAL_NAME.fullmatch(path.name) is not None


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


def try_lock(handle: int) -> bool:
    """Lock an open file or folder; False if another open handle of it holds the lock.

    The lock lasts until the handle, and each copy of it in a forked process, is closed. Where the
    file system has no locks, this is True.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        log.debug("there are no locks on this file system: %s", error.strerror)
    return True


def lock(handle: int, timeout_s: float) -> bool:
    """As try_lock(), but wait up to timeout_s for the one that holds it."""
    deadline = time.monotonic() + timeout_s
    while not try_lock(handle):
        if time.monotonic() >= deadline:
            return False
        time.sleep(LOCK_INTERVAL_S)
    return True
