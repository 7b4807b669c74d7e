"""Checkpoints: files that are complete or not there. Written in a thread, read back or refused.

The name of a file carries the start of its SHA-256, as those of torch.hub do, so that one rename
makes content and checksum appear together. What is in a checkpoint besides FORMAT is not known
here.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch

from ps.host.files import partial_file, remove_partials, sync_directory
from ps.job.rundir import CHECKPOINTS, checkpoints_in, list_checkpoints, sequence_of
from ps.server.state import Content, Snapshot
from ps.settings.errors import CheckpointUnusable, first_line
from ps.settings.log import log

FORMAT = 1
DIGEST_LENGTH = 16
READ_BYTES = 1 << 20


class TakeSnapshot(Protocol):
    def __call__(self, *, copy: bool) -> Snapshot:
        """Without a copy the tensors are the job's own: for a job that no longer changes them.

        May raise any error if there is no state to save.
        """


class Checkpoints:
    """The files of one run directory, oldest to newest. One process writes them."""

    def __init__(self, run_dir: Path, keep: int = 1) -> None:
        self.folder = run_dir / CHECKPOINTS
        self._run_dir = run_dir
        self._keep = keep

    def paths(self) -> list[Path]:
        """See rundir.checkpoints_in."""
        return checkpoints_in(self._run_dir)

    def write(self, state: Content, version: int) -> Path:
        """Write a new one, then remove those beyond `keep`. Blocks until it is on the disk.

        Raises:
            OSError: it could not be written; the others are as they were.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_partials(self.folder)
        with partial_file(self.folder / "checkpoint") as partial:
            digest = _write({"format": FORMAT, **state}, partial)
            older = list_checkpoints(self._run_dir)  # paths() hides a folder that cannot be listed
            path = self.folder / name_after(older, version, digest)
            os.replace(partial, path)
        sync_directory(self.folder)
        for old in expired(older, self._keep):
            with suppress(OSError):
                old.unlink()
        return path

    def newest(self, restore: Callable[[Content], None]) -> Path | None:
        """Restore from the newest that can be used; None if there is none at all.

        restore may raise CheckpointUnusable for one of another job, and then has changed nothing.
        Each that cannot be used is named in a warning.

        Raises:
            CheckpointUnusable: there are some, and all are unusable.
        """
        paths = self.paths()
        for path in reversed(paths):
            try:
                restore(read(path))
                return path
            except CheckpointUnusable as error:
                log.warning("checkpoint %s is not used: %s", path, error)
        if paths:
            raise CheckpointUnusable(
                f"none of the {len(paths)} checkpoints in {self.folder} can be used; to start from "
                "scratch, omit --resume or remove them"
            )
        return None


def name_after(older: Sequence[Path], version: int, digest: str) -> str:
    """The name of the next checkpoint; older are those that are there, the newest of them last."""
    sequence = sequence_of(older[-1]) + 1 if older else 1
    return f"{sequence:06}-update-{version}-{digest}.pt"


def expired(older: Sequence[Path], keep: int) -> Sequence[Path]:
    """Those to remove once one more than the older ones is there, and `keep` are to stay."""
    return older[: max(0, len(older) + 1 - keep)]


def read(path: Path) -> Content:
    """The content of one; only tensors and plain values are loaded.

    Raises:
        CheckpointUnusable: it cannot be read, is damaged, or of a format that is not known here.
    """
    try:
        with path.open("rb") as file:
            digest = hashlib.sha256()
            while block := file.read(READ_BYTES):
                digest.update(block)
            if not path.stem.endswith(digest.hexdigest()[:DIGEST_LENGTH]):
                raise CheckpointUnusable(
                    "it is damaged: its content does not have the checksum in its name"
                )
            file.seek(0)
            state: Content = torch.load(file, map_location="cpu", weights_only=True)
    except CheckpointUnusable:
        raise
    except Exception as error:
        raise CheckpointUnusable(f"{type(error).__name__}: {first_line(error)}") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointUnusable(f"it is not of format {FORMAT}")
    return state


class Checkpointer:
    """A thread that saves a job when asked, and once every interval."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        take_snapshot: TakeSnapshot,
        *,
        interval_s: float | None = None,
        newest: Path | None = None,
    ) -> None:
        """newest is the checkpoint of this run that is there already and can be used."""
        self.newest = newest
        """The newest one that can be used, None if there is none."""
        self._checkpoints = checkpoints
        self._take_snapshot = take_snapshot
        self._interval_s = interval_s
        self._wake = threading.Event()
        self._closing = False
        self._saved: object = object()  # equal to no mark
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def due(self) -> None:
        """Save soon. Does not wait; several calls during a save make one more."""
        self._wake.set()

    def close(self, timeout_s: float) -> bool:
        """Save a job that has ended, unless nothing is new; returns whether its end is saved.

        Blocks for timeout_s at most.
        """
        self._closing = True
        self._wake.set()
        if self._thread.is_alive():  # the job may have ended before start()
            self._thread.join(timeout_s)
        return not self._thread.is_alive() and not self._failing

    def _run(self) -> None:
        closing = False
        while not closing:
            self._wake.wait(self._interval_s)
            self._wake.clear()
            closing = self._closing  # before the save: it has all that came until this was set
            self.save(copy=not closing)

    def save(self, *, copy: bool = True) -> None:
        """Save now, unless nothing is new. Blocks. From another thread only before start()."""
        try:
            snapshot = self._take_snapshot(copy=copy)
            if snapshot.mark != self._saved:
                self.newest = self._checkpoints.write(snapshot.content, snapshot.version)
                self._saved = snapshot.mark
        except Exception as error:  # whatever it is, training goes on
            if not self._failing:
                reason = first_line(error) or type(error).__name__
                log.warning("no checkpoint could be saved: %s", reason)
            self._failing = True
            return
        if self._failing:
            log.info("checkpoints are saved again")
        self._failing = False


class _Hashing:
    """A file that computes the checksum of what is written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._sha256 = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, content: Any) -> int:
        self._sha256.update(content)
        try:
            return self._file.write(content)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()

    @property
    def digest(self) -> str:
        return self._sha256.hexdigest()[:DIGEST_LENGTH]


def _write(state: Content, path: Path) -> str:
    """Blocks until it is on the disk; returns the start of its checksum."""
    with path.open("wb") as file:
        hashing = _Hashing(file)
        try:
            torch.save(state, hashing)  # type: ignore[arg-type]
        except RuntimeError:  # what torch makes of an OSError of the file
            if hashing.error is not None:
                raise hashing.error from None
            raise
        file.flush()
        os.fsync(file.fileno())
    return hashing.digest
