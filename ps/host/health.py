"""What is wrong with the processes of a job. Pure: judges readings, marks and the time.

So every case can be tried without a process being in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from ps.host.processes import STOPPED, UNINTERRUPTIBLE, Reading
from ps.settings.errors import Orphaned, OutOfMemory, PeerLost, Stalled
from ps.settings.topology import SERVER_RANK, role_of

PATIENCE_S = 0.5
"""How much later another rank may be asked to end: torchrun and terminals ask all of them."""
WARN_FRACTION = 0.10
CALM_FRACTION = 0.15
STOP_FRACTION = 0.03
BUSY_CORES = 0.1


class Activity(Enum):
    """Whose turn it is, between the server and one trainer."""

    WORKING = "works on an order"
    SERVED = "is served by the server"
    WAITING = "waits for an order"


@dataclass(frozen=True, slots=True)
class Mark:
    """The newest sign of progress of a trainer: what it does, and since when."""

    activity: Activity
    since: float
    """Seconds of the monotonic clock."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What some ranks hold and what they may still take, in bytes."""

    private: Mapping[int, int]
    """Of each rank that is counted. No other rank can be named for it."""
    free: int
    shared: int = 0
    """What all of them share, counted once."""

    @classmethod
    def of(
        cls,
        readings: Mapping[int, Reading],
        *,
        shared: int,
        available: int,
        limit_bytes: int | None,
    ) -> Memory | None:
        """None if the memory of no rank could be read.

        available is what the host and its cgroup have left, limit_bytes is --memory-limit.
        """
        private = {
            rank: reading.private_bytes
            for rank, reading in readings.items()
            if reading.private_bytes is not None
        }
        if not private:
            return None
        used = shared + sum(private.values())
        free = available if limit_bytes is None else min(available, limit_bytes - used)
        return cls(private, free, shared)

    @property
    def used(self) -> int:
        return self.shared + sum(self.private.values())

    @property
    def limit(self) -> int:
        return self.used + self.free


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong with a rank, and ends the job; or a warning, with exit_code 0."""

    rank: int
    text: str
    exit_code: int = 0
    is_gone: bool = False
    is_quiet: bool = False
    """It ended as if all were well."""
    is_halted: bool = False
    """It cannot run."""
    wants_stacks: bool = False

    @property
    def cause(self) -> str:
        """In one line, with the rank."""
        who = f"{role_of(self.rank)} rank {self.rank}"
        return f"lost {who}: {self.text}" if self.is_gone else f"{who}: {self.text}"

    @property
    def is_seen_by_torchrun(self) -> bool:
        """Whether torchrun sees that the rank has failed, and soon stops all others."""
        return self.is_gone and not self.is_quiet


@dataclass(frozen=True, slots=True)
class FirstSight:
    """When a mark was first seen, and the CPU time then of the rank whose turn it is."""

    mark: Mark
    at: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Look:
    """One look at all ranks, and what the next one needs to know of this."""

    at: float
    readings: Mapping[int, Reading]
    memory: Memory | None = None
    gone_since: Mapping[int, float] = field(default_factory=dict)
    """Ranks that have ended, and when that was first seen."""
    halted_since: Mapping[int, float] = field(default_factory=dict)
    """Ranks that cannot run, and when that was first seen."""
    first_sights: Mapping[int, FirstSight] = field(default_factory=dict)
    """Of the newest mark of each rank."""
    warned: bool = False
    """Whether memory is short, and the job was warned of it."""


def judge(
    before: Look | None,
    now: Look,
    marks: Mapping[int, Mark],
    stall_timeout_s: float | None,
    patience_s: float = PATIENCE_S,
) -> tuple[Look, Sequence[Finding]]:
    """The look to keep for the next call, and what is wrong, the worst first.

    Every look finds again what is still wrong, except for the warning of short memory.
    """
    gone = [rank for rank, reading in now.readings.items() if not reading.is_alive]
    halted = [rank for rank, reading in now.readings.items() if _is_halted(reading)]
    look = replace(
        now,
        gone_since=_since(before.gone_since if before else {}, gone, now.at),
        halted_since=_since(before.halted_since if before else {}, halted, now.at),
        first_sights=_first_sights(before, now, marks),
        warned=_is_warned(before, now.memory),
    )
    findings = [
        *_gone(look, patience_s),
        *_halted(look, stall_timeout_s),
        *_stalled(look, marks, stall_timeout_s),
        *_short_of_memory(before, look),
    ]
    return look, findings


def cause_of(
    rank: int,
    reading: Reading,
    known_s: float,
    *,
    asked_too: bool = False,
    patience_s: float = PATIENCE_S,
) -> Finding | None:
    """The loss of that rank, if it is why the job ends; None if not, or if that is not known yet.

    A rank that has ended by itself is a cause at once. One that was asked to end is none where
    this process is asked too, now (asked_too) or in a moment: then what asked them is the cause.
    known_s is for how long its end, or the end of its connection, has been known.
    """
    if reading.is_alive:
        return None
    if reading.was_asked_to_end and (asked_too or known_s < patience_s):
        return None
    return loss_of(rank, reading)


def loss_of(rank: int, reading: Reading) -> Finding:
    """The finding for a process that has ended. The job exits with its code if that is 6 or 9."""
    own = (OutOfMemory.exit_code, Orphaned.exit_code)
    code = reading.exit_code if reading.exit_code in own else PeerLost.exit_code
    text = reading.ended
    if rank != SERVER_RANK and reading.exit_code == PeerLost.exit_code:
        text += ", as it got no answer from the server"
    return Finding(rank, text, code, is_gone=True, is_quiet=reading.exit_code == 0)


def standstill(
    rank: int, before: Look | None, at: float, stall_timeout_s: float | None
) -> Finding | None:
    """Whether rank, which looks, could not do so for long: then the others have left for that."""
    if before is None or stall_timeout_s is None or at - before.at < stall_timeout_s:
        return None
    return Finding(rank, f"it stood still for {at - before.at:.0f} s", Stalled.exit_code)


def _since(earlier: Mapping[int, float], ranks: Iterable[int], at: float) -> dict[int, float]:
    return {rank: earlier.get(rank, at) for rank in ranks}


def _is_halted(reading: Reading) -> bool:
    return reading.state in STOPPED or reading.state == UNINTERRUPTIBLE


def _first_sights(
    before: Look | None, now: Look, marks: Mapping[int, Mark]
) -> dict[int, FirstSight]:
    earlier = before.first_sights if before else {}
    sights = {}
    for rank, mark in marks.items():
        reading, sight = now.readings.get(_whose_turn(rank, mark)), earlier.get(rank)
        if sight is not None and sight.mark == mark:
            sights[rank] = sight
        elif reading is not None and reading.cpu_s is not None:
            sights[rank] = FirstSight(mark, now.at, reading.cpu_s)
    return sights


def _whose_turn(rank: int, mark: Mark) -> int:
    return SERVER_RANK if mark.activity is Activity.SERVED else rank


def _gone(look: Look, patience_s: float) -> list[Finding]:
    """Those first that were not asked to end."""
    ranks = sorted(look.gone_since, key=lambda rank: look.readings[rank].was_asked_to_end)
    causes = [
        cause_of(rank, look.readings[rank], look.at - look.gone_since[rank], patience_s=patience_s)
        for rank in ranks
    ]
    return [cause for cause in causes if cause is not None]


def _halted(look: Look, timeout_s: float | None) -> list[Finding]:
    findings = []
    for rank, since in look.halted_since.items():
        if timeout_s is not None and look.at - since >= timeout_s:
            state = STOPPED.get(look.readings[rank].state, "in uninterruptible sleep")
            text = f"it has been {state} for {look.at - since:.0f} s"
            findings.append(Finding(rank, text, Stalled.exit_code, is_halted=True))
    return findings


def _stalled(look: Look, marks: Mapping[int, Mark], timeout_s: float | None) -> list[Finding]:
    findings = []
    for rank, mark in marks.items():
        for_s = look.at - mark.since
        is_expected_to_move = mark.activity is not Activity.WAITING and (
            rank not in look.halted_since
        )
        if timeout_s is None or for_s < timeout_s or not is_expected_to_move:
            continue
        culprit = _whose_turn(rank, mark)
        who = "it" if culprit == rank else f"a call of trainer rank {rank}"
        text = f"{who} has made no progress for {for_s:.0f} s (--stall-timeout); "
        text += _cpu_use(look, rank, culprit)
        findings.append(Finding(culprit, text, Stalled.exit_code, wants_stacks=True))
    return findings


def _cpu_use(look: Look, rank: int, culprit: int) -> str:
    sight, reading = look.first_sights.get(rank), look.readings.get(culprit)
    if sight is None or reading is None or reading.cpu_s is None or look.at <= sight.at:
        return "its use of the CPU is not known"
    cores = (reading.cpu_s - sight.cpu_s) / (look.at - sight.at)
    if cores < BUSY_CORES:
        return f"it used {cores:.2f} of a core meanwhile, so it waits for something: a deadlock?"
    return f"it used {cores:.2f} of a core meanwhile: a slow step, or a loop without end?"


def _short_of_memory(before: Look | None, look: Look) -> list[Finding]:
    """Ends the job while there is still room for twice as much as came since the last look."""
    memory = look.memory
    if memory is None or memory.free >= WARN_FRACTION * memory.limit:
        return []
    earlier = before.memory if before else None
    rank = _largest(earlier, memory)
    text = (
        f"memory is short: {_mib(memory.used)} of {_mib(memory.limit)} MiB are in use, "
        f"{_mib(memory.private[rank])} MiB of them by this rank alone"
    )
    if memory.free < max(STOP_FRACTION * memory.limit, 2 * _growth(earlier, memory)):
        return [Finding(rank, text, OutOfMemory.exit_code)]
    return [] if before and before.warned else [Finding(rank, text)]


def _growth(before: Memory | None, now: Memory) -> int:
    """Since the last look, if that counted the same ranks."""
    if before is None or before.private.keys() != now.private.keys():
        return 0
    return max(0, now.used - before.used)


def _is_warned(before: Look | None, memory: Memory | None) -> bool:
    was_warned = before is not None and before.warned
    if memory is None:
        return was_warned
    limit = CALM_FRACTION if was_warned else WARN_FRACTION
    return memory.free < limit * memory.limit


def _largest(before: Memory | None, now: Memory) -> int:
    """Who grew most since the last look, or holds most."""

    def size(rank: int) -> tuple[int, int]:
        held = now.private[rank]
        grew = held - before.private.get(rank, held) if before else 0
        return (max(0, grew) >> 22, held)  # growth below 4 MiB is no sign of anything

    return max(now.private, key=size)


def _mib(count: int) -> int:
    return count >> 20
