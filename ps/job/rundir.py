"""The run directory: where a run leaves its options, checkpoints, report and weights. No torch."""

from __future__ import annotations

import json
import os
import re
import secrets
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ps.host.files import (
    is_partial,
    make_directories,
    remove_empty,
    remove_partials,
    replacing,
    try_lock,
    write_file,
)
from ps.settings.errors import CheckpointUnusable, ConfigError
from ps.settings.log import log

PARENT = Path("runs")
LATEST = "latest"
CHECKPOINTS = "checkpoints"
CHECKPOINT_NAME = re.compile(r"[0-9]+-update-[0-9]+-[0-9a-f]{16}\.pt")
OPTIONS = "config.json"
REPORT = "report.json"


class RunDirectory:
    """A folder that only this process, and ranks that report for it, write to."""

    def __init__(self, path: Path, created: Sequence[Path], lock: int | None = None) -> None:
        """created are the folders made for this run alone, innermost first; lock is a handle."""
        self.path = path
        self._created = created
        self._lock = lock

    @classmethod
    def create(cls, path: Path, error_file: str | None) -> RunDirectory:
        """Make the folder, or use an empty one; a new one is private to this user.

        error_file is torchrun's file for this rank: its log of this run may lie in the folder.

        Raises:
            ConfigError: it is not empty, is no directory, or cannot be written.
        """
        created: list[Path] = []
        try:
            created = make_directories(path, mode=0o700)
            foreign = _foreign(path, error_file)
            _try_to_write(path)
        except OSError as error:
            remove_empty(created)
            raise _unusable("--run-dir", path, error) from None
        if foreign:
            raise ConfigError(
                f"--run-dir {path} is not empty (it holds {foreign}); "
                "give a new one, or omit --run-dir; --resume goes on from an earlier run"
            )
        return cls(path, created, _own(path))

    @classmethod
    def reopen(cls, path: Path) -> RunDirectory:
        """Go on in the folder of an earlier run, or of an earlier attempt of this one.

        Raises:
            ConfigError: it cannot be written, or another run is still writing to it.
        """
        try:
            _try_to_write(path)
        except OSError as error:
            raise _unusable("--resume", path, error) from None
        return cls(path, (), _own(path))

    def discard(self) -> None:
        """Remove what create() made: the run never started."""
        remove_empty(self._created)

    def close(self) -> None:
        """Allow another run to write there. The end of this process does so too."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def publish(self) -> None:
        """Point runs/latest here, if this is one of runs/."""
        parent = self.path.absolute().parent
        if parent != PARENT.absolute():
            return
        try:
            with replacing(parent / LATEST) as link:
                link.symlink_to(self.path.name)
        except OSError as error:
            log.warning("%s does not point to this run: %s", PARENT / LATEST, error.strerror)

    def write_options(self, options: Mapping[str, object], job: str | None) -> None:
        """Write config.json, for options_of() and job_of()."""
        write(self.path, OPTIONS, {"job": job, "options": options})

    def write_report(self, report: Mapping[str, object]) -> Path:
        """Write report.json, whatever it says by now; see ps.job.report for one that asks."""
        return write(self.path, REPORT, report)


def write(run_dir: Path, name: str, content: Mapping[str, object]) -> Path:
    """Write a JSON file there in one step. Blocks until it is on the disk.

    Raises:
        OSError: it could not be written.
    """
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)  # somebody may have removed it
    path = run_dir / name
    write_file(path, to_json(content))
    return path


def to_json(content: Mapping[str, object]) -> bytes:
    """What is written to the files of a run directory.

    Raises:
        ValueError: it holds a number that is not finite.
    """
    return (json.dumps(content, indent=2, allow_nan=False) + "\n").encode()


def from_json(content: bytes | None) -> dict[str, Any]:
    """Empty if there is none, or it is damaged."""
    try:
        found = json.loads(content or b"")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def generated(job: str | None, *, again: bool = False) -> Path:
    """runs/<time>-<job>, or with `again` the one that an earlier attempt of this job used.

    job None stands for a random name.
    """
    if again and job is not None:
        there = sorted(folder for folder in PARENT.glob("*") if not folder.is_symlink())
        used = [folder for folder in there if job_of(folder) == job]  # which may be of another job
        if made := used or [folder for folder in there if folder.name.endswith(f"-{job}")]:
            return made[-1]
    return PARENT / f"{time.strftime('%Y%m%d-%H%M%S')}-{job or secrets.token_hex(3)}"


def checkpoints_in(run_dir: Path) -> list[Path]:
    """The files that are there, oldest first, unread. Empty if the folder cannot be listed."""
    try:
        return list_checkpoints(run_dir)
    except OSError:
        return []


def list_checkpoints(run_dir: Path) -> list[Path]:
    """As checkpoints_in().

    Raises:
        OSError: the folder cannot be listed, or is not there.
    """
    folder = run_dir / CHECKPOINTS
    names = filter(CHECKPOINT_NAME.fullmatch, os.listdir(folder))
    return sorted((folder / name for name in names), key=sequence_of)


def has_checkpoints(run_dir: Path) -> bool:
    return bool(checkpoints_in(run_dir))


def sequence_of(checkpoint: Path) -> int:
    """The number in its name: a newer one has a higher one."""
    return int(checkpoint.name.split("-", 1)[0])


def options_of(run_dir: Path) -> dict[str, Any]:
    """The options of the run that wrote there.

    Raises:
        CheckpointUnusable: they are not there, or damaged.
    """
    path = run_dir / OPTIONS
    try:
        options = from_json(path.read_bytes()).get("options")
    except OSError as error:
        raise CheckpointUnusable(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(options, dict):
        raise CheckpointUnusable(f"{path} cannot be read: it is damaged")
    return options


def job_of(run_dir: Path) -> str | None:
    """The job that wrote there last; None if that is not known."""
    job: str | None = _read(run_dir, OPTIONS).get("job")
    return job


def is_begun(run_dir: Path) -> bool:
    """Whether a run has begun there and is not done."""
    return (run_dir / OPTIONS).exists() and not is_done(run_dir)


def is_done(run_dir: Path) -> bool:
    """Whether its report says that it has trained to the end."""
    return report_of(run_dir).get("status") == "done"


def report_of(run_dir: Path) -> dict[str, Any]:
    """Its report; empty if there is none that can be read."""
    return _read(run_dir, REPORT)


def _read(run_dir: Path, name: str) -> dict[str, Any]:
    try:
        return from_json((run_dir / name).read_bytes())
    except OSError:
        return {}


def is_final(exit_code: int) -> bool:
    """Whether a further attempt of the same job would end in the same way."""
    return exit_code in (ConfigError.exit_code, CheckpointUnusable.exit_code)


def refuse_if_final(error_file: str | None, exit_code: int) -> None:
    """Note in torchrun's log of this job that no further attempt makes sense, if none does.

    For rank 0, which alone knows how the job ends.
    """
    if error_file is not None and is_final(exit_code):
        with suppress(OSError, IndexError):
            write_file(_refusal(error_file), str(exit_code).encode())


def refused(error_file: str | None) -> int | None:
    """The exit code of an earlier attempt after which no further one makes sense."""
    if error_file is None:
        return None
    try:
        return int(_refusal(error_file).read_text())
    except (OSError, ValueError, IndexError):
        return None


def _refusal(error_file: str) -> Path:
    """Beside the folders of the attempts, each of which has one for each rank."""
    return Path(error_file).absolute().parents[2] / "refused"


def _try_to_write(path: Path) -> None:
    with tempfile.TemporaryFile(dir=path):
        pass


def _unusable(option: str, path: Path, error: OSError) -> ConfigError:
    reason = error.strerror or error
    return ConfigError(f"{option} {path} cannot be used: {reason}; give one that can be written")


def _own(path: Path) -> int:
    """Lock the folder for this process until it ends, and remove what killed ones left there.

    The lock is on the folder itself, so that no file is left.
    """
    handle = os.open(path, os.O_RDONLY)
    os.register_at_fork(after_in_child=partial(_forget, handle, os.fstat(handle)))
    if not try_lock(handle):
        os.close(handle)
        raise ConfigError(
            f"another run is writing to {path}; wait for its end, or give another --run-dir"
        )
    remove_partials(path)
    remove_partials(path / CHECKPOINTS)
    return handle


def _forget(handle: int, locked: os.stat_result) -> None:
    """In a forked process, which would share the lock and may outlive this one."""
    with suppress(OSError):
        if os.path.samestat(os.fstat(handle), locked):
            os.close(handle)


def _foreign(path: Path, error_file: str | None) -> str | None:
    """The first entry that is neither torchrun's log of this run nor a killed run's partial."""
    log_of_run = Path(error_file).resolve().parents if error_file is not None else ()
    names = (e.name for e in path.iterdir() if e.resolve() not in log_of_run and not is_partial(e))
    return min(names, default=None)
