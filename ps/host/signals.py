"""What a request to end, which is a signal or the end of torchrun, does to this process.

One object holds it, made once in a process and handed on. It is always in one named phase.
"""

from __future__ import annotations

import os
import signal  # noqa: TID251
import threading
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from types import FrameType
from typing import Any

from ps.host.processes import FROM_TORCHRUN, SHOW_STACKS
from ps.host.timeouts import Deadline
from ps.settings.errors import Interrupted, Orphaned
from ps.settings.log import log

END_TIMEOUT_S = 20.0
"""From the first request to the end of this process. torchrun kills 30 s after its SIGTERM, and
what these seconds do not cover (the last flush, the interpreter's end) is to be over by 25 s."""


class Phase(Enum):
    """What a request to end does, by part of the process's life."""

    END_AT_ONCE = "the signal ends the process by itself, also inside C++"
    INTERRUPT = "the first request raises Interrupted in the main thread, later ones are kept"
    CLEAN_UP = "one function is called, and the process ends where it stands"
    NOTE = "the first request is kept for check(), the second ends the process at once"
    HANDED_OVER = "another thread takes signals from a handle, also while this one is inside C++"
    FINISHING = "requests are only kept: what is being written is written to its end"


class Signals:
    """The phase of this process, and the first request to end that came: it is never forgotten."""

    def __init__(
        self, *, end_timeout_s: float = END_TIMEOUT_S, leave: Callable[[int], object] = os._exit
    ) -> None:
        """Starts in Phase.END_AT_ONCE. In the main thread only. leave ends this process.

        In a process that is forked from this one signals do what they do by default.
        """
        self.handle, self._writer = os.pipe()
        """Becomes readable when a signal comes, also while the main thread is inside C++."""
        self._requests: list[tuple[Interrupted, Deadline]] = []  # appended to by any thread
        self._end_timeout_s = end_timeout_s
        self._leave = leave
        self._phase = Phase.END_AT_ONCE
        self._clean_up: Callable[[], None] = lambda: None
        self._was_raised = False
        for handle in (self.handle, self._writer):
            os.set_blocking(handle, False)
        restore_defaults()
        os.register_at_fork(after_in_child=restore_defaults)

    @property
    def came(self) -> Interrupted | None:
        """The first request to end; later ones change nothing."""
        return self._requests[0][0] if self._requests else None

    @property
    def deadline(self) -> Deadline | None:
        """Starts with the first request. Every limit of time after it is taken from this one."""
        return self._requests[0][1] if self._requests else None

    def enter(self, phase: Phase, clean_up: Callable[[], None] = lambda: None) -> None:
        """From now on a request to end does what the phase says, and so does one that came before.

        clean_up is what Phase.CLEAN_UP calls: that phase is for while modules are loaded, when an
        exception can be swallowed, or abort the process inside C++. In the main thread only.

        Raises:
            Interrupted: the phase is INTERRUPT and a request came before.
        """
        self._clean_up, self._phase = clean_up, phase
        self._was_raised = False
        if phase is Phase.END_AT_ONCE:
            restore_defaults()
        else:
            # Before the handlers are set, so that no signal gets lost.
            signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            _set(self._take)
        if phase is Phase.HANDED_OVER:
            signal.signal(
                SHOW_STACKS, signal.SIG_IGN
            )  # would end a process that cannot show them yet
        if self.came is not None:
            self._act(self.came)

    def check(self) -> None:
        """For loops of the main thread that may run long.

        Raises:
            Interrupted: a request came, and what it raised may have been swallowed: Python ignores
                exceptions in destructors and in callbacks of weak references.
        """
        if self.came is not None:
            raise self.came

    def left_s(self, at_most: float) -> float:
        """How long something may still take: at_most, or less once a request to end has come."""
        return at_most if self.deadline is None else self.deadline.left_s(at_most)

    def orphaned(self) -> None:
        """torchrun is gone: to this process as a signal, with a cause of its own. Any thread."""
        came = self._record(Interrupted.by_error(Orphaned()))
        if self._phase in (Phase.INTERRUPT, Phase.NOTE, Phase.FINISHING):
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGTERM)
        else:  # the main thread may be inside C++
            self._act(came)

    def read(self) -> Interrupted | None:
        """Note what has come, so that its deadline starts. Does not block. Any thread.

        Returns the first request to end if it was handed over, so that the caller is to end this
        process. The handle also becomes readable by signals that are no request, for which
        somebody has set a handler.
        """
        with suppress(BlockingIOError):
            for number in os.read(self.handle, 64):
                if number in FROM_TORCHRUN:
                    self._record(_interrupted_by(number))
        return self.came if self._phase is Phase.HANDED_OVER else None

    def _take(self, number: int, frame: FrameType | None) -> None:
        """The handler, which runs in the main thread."""
        if self._phase is not Phase.HANDED_OVER:
            self._act(self._record(_interrupted_by(number)))

    def _record(self, request: Interrupted) -> Interrupted:
        self._requests.append((request, Deadline.after(self._end_timeout_s)))
        return self._requests[0][0]

    def _act(self, came: Interrupted) -> None:
        if self._phase is Phase.INTERRUPT and not self._was_raised:
            self._was_raised = True
            raise came
        if self._phase is Phase.NOTE:
            restore_defaults()
        elif self._phase in (Phase.END_AT_ONCE, Phase.CLEAN_UP, Phase.HANDED_OVER):
            self._end(came)

    def _end(self, came: Interrupted) -> None:
        self._phase = Phase.FINISHING
        try:
            self._clean_up()
        except Exception as error:
            log.error("could not clean up: %s: %s", type(error).__name__, error)
        log.error("%s", came)
        self._leave(came.exit_code)


def restore_defaults() -> None:
    """Signals end this process at once: without a traceback, also inside C++."""
    signal.set_wakeup_fd(-1)
    _set(signal.SIG_DFL)


def _interrupted_by(number: int) -> Interrupted:
    return Interrupted.by_signal(signal.Signals(number).name, number)


def _set(handler: Any) -> None:
    for number in FROM_TORCHRUN:
        signal.signal(number, handler)
