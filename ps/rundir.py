"""The run directory: where one run leaves its report and the trained weights."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from ps.errors import ConfigError
from ps.log import log

PARENT = Path("runs")
LATEST = "latest"


class RunDirectory:
    """A directory that this run alone writes to."""

    def __init__(self, path: Path, created: list[Path]) -> None:
        self.path = path
        self._created = created

    @classmethod
    def create(cls, path: Path | None, error_file: str | None) -> RunDirectory:
        """Make it. path None gives runs/<time>-<id>; error_file tells which of the entries
        that are already there are torchrun's own logs of this run.

        Raises:
            ConfigError: it is not empty, is no directory, or cannot be written.
        """
        path = path or PARENT / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        created = [p for p in (path, *path.parents) if not p.exists()]
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            foreign = sorted(e.name for e in path.iterdir() if not _holds(e, error_file))
            probe = path / ".probe"
            probe.touch()
            probe.unlink()
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"--run-dir {path} cannot be used: {reason}") from None
        if foreign:
            raise ConfigError(
                f"--run-dir {path} is not empty (it holds {foreign[0]}); "
                "give a new one, or leave --run-dir away"
            )
        return cls(path, created)

    def discard(self) -> None:
        """Take back what create() made: the run never started."""
        for path in self._created:
            path.rmdir()

    def publish(self) -> None:
        """Point runs/latest here, if this is one of runs/."""
        parent = self.path.parent
        if parent.name != PARENT.name:
            return
        link = parent / f".{LATEST}-{secrets.token_hex(3)}"
        link.symlink_to(self.path.name)
        try:
            os.replace(link, parent / LATEST)
        except OSError as error:
            link.unlink()
            log.warning("%s does not point here: %s", parent / LATEST, error.strerror)

    def write_report(self, report: Mapping[str, object]) -> Path:
        """Write report.json; a reader finds the old one or the new one, never half."""
        path = self.path / "report.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
        os.replace(partial, path)
        return path

    def write_model(self, state: Mapping[str, torch.Tensor]) -> Path:
        """Write the weights as model.pt, a plain state_dict for torch.load(weights_only=True)."""
        path = self.path / "model.pt"
        partial = path.with_suffix(".partial")
        torch.save(dict(state), partial)
        os.replace(partial, path)
        return path


def _holds(entry: Path, error_file: str | None) -> bool:
    return error_file is not None and entry.resolve() in Path(error_file).resolve().parents
