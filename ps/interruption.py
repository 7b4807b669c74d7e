"""What SIGINT and SIGTERM do to this process, in each part of its life."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from ps.errors import Interrupted
from ps.log import log

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_came: Interrupted | None = None


def end_at_once() -> None:
    """Nothing needs putting in order: end without a traceback, also inside C++."""
    _set(signal.SIG_DFL)


def end_after(put_in_order: Callable[[], None]) -> None:
    """End where the process stands, after this one call: for while modules are loaded.

    An exception raised there can be swallowed, or abort the process inside C++.
    """

    def end(number: int, frame: FrameType | None) -> None:
        ignore()
        put_in_order()
        error = _interrupted(number)
        log.error("%s", error)
        os._exit(error.exit_code)

    _set(end)


def raise_once() -> None:
    """The first signal raises Interrupted in the main thread; later ones are ignored."""
    global _came
    _came = None
    _set(_raise)


def note_once() -> None:
    """The first signal is kept for check(), so that nothing is broken off; the second ends."""
    global _came
    _came = None
    _set(_note)


def check() -> None:
    """For loops of the main thread that may run long.

    Raises:
        Interrupted: a signal came, and what it raised may have been swallowed: Python ignores
            exceptions in destructors and in callbacks of weak references.
    """
    if _came is not None:
        raise _came


def ignore() -> None:
    """What is being written now is written to its end."""
    _set(signal.SIG_IGN)


def _raise(number: int, frame: FrameType | None) -> None:
    global _came
    ignore()
    _came = _interrupted(number)
    raise _came


def _note(number: int, frame: FrameType | None) -> None:
    global _came
    end_at_once()
    _came = _interrupted(number)


def _interrupted(number: int) -> Interrupted:
    return Interrupted(signal.Signals(number).name, number)


def _set(handler: Any) -> None:
    for number in _SIGNALS:
        signal.signal(number, handler)
