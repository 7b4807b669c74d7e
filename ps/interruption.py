"""SIGINT and SIGTERM, as an exception where a process has something to put in order."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ps.errors import Interrupted


def end_at_once() -> None:
    """Have Ctrl-C end this process without a traceback, as SIGTERM does by default."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT and SIGTERM raise Interrupted inside, once; after it they are ignored.

    So a report is written to its end although torchrun is already stopping this process.
    Only for the main thread.
    """
    armed = True

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise Interrupted(signal.Signals(number).name, number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        armed = False
