"""Who takes part in a job, whose turn it is, and what ended it. Pure: no torch, no clock, no lock.

The caller holds a lock around every call but those that say otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from ps.host.health import Activity, Mark
from ps.settings.topology import SERVER_RANK


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the job ended. cause is None when it is done."""

    status: Literal["done", "failed", "interrupted"]
    exit_code: int = 0
    cause: str | None = None
    rank: int = SERVER_RANK
    """Who holds the cause."""
    rank_ends: bool = False
    """Whether that rank fails by itself, so that torchrun names it if this one waits."""


Reply = TypeVar("Reply")


@dataclass(slots=True)
class _Member(Generic[Reply]):
    """All that is known of one trainer."""

    is_present: bool = True
    """It has not left."""
    is_abandoned: bool = False
    """It is not waited for."""
    mark: Mark | None = None
    """Written by its own calls alone, without the lock."""
    waiting_since: float = 0.0
    reply: Reply | None = None
    """Where the next order is to go, if it waits for one."""


class Roll(Generic[Reply]):
    def __init__(self, trainers: Iterable[int]) -> None:
        self._members: dict[int, _Member[Reply]] = {trainer: _Member() for trainer in trainers}
        self.outcome: Outcome | None = None
        self.situation: Mapping[str, object] = {}
        """What the rank with the cause was doing when the job ended."""
        self.consequences: list[str] = []
        """What went wrong after that."""
        self._is_anybody_abandoned = False

    @property
    def present(self) -> list[int]:
        """Those that have not left."""
        return [trainer for trainer, member in self._members.items() if member.is_present]

    @property
    def all_left(self) -> bool:
        """Whether all have said goodbye, and no rank was lost."""
        return not self.present and not self._is_anybody_abandoned

    @property
    def is_over(self) -> bool:
        """Whether nobody is waited for any more."""
        return not any(m.is_present and not m.is_abandoned for m in self._members.values())

    def is_present(self, trainer: int) -> bool:
        """Needs no lock. False for a rank that is no trainer."""
        member = self._members.get(trainer)
        return member is not None and member.is_present

    def leave(self, trainer: int) -> None:
        """It gets no reply any more."""
        member = self._members[trainer]
        member.is_present = False
        member.reply = None

    def abandon(self, ranks: Iterable[int]) -> None:
        """Wait for these no more. The server's own rank may be among them."""
        for rank in ranks:
            self._is_anybody_abandoned = True
            if rank in self._members:
                self._members[rank].is_abandoned = True

    def mark(self, trainer: int, activity: Activity, now: float) -> None:
        """Whose turn it is from now on. Needs no lock."""
        self._members[trainer].mark = Mark(activity, now)

    def marks(self) -> dict[int, Mark]:
        """Of those present. Needs no lock."""
        members = self._members.items()
        return {t: m.mark for t, m in members if m.is_present and m.mark is not None}

    def wait(self, trainer: int, reply: Reply, now: float) -> None:
        """The trainer waits for an order, which is to go to `reply`."""
        member = self._members[trainer]
        member.reply, member.waiting_since = reply, now

    def waiting(self) -> list[int]:
        """Those that wait, in the order in which they came."""
        waiting = [(m.waiting_since, t) for t, m in self._members.items() if m.reply is not None]
        return [trainer for _, trainer in sorted(waiting)]

    def waiting_since_before(self, moment: float) -> list[int]:
        return [trainer for trainer in self.waiting() if self._since(trainer) < moment]

    def _since(self, trainer: int) -> float:
        return self._members[trainer].waiting_since

    def take_reply(self, trainer: int) -> Reply:
        """Where to send its order: it waits no more."""
        member = self._members[trainer]
        reply, member.reply = member.reply, None
        assert reply is not None, f"trainer {trainer} does not wait"
        return reply

    def circumstances(self) -> dict[str, object]:
        """Of the end, in plain values: what the rank with the cause was doing, and what went wrong
        later. Needs no lock."""
        return {**self.situation, "consequences": list(self.consequences)}

    def end(self, outcome: Outcome, situation: Mapping[str, object]) -> None:
        """The first outcome is the cause; what follows from it changes nothing."""
        if self.outcome is None:
            self.outcome, self.situation = outcome, situation
        elif outcome.cause not in (None, self.outcome.cause, *self.consequences):
            assert outcome.cause is not None
            self.consequences.append(outcome.cause)
