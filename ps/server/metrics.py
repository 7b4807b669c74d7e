"""What was trained and how fast: counters, one progress line, and the numbers of the report.

Pure: the caller passes the time (seconds of a monotonic clock) and writes the lines.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ps.protocol import Evaluated, Train, Trained
from ps.server.orders import Plan

PROGRESS_INTERVAL_S = 1.0
MAX_NAMED = 10


@dataclass(slots=True)
class Evaluation:
    """Loss and accuracy over a test set; each sample counts once."""

    samples: int = 0
    loss_sum: float = 0.0
    correct: int = 0

    def add(self, result: Evaluated) -> None:
        self.samples += result.samples
        self.loss_sum += result.loss_sum
        self.correct += result.correct

    @property
    def loss(self) -> float:
        return self.loss_sum / self.samples

    @property
    def accuracy(self) -> float:
        return self.correct / self.samples


@dataclass(slots=True)
class EpochRecord:
    """One line of the report's history."""

    epoch: int
    updates: int
    train_loss: float
    test_loss: float
    test_accuracy: float


@dataclass(slots=True)
class _Since:
    """What came since the last progress line."""

    training_s: float = 0.0
    epoch: int = 0
    orders: int = 0
    samples: int = 0
    loss_sum: float = 0.0
    staleness: int = 0

    def add(self, epoch: int, samples: int, loss_sum: float, staleness: int) -> None:
        self.epoch = epoch
        self.orders += 1
        self.samples += samples
        self.loss_sum += loss_sum
        self.staleness += staleness


@dataclass(slots=True)
class _Trainer:
    """What one trainer did."""

    orders: int = 0
    samples: int = 0
    busy_s: float = 0.0
    """From dispatch to return, over all orders that became part of an update."""
    busy_since: float | None = None
    """When the order was dispatched that it holds."""
    last_busy_s: float = 0.0
    """Of the order that it returned last."""
    staleness: Counter[int] = field(default_factory=Counter)
    """How many of its gradients had which staleness."""

    def report(self) -> dict[str, object]:
        return {
            "orders": self.orders,
            "samples": self.samples,
            "order_s": self.busy_s / self.orders if self.orders else None,
            **_staleness(self.staleness),
        }


def _staleness(counts: Counter[int]) -> dict[str, object]:
    """Mean, 99th percentile (nearest rank) and maximum; None where there are none."""
    total = counts.total()
    if not total:
        return dict.fromkeys(("staleness_mean", "staleness_p99", "staleness_max"))
    return {
        "staleness_mean": sum(value * count for value, count in counts.items()) / total,
        "staleness_p99": _at_rank(counts, math.ceil(0.99 * total)),
        "staleness_max": max(counts),
    }


def _at_rank(counts: Counter[int], rank: int) -> int:
    """The value at that place, from 1, of all values sorted."""
    for value in sorted(counts):
        rank -= counts[value]
        if rank <= 0:
            return value
    raise AssertionError("rank is beyond the number of values")


class Metrics:
    """Counts what the server applied. The caller holds a lock around every call."""

    def __init__(self, plan: Plan, trainers: Iterable[int]) -> None:
        self._plan = plan
        self._trainers = {trainer: _Trainer() for trainer in trainers}
        self.total_updates = plan.total_updates
        """As many as there will be if no trainer leaves."""
        self.updates = 0
        self.samples_trained = 0
        self.orders_skipped = 0
        self.samples_skipped = 0
        self._skipped: list[dict[str, object]] = []
        self.training_s = 0.0
        """Time in which at least one training order was out: what the rate is over."""
        self.history: list[EpochRecord] = []
        self._orders_out = 0
        self._busy_since = 0.0
        self._losses: dict[int, tuple[float, int]] = {}
        self._evaluation = Evaluation()
        self._printed_at = float("-inf")
        self._since = _Since()

    def dispatched(self, trainer: int, now: float) -> None:
        """A training order was given to the trainer."""
        self._trainers[trainer].busy_since = now
        if self._orders_out == 0:
            self._busy_since = now
        self._orders_out += 1

    def returned(self, trainer: int, now: float) -> None:
        """A training order is no longer out, if one was: it was returned, or its trainer left."""
        record = self._trainers[trainer]
        if record.busy_since is None:
            return
        record.last_busy_s = now - record.busy_since
        record.busy_since = None
        self._orders_out -= 1
        if self._orders_out == 0:
            self.training_s += now - self._busy_since

    def updated(self) -> None:
        """The optimizer took a step."""
        self.updates += 1

    def trained(self, trainer: int, result: Trained, staleness: int) -> None:
        """A gradient became part of an update."""
        self.samples_trained += result.samples
        record = self._trainers[trainer]
        record.orders += 1
        record.busy_s += record.last_busy_s
        record.samples += result.samples
        record.staleness[staleness] += 1
        loss_sum = result.loss * result.samples
        before, samples = self._losses.get(result.epoch, (0.0, 0))
        self._losses[result.epoch] = (before + loss_sum, samples + result.samples)
        self._since.add(result.epoch, result.samples, loss_sum, staleness)

    def skipped(self, trainer: int, order: Train, version: int, cause: str) -> str | None:
        """A gradient was left out; gives a line for the first ones."""
        self.samples_skipped += len(order.indices)
        self.orders_skipped += 1
        if self.orders_skipped > MAX_NAMED:
            return None
        where = {"epoch": order.epoch + 1, "batch": order.batch, "trainer": trainer}
        self._skipped.append(
            {**where, "version": version, "samples": list(order.indices), "cause": cause}
        )
        last = "; further ones are only counted" if self.orders_skipped == MAX_NAMED else ""
        return (
            f"skipped epoch {order.epoch + 1}, batch {order.batch} of trainer rank {trainer}: "
            f"{cause}{last}"
        )

    def evaluated(self, result: Evaluated) -> str | None:
        """A slice was evaluated; gives a line when it completes the epoch's evaluation."""
        self._evaluation.add(result)
        if self._evaluation.samples < self._plan.num_test_samples:
            return None
        done, self._evaluation = self._evaluation, Evaluation()
        record = EpochRecord(
            epoch=result.epoch + 1,
            updates=self.updates,
            train_loss=self.train_loss(result.epoch),
            test_loss=done.loss,
            test_accuracy=done.accuracy,
        )
        self.history.append(record)
        return (
            f"epoch {record.epoch}/{self._plan.epochs} evaluated: test loss {done.loss:.4f}, "
            f"test accuracy {done.accuracy:.4f} ({done.correct} of {done.samples})"
        )

    def progress(self, now: float) -> str | None:
        """A line for people, at most one per PROGRESS_INTERVAL_S; it covers what came since."""
        since = self._since
        if now - self._printed_at < PROGRESS_INTERVAL_S or not since.orders:
            return None
        elapsed_s = self._training_s_until(now) - since.training_s
        rate = since.samples / elapsed_s if elapsed_s > 0 else 0.0
        self._printed_at = now
        self._since = _Since(training_s=self._training_s_until(now))
        return (
            f"epoch {since.epoch + 1}/{self._plan.epochs}  "
            f"updates {self.updates}/{self.total_updates}  "
            f"loss {since.loss_sum / since.samples:.4f}  {rate:.0f} samples/s  "
            f"staleness {since.staleness / since.orders:.2f}"
        )

    def train_loss(self, epoch: int) -> float:
        """Mean over the samples trained in that epoch, each with the weights of its step."""
        loss_sum, samples = self._losses.get(epoch, (0.0, 0))
        return loss_sum / samples if samples else float("nan")

    def report(self, now: float) -> dict[str, object]:
        """The numbers as report.json holds them; what does not exist yet is None."""
        training_s = self._training_s_until(now)
        last = self.history[-1] if self.history else None
        losses = [self.train_loss(epoch) for epoch in sorted(self._losses)]
        return {
            "updates": self.updates,
            "samples_trained": self.samples_trained,
            "samples_per_s": self.samples_trained / training_s if training_s > 0 else None,
            "orders_skipped": self.orders_skipped,
            "samples_skipped": self.samples_skipped,
            "skipped": self._skipped,
            "train_loss": losses[-1] if losses else None,
            "test_loss": last.test_loss if last else None,
            "test_accuracy": last.test_accuracy if last else None,
            **_staleness(self.staleness),
            "trainers": {str(t): record.report() for t, record in self._trainers.items()},
            "history": [asdict(record) for record in self.history],
        }

    @property
    def staleness(self) -> Counter[int]:
        """How many gradients had which staleness."""
        return sum((record.staleness for record in self._trainers.values()), Counter())

    def state(self, now: float) -> dict[str, object]:
        """The numbers so far, in plain values."""
        return {
            "updates": self.updates,
            "samples_trained": self.samples_trained,
            "orders_skipped": self.orders_skipped,
            "samples_skipped": self.samples_skipped,
            "skipped": list(self._skipped),
            "training_s": self._training_s_until(now),
            "history": [asdict(record) for record in self.history],
            "losses": {epoch: list(loss) for epoch, loss in self._losses.items()},
            "evaluation": asdict(self._evaluation),
            "trainers": {
                trainer: {
                    "orders": record.orders,
                    "samples": record.samples,
                    "busy_s": record.busy_s,
                    "staleness": dict(record.staleness),
                }
                for trainer, record in self._trainers.items()
            },
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on counting from state(). Before the first order."""
        self.updates = state["updates"]
        self.samples_trained = state["samples_trained"]
        self.orders_skipped = state["orders_skipped"]
        self.samples_skipped = state["samples_skipped"]
        self._skipped = list(state["skipped"])
        self.training_s = state["training_s"]
        self.history = [EpochRecord(**record) for record in state["history"]]
        self._losses = {epoch: (loss, count) for epoch, (loss, count) in state["losses"].items()}
        self._evaluation = Evaluation(**state["evaluation"])
        for trainer, record in state["trainers"].items():
            counts = Counter(record["staleness"])
            self._trainers[trainer] = _Trainer(**record | {"staleness": counts})
        self._since = _Since(training_s=self.training_s)

    def _training_s_until(self, now: float) -> float:
        return self.training_s + (now - self._busy_since if self._orders_out else 0.0)
