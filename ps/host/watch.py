"""The thread in each rank that watches the others: it looks, and says what it found."""

from __future__ import annotations

import faulthandler  # noqa: TID251
import os
import select  # noqa: TID251
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TextIO

from ps.host.processes import FROM_TORCHRUN, Peer
from ps.settings.errors import Orphaned
from ps.settings.log import log

INTERVAL_S = 0.5
HOLD_S = 10.0
"""A trainer that has lost the server waits for torchrun, which names whoever ends first."""
GIL_GRACE_S = 3.0
"""Longer than the others need to tell a stall, so that they name it first."""


class Watch:
    """Wakes up once an interval, and at once when a process ends or a signal comes."""

    def __init__(self) -> None:
        """Watches this process's parent; what else, the other methods tell."""
        self.on_orphaned: Callable[[], None] = lambda: leave(Orphaned.exit_code)
        self.on_signal: Callable[[int], None] = lambda number: leave(128 + number)
        self._parent = os.getppid()
        self._poll = select.poll()
        self._signals: int | None = None
        self._look: Callable[[], None] | None = None
        self._stacks: tuple[TextIO, float] | None = None
        self._blind = ""
        self._end: tuple[float, int] | None = None
        self._lock = threading.Lock()  # held during a look
        self._wake, self._waker = os.pipe()
        self._poll.register(self._wake, select.POLLIN)
        with suppress(OSError, AttributeError):
            self._poll.register(os.pidfd_open(self._parent), select.POLLIN)

    def end_orphaned_after(self, put_in_order: Callable[[], None]) -> None:
        """When the parent is gone, end after this one call."""

        def end() -> None:
            put_in_order()
            leave(Orphaned.exit_code)

        self.on_orphaned = end

    def start(self) -> None:
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def take_signals(self, handle: int) -> None:
        """Read signals from there (see interruption.by_handle), and hand them to on_signal."""
        self._signals = handle
        self._poll.register(handle, select.POLLIN)
        os.write(self._waker, b".")

    def guard(self, stacks: TextIO, bound_s: float) -> None:
        """From now on this process ends, and writes its stacks, when no Python code can run for
        bound_s, as when a C function never gives the GIL back."""
        self._stacks = (stacks, bound_s)

    def look_with(self, look: Callable[[], None], peers: Iterable[Peer]) -> None:
        """Call look once an interval, and when one of the peers ends."""
        for peer in peers:
            if peer.handle is not None:
                self._poll.register(peer.handle, select.POLLIN)
        self._look = look
        os.write(self._waker, b".")

    def look_now(self) -> None:
        """In the caller's thread; when it returns, a look has been made since the call."""
        with self._lock:
            self._look_once()

    def close(self) -> None:
        """Look no more: what ends from now on is meant to. The parent is still watched."""
        with self._lock:
            self._look = None

    def end_later(self, exit_code: int, after_s: float) -> None:
        """End this process then, unless a signal comes first. Looks no more."""
        self._look = None
        self._end = (time.monotonic() + after_s, exit_code)

    def _run(self) -> None:
        """A rank that nobody watches any more does not go on."""
        try:
            self._watch()
        except Exception as error:
            log.error("the watch broke: %s: %s", type(error).__name__, error)
            leave(1)

    def _watch(self) -> None:
        while True:
            self._sleep()
            if self._end is not None and time.monotonic() > self._end[0]:
                leave(self._end[1])
            if os.getppid() != self._parent:
                log.error("torchrun (pid %d) is gone", self._parent)
                faulthandler.cancel_dump_traceback_later()  # what follows has bounds of its own
                self.on_orphaned()
                return
            with self._lock:
                self._look_once()

    def _sleep(self) -> None:
        if self._stacks is not None:
            file, bound_s = self._stacks
            faulthandler.dump_traceback_later(bound_s, exit=True, file=file)
        for handle, _ in self._poll.poll(INTERVAL_S * 1000):
            if handle == self._wake:
                os.read(handle, 64)
            elif handle == self._signals:
                for number in os.read(handle, 64):
                    if number in FROM_TORCHRUN:
                        self.on_signal(number)
            else:  # a process that has ended stays so
                self._poll.unregister(handle)

    def _look_once(self) -> None:
        if self._look is None:
            return
        try:
            self._look()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if text != self._blind:
                log.warning("health could not be looked at: %s", text)
            self._blind = text


def leave(exit_code: int) -> None:
    """End this process from any thread, and let nothing run any more."""
    os._exit(exit_code)
