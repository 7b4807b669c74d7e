"""Checkpoints: files that are whole, or not there. Written in the background, read back or refused.

The name of a file carries the start of its SHA-256, as those of torch.hub do, so that one rename
makes content and checksum appear together.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ps.host.files import sync_directory
from ps.job.rundir import CHECKPOINTS, checkpoints_in, list_checkpoints, sequence_of
from ps.settings.errors import CheckpointUnusable, first_line
from ps.settings.log import log

FORMAT = 1
DIGEST_LENGTH = 16
PARTIAL = ".checkpoint.partial"
READ_BYTES = 1 << 20

State = Mapping[str, Any]


class Checkpoints:
    """The files of one run directory, oldest to newest. One process writes them."""

    def __init__(self, run_dir: Path, keep: int = 1) -> None:
        self.folder = run_dir / CHECKPOINTS
        self._run_dir = run_dir
        self._keep = keep

    def paths(self) -> list[Path]:
        """See rundir.checkpoints_in."""
        return checkpoints_in(self._run_dir)

    def write(self, state: State, version: int) -> Path:
        """Write a new one, then remove those beyond `keep`. Blocks until it is on the disk.

        Raises:
            OSError: it could not be written; the others are as they were.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = self.folder / PARTIAL
        try:
            with partial.open("wb") as file:
                hashing = _Hashing(file)
                _save({"format": FORMAT, **state}, hashing)
                file.flush()
                os.fsync(file.fileno())
            older = list_checkpoints(self._run_dir)  # not paths(), which may tell of none
            sequence = sequence_of(older[-1]) + 1 if older else 1
            path = self.folder / f"{sequence:06}-update-{version}-{hashing.digest}.pt"
            os.replace(partial, path)
            sync_directory(self.folder)
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
        for old in older[: max(0, len(older) + 1 - self._keep)]:
            with suppress(OSError):
                old.unlink()
        return path

    def newest(self, restore: Callable[[State], None]) -> Path | None:
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


def read(path: Path) -> State:
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
                raise CheckpointUnusable("it is damaged: its content does not fit its name")
            file.seek(0)
            state: State = torch.load(file, map_location="cpu", weights_only=True)
    except CheckpointUnusable:
        raise
    except Exception as error:
        raise CheckpointUnusable(f"{type(error).__name__}: {first_line(error)}") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointUnusable(f"it is not of format {FORMAT}")
    return state


class Checkpointer:
    """A thread that saves a job's state when it is told to, and once every interval."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        state: Callable[..., Any],
        interval_s: float | None = None,
    ) -> None:
        """state makes the snapshot, in the thread, and may raise if there is none."""
        self._checkpoints = checkpoints
        self._state = state
        self._interval_s = interval_s
        self._wake = threading.Event()
        self._closing = False
        self.last: Path | None = None
        """The newest that was saved."""
        self._saved: object = None
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def due(self) -> None:
        """Save soon. Does not wait; several calls during a save make one more."""
        self._wake.set()

    def close(self, bound_s: float) -> bool:
        """Save the state as it is now, if it is not; tells if that is done within bound_s."""
        self._closing = True
        self._wake.set()
        if self._thread.is_alive():  # the job may have ended before start()
            self._thread.join(bound_s)
        return not self._thread.is_alive() and not self._failing

    def _run(self) -> None:
        closing = False
        while not closing:
            self._wake.wait(self._interval_s)
            self._wake.clear()
            closing = self._closing  # before the save: it has all that came until this was set
            self.save()

    def save(self) -> None:
        """Save now, if anything is new. Blocks. Of others than the thread, only before start()."""
        try:
            snapshot = self._state(copy=not self._closing)
            if snapshot.progress != self._saved:
                self.last = self._checkpoints.write(snapshot.content, snapshot.version)
                self._saved = snapshot.progress
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
    """A file to write to that knows the checksum of what was written."""

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


def _save(state: State, file: _Hashing) -> None:
    try:
        torch.save(state, file)  # type: ignore[arg-type]
    except RuntimeError:  # what torch makes of an OSError of the file
        if file.error is not None:
            raise file.error from None
        raise
