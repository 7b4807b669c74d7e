from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from ps.protocol import Evaluate, Evaluated, Finished, Order, Train, Trained, Wait
from ps.workload import fetch
from tests.helpers import COMPUTE, Parts, server_of, sgd, train_all
from tests.plugins import fixed_gradients, one_weight_for_each_sample, perceptron


def train_order(order: Order) -> Train:
    assert isinstance(order, Train)
    return order


def result_of(parts: Parts, trainer: int, order: Order) -> Trained:
    """Work on an order in this process."""
    result = parts.worker(trainer).do(train_order(order))
    assert isinstance(result, Trained)
    return result


def test_a_trainer_without_work_holds_a_future_and_no_thread() -> None:
    parts = server_of(perceptron(num_train=8), trainers=(1, 2))
    order = parts.server.next_order(1, None).wait()
    waiting = parts.server.next_order(2, None)
    assert not waiting.done()
    evaluating = parts.server.next_order(1, result_of(parts, 1, order)).wait()
    assert isinstance(evaluating, Evaluate) and evaluating.slice == 1
    order_of_the_other = waiting.wait()
    assert isinstance(order_of_the_other, Evaluate) and order_of_the_other.slice == 0


def test_who_waits_too_long_for_a_call_is_told_to_ask_again() -> None:
    parts = server_of(perceptron(num_train=8), trainers=(1, 2))
    parts.server.next_order(1, None)
    waiting = parts.server.next_order(2, None)
    parts.server.tick(max_wait_s=60.0)
    assert not waiting.done()
    time.sleep(0.01)
    parts.server.tick(max_wait_s=0.0)
    assert isinstance(waiting.wait(), Wait)


def test_who_was_told_to_ask_again_takes_part_in_the_round() -> None:
    parts = server_of(perceptron(), trainers=(1, 2), max_lag=0)
    first = parts.server.next_order(1, None)
    time.sleep(0.01)
    parts.server.tick(max_wait_s=0.0)
    assert isinstance(first.wait(), Wait)
    second = parts.server.next_order(2, None)
    assert not second.done()
    assert train_order(parts.server.next_order(1, None).wait()).batch == 0
    assert train_order(second.wait()).batch == 1


def test_the_order_of_a_trainer_that_left_goes_to_one_that_waits() -> None:
    parts = server_of(perceptron(num_train=8), trainers=(1, 2))
    left = parts.server.next_order(1, None).wait()
    waiting = parts.server.next_order(2, None)
    parts.server.leave(1)
    assert waiting.wait() == left


def test_a_slice_of_a_trainer_that_left_is_evaluated_by_another() -> None:
    parts = server_of(perceptron(num_train=8), trainers=(1, 2))
    work = parts.worker(1)
    order = parts.server.next_order(1, None).wait()
    waiting = parts.server.next_order(2, None)
    order = parts.server.next_order(1, work.do(train_order(order))).wait()
    left = waiting.wait()
    assert isinstance(left, Evaluate)
    parts.server.leave(2)
    starts = set()
    while isinstance(order, Evaluate):
        starts.add(order.start)
        order = parts.server.next_order(1, work.do(order)).wait()
    assert starts == {0, 40, 80} and left.start in starts
    assert isinstance(order, Finished)
    assert len(parts.metrics.history) == 1


@pytest.mark.parametrize("compute", COMPUTE)
def test_a_round_waits_for_all_and_is_one_update(compute: str) -> None:
    parts = server_of(perceptron(), compute=compute, trainers=(1, 2), max_lag=0)
    workers = {trainer: parts.worker(trainer) for trainer in (1, 2)}
    futures = {trainer: parts.server.next_order(trainer, None) for trainer in (1, 2)}
    orders = {trainer: train_order(future.wait()) for trainer, future in futures.items()}
    assert [order.batch for order in orders.values()] == [0, 1]
    results = {trainer: workers[trainer].do(order) for trainer, order in orders.items()}
    waiting = parts.server.next_order(2, results[2])
    assert not waiting.done() and parts.store.version == 0
    assert train_order(parts.server.next_order(1, results[1]).wait()).batch == 2
    assert train_order(waiting.wait()).batch == 3
    assert (parts.store.version, parts.metrics.samples_trained) == (1, 16)


@pytest.mark.parametrize("compute", COMPUTE)
def test_what_a_trainer_handed_in_is_withdrawn_when_it_leaves_before_the_round_closes(
    compute: str,
) -> None:
    parts = server_of(
        one_weight_for_each_sample(16),
        compute=compute,
        trainers=(1, 2),
        max_lag=0,
        optimizer=lambda model: sgd(model, lr=8.0),
    )
    workers = {trainer: parts.worker(trainer) for trainer in (1, 2)}
    futures = {trainer: parts.server.next_order(trainer, None) for trainer in (1, 2)}
    first, second = (train_order(futures[trainer].wait()) for trainer in (1, 2))
    parts.server.next_order(2, workers[2].do(second))
    parts.server.leave(2)
    assert parts.store.version == 0
    again = train_order(parts.server.next_order(1, workers[1].do(first)).wait())
    assert again == second
    assert isinstance(parts.server.next_order(1, workers[1].do(again)).wait(), Evaluate)
    assert parts.store.state_dict()["weight"].tolist() == [[-1.0] * 16]
    assert parts.metrics.samples_trained == 16


@pytest.mark.parametrize("compute", COMPUTE)
def test_a_round_closes_when_the_last_one_that_works_on_it_leaves(compute: str) -> None:
    parts = server_of(perceptron(), compute=compute, trainers=(1, 2), max_lag=0)
    work = parts.worker(1)
    futures = {trainer: parts.server.next_order(trainer, None) for trainer in (1, 2)}
    waiting = parts.server.next_order(1, work.do(train_order(futures[1].wait())))
    assert not waiting.done()
    parts.server.leave(2)
    assert train_order(waiting.wait()).batch == 1
    assert (parts.store.version, parts.metrics.samples_trained) == (1, 8)


def test_a_trainer_that_is_lost_after_it_left_is_no_failure() -> None:
    parts = server_of(perceptron(), trainers=(1, 2))
    parts.server.leave(2)
    parts.server.lost(2, "its connection closed")
    assert parts.server.outcome is None


def test_a_trainer_that_is_lost_after_it_told_why_leaves_the_cause_as_it_is() -> None:
    parts = server_of(perceptron(), trainers=(1, 2))
    parts.server.fail(2, "ValueError: boom", 1)
    parts.server.lost(2, "its connection closed")
    assert parts.outcome.cause == "trainer rank 2: ValueError: boom"


def test_all_trainers_leaving_early_is_a_failure() -> None:
    parts = server_of(perceptron(), trainers=(1, 2))
    parts.server.leave(1)
    assert not parts.server.ended.is_set()
    parts.server.leave(2)
    assert parts.server.ended.is_set()
    assert (parts.outcome.status, parts.outcome.exit_code) == ("failed", 4)


def test_the_first_failure_stays_the_cause() -> None:
    parts = server_of(perceptron(), trainers=(1, 2))
    parts.server.fail(2, "first", 1)
    parts.server.fail(1, "second", 1)
    assert parts.outcome.cause == "trainer rank 2: first"


def test_nothing_is_applied_any_more_once_the_job_has_failed() -> None:
    parts = server_of(perceptron(), trainers=(1, 2))
    result = result_of(parts, 1, parts.server.next_order(1, None).wait())
    parts.server.fail(2, "boom", 1)
    assert isinstance(parts.server.next_order(1, result).wait(), Finished)
    assert (parts.store.version, parts.metrics.samples_trained) == (0, 0)


def test_a_result_that_comes_twice_is_refused_and_not_applied_again() -> None:
    parts = server_of(perceptron(), trainers=(1, 2))
    result = result_of(parts, 1, parts.server.next_order(1, None).wait())
    parts.server.next_order(1, result)
    with pytest.raises(AssertionError, match="trainer 1 hands in a batch without forward"):
        parts.server.next_order(1, result)
    parts.server.forward(1, 0, 1, torch.randn(8, 6))
    with pytest.raises(AssertionError, match="trainer 1 holds"):
        parts.server.next_order(1, result)
    assert parts.store.version == 1
    assert parts.metrics.updates == 1


@pytest.mark.parametrize("compute", COMPUTE)
def test_evaluation_sees_the_weights_that_the_epoch_ended_with(compute: str) -> None:
    parts = server_of(perceptron(num_train=8), compute=compute, epochs=2)
    server, work = parts.server, parts.worker()
    order = server.next_order(1, work.do(train_order(server.next_order(1, None).wait()))).wait()
    ended_with = {name: value.clone() for name, value in parts.store.state_dict().items()}
    results: list[Evaluated] = []
    while isinstance(order, Evaluate):
        result = work.do(order)
        assert isinstance(result, Evaluated)
        results.append(result)
        order = server.next_order(1, result).wait()
    assert train_order(order).epoch == 1
    model = parts.workload.model().eval()
    model.load_state_dict(ended_with)
    inputs, targets = fetch(parts.workload.test, range(97))
    with torch.inference_mode():
        outputs = model(inputs)
    assert [result.samples for result in results] == [40, 40, 17]
    assert sum(r.correct for r in results) == parts.workload.correct(outputs, targets)
    loss_sum = parts.workload.loss(outputs, targets).item() * 97
    assert sum(r.loss_sum for r in results) == pytest.approx(loss_sum)


def test_evaluation_leaves_the_mode_of_the_training_replicas_alone() -> None:
    parts = server_of(perceptron(dropout=0.5), trainers=(1, 2))
    parts.server.evaluate(1, torch.randn(5, 6))
    compute = parts.server._on_server
    assert all(replica.module.training for replica in compute._replicas.values())
    assert not compute._evaluation.module.training


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("num_trainers", [1, 2, 5])
def test_threads_of_many_trainers_lose_no_update_and_no_sample(
    num_trainers: int, compute: str
) -> None:
    """Each gradient is exactly one per weight, so each update takes exactly lr off."""
    parts = server_of(
        fixed_gradients(None),  # type: ignore[arg-type]
        compute=compute,
        trainers=range(1, num_trainers + 1),
        epochs=3,
        optimizer=lambda model: sgd(model, lr=1.0),
    )
    train_all(parts)
    assert parts.store.version == 150
    assert parts.store.state_dict()["weight"].tolist() == [[-150.0] * 4]
    assert parts.metrics.samples_trained == 1200
    assert [record.epoch for record in parts.metrics.history] == [1, 2, 3]
    assert isinstance(parts.server.next_order(1, None).wait(), Finished)


def test_a_parameter_that_no_gradient_reached_in_an_epoch_is_named_once(
    warnings: pytest.LogCaptureFixture,
) -> None:
    class HalfUsed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(6, 3)
            self.forgotten = nn.Linear(6, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.used(inputs)
            return outputs

    parts = server_of(replace(perceptron(num_train=40), model=HalfUsed), epochs=2)
    train_all(parts)
    assert [record.getMessage() for record in warnings.records] == [
        "no gradient has reached forgotten.bias, forgotten.weight in this epoch"
    ]


@pytest.mark.parametrize("compute", COMPUTE)
def test_an_order_whose_gradient_reaches_no_parameter_ends_the_job(compute: str) -> None:
    """As in a model that detaches its outputs, and a loss that has a parameter of its own."""
    scale = nn.Parameter(torch.ones(()))

    class Detached(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs).detach().requires_grad_()

    workload = replace(
        perceptron(),
        model=lambda: Detached(6, 3),
        loss=lambda outputs, targets: (outputs * scale).mean(),
    )
    parts = server_of(workload, compute=compute)
    result = result_of(parts, 1, parts.server.next_order(1, None).wait())
    assert isinstance(parts.server.next_order(1, result).wait(), Finished)
    assert (parts.outcome.exit_code, parts.outcome.cause) == (
        8,
        "trainer rank 1, epoch 1, batch 0: no gradient reached any parameter",
    )
