"""What the signals of torchrun do to this process, in each part of its life."""

from __future__ import annotations

import faulthandler  # noqa: TID251
import os
import signal  # noqa: TID251
from collections.abc import Callable
from types import FrameType
from typing import Any, TextIO

from ps.host.processes import FROM_TORCHRUN
from ps.settings.errors import Interrupted
from ps.settings.log import log

_came: Interrupted | None = None


def end_at_once() -> None:
    """Nothing needs putting in order: end without a traceback, also inside C++."""
    signal.set_wakeup_fd(-1)
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


def by_handle() -> int:
    """Signals do nothing by themselves: each can be read, as a byte, from the handle returned.

    So a thread takes them, also while the main thread is inside C++. There may be bytes of other
    signals too, for which somebody has set a handler. A process that this one forks is as others.
    """
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # first, so that none gets lost
    _set(lambda number, frame: None)
    os.register_at_fork(after_in_child=end_at_once)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until show_stacks_to(): it would end this
    return reader


def show_stacks_to(file: TextIO) -> None:
    """On SIGUSR1, write the stacks of all threads there, also of one that holds the GIL."""
    faulthandler.register(signal.SIGUSR1, file, all_threads=True)


def interrupt() -> None:
    """As if a signal had come, from any thread."""
    os.kill(os.getpid(), signal.SIGTERM)


def check() -> None:
    """For loops of the main thread that may run long.

    Raises:
        Interrupted: a signal came, and what it raised may have been swallowed: Python ignores
            exceptions in destructors and in callbacks of weak references.
    """
    if _came is not None:
        raise _came


def ignore() -> None:
    """What is being written now is written to its end; came() tells if a signal came."""
    _set(_remember)


def came() -> bool:
    """Whether a signal has come since raise_once() or note_once()."""
    return _came is not None


def _raise(number: int, frame: FrameType | None) -> None:
    global _came
    _came = _interrupted(number)
    ignore()
    raise _came


def _note(number: int, frame: FrameType | None) -> None:
    global _came
    end_at_once()
    _came = _interrupted(number)


def _remember(number: int, frame: FrameType | None) -> None:
    global _came
    _came = _came or _interrupted(number)


def _interrupted(number: int) -> Interrupted:
    return Interrupted(signal.Signals(number).name, number)


def _set(handler: Any) -> None:
    for number in FROM_TORCHRUN:
        signal.signal(number, handler)
