"""Which results make the next update, and when it is due. Pure: no torch, no clock, no lock."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Generic, TypeVar

from ps.server.pacing import Pacing

Item = TypeVar("Item")


class Rounds(Generic[Item]):
    """Keeps what trainers hand in until an update is made from it.

    Without rounds (any max_lag but 0) that is at once. The caller holds a lock around every call.
    """

    def __init__(self, trainers: Iterable[int], max_lag: int | None) -> None:
        self._pacing = Pacing(trainers, max_lag)
        self._kept: dict[int, Item] = {}

    def ready(self, waiting: Collection[int]) -> list[int]:
        """See Pacing.ready()."""
        return self._pacing.ready(waiting)

    def start(self, trainer: int) -> None:
        """The trainer was given a training order."""
        self._pacing.start(trainer)

    def finish(self, trainer: int, item: Item | None) -> None:
        """It handed it in; None is left out of the update."""
        self._pacing.finish(trainer)
        if item is not None:
            self._kept[trainer] = item

    def leave(self, trainer: int) -> bool:
        """Forget the trainer and what it handed in; tells whether that was kept."""
        self._pacing.leave(trainer)
        return self._kept.pop(trainer, None) is not None

    def take_due(self) -> list[tuple[int, Item]]:
        """What the next update is to be made from, by trainer; empty if none is due."""
        if not self._kept or self._pacing.round_is_open:
            return []
        due, self._kept = sorted(self._kept.items(), key=lambda pair: pair[0]), {}
        return due
