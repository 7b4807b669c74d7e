"""The run directory: where one run leaves its report and the trained weights. No torch."""

from __future__ import annotations

import json
import os
import secrets
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ps.errors import ConfigError
from ps.files import make_directories, remove_empty, replacing
from ps.log import log

PARENT = Path("runs")
LATEST = "latest"


class RunDirectory:
    """A directory that this run alone writes to."""

    def __init__(self, path: Path, created: Sequence[Path]) -> None:
        """created are the folders that exist only for this run, innermost first."""
        self.path = path
        self._created = created

    @classmethod
    def create(cls, path: Path | None, error_file: str | None) -> RunDirectory:
        """Make it; a new one is private to this user. path None gives runs/<time>-<id>.

        error_file tells which entry that is already there is torchrun's own log of this run.

        Raises:
            ConfigError: it is not empty, is no directory, or cannot be written.
        """
        path = path or PARENT / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        created: list[Path] = []
        try:
            created = make_directories(path, mode=0o700)
            foreign = sorted(e.name for e in path.iterdir() if not _holds(e, error_file))
            with tempfile.TemporaryFile(dir=path):
                pass  # it can be written
        except OSError as error:
            remove_empty(created)
            reason = error.strerror or error
            raise ConfigError(
                f"--run-dir {path} cannot be used: {reason}; give one that can be written"
            ) from None
        if foreign:
            raise ConfigError(
                f"--run-dir {path} is not empty (it holds {foreign[0]}); "
                "give a new one, or leave --run-dir away"
            )
        return cls(path, created)

    def discard(self) -> None:
        """Take back what create() made: the run never started."""
        remove_empty(self._created)

    def publish(self) -> None:
        """Point runs/latest here, if this is one of runs/."""
        parent = self.path.absolute().parent
        if parent != PARENT.absolute():
            return
        link = parent / f".{LATEST}-{secrets.token_hex(3)}"
        try:
            link.symlink_to(self.path.name)
            os.replace(link, parent / LATEST)
        except OSError as error:
            link.unlink(missing_ok=True)
            log.warning("%s does not point to this run: %s", PARENT / LATEST, error.strerror)

    def write_report(self, report: Mapping[str, object]) -> Path:
        """Write report.json; a reader finds the old one or the new one, never half."""
        path = self.path / "report.json"
        with replacing(path) as partial:
            partial.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
        return path


def _holds(entry: Path, error_file: str | None) -> bool:
    return error_file is not None and entry.resolve() in Path(error_file).resolve().parents
