"""What is wrong with the processes of a job. Pure: judges readings, progress and the time.

So every case can be tried without a process being in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from ps.host.processes import STOPPED, UNINTERRUPTIBLE, Reading
from ps.settings.errors import Orphaned, OutOfMemory, PeerLost, Stalled
from ps.settings.topology import SERVER_RANK, role_of

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
    activity: Activity
    since: float
    """Seconds of the monotonic clock."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Of all ranks together and of what they may use, in bytes."""

    used: int
    free: int

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


@dataclass(frozen=True, slots=True)
class Look:
    """One look at all ranks, and what the next one needs to know of this."""

    at: float
    readings: Mapping[int, Reading]
    memory: Memory | None = None
    halted_since: Mapping[int, float] = field(default_factory=dict)
    """Ranks that cannot run, and when that was first seen."""
    marks: Mapping[int, tuple[Mark, float, float]] = field(default_factory=dict)
    """By rank: progress, when it was first seen, and the CPU time then of whose turn it is."""
    warned: bool = False
    """Whether memory is short, and that was said."""


def judge(
    before: Look | None,
    now: Look,
    progress: Mapping[int, Mark],
    stall_timeout_s: float | None,
) -> tuple[Look, Sequence[Finding]]:
    """The look to keep, and what is wrong, the worst first. Pure."""
    look = replace(
        now, halted_since=_halted_since(before, now), marks=_marks(before, now, progress)
    )
    findings = [*_gone(look), *_stalled(look, progress, stall_timeout_s)]
    pressure = _short_of_memory(before, look)
    if pressure is not None:
        findings.append(pressure)
    return replace(look, warned=_is_warned(before, look)), findings


def _halted_since(before: Look | None, now: Look) -> dict[int, float]:
    earlier = before.halted_since if before else {}
    return {
        rank: earlier.get(rank, now.at)
        for rank, reading in now.readings.items()
        if reading.state in STOPPED or reading.state == UNINTERRUPTIBLE
    }


def _marks(
    before: Look | None, now: Look, progress: Mapping[int, Mark]
) -> dict[int, tuple[Mark, float, float]]:
    earlier = before.marks if before else {}
    marks = {}
    for rank, made in progress.items():
        reading = now.readings.get(_whose_turn(rank, made))
        cpu_s = reading.cpu_s if reading else None
        mark = earlier.get(rank)
        if mark is not None and mark[0] == made:
            marks[rank] = mark
        elif cpu_s is not None:
            marks[rank] = (made, now.at, cpu_s)
    return marks


def _whose_turn(rank: int, made: Mark) -> int:
    return SERVER_RANK if made.activity is Activity.SERVED else rank


def _gone(look: Look) -> list[Finding]:
    """Those first that were not told to end."""
    gone = [(rank, r) for rank, r in look.readings.items() if not r.is_alive]
    gone.sort(key=lambda item: item[1].was_asked_to_end)
    return [loss_of(rank, reading) for rank, reading in gone]


def loss_of(rank: int, reading: Reading) -> Finding:
    """That this process has ended. The exit code is its own where that tells more."""
    told = (OutOfMemory.exit_code, Orphaned.exit_code)
    code = reading.exit_code if reading.exit_code in told else PeerLost.exit_code
    text = reading.ended
    if rank != SERVER_RANK and reading.exit_code == PeerLost.exit_code:
        text += ", as it got no answer from the server"
    return Finding(rank, text, code, is_gone=True, is_quiet=reading.exit_code == 0)


def _stalled(look: Look, progress: Mapping[int, Mark], timeout_s: float | None) -> list[Finding]:
    if timeout_s is None:
        return []
    findings = []
    for rank, since in look.halted_since.items():
        if look.at - since >= timeout_s:
            state = STOPPED.get(look.readings[rank].state, "in uninterruptible sleep")
            text = f"it has been {state} for {look.at - since:.0f} s"
            findings.append(Finding(rank, text, Stalled.exit_code, is_halted=True))
    for rank, made in progress.items():
        for_s = look.at - made.since
        if for_s < timeout_s or made.activity is Activity.WAITING or rank in look.halted_since:
            continue
        culprit = _whose_turn(rank, made)
        who = "it" if culprit == rank else f"a call of trainer rank {rank}"
        text = f"{who} has made no progress for {for_s:.0f} s (--stall-timeout); "
        text += _cpu_use(look, rank, culprit)
        findings.append(Finding(culprit, text, Stalled.exit_code, wants_stacks=True))
    return findings


def _cpu_use(look: Look, rank: int, culprit: int) -> str:
    mark, reading = look.marks.get(rank), look.readings.get(culprit)
    if mark is None or reading is None or reading.cpu_s is None or look.at <= mark[1]:
        return "its use of the CPU is not known"
    cores = (reading.cpu_s - mark[2]) / (look.at - mark[1])
    if cores < BUSY_CORES:
        return f"it used {cores:.2f} of a core meanwhile, so it waits for something: a deadlock?"
    return f"it used {cores:.2f} of a core meanwhile: a slow step, or a loop without end?"


def _short_of_memory(before: Look | None, look: Look) -> Finding | None:
    """Stops while there is still room for twice as much as came since the last look."""
    memory = look.memory
    if memory is None:
        return None
    if memory.free >= WARN_FRACTION * memory.limit:
        return None
    rank = _largest(before, look)
    private = look.readings[rank].private_bytes or 0
    text = (
        f"the job uses {_mib(memory.used)} of {_mib(memory.limit)} MiB, "
        f"{_mib(private)} of them here"
    )
    if memory.free < max(STOP_FRACTION * memory.limit, 2 * _growth(before, look)):
        return Finding(rank, text, OutOfMemory.exit_code)
    return None if before and before.warned else Finding(rank, text)


def _growth(before: Look | None, look: Look) -> int:
    """Since the last look, if that saw the memory of the same ranks."""
    if before is None or before.memory is None or look.memory is None:
        return 0
    seen = [{rank for rank, r in x.readings.items() if r.private_bytes} for x in (before, look)]
    return max(0, look.memory.used - before.memory.used) if seen[0] == seen[1] else 0


def _is_warned(before: Look | None, look: Look) -> bool:
    if look.memory is None:
        return bool(before and before.warned)
    limit = CALM_FRACTION if before and before.warned else WARN_FRACTION
    return look.memory.free < limit * look.memory.limit


def _largest(before: Look | None, look: Look) -> int:
    """Who grew most since the last look, or holds most."""

    def size(rank: int) -> tuple[int, int]:
        held = look.readings[rank].private_bytes or 0
        earlier = before.readings.get(rank) if before else None
        grew = held - earlier.private_bytes if earlier and earlier.private_bytes else 0
        return (max(0, grew) >> 22, held)  # growth below 4 MiB is no sign of anything

    return max(look.readings, key=size)


def _mib(count: int) -> int:
    return count >> 20
