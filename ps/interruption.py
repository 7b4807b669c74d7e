"""What SIGINT and SIGTERM do to this process, in each part of its life."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from ps.errors import Interrupted

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def end_at_once() -> None:
    """Nothing needs putting in order: end without a traceback, also inside C++."""
    _set(signal.SIG_DFL)


def raise_once() -> None:
    """The first signal raises Interrupted in the main thread; later ones are ignored."""
    _set(_interrupt)


def ignore() -> None:
    """What is being written now is written to its end."""
    _set(signal.SIG_IGN)


def _interrupt(number: int, frame: FrameType | None) -> None:
    ignore()
    raise Interrupted(signal.Signals(number).name, number)


def _set(handler: Any) -> None:
    for number in _SIGNALS:
        signal.signal(number, handler)
