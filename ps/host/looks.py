"""What a rank looks at: every rank, or the server and itself."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from ps.host import health, resources
from ps.host.health import Finding, Look, Mark, Memory
from ps.host.processes import Peer, Reading
from ps.host.stacks import dump_stacks, size_of, stacks_path
from ps.settings.errors import Stalled

RECORD_INTERVAL_S = 5.0


STACKS_BOUND_S = 1.0


TELL_BOUND_S = 0.5


LOCK_BOUND_S = 10.0
"""Nothing that goes on holds the server's lock for so long."""


END_BOUND_S = 0.5


HEALTH_FILE = "health.jsonl"


class Watched(Protocol):
    """What the server tells of its trainers, and takes."""

    def progress(self) -> Mapping[int, Mark]:
        """Of those that have joined and not left."""

    def report(self, finding: Finding) -> None:
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
                self._server.report(finding)
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
        if not (finding.is_gone and now.readings[finding.rank].was_asked_to_end):
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
        while (reading.is_alive or reading.was_asked_to_end) and time.monotonic() < until:
            time.sleep(0.01)
            reading = peer.read()
        return None if reading.is_alive else health.loss_of(trainer, reading)

    def disconnected(self, trainer: int, how: str) -> None:
        """temporary"""
        from ps.settings.errors import PeerLost

        gone = Finding(trainer, how, PeerLost.exit_code, is_gone=True)
        if trainer in self._server.progress():
            reason = self.explain(trainer) or gone
            self._server.report(reason)
            if reason.rank != trainer:
                self._server.report(gone)

    def lost_before(self) -> Finding | None:
        """The loss of a rank that was not told to end, if any: for when this one is told."""
        if standstill := self._standstill():
            return standstill
        for rank in self._server.progress():
            reading = self._peers[rank].read()
            if not reading.is_alive and not reading.was_asked_to_end:
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
        before = size_of(path)
        self._peers[rank].show_stacks()
        until = time.monotonic() + STACKS_BOUND_S
        while time.monotonic() < until and size_of(path) == before:
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


def _facts(now: Reading | None, alive: Reading | None) -> dict[str, object]:
    """What was seen last of a process, for the report."""
    seen = now.facts() if now else {}
    return {**seen, "last_seen_alive": alive.facts() if alive else None}


def _memory_of(readings: Mapping[int, Reading], limit_bytes: int | None) -> Memory | None:
    """limit_bytes is --memory-limit; the host and its cgroup may leave less. None if unknown."""
    used = sum(reading.private_bytes or 0 for reading in readings.values())
    used += resources.shared_memory_bytes()
    try:
        free = resources.available_memory_bytes()
    except OSError:
        return None
    return Memory(used, free if limit_bytes is None else min(free, limit_bytes - used))
