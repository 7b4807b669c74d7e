"""The thread in each rank that watches the others: it looks, and says what it found."""

from __future__ import annotations

import faulthandler
import json
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TextIO

from ps import health, machine
from ps.errors import Orphaned, Stalled
from ps.health import Finding, Look, Memory, Progress
from ps.log import log
from ps.processes import FROM_TORCHRUN, Peer, Reading

INTERVAL_S = 0.5
RECORD_INTERVAL_S = 5.0
STACKS_BOUND_S = 1.0
TELL_BOUND_S = 0.5
LOCK_BOUND_S = 10.0
"""Nothing that goes on holds the server's lock for so long."""
END_BOUND_S = 0.5
HOLD_S = 10.0
"""A trainer that has lost the server waits for torchrun, which names whoever ends first."""
GIL_GRACE_S = 3.0
"""Longer than the others need to tell a stall, so that they name it first."""
HEALTH_FILE = "health.jsonl"


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


class Watched(Protocol):
    """What the server tells of its trainers, and takes."""

    def progress(self) -> Mapping[int, Progress]:
        """Of those that have joined and not left."""

    def found(self, finding: Finding) -> None:
        """End the job for it."""


class ServerSide:
    """The server's look: at every rank, itself included."""

    def __init__(
        self,
        server: Watched,
        peers: Mapping[int, Peer],
        rank: int,
        run_dir: Path,
        *,
        stall_timeout_s: float | None,
        memory_limit_bytes: int | None,
        on_stuck: Callable[[Finding, Mapping[str, Any]], None],
    ) -> None:
        """on_stuck is told what this rank is to end for if the server cannot be told."""
        self.last_alive: dict[int, Reading] = {}
        self._on_stuck = on_stuck
        self._teller = threading.Thread()
        self._telling_since = 0.0
        self._known: set[tuple[int, int]] = set()
        """Rank and exit code of the findings that the server knows."""
        self._shown: set[int] = set()
        """Ranks whose stacks were asked for."""
        self._server = server
        self._peers = peers
        self._rank = rank
        self._run_dir = run_dir
        self._stall_timeout_s = stall_timeout_s
        self._memory_limit_bytes = memory_limit_bytes
        self._before: Look | None = None
        self._told_since: dict[int, float] = {}
        self._recorded_at = float("-inf")

    def look(self) -> None:
        """Read, judge, tell the server, write down."""
        if standstill := self._standstill():
            self._tell([standstill])
        progress = self._server.progress()
        ranks = {self._rank, *progress}
        readings = {rank: self._peers[rank].read() for rank in sorted(ranks)}
        self.last_alive |= {rank: r for rank, r in readings.items() if r.is_alive}
        memory = _memory_of(readings, self._memory_limit_bytes)
        now = Look(time.monotonic(), readings, memory)
        self._before, found = health.judge(self._before, now, progress, self._stall_timeout_s)
        findings = [
            f
            for f in found
            if (f.rank, f.exit_code) not in self._known and not self._may_be_no_cause(f, now)
        ]
        self._record(self._before, findings)
        for finding in findings:
            if finding.wants_stacks and finding.rank not in self._shown:
                self._shown.add(finding.rank)
                self._show_stacks(finding.rank)
        self._tell(findings)
        for finding in findings:
            if finding.is_halted:  # or torchrun's SIGTERM would not reach it
                self._peers[finding.rank].show_stacks()
                self._peers[finding.rank].go_on()

    def _tell(self, findings: Sequence[Finding]) -> None:
        """In a thread of its own: whoever stands still may hold the server's lock, and this thread
        must go on looking. What was not told then is found again by the next look."""

        def tell() -> None:
            for finding in findings:
                self._server.found(finding)
                if finding.exit_code:
                    self._known.add((finding.rank, finding.exit_code))

        if findings and not self._teller.is_alive():
            self._teller = threading.Thread(target=tell, name="findings", daemon=True)
            self._telling_since = time.monotonic()
            self._teller.start()
        if not self._teller.is_alive():
            return
        self._teller.join(TELL_BOUND_S)
        for_s = time.monotonic() - self._telling_since
        if self._teller.is_alive() and for_s > LOCK_BOUND_S:
            text = f"its lock has not been given back for {for_s:.0f} s"
            stuck = Finding(self._rank, text, Stalled.exit_code)
            own = [f for f in findings if f.rank == self._rank and f.exit_code]
            self._on_stuck((own or [stuck])[0], self.facts(self._rank))

    def _may_be_no_cause(self, finding: Finding, now: Look) -> bool:
        """See explain(). Does not wait: this thread is also the one that sees torchrun's end."""
        if not (finding.is_gone and now.readings[finding.rank].was_told_to_end):
            return False
        return now.at - self._told_since.setdefault(finding.rank, now.at) < END_BOUND_S

    def explain(self, trainer: int) -> Finding | None:
        """Why the connection of a trainer closed; waits a moment for its end, None without one.

        If it was told to end, this rank is probably told too: that is the cause then, and comes
        first if it comes in that time.
        """
        if standstill := self._standstill():
            return standstill
        peer = self._peers[trainer]
        until = time.monotonic() + END_BOUND_S
        reading = peer.read()
        while (reading.is_alive or reading.was_told_to_end) and time.monotonic() < until:
            time.sleep(0.01)
            reading = peer.read()
        return None if reading.is_alive else health.loss_of(trainer, reading)

    def lost_before(self) -> Finding | None:
        """The loss of a rank that was not told to end, if any: for when this one is told."""
        if standstill := self._standstill():
            return standstill
        for rank in self._server.progress():
            reading = self._peers[rank].read()
            if not reading.is_alive and not reading.was_told_to_end:
                return health.loss_of(rank, reading)
        return None

    def _standstill(self) -> Finding | None:
        """Whether this process itself could not run: then the others have left for that."""
        if self._before is None or self._stall_timeout_s is None:
            return None
        for_s = time.monotonic() - self._before.at
        if for_s < self._stall_timeout_s:
            return None
        return Finding(self._rank, f"it stood still for {for_s:.0f} s", Stalled.exit_code)

    def facts(self, rank: int) -> dict[str, object]:
        """What was seen last of a rank, alive and now."""
        peer = self._peers.get(rank)
        return _facts(peer.read() if peer else None, self.last_alive.get(rank))

    def _show_stacks(self, rank: int) -> None:
        if rank == self._rank:
            dump_stacks(self._run_dir, rank)
            return
        path = stacks_path(self._run_dir, rank)
        before = _size_of(path)
        self._peers[rank].show_stacks()
        until = time.monotonic() + STACKS_BOUND_S
        while time.monotonic() < until and _size_of(path) == before:
            time.sleep(0.02)

    def _record(self, look: Look, findings: Iterable[Finding]) -> None:
        told = [f"rank {finding.rank}: {finding.text}" for finding in findings]
        if not told and look.at - self._recorded_at < RECORD_INTERVAL_S:
            return
        self._recorded_at = look.at
        memory = look.memory
        record = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "ranks": {str(rank): reading.facts() for rank, reading in look.readings.items()},
            "memory": {"used_bytes": memory.used, "free_bytes": memory.free} if memory else None,
            "findings": told,
        }
        with suppress(OSError), (self._run_dir / HEALTH_FILE).open("a") as file:
            file.write(json.dumps(record) + "\n")


class TrainerSide:
    """A trainer's look: at the server, and at itself."""

    def __init__(
        self,
        server: Peer,
        me: Peer,
        rank: int,
        found: Callable[[Finding, Mapping[str, Any]], None],
        *,
        stall_timeout_s: float | None,
        memory_limit_bytes: int | None,
    ) -> None:
        """found is told what ends this trainer, with what was seen of the rank it is about."""
        self._peers = {0: server, rank: me}
        self._rank = rank
        self._found = found
        self._stall_timeout_s = stall_timeout_s
        self._memory_limit_bytes = memory_limit_bytes
        self._before: Look | None = None
        self._last_alive: dict[int, Reading] = {}
        self._server_may_end = False

    def expect_end(self) -> None:
        """From now on the server may end. It may not stand still."""
        self._server_may_end = True

    def look(self) -> None:
        """Read, judge, tell."""
        readings = {rank: peer.read() for rank, peer in self._peers.items()}
        self._last_alive |= {rank: r for rank, r in readings.items() if r.is_alive}
        own = {self._rank: readings[self._rank]}
        memory = _memory_of(own, self._memory_limit_bytes)
        now = Look(time.monotonic(), readings, memory)
        self._before, findings = health.judge(self._before, now, {}, self._stall_timeout_s)
        for finding in findings:
            if finding.exit_code and not (finding.is_gone and self._server_may_end):
                rank = finding.rank
                self._found(finding, _facts(readings[rank], self._last_alive.get(rank)))
                if finding.is_halted:  # or torchrun's SIGTERM would not reach it
                    self._peers[finding.rank].go_on()
                return


def dump_stacks(run_dir: Path, rank: int) -> None:
    """Those of all threads of this process, which is that rank."""
    with suppress(OSError), stacks_path(run_dir, rank).open("a") as file:
        faulthandler.dump_traceback(file, all_threads=True)


def _size_of(path: Path) -> int:
    """0 if that is not known."""
    with suppress(OSError):
        return path.stat().st_size
    return 0


def stacks_path(run_dir: Path, rank: int) -> Path:
    return run_dir / f"stacks-rank-{rank}.txt"


def _facts(now: Reading | None, alive: Reading | None) -> dict[str, object]:
    """What was seen last of a process, for the report."""
    seen = now.facts() if now else {}
    return {**seen, "last_seen_alive": alive.facts() if alive else None}


def _memory_of(readings: Mapping[int, Reading], limit_bytes: int | None) -> Memory | None:
    """limit_bytes is --memory-limit; the host and its cgroup may leave less. None if unknown."""
    used = sum(reading.private_bytes or 0 for reading in readings.values())
    used += machine.shared_memory_bytes()
    try:
        free = machine.available_memory_bytes()
    except OSError:
        return None
    return Memory(used, free if limit_bytes is None else min(free, limit_bytes - used))
