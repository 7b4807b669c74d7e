from __future__ import annotations

import threading
import time

import pytest
import torch

from ps import link
from ps.protocol import Evaluate, Evaluated, Finished, Train, Trained, Wait
from ps.step import ServerSideWorker
from ps.trainer import train
from tests.helpers import Parts, server_of, sgd
from tests.plugins import fixed_gradients, perceptron


def done(order: Train, parts: Parts, trainer: int) -> Trained:
    """Work on an order in this process."""
    worker = ServerSideWorker(trainer, link.InProcessLink(parts.server), parts.workload, 0)
    result = worker.do(order)
    assert isinstance(result, Trained)
    return result


def test_a_trainer_without_work_holds_a_future_and_no_thread() -> None:
    parts = server_of(perceptron(num_train=8), trainers=(1, 2))
    order = parts.server.next_order(1, None).wait()
    assert isinstance(order, Train)
    waiting = parts.server.next_order(2, None)
    assert not waiting.done()
    evaluating = parts.server.next_order(1, done(order, parts, 1)).wait()
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


def test_the_order_of_a_trainer_that_left_goes_to_one_that_waits() -> None:
    parts = server_of(perceptron(num_train=8), trainers=(1, 2))
    lost = parts.server.next_order(1, None).wait()
    waiting = parts.server.next_order(2, None)
    parts.server.leave(1)
    assert waiting.wait() == lost


def test_all_trainers_leaving_early_is_a_failure() -> None:
    parts = server_of(perceptron(), trainers=(1, 2))
    parts.server.leave(1)
    assert not parts.server.ended.is_set()
    parts.server.leave(2)
    assert parts.server.ended.is_set()
    outcome = parts.server.outcome
    assert outcome is not None and (outcome.status, outcome.exit_code) == ("failed", 4)


def test_the_first_failure_stays_the_cause() -> None:
    parts = server_of(perceptron(), trainers=(1, 2))
    parts.server.fail(2, "first", 1)
    parts.server.fail(1, "second", 1)
    outcome = parts.server.outcome
    assert outcome is not None and outcome.cause == "trainer rank 2: first"


def test_a_result_that_comes_twice_is_refused_and_not_applied_again() -> None:
    parts = server_of(perceptron(), trainers=(1, 2))
    order = parts.server.next_order(1, None).wait()
    assert isinstance(order, Train)
    result = done(order, parts, 1)
    parts.server.next_order(1, result)
    with pytest.raises(AssertionError, match="trainer 1 hands in a batch without forward"):
        parts.server.next_order(1, result)
    parts.server.forward(1, 0, 1, torch.randn(8, 6))
    with pytest.raises(AssertionError, match="trainer 1 holds"):
        parts.server.next_order(1, result)
    assert parts.store.version == 1
    assert parts.metrics.updates == 1


def test_evaluation_sees_the_weights_that_the_epoch_ended_with() -> None:
    parts = server_of(perceptron(num_train=8), epochs=2)
    server = parts.server
    order = server.next_order(1, None).wait()
    assert isinstance(order, Train)
    order = server.next_order(1, done(order, parts, 1)).wait()
    ended_with = {name: value.clone() for name, value in parts.store.state_dict().items()}
    while isinstance(order, Evaluate):
        result = Evaluated(order.epoch, order.slice, order.stop - order.start, 1.0, 0)
        order = server.next_order(1, result).wait()
    assert isinstance(order, Train) and order.epoch == 1
    inputs = torch.randn(5, 6)
    at_the_end = server.evaluate(1, inputs)
    server.next_order(1, done(order, parts, 1))
    model = parts.workload.model().eval()
    model.load_state_dict(ended_with)
    with torch.inference_mode():
        assert torch.equal(at_the_end, model(inputs))


def test_evaluation_leaves_the_mode_of_the_training_replicas_alone() -> None:
    parts = server_of(perceptron(dropout=0.5), trainers=(1, 2))
    parts.server.evaluate(1, torch.randn(5, 6))
    assert all(r.module.training for r in parts.server._replicas.values())
    assert not parts.server._evaluation.module.training


@pytest.mark.parametrize("num_trainers", [1, 2, 5])
def test_threads_of_many_trainers_lose_no_update_and_no_sample(num_trainers: int) -> None:
    """Each gradient is exactly one per weight, so each update takes exactly lr off."""
    trainers = tuple(range(1, num_trainers + 1))
    workload = fixed_gradients(None)  # type: ignore[arg-type]
    parts = server_of(
        workload, trainers=trainers, epochs=3, optimizer=lambda model: sgd(model, lr=1.0)
    )

    def be(trainer: int) -> None:
        server = link.InProcessLink(parts.server)
        train(trainer, server, ServerSideWorker(trainer, server, workload, 0))

    threads = [threading.Thread(target=be, args=(trainer,)) for trainer in trainers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    outcome = parts.server.outcome
    assert outcome is not None and outcome.status == "done"
    assert parts.store.version == 150
    assert parts.store.state_dict()["weight"].tolist() == [[-150.0] * 4]
    assert parts.metrics.samples_trained == 1200
    assert [record.epoch for record in parts.metrics.history] == [1, 2, 3]
    assert isinstance(parts.server.next_order(1, None).wait(), Finished)
