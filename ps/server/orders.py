"""The list of work: to do, dispatched, done. Pure: no torch, no clock, no lock.

Every sample is trained on exactly once per epoch and every test sample evaluated exactly once
after it, at any number of trainers and whatever their speeds. Which samples batch k of epoch e
holds depends on the seed alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ps.protocol import Evaluate, Evaluated, Order, Result, Train
from ps.settings.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The whole job in numbers."""

    num_train_samples: int
    num_test_samples: int
    batch_size: int
    """Samples of one order."""
    epochs: int
    seed: int
    slice_size: int = 500
    batches_per_update: int = 1

    @property
    def batches_per_epoch(self) -> int:
        return -(-self.num_train_samples // self.batch_size)

    @property
    def updates_per_epoch(self) -> int:
        return -(-self.batches_per_epoch // self.batches_per_update)

    @property
    def total_updates(self) -> int:
        return self.epochs * self.updates_per_epoch

    @property
    def slices(self) -> int:
        return -(-self.num_test_samples // self.slice_size)


PermutationOf = Callable[[int], "Sequence[int] | None"]
"""The order of the samples in an epoch, from 0; None while it is still being made."""


class Orders:
    """Gives each order to one trainer. The caller holds a lock around every call."""

    def __init__(self, plan: Plan, permutation_of: PermutationOf) -> None:
        """permutation_of is asked again at each call while it gives None: till then an epoch has
        no batches to take."""
        self._plan = plan
        self._permutation_of = permutation_of
        self._permutation: Sequence[int] | None = None
        self._requeued: deque[int] = deque()
        """Batches that were taken and come first again."""
        self._next = 0
        """The first batch of the epoch that was never taken."""
        self._reserved: dict[int, deque[int]] = {}
        """By trainer: batches that it is to get next."""
        self._slices: deque[int] = deque()
        self._dispatched: dict[int, Order] = {}
        self._epoch = -1
        self._evaluating: int | None = None
        self._open_epoch()

    @property
    def evaluating(self) -> int | None:
        """The newest epoch whose evaluation was opened. When it changes, no batch is out."""
        return self._evaluating

    @property
    def finished(self) -> bool:
        """Whether all that was planned is done."""
        over = not self._slices and not self._dispatched
        return over and self._evaluating == self._plan.epochs - 1

    def take_slice(self, trainer: int) -> Evaluate | None:
        """The next slice to evaluate, for a trainer that holds no order; None if there is none."""
        if not self._slices:
            return None
        evaluate = self._slice(self._slices.popleft())
        self._dispatch(trainer, evaluate)
        return evaluate

    def take_batch(self, trainer: int) -> Train | None:
        """As take_slice, for training; None also while an evaluation is open, and until the
        epoch's permutation is there."""
        if not self._is_shuffled():
            return None
        batch = self._next_batch(trainer)
        if batch is None:
            return None
        train = self._batch(batch)
        self._dispatch(trainer, train)
        return train

    def reserve(self, trainers: Sequence[int], count: int) -> dict[int, Sequence[Train]]:
        """The batches that each trainer is to take next: those reserved before, and up to count.

        Dealt out in turn, so that batches in a row stay in one round. Another trainer takes them
        when nothing else is left.
        """
        if not self._is_shuffled():
            return {trainer: [] for trainer in trainers}
        for depth in range(1, count + 1):
            for trainer in trainers:
                reserved = self._reserved.setdefault(trainer, deque())
                if len(reserved) < depth and (batch := self._first()) is not None:
                    reserved.append(batch)
        return {t: [self._batch(batch) for batch in self._reserved.get(t, ())] for t in trainers}

    def _next_batch(self, trainer: int) -> int | None:
        if reserved := self._reserved.get(trainer):
            return reserved.popleft()
        if (batch := self._first()) is not None:
            return batch
        longest = max(self._reserved.values(), key=len, default=None)
        return longest.pop() if longest else None

    def _first(self) -> int | None:
        """The first batch that nobody holds and that is reserved for nobody."""
        if self._requeued:
            return self._requeued.popleft()
        if self._next < self._plan.batches_per_epoch:
            self._next += 1
            return self._next - 1
        return None

    def _dispatch(self, trainer: int, order: Order) -> None:
        assert trainer not in self._dispatched, f"trainer {trainer} already holds an order"
        self._dispatched[trainer] = order

    def check(self, trainer: int, result: Result) -> None:
        """Assert that the result names the order that the trainer holds: none counts twice."""
        order = self._dispatched.get(trainer)
        held = order and _name(order)
        assert held == _name(result), f"trainer {trainer} holds {held}, not {_name(result)}"

    def finish(self, trainer: int, result: Result) -> None:
        """Tick off the order that the trainer holds, which the result must name."""
        self.check(trainer, result)
        del self._dispatched[trainer]
        self._open_next()

    def held_by(self, trainer: int) -> Order | None:
        """The order that the trainer holds."""
        return self._dispatched.get(trainer)

    def leave(self, trainer: int) -> None:
        """Forget the trainer; what it held goes back to the head of the list."""
        self._requeued.extendleft(reversed(self._reserved.pop(trainer, ())))
        order = self._dispatched.pop(trainer, None)
        if isinstance(order, Train):
            self._requeued.appendleft(order.batch)
        elif order is not None:
            self._slices.appendleft(order.slice)

    def state(self) -> dict[str, Any]:
        """What is still to be done, in plain values; what somebody holds is not done."""
        held = self._dispatched.values()
        taken = [order.batch for order in held if isinstance(order, Train)]
        taken += [batch for reserved in self._reserved.values() for batch in reserved]
        slices = [order.slice for order in held if isinstance(order, Evaluate)]
        return {
            "epoch": self._epoch,
            "evaluating": self._evaluating,
            "next_batch": self._next,
            "returned_batches": sorted([*taken, *self._requeued]),
            "slices": sorted([*slices, *self._slices]),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from state(), of orders of a plan with the same batches. Before the first order.

        Raises:
            ConfigError: more epochs were begun than are planned; nothing was changed.
        """
        begun = state["epoch"] + (state["next_batch"] > 0)
        if begun > self._plan.epochs:
            raise ConfigError(
                f"--epochs {self._plan.epochs} is too few: the run to go on from has begun epoch "
                f"{begun}; type {begun} or more, or omit it"
            )
        self._epoch = state["epoch"]
        self._evaluating = state["evaluating"]
        self._next = state["next_batch"]
        self._requeued = deque(state["returned_batches"])
        self._slices = deque(state["slices"])
        self._permutation = self._permutation_of(self._epoch)
        self._open_next()

    @property
    def updates_left(self) -> int:
        """Updates until all that was planned is done, if no trainer leaves."""
        plan = self._plan
        held = sum(isinstance(order, Train) for order in self._dispatched.values())
        updates = -(-(self._num_batches_free + held) // plan.batches_per_update)
        return updates + (plan.epochs - 1 - self._epoch) * plan.updates_per_epoch

    @property
    def _num_batches_free(self) -> int:
        """Batches of this epoch that nobody holds."""
        reserved = sum(map(len, self._reserved.values()))
        return self._plan.batches_per_epoch - self._next + len(self._requeued) + reserved

    def _open_next(self) -> None:
        """Open the evaluation of an epoch once its batches are done, and then the next epoch.

        So the weights stand still while they are evaluated.
        """
        if self._num_batches_free or self._slices or self._dispatched:
            return
        if self._evaluating != self._epoch:
            self._evaluating = self._epoch
            self._slices.extend(range(self._plan.slices))
        elif not self.finished:
            self._open_epoch()

    def _open_epoch(self) -> None:
        self._epoch += 1
        self._next = 0
        self._permutation = self._permutation_of(self._epoch)

    def _is_shuffled(self) -> bool:
        if self._permutation is None:
            self._permutation = self._permutation_of(self._epoch)
        return self._permutation is not None

    def _batch(self, batch: int) -> Train:
        assert self._permutation is not None
        start = batch * self._plan.batch_size
        indices = self._permutation[start : start + self._plan.batch_size]
        return Train(self._epoch, batch, indices)

    def _slice(self, index: int) -> Evaluate:
        assert self._evaluating is not None
        start = index * self._plan.slice_size
        stop = min(start + self._plan.slice_size, self._plan.num_test_samples)
        return Evaluate(self._evaluating, index, start, stop)


def _name(item: Order | Result) -> tuple[str, int, int]:
    if isinstance(item, (Evaluate, Evaluated)):
        return ("slice", item.epoch, item.slice)
    return ("batch", item.epoch, item.batch)
