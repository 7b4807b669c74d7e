from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ps.host.health import Activity, Finding
from ps.protocol import Evaluate, Evaluated, Finished, Order, Train, Trained, Wait
from ps.server.server import Outcome, ParameterServer
from ps.workload import Workload, fetch
from ps.workloads.checks import make_model
from tests.helpers import COMPUTE, Parts, assert_equal, server_of, sgd, train_all
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


# --- how a job ends, and why


def gone(trainer: int, text: str = "killed by SIGKILL", exit_code: int = 4) -> Finding:
    return Finding(trainer, text, exit_code, is_gone=True)


def two_at_work() -> Parts:
    """Trainer 1 has an order, and trainer 2 too."""
    parts = server_of(perceptron(), trainers=(1, 2))
    for trainer in parts.trainers:
        parts.server.join(trainer, None)
        parts.server.next_order(trainer, None)
    return parts


def test_a_warning_is_told_and_the_job_goes_on(warnings: pytest.LogCaptureFixture) -> None:
    parts = two_at_work()
    parts.server.report(Finding(1, "the job uses 90 of 100 MiB"))
    parts.server.report(Finding(0, "the job uses 95 of 100 MiB"))
    assert [record.getMessage() for record in warnings.records] == [
        "trainer rank 1: the job uses 90 of 100 MiB",
        "server rank 0: the job uses 95 of 100 MiB",
    ]
    assert parts.server.outcome is None
    assert parts.server.circumstances()["consequences"] == []


@pytest.mark.parametrize("is_quiet", [False, True])
def test_a_rank_that_is_gone_is_the_cause_and_not_waited_for(is_quiet: bool) -> None:
    parts = two_at_work()
    parts.server.report(replace(gone(2, "ended", 6), is_quiet=is_quiet))
    cause = "lost trainer rank 2: ended"
    assert parts.outcome == Outcome("failed", 6, cause, 2, rank_ends=not is_quiet)
    assert not parts.server.ended.is_set()
    assert isinstance(parts.server.next_order(1, None).wait(), Finished)
    parts.server.leave(1)
    assert parts.server.ended.is_set()
    assert not parts.server.all_left


def test_a_rank_that_stands_still_is_the_cause_and_not_waited_for() -> None:
    parts = two_at_work()
    parts.server.report(Finding(2, "it has made no progress", 5))
    assert parts.outcome == Outcome("failed", 5, "trainer rank 2: it has made no progress", 2)
    assert not parts.server.ended.is_set()
    parts.server.leave(1)
    assert parts.server.ended.is_set()
    assert not parts.server.all_left


def test_a_server_that_stands_still_waits_for_its_trainers_all_the_same() -> None:
    parts = two_at_work()
    parts.server.report(Finding(0, "a call has made no progress", 5))
    assert parts.outcome == Outcome("failed", 5, "server rank 0: a call has made no progress", 0)
    parts.server.leave(1)
    assert not parts.server.ended.is_set()
    parts.server.leave(2)
    assert parts.server.ended.is_set()
    assert not parts.server.all_left


def test_the_end_of_a_trainer_that_has_left_or_has_told_why_is_no_finding() -> None:
    parts = two_at_work()
    parts.server.leave(1)
    parts.server.report(gone(1))
    assert parts.server.outcome is None
    parts.server.fail(2, "ValueError: boom", 1)
    parts.server.report(gone(2))
    assert parts.outcome.cause == "trainer rank 2: ValueError: boom"
    assert parts.server.circumstances()["consequences"] == []


def test_one_loss_that_is_found_twice_is_one() -> None:
    parts = two_at_work()
    parts.server.report(gone(1))
    parts.server.report(gone(1))
    assert parts.server.circumstances()["consequences"] == []


def test_one_loss_that_two_threads_find_at_once_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link's, and the one that watches."""
    parts = two_at_work()
    depart = parts.server._depart

    def be_overtaken(*args: Any, **options: Any) -> None:
        monkeypatch.setattr(parts.server, "_depart", depart)
        parts.server.report(gone(1))
        depart(*args, **options)

    monkeypatch.setattr(parts.server, "_depart", be_overtaken)
    parts.server.report(gone(1))
    assert parts.outcome.cause == "lost trainer rank 1: killed by SIGKILL"
    assert parts.server.circumstances()["consequences"] == []


def test_what_goes_wrong_after_the_cause_is_a_consequence() -> None:
    parts = two_at_work()
    parts.server.report(Finding(1, "it has been stopped for 60 s", 5))
    parts.server.report(gone(2))
    parts.server.fail(1, "PeerLost: lost the server", 4)
    parts.server.stop(Outcome("interrupted", 143, "stopped by SIGTERM"))
    parts.server.broke("RuntimeError: late", 1)
    assert parts.outcome.cause == "trainer rank 1: it has been stopped for 60 s"
    assert parts.server.circumstances()["consequences"] == [
        "lost trainer rank 2: killed by SIGKILL",
        "trainer rank 1: PeerLost: lost the server",
        "stopped by SIGTERM",
        "server rank 0: RuntimeError: late",
    ]


def test_why_a_connection_closed_is_asked_for_and_is_the_cause() -> None:
    asked: list[int] = []

    def explain(trainer: int) -> Finding:
        asked.append(trainer)
        return gone(trainer, "ended with exit code 6", 6)

    parts = two_at_work()
    parts.server.explain = explain
    parts.server.leave(1)
    parts.server.lost(1, "its connection closed")
    assert (asked, parts.server.outcome) == ([], None)
    parts.server.lost(2, "its connection closed")
    assert asked == [2]
    assert (parts.outcome.exit_code, parts.outcome.rank) == (6, 2)
    assert parts.outcome.cause == "lost trainer rank 2: ended with exit code 6"


def test_a_connection_that_closed_for_no_known_reason_is_a_loss() -> None:
    parts = two_at_work()
    parts.server.lost(2, "its connection closed")
    cause = "lost trainer rank 2: its connection closed"
    assert parts.outcome == Outcome("failed", 4, cause, 2, rank_ends=True)


def test_a_connection_that_closed_as_another_rank_stood_still_is_a_consequence() -> None:
    parts = two_at_work()
    parts.server.explain = lambda trainer: Finding(0, "it stood still for 60 s", 5)
    parts.server.lost(2, "its connection closed")
    assert (parts.outcome.rank, parts.outcome.exit_code) == (0, 5)
    assert parts.server.circumstances()["consequences"] == [
        "lost trainer rank 2: its connection closed"
    ]
    parts.server.leave(1)
    assert parts.server.ended.is_set()


def test_a_server_whose_code_raised_is_the_cause_and_sends_its_trainers_home() -> None:
    parts = two_at_work()
    parts.server.broke("RuntimeError: boom", 1)
    assert parts.outcome == Outcome("failed", 1, "server rank 0: RuntimeError: boom", 0)
    assert isinstance(parts.server.next_order(1, None).wait(), Finished)
    assert not parts.server.ended.is_set()


@pytest.mark.parametrize("finding", [gone(1), Finding(1, "it has made no progress", 5)])
def test_who_waits_when_the_job_fails_is_sent_home(finding: Finding) -> None:
    parts = server_of(perceptron(num_train=8), trainers=(1, 2))
    parts.server.next_order(1, None)
    waiting = parts.server.next_order(2, None)
    parts.server.report(finding)
    assert waiting.done() and isinstance(waiting.wait(), Finished)


def test_a_trainer_that_tells_why_it_ends_is_the_cause_and_ends_by_itself() -> None:
    parts = two_at_work()
    parts.server.fail(1, "ValueError: boom", 1)
    cause = "trainer rank 1: ValueError: boom"
    assert parts.outcome == Outcome("failed", 1, cause, 1, rank_ends=True)


def test_a_job_that_waits_for_nobody_has_ended_when_it_is_stopped() -> None:
    parts = two_at_work()
    parts.server.stop(Outcome("failed", 9, "torchrun is gone"), abandoned={1, 2})
    assert parts.server.ended.is_set()
    assert not parts.server.all_left


def test_all_have_left_only_when_each_has_said_goodbye() -> None:
    parts = two_at_work()
    parts.server.fail(1, "boom", 1)
    assert not parts.server.all_left
    parts.server.leave(2)
    assert parts.server.all_left


# --- what a rank was doing


def test_the_order_and_the_time_of_who_holds_the_cause_are_kept() -> None:
    parts = two_at_work()
    held = parts.orders.held_by(2)
    assert isinstance(held, Train)
    time.sleep(0.05)
    parts.server.report(gone(2))
    circumstances = parts.server.circumstances()
    since_s = circumstances.pop("since_s")
    assert circumstances == {
        "last_order": {"epoch": 1, "batch": 1, "samples": list(held.indices)},
        "doing": "works on an order",
        "consequences": [],
    }
    assert isinstance(since_s, float) and 0.05 <= since_s < 5


def test_a_slice_is_told_by_epoch_and_number() -> None:
    parts = server_of(perceptron(num_train=8))
    order = parts.server.next_order(1, None).wait()
    assert isinstance(parts.server.next_order(1, result_of(parts, 1, order)).wait(), Evaluate)
    parts.server.report(gone(1))
    assert parts.server.circumstances()["last_order"] == {"epoch": 1, "slice": 0}


def test_nothing_is_told_of_what_the_server_or_one_that_never_joined_was_doing() -> None:
    for finding in (Finding(0, "it stood still", 5), gone(2)):
        parts = server_of(perceptron(), trainers=(1, 2))
        parts.server.report(finding)
        nothing = dict.fromkeys(("last_order", "doing", "since_s"))
        assert parts.server.circumstances() == {**nothing, "consequences": []}


def test_circumstances_are_those_of_the_cause_and_not_of_a_consequence() -> None:
    parts = two_at_work()
    parts.server.report(Finding(0, "it stood still", 5))
    parts.server.report(gone(1))
    assert parts.server.circumstances()["last_order"] is None


def doing(parts: Parts) -> dict[int, Activity]:
    return {trainer: made.activity for trainer, made in parts.server.progress().items()}


def test_whose_turn_it_is_is_known_from_joining_to_leaving() -> None:
    parts = server_of(perceptron(num_train=8), trainers=(1, 2))
    assert doing(parts) == {}
    work = parts.worker(1)
    assert doing(parts) == {1: Activity.WORKING}
    order = train_order(parts.server.next_order(1, None).wait())
    parts.server.join(2, None)
    parts.server.next_order(2, None)
    assert doing(parts) == {1: Activity.WORKING, 2: Activity.WAITING}
    parts.server.next_order(1, work.do(order))
    assert doing(parts) == {1: Activity.WORKING, 2: Activity.WORKING}
    parts.server.leave(1)
    assert doing(parts) == {2: Activity.WORKING}


def test_a_trainer_that_has_arrived_is_expected_to_join() -> None:
    parts = server_of(perceptron(), trainers=(1, 2))
    parts.server.arrived()
    assert doing(parts) == {1: Activity.WORKING, 2: Activity.WORKING}


@pytest.mark.parametrize("call", ["forward", "backward", "evaluate", "contribution"])
def test_while_the_server_answers_it_is_the_servers_turn(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    seen: list[dict[int, Activity]] = []
    parts = server_of(perceptron(num_train=8))
    compute: Any = parts.compute
    original: Callable[..., Any] = getattr(compute, call)

    def watched(*args: Any) -> Any:
        seen.append(doing(parts))
        return original(*args)

    work = parts.worker()
    order = parts.server.next_order(1, None).wait()
    monkeypatch.setattr(compute, call, watched)
    if call == "backward":
        outputs = parts.server.forward(1, 0, 0, torch.randn(8, 6))
        assert doing(parts) == {1: Activity.WORKING}
        parts.server.backward(1, outputs)
        assert doing(parts) == {1: Activity.WORKING}
    else:
        while isinstance(order, Train | Evaluate):
            order = parts.server.next_order(1, work.do(order)).wait()
    assert seen and all(made == {1: Activity.SERVED} for made in seen)


def test_progress_is_since_when_the_turn_changed() -> None:
    parts = server_of(perceptron())
    parts.server.join(1, None)
    joined = parts.server.progress()[1]
    time.sleep(0.01)
    parts.server.next_order(1, None)
    ordered = parts.server.progress()[1]
    assert (joined.activity, ordered.activity) == (Activity.WORKING, Activity.WORKING)
    assert 0.01 <= ordered.since - joined.since < 5
    assert parts.server.progress()[1] == ordered


# --- what is not finite, and is skipped


def normalized() -> Workload:
    """With BatchNorm, whose statistics change with every forward."""

    def model() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3), nn.LogSoftmax(1))

    return replace(perceptron(num_train=32), model=model)


def spoiled(workload: Workload, parts: dict[str, Parts], *batches: tuple[int, int]) -> Workload:
    """The loss of these batches, by epoch and number, is infinite."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        value = workload.loss(outputs, targets)
        held = parts["job"].orders.held_by(parts["job"].trainers[0])
        is_bad = isinstance(held, Train) and (held.epoch, held.batch) in batches
        return value * math.inf if is_bad else value

    return replace(workload, loss=loss)


def skipping(compute: str, *batches: tuple[int, int], epochs: int = 1) -> Parts:
    """A job of one trainer that has ended, with the batches spoiled and skipped."""
    known: dict[str, Parts] = {}
    workload = spoiled(normalized(), known, *batches)
    parts = server_of(workload, compute=compute, epochs=epochs, skip_nonfinite=True)
    known["job"] = parts
    work = parts.worker()
    order = parts.server.next_order(1, None).wait()
    while isinstance(order, Train | Evaluate):
        order = parts.server.next_order(1, work.do(order)).wait()
    return parts


@pytest.mark.parametrize("compute", COMPUTE)
def test_what_is_not_finite_is_left_out_and_counted_and_named(
    compute: str, warnings: pytest.LogCaptureFixture
) -> None:
    parts = skipping(compute, (0, 1))
    assert parts.server.outcome is None
    assert parts.orders.finished
    assert (parts.store.version, parts.metrics.samples_trained) == (3, 24)
    assert (parts.metrics.orders_skipped, parts.metrics.samples_skipped) == (1, 8)
    parts.server.leave(1)
    outcome, numbers = parts.server.result()
    assert outcome.status == "done"
    [skipped] = numbers["skipped"]  # type: ignore[misc]
    samples = skipped.pop("samples")
    assert len(samples) == 8
    assert skipped == {
        "epoch": 1,
        "batch": 1,
        "trainer": 1,
        "version": 1,
        "cause": "the loss is inf",
    }
    assert [record.getMessage() for record in warnings.records] == [
        "skipped epoch 1, batch 1 of trainer rank 1: the loss is inf"
    ]


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("bad", [0, 1, 3])
def test_what_is_skipped_reaches_neither_weights_nor_statistics(compute: str, bad: int) -> None:
    """The result is that of training on the other batches alone."""
    parts = skipping(compute, (0, bad))
    workload = normalized()
    model = make_model(workload, 0)
    optimizer = sgd(model)
    orders = server_of(workload, skip_nonfinite=True).orders
    for batch in range(4):
        order = orders.take_batch(batch)
        assert order is not None
        if batch == bad:
            continue
        inputs, targets = fetch(workload.train, order.indices)
        optimizer.zero_grad()
        workload.loss(model(inputs), targets).backward()
        optimizer.step()
    assert_equal(parts.store.state_dict(), dict(model.state_dict()))


@pytest.mark.parametrize("compute", COMPUTE)
def test_a_gradient_that_is_not_finite_is_skipped_though_its_loss_is(compute: str) -> None:
    class Infinite(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, value: Tensor) -> Tensor:
            return value.clone()

        @staticmethod
        def backward(context: Any, *gradients: Tensor) -> Tensor:
            return gradients[0] * math.inf

    workload = perceptron(num_train=16)
    calls: list[int] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        value = workload.loss(outputs, targets)
        calls.append(1)
        spoil: Callable[[Tensor], Tensor] = Infinite.apply
        return spoil(value) if len(calls) == 1 else value

    parts = server_of(replace(workload, loss=loss), compute=compute, skip_nonfinite=True)
    train_all(parts)
    [skipped] = parts.server.result()[1]["skipped"]  # type: ignore[misc]
    assert skipped["cause"] == "the gradient of 0.weight is not finite"
    assert (parts.store.version, parts.metrics.samples_trained) == (1, 8)
    assert all(bool(value.isfinite().all()) for value in parts.store.state_dict().values())


@pytest.mark.parametrize("compute", COMPUTE)
def test_in_a_round_the_others_make_the_update_without_the_one_that_is_skipped(
    compute: str,
) -> None:
    """Each sample that is trained on moves its weight by lr over the samples of the update."""
    workload, factors = one_weight_for_each_sample(32), [1.0, math.inf]
    parts = server_of(
        replace(workload, loss=lambda *args: workload.loss(*args) * factors.pop(0)),
        compute=compute,
        trainers=(1, 2),
        max_lag=0,
        optimizer=lambda model: sgd(model, lr=16.0),
        skip_nonfinite=True,
    )
    futures = {trainer: parts.server.next_order(trainer, None) for trainer in (1, 2)}
    first = {trainer: train_order(future.wait()) for trainer, future in futures.items()}
    workers = {trainer: parts.worker(trainer) for trainer in (1, 2)}
    good = workers[2].do(first[2])
    bad = workers[1].do(first[1])
    waiting = parts.server.next_order(1, bad)
    assert not waiting.done() and parts.store.version == 0
    parts.server.next_order(2, good)
    assert train_order(waiting.wait()).batch == 2
    assert (parts.store.version, parts.metrics.samples_trained) == (1, 8)
    moved = parts.store.state_dict()["weight"].flatten()
    assert sorted(moved.nonzero().flatten().tolist()) == sorted(first[2].indices)
    assert set(moved[list(first[2].indices)].tolist()) == {-2.0}


@pytest.mark.parametrize("compute", COMPUTE)
def test_a_round_in_which_all_is_skipped_is_no_update(compute: str) -> None:
    workload = perceptron(num_train=32)
    broken = replace(workload, loss=lambda *args: workload.loss(*args) * math.nan)
    parts = server_of(broken, compute=compute, trainers=(1, 2), max_lag=0, skip_nonfinite=True)
    workers = {trainer: parts.worker(trainer) for trainer in (1, 2)}
    futures = {trainer: parts.server.next_order(trainer, None) for trainer in (1, 2)}
    results = {t: workers[t].do(train_order(future.wait())) for t, future in futures.items()}
    futures = {trainer: parts.server.next_order(trainer, results[trainer]) for trainer in (1, 2)}
    assert [train_order(futures[trainer].wait()).batch for trainer in (1, 2)] == [2, 3]
    assert (parts.store.version, parts.metrics.orders_skipped) == (0, 2)


@pytest.mark.parametrize("compute", COMPUTE)
def test_an_epoch_of_which_all_is_skipped_ends_the_job(compute: str) -> None:
    parts = skipping(compute, *((1, batch) for batch in range(4)), epochs=3)
    assert parts.outcome == Outcome(
        "failed", 8, "no order of the epoch gave a loss and gradients that are finite"
    )
    assert (parts.store.version, len(parts.metrics.history)) == (4, 1)


def test_an_epoch_of_which_one_order_is_left_goes_on() -> None:
    parts = skipping("server", (0, 0), (0, 1), (0, 2), epochs=2)
    assert parts.server.outcome is None
    assert (parts.store.version, len(parts.metrics.history)) == (5, 2)


def test_what_was_trained_on_before_a_restart_counts_for_its_epoch() -> None:
    workload = perceptron(num_train=16)
    before = server_of(workload)
    before.server.next_order(1, result_of(before, 1, before.server.next_order(1, None).wait()))
    state = before.server.state()
    broken = replace(workload, loss=lambda *args: workload.loss(*args) * math.nan)
    store = server_of(broken, skip_nonfinite=True)
    store.store.restore(state["store"])
    store.orders.restore(state["orders"])
    store.metrics.restore(state["metrics"])
    server = ParameterServer(
        *(store.store, store.orders, store.metrics, store.compute),
        trainers=(1,),
        skip_nonfinite=True,
    )
    parts = replace(store, server=server)
    result = result_of(parts, 1, server.next_order(1, None).wait())
    assert isinstance(server.next_order(1, result).wait(), Evaluate)
    assert (server.outcome, parts.metrics.orders_skipped) == (None, 1)
