"""What becomes of results and which orders go out, with gradients that the test invents."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from ps.protocol import Assignment, Evaluate, Evaluated, Order, Train, Trained, Weights
from ps.server.orders import Plan
from ps.server.state import TrainingState
from ps.server.training import Line, Training, facts_of
from ps.settings.errors import TrainingFailed
from tests.server.work import Direct, plan_of, result_of, state_of, training_of


@dataclass
class Job:
    """A training, and the calls that the server makes in a row."""

    state: TrainingState
    training: Training
    compute: Direct
    versions: list[int]
    lines: list[Line] = field(default_factory=list)

    def give(self, *trainers: int, now: float = 0.0) -> list[Order | None]:
        """What each gets of those who wait."""
        assigned = self.training.assign(trainers, now)
        return [assigned[t].order if t in assigned else None for t in trainers]

    def take(
        self, trainer: int, *, loss: float = 1.0, gradient: float = 1.0, now: float = 1.0
    ) -> None:
        """The trainer has done the order that it holds."""
        order = self.training.held_by(trainer)
        result = result_of(order, loss, torch.tensor(gradient))
        if isinstance(result, Evaluated):
            self.lines += self.training.take_evaluated(trainer, result)
            return
        assert isinstance(result, Trained)
        contribution = self.training.contribution(trainer, result)
        self.lines += self.training.take_trained(trainer, result, contribution, now)

    @property
    def done(self) -> tuple[int, int, float]:
        """Updates, samples that were trained on, and the weight."""
        weight = self.state.store.state_dict()["value"].item()
        return self.state.store.version, self.state.metrics.samples_trained, weight

    def order_s(self) -> list[object]:
        trainers = self.state.metrics.report(99.0)["trainers"]
        return [trainer["order_s"] for trainer in trainers.values()]  # type: ignore[attr-defined]


def job_of(
    plan: Plan | None = None,
    trainers: Sequence[int] = (1,),
    *,
    max_lag: int | None = None,
    prefetch: int = 0,
    skip_nonfinite: bool = False,
    before: Job | None = None,
) -> Job:
    """Batches of 4 samples, slices of 4; before is a job whose state it goes on from."""
    state = state_of(plan or plan_of(train=16), trainers, restore_from=before and before.state)
    versions: list[int] = []
    training, compute = training_of(
        *(state, trainers),
        max_lag=max_lag,
        prefetch=prefetch,
        skip_nonfinite=skip_nonfinite,
        after_update=versions.append,
    )
    return Job(state, training, compute, versions)


# --- updates


def test_without_rounds_each_result_is_an_update_of_its_own() -> None:
    job = job_of(trainers=(1, 2))
    job.give(1, 2)
    job.take(2, gradient=3.0)
    assert job.done == (1, 4, -3.0)
    assert job.state.store.state_dict()["seen"].item() == 2.0
    assert (job.training.held_by(2), job.versions) == (None, [1])
    job.take(1, gradient=5.0)
    assert (job.done, job.versions) == ((2, 8, -8.0), [1, 2])
    assert job.state.metrics.staleness == {0: 1, 1: 1}


def test_a_round_is_one_update_of_the_mean_over_its_samples() -> None:
    """Of batches of 4 and 2 samples."""
    job = job_of(plan_of(train=6, per_update=2), (1, 2), max_lag=0)
    assert job.give(1) == [None]
    assert [getattr(order, "batch", None) for order in job.give(2, 1)] == [1, 0]
    job.take(2, gradient=3.0)
    assert (job.done, job.versions) == ((0, 0, 0.0), [])
    job.take(1, gradient=6.0)
    assert (job.done, job.versions) == ((1, 6, -5.0), [1])
    assert job.state.store.state_dict()["seen"].item() == 1.0
    assert job.state.metrics.staleness == {0: 2}


def test_what_a_trainer_returned_is_withdrawn_when_it_leaves_before_the_round_closes() -> None:
    job = job_of(trainers=(1, 2, 3), max_lag=0)
    orders = job.give(1, 2, 3)
    for trainer in (2, 3):
        job.take(trainer, gradient=float(trainer), now=2.0)
    job.training.leave(3, now=5.0)
    assert job.training.update_without_those_who_left() == []
    assert job.done == (0, 0, 0.0)
    job.training.leave(1, now=6.0)
    job.training.update_without_those_who_left()
    assert job.done == (1, 4, -2.0)
    assert job.give(2) == [orders[0]]
    assert job.order_s() == [None, 2.0, None]
    assert job.state.metrics.training_s == 6.0


def test_a_trainer_that_leaves_with_a_slice_or_nothing_cost_no_training_time() -> None:
    job = job_of(plan_of(train=4), (1, 2))
    job.training.leave(2, now=1.0)
    job.give(1)
    job.take(1)
    [held] = job.give(1)
    assert isinstance(held, Evaluate)
    job.training.leave(1, now=9.0)
    assert (job.state.metrics.training_s, job.training.held_by(1)) == (1.0, None)


def test_a_result_that_comes_twice_is_refused_and_not_applied_again() -> None:
    job = job_of()
    [order] = job.give(1)
    job.take(1)
    result = result_of(order, 1.0, torch.tensor(1.0))
    assert isinstance(result, Trained)
    job.give(1)
    with pytest.raises(AssertionError, match="trainer 1 holds"):
        job.training.take_trained(1, result, job.training.contribution(1, result), 2.0)
    assert job.done == (1, 4, -1.0)


# --- what is not finite


NOT_FINITE = pytest.mark.parametrize(
    ("loss", "gradient", "cause"),
    [
        (math.nan, 1.0, "the loss is nan"),
        (math.inf, 1.0, "the loss is inf"),
        (1.0, math.nan, "the gradient of value is not finite"),
        (1.0, -math.inf, "the gradient of value is not finite"),
    ],
)


@NOT_FINITE
def test_what_is_not_finite_ends_the_job_and_is_not_applied(
    loss: float, gradient: float, cause: str
) -> None:
    job = job_of(trainers=(1, 2))
    job.give(1, 2)
    with pytest.raises(TrainingFailed, match=rf"rank 2, epoch 1, batch 1: {cause}$") as caught:
        job.take(2, loss=loss, gradient=gradient)
    assert (caught.value.rank, caught.value.exit_code) == (2, 8)
    assert job.done == (0, 0, 0.0)
    assert job.training.held_by(2) is not None


@NOT_FINITE
def test_it_is_left_out_and_counted_and_named_where_that_was_asked_for(
    loss: float, gradient: float, cause: str
) -> None:
    job = job_of(trainers=(1, 2), skip_nonfinite=True)
    job.give(1, 2)
    job.take(1)
    job.take(2, loss=loss, gradient=gradient, now=7.0)
    assert (job.done, job.versions) == ((1, 4, -1.0), [1])
    assert job.state.store.state_dict()["seen"].item() == 1.0
    [(level, line)] = job.lines
    assert level == logging.WARNING and line.endswith(f"batch 1 of trainer rank 2: {cause}")
    report = job.state.metrics.report(9.0)
    [skipped] = report["skipped"]  # type: ignore[misc]
    assert (report["orders_skipped"], skipped["version"], skipped["cause"]) == (1, 1, cause)
    assert job.order_s() == [1.0, None]
    assert [getattr(order, "batch", None) for order in job.give(1, 2)] == [2, 3]


def test_in_a_round_the_others_make_the_update_without_the_one_that_is_skipped() -> None:
    job = job_of(trainers=(1, 2), max_lag=0, skip_nonfinite=True)
    job.give(1, 2)
    job.take(1, loss=math.inf)
    assert job.done == (0, 0, 0.0)
    job.take(2, gradient=3.0)
    assert job.done == (1, 4, -3.0)
    job.give(1, 2)
    job.take(1, gradient=2.0)
    job.take(2, loss=math.inf)
    assert job.done == (2, 8, -5.0)


def test_a_round_in_which_all_is_skipped_is_no_update() -> None:
    job = job_of(trainers=(1, 2), max_lag=0, skip_nonfinite=True)
    job.give(1, 2)
    for trainer in (1, 2):
        job.take(trainer, loss=math.nan)
    assert (job.done, job.versions) == ((0, 0, 0.0), [])
    assert [getattr(order, "batch", None) for order in job.give(1, 2)] == [2, 3]


def test_an_epoch_ends_the_job_if_all_of_it_was_skipped_and_goes_on_if_one_order_is_left() -> None:
    job = job_of(plan_of(train=8, test=4), skip_nonfinite=True)
    for loss in (math.nan, 1.0):
        job.give(1)
        job.take(1, loss=loss)
    job.give(1)
    job.take(1)
    job.give(1)
    job.take(1, loss=math.nan)
    job.give(1)
    with pytest.raises(TrainingFailed, match="no order of the epoch"):
        job.take(1, loss=math.nan)
    assert (job.compute.opened, len(job.state.metrics.history)) == ([1], 1)


def test_what_was_trained_on_before_a_restart_counts_for_its_epoch() -> None:
    before = job_of(plan_of(train=8))
    before.give(1)
    before.take(1)
    job = job_of(plan_of(train=8), skip_nonfinite=True, before=before)
    job.give(1)
    job.take(1, loss=math.nan)
    assert job.compute.opened == [1]


# --- which orders go out


def test_orders_go_out_with_the_newest_weights_and_what_is_reserved() -> None:
    job = job_of(plan_of(train=24, batch=2), trainers=(1, 2), prefetch=2)
    job.give(1)
    job.take(1)
    assigned = job.training.assign([2, 1], 0.0)
    batches = {
        trainer: (a.order.batch, [order.batch for order in a.prefetch])
        for trainer, a in assigned.items()
        if isinstance(a.order, Train)
    }
    assert batches == {2: (3, [4, 5]), 1: (1, [2, 6])}
    assert {a.weights for a in assigned.values()} == {Weights(1)}


def test_those_ahead_get_none_and_where_too_few_are_left_the_first_in_line_get_them() -> None:
    job = job_of(plan_of(train=20), trainers=(1, 2), max_lag=1)
    for _ in range(2):
        job.give(1)
        job.take(1)
    assert job.give(1) == [None]
    assert [getattr(order, "batch", None) for order in job.give(1, 2)] == [None, 2]
    job = job_of(plan_of(train=4), trainers=(1, 2))
    assert [getattr(order, "batch", None) for order in job.give(2, 1)] == [0, None]
    job.take(2)
    assert job.state.metrics.training_s == 1.0


def test_slices_go_out_first_without_prefetch_and_alone() -> None:
    job = job_of(plan_of(train=4, test=6, epochs=2), trainers=(1, 2, 3), prefetch=1)
    job.give(1)
    job.take(1)
    weights = Weights(1)
    assert job.training.assign([3, 1, 2], 0.0) == {
        3: Assignment(Evaluate(0, 0, 0, 4), weights),
        1: Assignment(Evaluate(0, 1, 4, 6), weights),
    }
    assert job.give(2) == [None]
    for trainer in (1, 3):
        assert not job.training.is_finished
        job.take(trainer)
    [order] = job.give(2)
    assert isinstance(order, Train) and order.epoch == 1
    job.take(2)
    for trainer in (1, 2):
        job.give(trainer)
        assert not job.training.is_finished
        job.take(trainer)
    assert job.training.is_finished


# --- the end of an epoch


@pytest.mark.parametrize("max_lag", [None, 0])
def test_evaluation_is_opened_once_with_the_weights_that_the_epoch_ended_with(
    max_lag: int | None,
) -> None:
    job = job_of(plan_of(train=8, test=4), trainers=(1, 2), max_lag=max_lag)
    for end in (1 if max_lag == 0 else 2, 2 if max_lag == 0 else 4):
        assert end not in job.compute.opened
        job.give(1, 2)
        job.take(1)
        job.take(2)
        assert job.compute.opened[-1] == end
        job.give(1)
        job.take(1)
    assert len(job.compute.opened) == 2
    assert [level for level, line in job.lines if "evaluated" in line] == [logging.INFO] * 2


def test_an_evaluation_that_a_job_goes_on_with_is_not_opened_by_training_again() -> None:
    before = job_of(plan_of(train=4))
    before.give(1)
    before.take(1)
    job = job_of(plan_of(train=4), before=before)
    job.give(1)
    assert job.training.update_without_those_who_left() == []
    assert job.compute.opened == []


def test_a_parameter_that_no_gradient_reached_in_an_epoch_is_named_once() -> None:
    job = job_of(plan_of(train=8, test=4))
    for _ in range(6):
        job.give(1)
        job.take(1)
    [(level, line)] = [line for line in job.lines if "no gradient" in line[1]]
    assert level == logging.WARNING
    assert "forgotten" in line and "value" not in line


@pytest.mark.parametrize(
    ("order", "facts"),
    [
        (None, None),
        (Evaluate(2, 3, 4, 5), {"epoch": 3, "slice": 3}),
        (Train(2, 3, range(2)), {"epoch": 3, "batch": 3, "samples": [0, 1]}),
    ],
)
def test_the_facts_of_an_order(order: Order | None, facts: object) -> None:
    assert facts_of(order) == facts
