"""The format of log lines: each carries the role and the rank of the process that writes it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import TextIO

log = logging.getLogger("ps")
log.addHandler(logging.NullHandler())
log.propagate = False


class _RoleFormatter(logging.Formatter):
    def __init__(self, role: str, rank: int | str) -> None:
        super().__init__()
        self._prefix = f"{role} rank {rank} | "

    def format(self, record: logging.LogRecord) -> str:
        label = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        lines = (label + super().format(record)).splitlines()
        return "\n".join(self._prefix + line for line in lines)


def configure(role: str, rank: int | str, level: str = "info") -> None:
    """Print messages of at least this level: warnings and errors to stderr, others to stdout.

    level is debug, info or warning. A second call replaces what the first one configured.
    """
    for handler in list(log.handlers):
        log.removeHandler(handler)
    log.setLevel(level.upper())
    log.addHandler(_handler(sys.stdout, role, rank, lambda r: r.levelno < logging.WARNING))
    log.addHandler(_handler(sys.stderr, role, rank, lambda r: r.levelno >= logging.WARNING))


def _handler(
    stream: TextIO, role: str, rank: int | str, wanted: Callable[[logging.LogRecord], bool]
) -> logging.Handler:
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_RoleFormatter(role, rank))
    handler.addFilter(wanted)
    return handler
