"""What the thread that watches does: the server looks at all ranks, a trainer at the server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ps.host import health, resources
from ps.host.findings import HEALTH_FILE, Recorder, Reporter
from ps.host.health import Finding, Look, Mark, Memory
from ps.host.processes import Peer, Reading
from ps.host.stacks import dump_stacks, size_of, stacks_path
from ps.settings.errors import PeerLost, Stalled
from ps.settings.topology import SERVER_RANK

LOCK_TIMEOUT_S = 10.0
"""Nothing that goes on holds the server's lock for so long."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of the server's monitor, in seconds."""

    patience_s: float = health.PATIENCE_S
    """How long a rank that was asked to end is not held to be the cause."""
    record_interval_s: float = 5.0
    """Between two lines of health.jsonl without a finding."""
    stacks_timeout_s: float = 1.0
    """For a trainer to write its stacks."""
    report_timeout_s: float = 0.5
    """For the server to take a finding, before the monitor goes on looking."""
    lock_timeout_s: float = LOCK_TIMEOUT_S
    """For the server to take a finding at all."""


class MonitoredServer(Protocol):
    """What the monitor needs of the server."""

    def progress(self) -> Mapping[int, Mark]:
        """The newest mark of each trainer that has joined and not left. Does not block."""

    def report(self, finding: Finding) -> None:
        """End the job for it, or warn. Blocks while another thread holds the server's lock."""


class JobMonitor:
    """The server's: looks at every rank, itself included, and reports to the server."""

    def __init__(
        self,
        server: MonitoredServer,
        peers: Mapping[int, Peer],
        rank: int,
        run_dir: Path,
        *,
        stall_timeout_s: float | None,
        memory_limit_bytes: int | None,
        on_stuck: Callable[[Finding, Mapping[str, Any]], None],
        limits: Limits = Limits(),
    ) -> None:
        """on_stuck gets what this rank is to end for where the server does not take findings."""
        self._server = server
        self._peers = _Peers(peers)
        self._rank = rank
        self._run_dir = run_dir
        self._stall_timeout_s = stall_timeout_s
        self._memory_limit_bytes = memory_limit_bytes
        self._on_stuck = on_stuck
        self._limits = limits
        self._reporter = Reporter(server.report, limits.report_timeout_s)
        self._recorder = Recorder(run_dir / HEALTH_FILE, limits.record_interval_s)
        self._before: Look | None = None
        self._has_shown: set[int] = set()
        """Ranks whose stacks were asked for."""

    def look(self) -> None:
        """Read all ranks, judge what was read, record it, report what is wrong."""
        marks = self._server.progress()
        standstill = self._standstill()
        now = self._read({self._rank, *marks})
        findings = [*([standstill] if standstill else []), *self._judge(now, marks)]
        self._recorder.record(now, findings)
        self._show_stacks(findings)
        self._report(findings)
        self._resume(findings)

    def disconnected(self, trainer: int, how: str) -> None:
        """The connection of a trainer has closed: report why. Any thread.

        Blocks until the process has ended, for Limits.patience_s at most. The reason is reported
        first; where that is another rank's, the loss of the trainer follows. Does nothing once
        the trainer has left.
        """
        if trainer not in self._server.progress():
            return
        loss = Finding(trainer, how, PeerLost.exit_code, is_gone=True)
        reason = self.explain(trainer) or loss
        self._server.report(reason)
        if reason.rank != trainer:
            self._server.report(loss)

    def explain(self, trainer: int) -> Finding | None:
        """Why the connection of a trainer closed; None if its process lives on. See above."""
        if standstill := self._standstill():
            return standstill
        since, known_s = time.monotonic(), 0.0
        while True:
            cause = health.cause_of(
                trainer,
                self._peers.read_one(trainer),
                known_s,
                patience_s=self._limits.patience_s,
            )
            if cause is not None or known_s >= self._limits.patience_s:
                return cause
            time.sleep(0.01)
            known_s = time.monotonic() - since

    def lost_before(self) -> Finding | None:
        """The finding from before this process was asked to end, if there is one. Any thread."""
        if standstill := self._standstill():
            return standstill
        for rank in self._server.progress():
            cause = health.cause_of(rank, self._peers.read_one(rank), 0.0, asked_too=True)
            if cause is not None:
                return cause
        return None

    def facts(self, rank: int) -> dict[str, object]:
        """What was seen last of a rank, alive and now. In plain values."""
        return self._peers.facts(rank)

    def _standstill(self) -> Finding | None:
        return health.standstill(self._rank, self._before, time.monotonic(), self._stall_timeout_s)

    def _read(self, ranks: Iterable[int]) -> Look:
        readings = self._peers.read(ranks)
        return Look(time.monotonic(), readings, _memory_of(readings, self._memory_limit_bytes))

    def _judge(self, now: Look, marks: Mapping[int, Mark]) -> list[Finding]:
        """What is wrong and not known to the server yet."""
        self._before, findings = health.judge(
            self._before, now, marks, self._stall_timeout_s, self._limits.patience_s
        )
        return [finding for finding in findings if not self._reporter.has_reported(finding)]

    def _show_stacks(self, findings: Sequence[Finding]) -> None:
        ranks = {finding.rank for finding in findings if finding.wants_stacks}
        for rank in sorted(ranks - self._has_shown):
            self._has_shown.add(rank)
            if rank == self._rank:
                dump_stacks(self._run_dir, rank)
            else:
                self._ask_for_stacks(rank)

    def _ask_for_stacks(self, rank: int) -> None:
        path = stacks_path(self._run_dir, rank)
        before, until = size_of(path), time.monotonic() + self._limits.stacks_timeout_s
        self._peers[rank].show_stacks()
        while time.monotonic() < until and size_of(path) == before:
            time.sleep(0.02)

    def _report(self, findings: Sequence[Finding]) -> None:
        blocked_s = self._reporter.report(findings)
        if blocked_s > self._limits.lock_timeout_s:
            text = f"its lock has not been given back for {blocked_s:.0f} s"
            stuck = Finding(self._rank, text, Stalled.exit_code)
            own = [f for f in findings if f.rank == self._rank and f.exit_code]
            self._on_stuck((own or [stuck])[0], self.facts(self._rank))

    def _resume(self, findings: Sequence[Finding]) -> None:
        """Stopped ranks go on, or torchrun's SIGTERM would not reach them."""
        for rank in (finding.rank for finding in findings if finding.is_halted):
            self._peers[rank].show_stacks()
            self._peers[rank].resume()


class ServerMonitor:
    """A trainer's: looks at the server, and at the trainer itself."""

    def __init__(
        self,
        server: Peer,
        me: Peer,
        rank: int,
        report: Callable[[Finding, Mapping[str, Any]], None],
        *,
        stall_timeout_s: float | None,
        memory_limit_bytes: int | None,
        patience_s: float = health.PATIENCE_S,
    ) -> None:
        """report gets what ends this trainer, and what was seen of the rank that it is about."""
        self._peers = _Peers({SERVER_RANK: server, rank: me})
        self._rank = rank
        self._report = report
        self._stall_timeout_s = stall_timeout_s
        self._memory_limit_bytes = memory_limit_bytes
        self._patience_s = patience_s
        self._before: Look | None = None
        self._server_may_end = False

    def expect_end(self) -> None:
        """From now on the server may end. It may not stand still."""
        self._server_may_end = True

    def look(self) -> None:
        """Read both, judge what was read, report the worst."""
        readings = self._peers.read((SERVER_RANK, self._rank))
        memory = _memory_of({self._rank: readings[self._rank]}, self._memory_limit_bytes)
        now = Look(time.monotonic(), readings, memory)
        self._before, findings = health.judge(
            self._before, now, {}, self._stall_timeout_s, self._patience_s
        )
        for finding in findings:
            if finding.exit_code and not (finding.is_gone and self._server_may_end):
                self._report(finding, self._peers.facts(finding.rank))
                if finding.is_halted:  # or torchrun's SIGTERM would not reach it
                    self._peers[finding.rank].resume()
                return


class _Peers:
    """The processes of some ranks, and what was seen last of each while it lived."""

    def __init__(self, peers: Mapping[int, Peer]) -> None:
        self._peers = peers
        self._last_alive: dict[int, Reading] = {}

    def __getitem__(self, rank: int) -> Peer:
        return self._peers[rank]

    def read(self, ranks: Iterable[int]) -> dict[int, Reading]:
        return {rank: self.read_one(rank) for rank in sorted(ranks)}

    def read_one(self, rank: int) -> Reading:
        reading = self._peers[rank].read()
        if reading.is_alive:
            self._last_alive[rank] = reading
        return reading

    def facts(self, rank: int) -> dict[str, object]:
        """For the report, in plain values."""
        peer, alive = self._peers.get(rank), self._last_alive.get(rank)
        now = peer.read().facts() if peer else {}
        return {**now, "last_seen_alive": alive.facts() if alive else None}


def _memory_of(readings: Mapping[int, Reading], limit_bytes: int | None) -> Memory | None:
    """See Memory.of(); None also where the memory of the host cannot be read."""
    try:
        available = resources.available_memory_bytes()
    except OSError:
        return None
    shared = resources.shared_memory_bytes()
    return Memory.of(readings, shared=shared, available=available, limit_bytes=limit_bytes)
