"""The threads in each rank that watch: one the other ranks and torchrun, one for the end."""

from __future__ import annotations

import os
import select  # noqa: TID251
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TextIO

from ps.host import stacks
from ps.host.processes import Peer
from ps.host.signals import Signals
from ps.host.timeouts import Deadline, call_with_timeout
from ps.settings.errors import Interrupted
from ps.settings.log import log

INTERVAL_S = 0.5
HOLD_S = 10.0
"""How long a rank with an error lives on, so that torchrun sees the rank with the cause first."""
GIL_GRACE_S = 3.0
"""Longer than the other ranks need to notice a stall, so that they name it first."""
LAST_LOOK_TIMEOUT_S = 5.0
OVERDUE_S = 3.0
"""After the deadline of a request to end, this process is ended whatever it is doing."""
LAST_LINE_TIMEOUT_S = 0.5


def leave(exit_code: int) -> None:
    """End this process from any thread, and let nothing run any more."""
    os._exit(exit_code)


class Watch:
    """Wakes up once an interval, and at once when a process ends or a signal is handed over."""

    def __init__(
        self,
        signals: Signals,
        *,
        interval_s: float = INTERVAL_S,
        last_look_timeout_s: float = LAST_LOOK_TIMEOUT_S,
        overdue_s: float = OVERDUE_S,
        leave: Callable[[int], object] = leave,
    ) -> None:
        """leave ends this process, from any thread.

        When torchrun, the parent, is gone, signals.orphaned() is called. When a signal is handed
        over, the process leaves after a last look, as torchrun sends one when another rank has
        ended: that is reported first. In other phases the process ends by itself, and overdue_s
        after the deadline of the request it is ended if it has not.
        """
        self._signals = signals
        self._interval_s = interval_s
        self._last_look_timeout_s = last_look_timeout_s
        self._overdue_s = overdue_s
        self._leave = leave
        self._parent = os.getppid()
        self._on_orphaned = signals.orphaned
        self._looks = _Looks()
        self._guard: tuple[float, TextIO] | None = None
        self._end: tuple[Deadline, int] | None = None
        self._poll = select.poll()
        self._wake = os.pipe()
        self._poll.register(self._wake[0], select.POLLIN)
        with suppress(OSError, AttributeError):  # where there are no handles of processes
            self._poll.register(os.pidfd_open(self._parent), select.POLLIN)

    def start(self) -> None:
        for name, run in (("watch", self._watch), ("end", self._await_end)):
            threading.Thread(target=self._run, args=(run,), name=name, daemon=True).start()

    def when_orphaned(self, act: Callable[[], None]) -> None:
        """From now on call this, in the thread that watches, in place of signals.orphaned()."""
        self._on_orphaned = act

    def guard(self, stacks: TextIO, timeout_s: float) -> None:
        """From now on this process writes its stacks and ends with exit code 1 when no Python
        code can run for timeout_s, as when a C function never gives the GIL back."""
        self._guard = (timeout_s, stacks)

    def look_with(self, look: Callable[[], None], peers: Iterable[Peer]) -> None:
        """From now on call look once an interval, and when one of the peers ends."""
        for peer in peers:
            if peer.handle is not None:
                self._poll.register(peer.handle, select.POLLIN)
        self._looks.begin(look)
        os.write(self._wake[1], b".")

    def look_now(self) -> None:
        """In the caller's thread; when it returns, a look has been made since the call."""
        self._looks.make()

    def close(self) -> None:
        """Look no more: what ends from now on is meant to. The parent is still watched.

        Waits for a look under way, as long as for a last look at most.
        """
        self._looks.end(self._last_look_timeout_s)

    def end_later(self, exit_code: int, after_s: float) -> None:
        """End this process then, unless a signal comes first. Looks no more."""
        self._looks.end(0.0)
        self._end = (Deadline.after(after_s), exit_code)

    def _run(self, run: Callable[[], None]) -> None:
        """A rank that nobody watches any more does not go on."""
        try:
            run()
        except Exception as error:
            log.error("the watching thread failed: %s: %s", type(error).__name__, error)
            self._leave(1)

    def _watch(self) -> None:
        self._sleep()
        while os.getppid() == self._parent:
            self._turn()
            self._sleep()
        stacks.cancel_end()  # what follows has limits of its own
        self._on_orphaned()

    def _await_end(self) -> None:
        """Apart from the other thread, which may be in a look that takes long."""
        poll = select.poll()
        poll.register(self._signals.handle, select.POLLIN)
        while True:
            came = self._signals.read() if poll.poll(self._interval_s * 1000) else None
            if came is not None:
                self._end_by_signal(came)
            deadline, came = self._signals.deadline, self._signals.came
            if deadline and came and time.monotonic() > deadline.at + self._overdue_s:
                self._end_overdue(came)

    def _turn(self) -> None:
        if self._end is not None and self._end[0].is_over:
            self._leave(self._end[1])
        self._looks.make()

    def _sleep(self) -> None:
        self._renew_guard()
        for handle, _ in self._poll.poll(self._interval_s * 1000):
            if handle == self._wake[0]:
                os.read(handle, 64)
            else:  # a process that has ended stays so
                self._poll.unregister(handle)

    def _end_by_signal(self, came: Interrupted) -> None:
        self._renew_guard(self._last_look_timeout_s)
        with suppress(TimeoutError):
            call_with_timeout(self._last_look_timeout_s, self._looks.make, "last look")
        self._leave(came.exit_code)

    def _end_overdue(self, came: Interrupted) -> None:
        def tell() -> None:
            log.error("%s; this process could not end in time", came)

        with suppress(TimeoutError):  # nobody may read what is written
            call_with_timeout(LAST_LINE_TIMEOUT_S, tell, "last line")
        self._leave(came.exit_code)

    def _renew_guard(self, more_s: float = 0.0) -> None:
        if self._guard is not None:
            timeout_s, file = self._guard
            stacks.end_after(timeout_s + more_s, file)


class _Looks:
    """Made by several threads, one at a time."""

    def __init__(self) -> None:
        self._look: Callable[[], None] | None = None
        self._last_warning = ""
        self._lock = threading.Lock()  # held during a look

    def begin(self, look: Callable[[], None]) -> None:
        self._look = look

    def end(self, timeout_s: float) -> None:
        """Waits so long for a look under way, which may be stuck."""
        self._look = None
        if self._lock.acquire(timeout=timeout_s):
            self._lock.release()

    def make(self) -> None:
        """One look, unless they have ended. The same error is logged once."""
        with self._lock:
            try:
                if self._look is not None:
                    self._look()
            except Exception as error:
                warning = f"{type(error).__name__}: {error}"
                if warning != self._last_warning:
                    log.warning("the health of the ranks could not be checked: %s", warning)
                self._last_warning = warning
