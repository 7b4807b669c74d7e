"""All that training goes on from: weights, list of orders, progress. What a checkpoint holds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ps.model.store import Store
from ps.server.metrics import Metrics
from ps.server.orders import Orders, Plan
from ps.settings.errors import CheckpointUnusable

Content = Mapping[str, Any]
"""Of a checkpoint: tensors and plain values, in the parts `store`, `orders`, `metrics`, `job`."""
RestoreNewest = Callable[[Callable[[Content], None]], "Path | None"]
"""Calls the function it is given with the newest usable content and tells where that was, if there
is any."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A job as it was at one moment."""

    version: int
    """The updates that its weights have had."""
    mark: object
    """Equal to the mark of an earlier snapshot if nothing was done since."""
    content: Content


class TrainingState:
    """Made by begin() alone, so that whatever is built on it sees the weights to go on from."""

    def __init__(
        self,
        plan: Plan,
        store: Store,
        orders: Orders,
        metrics: Metrics,
        clock: Callable[[], float],
        resumed_from: Path | None,
    ) -> None:
        self.plan = plan
        self.store = store  # under lock, as all that follow
        self.orders = orders
        self.metrics = metrics
        self.lock = threading.Lock()
        self.resumed_from = resumed_from
        """The checkpoint that the job goes on from."""
        self._clock = clock

    def snapshot(self, *, copy: bool = True) -> Snapshot:
        """What was applied is in it, and nothing else. Takes the lock.

        Training stands still while it is copied. Without a copy its tensors change with the next
        update: for when there will be none.

        Raises:
            TrainingFailed: an update was broken off, and the weights are of no version.
        """
        with self.lock:
            orders = self.orders.state()
            content = {
                "store": self.store.state(copy=copy),
                "orders": orders,
                "metrics": self.metrics.state(self._clock()),
                "job": _identity(self.plan),
            }
            version = self.store.version
        return Snapshot(version, (version, orders), content)


def begin(
    plan: Plan,
    store: Store,
    orders: Orders,
    metrics: Metrics,
    *,
    clock: Callable[[], float],
    restore_newest: RestoreNewest | None = None,
) -> TrainingState:
    """The state that training starts from: as the parts are, or as restore_newest has it.

    clock gives seconds of the monotonic clock.

    Raises:
        CheckpointUnusable, ConfigError: there is something to go on from, and it cannot be used.
    """

    def restore(content: Content) -> None:
        if difference := _difference(_identity(plan), content["job"]):
            raise CheckpointUnusable(f"it is of another job: {difference}")
        store.restore(content["store"])
        orders.restore(content["orders"])
        metrics.restore(content["metrics"])
        metrics.total_updates = store.version + orders.updates_left

    resumed_from = restore_newest(restore) if restore_newest else None
    return TrainingState(plan, store, orders, metrics, clock, resumed_from)


def _identity(plan: Plan) -> dict[str, Any]:
    """What two jobs must have in common for one to go on from the other's checkpoint."""
    numbers = asdict(plan)
    return {name: numbers[name] for name in numbers.keys() - {"epochs", "batches_per_update"}}


def _difference(own: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    for name, value in sorted(own.items()):
        if other.get(name) != value:
            return f"{name} is {other.get(name)} there and {value} here"
    return None
