"""What becomes of the results of trainers, and which order each gets next."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from ps.model.gradients import check_gradients, mean_gradients
from ps.protocol import Assignment, Evaluate, Evaluated, Order, Train, Trained
from ps.server.compute import Compute, Contribution
from ps.server.rounds import Rounds
from ps.server.state import TrainingState
from ps.settings.errors import TrainingFailed

Line = tuple[int, str]
"""A line for the log, with its level: to be written without the lock, as writing may block."""


class Training:
    """The algorithm. The caller holds state.lock around every call but contribution().

    Nothing here waits, and nothing knows of calls and connections.
    """

    def __init__(
        self,
        state: TrainingState,
        compute: Compute,
        trainers: Sequence[int],
        *,
        max_lag: int | None = None,
        prefetch: int = 0,
        skip_nonfinite: bool = False,
        after_update: Callable[[int], None] = lambda version: None,
    ) -> None:
        """prefetch is how many orders a trainer is told in advance, for loading their data.

        skip_nonfinite: what is not finite leaves its order out, instead of ending the job.
        after_update is called with each new version, under the lock.
        """
        self.state = state
        self.compute = compute
        self._orders, self._metrics, self._store = state.orders, state.metrics, state.store
        self._rounds: Rounds[tuple[Trained, Contribution]] = Rounds(trainers, max_lag)
        self._prefetch = prefetch
        self._skip_nonfinite = skip_nonfinite
        self._after_update = after_update
        self._evaluated = self._orders.evaluating
        """The newest epoch whose evaluation was opened."""

    @property
    def is_finished(self) -> bool:
        """Whether all that was planned is done."""
        return self._orders.finished

    def held_by(self, trainer: int) -> Order | None:
        """The order that the trainer holds."""
        return self._orders.held_by(trainer)

    def contribution(self, trainer: int, result: Trained) -> Contribution | TrainingFailed:
        """What a result gives to an update; an error where it must not reach the weights.

        Needs no lock: what is left of backward runs here, in the caller's thread, beside that of
        other trainers.
        """
        contribution = self.compute.contribution(trainer, result)
        try:
            if not math.isfinite(result.loss):
                raise TrainingFailed(f"the loss is {result.loss}")
            check_gradients(contribution.gradients, self._store.names, contribution.blocks)
        except TrainingFailed as error:
            return error
        return contribution

    def take_evaluated(self, trainer: int, result: Evaluated) -> list[Line]:
        self._orders.finish(trainer, result)
        line = self._metrics.evaluated(result)
        return [(logging.INFO, line)] if line else []

    def take_trained(
        self,
        trainer: int,
        result: Trained,
        contribution: Contribution | TrainingFailed,
        now: float,
    ) -> list[Line]:
        """Take the finished order in, and make an update if one is due.

        Raises:
            TrainingFailed: the job must not go on from this; nothing was applied.
        """
        self._orders.check(trainer, result)
        if isinstance(contribution, TrainingFailed) and not self._skip_nonfinite:
            raise TrainingFailed(
                f"trainer rank {trainer}, epoch {result.epoch + 1}, batch {result.batch}: "
                f"{contribution}",
                rank=trainer,
            )
        self._metrics.returned(trainer, now)
        lines: list[Line] = []
        if isinstance(contribution, TrainingFailed):
            self._rounds.finish(trainer, None)
            lines += self._skip(trainer, result, str(contribution))
        else:
            self._rounds.finish(trainer, (result, contribution))
        return lines + self._update_if_due()

    def leave(self, trainer: int, now: float) -> None:
        """Forget the trainer: what it held, or had handed in for a round that is open, is to be
        done again."""
        self._rounds.leave(trainer)
        self._metrics.returned(trainer, now)
        self._orders.leave(trainer)

    def update_without_those_who_left(self) -> list[Line]:
        """Make the update that a round was waiting to make for a trainer that has left.

        Raises:
            TrainingFailed: as take_trained().
        """
        return self._update_if_due()

    def assign(self, waiting: Sequence[int], now: float) -> dict[int, Assignment]:
        """Orders for those who wait: slices first, then batches as the pacing allows."""
        orders: dict[int, Order] = {}
        for trainer in waiting:
            if (evaluate := self._orders.take_slice(trainer)) is not None:
                orders[trainer] = evaluate
        reserved: dict[int, Sequence[Train]] = {}
        if not orders:
            batches = self._take_batches(waiting, now)
            reserved = self._orders.reserve(tuple(batches), self._prefetch)
            orders |= batches
        return {
            trainer: Assignment(order, self.compute.dispatch(trainer), reserved.get(trainer, ()))
            for trainer, order in orders.items()
        }

    def _take_batches(self, waiting: Sequence[int], now: float) -> dict[int, Train]:
        taken: dict[int, Train] = {}
        for trainer in self._rounds.ready(waiting):
            batch = self._orders.take_batch(trainer)
            if batch is None:
                break
            taken[trainer] = batch
            self._rounds.start(trainer)
            self._metrics.dispatched(trainer, now)
        return taken

    def _skip(self, trainer: int, result: Trained, cause: str) -> list[Line]:
        order = self._orders.held_by(trainer)
        assert isinstance(order, Train)
        line = self._metrics.skipped(trainer, order, self._store.version, cause)
        self._orders.finish(trainer, result)
        return [(logging.WARNING, line)] if line else []

    def _update_if_due(self) -> list[Line]:
        if due := self._rounds.take_due():
            self._update(due)
        if self._orders.evaluating == self._evaluated:
            return []
        self._evaluated = self._orders.evaluating
        return self._end_epoch()

    def _update(self, due: Sequence[tuple[int, tuple[Trained, Contribution]]]) -> None:
        version = self._store.version
        self._store.apply(mean_gradients([(c.gradients, r.samples) for _, (r, c) in due]))
        self._store.take_buffers(due[0][1][1].buffers)
        self._metrics.updated()
        for trainer, (result, contribution) in due:
            self._metrics.trained(trainer, result, version - contribution.version)
            self._orders.finish(trainer, result)
        self._after_update(self._store.version)

    def _end_epoch(self) -> list[Line]:
        assert self._evaluated is not None
        if math.isnan(self._metrics.train_loss(self._evaluated)):  # no sample was trained on
            raise TrainingFailed("no order of the epoch gave a loss and gradients that are finite")
        self.compute.open_evaluation()
        names, self._store.untrained = sorted(self._store.untrained), set()
        text = f"no gradient has reached {', '.join(names)} in this epoch"
        return [(logging.WARNING, text)] if names else []


def facts_of(order: Order | None) -> dict[str, object] | None:
    """For the report: what is needed to do the order alone."""
    if order is None:
        return None
    if isinstance(order, Evaluate):
        return {"epoch": order.epoch + 1, "slice": order.slice}
    return {"epoch": order.epoch + 1, "batch": order.batch, "samples": list(order.indices)}
