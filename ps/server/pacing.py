"""Who may start another training order. Pure: no torch, no clock, no lock.

Stale synchronous parallel (Ho et al., "More Effective Distributed ML via a Stale Synchronous
Parallel Parameter Server", NIPS 2013), with orders as its clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable


class Pacing:
    """The caller holds a lock around every call.

    max_lag is the lead, in finished orders, that a trainer may have over the slowest one when it
    starts another: None for any, and 0 for rounds, in which all start together.
    """

    def __init__(self, trainers: Iterable[int], max_lag: int | None) -> None:
        self._finished = dict.fromkeys(trainers, 0)
        self._working: set[int] = set()
        self._max_lag = max_lag

    @property
    def round_is_open(self) -> bool:
        """Whether gradients are kept until all of a round are there."""
        return self._max_lag == 0 and bool(self._working)

    def ready(self, waiting: Collection[int]) -> list[int]:
        """Those of the waiting trainers that may start, in the order in which they are served.

        Every trainer counts, from the start until it leaves. One that waits because there are no
        orders holds nobody up: when there are some, it is served before all that are ahead of it.
        """
        if self._max_lag is None:
            return list(waiting)
        if self._max_lag == 0:
            return sorted(waiting) if len(waiting) == len(self._finished) else []
        limit = min(self._finished.values(), default=0) + self._max_lag
        able = [trainer for trainer in waiting if self._finished[trainer] <= limit]
        return sorted(able, key=self._finished.__getitem__)

    def start(self, trainer: int) -> None:
        """The trainer was given a training order."""
        self._working.add(trainer)

    def finish(self, trainer: int) -> None:
        """It handed it in."""
        self._working.remove(trainer)
        self._finished[trainer] += 1

    def leave(self, trainer: int) -> None:
        """Forget a trainer, so that it holds nobody up."""
        self._working.discard(trainer)
        self._finished.pop(trainer, None)


def staleness_bound(max_lag: int | None, num_trainers: int) -> int | None:
    """The largest staleness that can occur, in updates; None if there is no limit.

    While a trainer works on its order number a, every other one may finish those up to a + K
    that it had not finished before, which was a - 1 - K at least.
    """
    if max_lag is None:
        return None
    return 0 if max_lag == 0 else (num_trainers - 1) * (2 * max_lag + 1)
