"""What was trained and how fast: counters, one progress line, and the numbers of the report.

Pure: the caller passes the time (seconds of a monotonic clock) and writes the lines.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ps.orders import Plan
from ps.protocol import Evaluated, Trained

PROGRESS_INTERVAL_S = 1.0


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
    updates: int = 0
    samples: int = 0
    loss_sum: float = 0.0
    staleness: int = 0

    def add(self, epoch: int, samples: int, loss_sum: float, staleness: int) -> None:
        self.epoch = epoch
        self.updates += 1
        self.samples += samples
        self.loss_sum += loss_sum
        self.staleness += staleness


class Metrics:
    """Counts what the server applied. The caller holds a lock around every call."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.updates = 0
        self.samples_trained = 0
        self.training_s = 0.0
        """Time in which at least one training order was out: what the rate is over."""
        self.staleness_sum = 0
        self.staleness_max = 0
        self.history: list[EpochRecord] = []
        self._orders_out = 0
        self._busy_since = 0.0
        self._losses: dict[int, tuple[float, int]] = {}
        self._evaluation = Evaluation()
        self._printed_at = float("-inf")
        self._since = _Since()

    def handed_out(self, now: float) -> None:
        """A training order went out."""
        if self._orders_out == 0:
            self._busy_since = now
        self._orders_out += 1

    def taken_back(self, now: float) -> None:
        """A training order is no longer out: its gradient was applied, or its trainer left."""
        self._orders_out -= 1
        if self._orders_out == 0:
            self.training_s += now - self._busy_since

    def trained(self, result: Trained, staleness: int) -> None:
        """A gradient was applied."""
        self.updates += 1
        self.samples_trained += result.samples
        self.staleness_sum += staleness
        self.staleness_max = max(self.staleness_max, staleness)
        loss_sum = result.loss * result.samples
        before, samples = self._losses.get(result.epoch, (0.0, 0))
        self._losses[result.epoch] = (before + loss_sum, samples + result.samples)
        self._since.add(result.epoch, result.samples, loss_sum, staleness)

    def evaluated(self, result: Evaluated) -> str | None:
        """A slice was evaluated; gives a line when it completes the epoch's evaluation."""
        self._evaluation.add(result)
        if self._evaluation.samples < self._plan.num_test_samples:
            return None
        done, self._evaluation = self._evaluation, Evaluation()
        record = EpochRecord(
            epoch=result.epoch + 1,
            updates=(result.epoch + 1) * self._plan.updates_per_epoch,
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
        if now - self._printed_at < PROGRESS_INTERVAL_S or not since.updates:
            return None
        elapsed_s = self._training_s_until(now) - since.training_s
        rate = since.samples / elapsed_s if elapsed_s > 0 else 0.0
        self._printed_at = now
        self._since = _Since(training_s=self._training_s_until(now))
        return (
            f"epoch {since.epoch + 1}/{self._plan.epochs}  "
            f"updates {self.updates}/{self._plan.total_updates}  "
            f"loss {since.loss_sum / since.samples:.4f}  {rate:.0f} samples/s  "
            f"staleness {since.staleness / since.updates:.2f}"
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
            "train_loss": losses[-1] if losses else None,
            "test_loss": last.test_loss if last else None,
            "test_accuracy": last.test_accuracy if last else None,
            "staleness_mean": self.staleness_sum / self.updates if self.updates else None,
            "staleness_max": self.staleness_max if self.updates else None,
            "history": [asdict(record) for record in self.history],
        }

    def _training_s_until(self, now: float) -> float:
        return self.training_s + (now - self._busy_since if self._orders_out else 0.0)
