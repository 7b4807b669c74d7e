"""The server's calls: futures, marks, how a job ends; and whole jobs with both ways to compute."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.futures import Future

from ps.host.health import Activity, Finding
from ps.protocol import Assignment, Evaluate, Evaluated, Finished, Order, Reply, Train, Wait
from ps.server.orders import Orders, Plan
from ps.server.roll import Outcome
from ps.server.server import ParameterServer
from ps.settings.log import log
from ps.workload import fetch
from ps.workloads.checks import make_model
from tests.helpers import COMPUTE, Parts, assert_equal, server_of, sgd, train_all
from tests.plugins import fixed_gradients, perceptron
from tests.server.work import plan_of, result_of, state_of, training_of

BOUND_S = 10.0


class Job:
    """A server whose trainers are invented: batches of 4 samples, slices of 4."""

    def __init__(
        self,
        plan: Plan | None = None,
        trainers: Sequence[int] = (1, 2),
        *,
        max_lag: int | None = None,
        orders: Orders | None = None,
        are_at_work: bool = False,
    ) -> None:
        self.state = state_of(plan or plan_of(train=40), trainers, orders=orders)
        self.training, _ = training_of(self.state, trainers, max_lag=max_lag)
        self.server = ParameterServer(self.training, trainers)
        for trainer in trainers if are_at_work else ():
            self.server.join(trainer, None)
            self.server.next_order(trainer, None)

    def ask(self, trainer: int, gradient: float | None = None) -> Future[Reply]:
        """Return the order that the trainer holds, if a gradient is given, and get the next."""
        if gradient is None:
            return self.server.next_order(trainer, None)
        held = self.training.held_by(trainer)
        return self.server.next_order(trainer, result_of(held, 1.0, torch.tensor(gradient)))

    @property
    def outcome(self) -> Outcome:
        assert self.server.outcome is not None
        return self.server.outcome

    @property
    def consequences(self) -> object:
        return self.server.roll.circumstances()["consequences"]

    @property
    def activities(self) -> dict[int, Activity]:
        return {trainer: mark.activity for trainer, mark in self.server.progress().items()}


def order_in(future: Future[Reply]) -> Order:
    """The order that has come."""
    assert future.done()
    reply = future.wait()
    assert isinstance(reply, Assignment)
    return reply.order


def batch_in(future: Future[Reply]) -> int:
    order = order_in(future)
    assert isinstance(order, Train)
    return order.batch


def kind_in(future: Future[Reply]) -> type | None:
    return type(future.wait()) if future.done() else None


def gone(trainer: int, text: str = "killed by SIGKILL", exit_code: int = 4) -> Finding:
    return Finding(trainer, text, exit_code, is_gone=True)


# --- who waits


def test_a_trainer_without_work_holds_a_future_that_the_calls_of_others_complete() -> None:
    job = Job(plan_of(train=4))
    assert batch_in(job.ask(1)) == 0
    waiting = job.ask(2)
    assert not waiting.done()
    assert order_in(job.ask(1, 1.0)) == Evaluate(0, 1, 4, 6)
    assert order_in(waiting) == Evaluate(0, 0, 0, 4)


def test_who_waits_too_long_for_a_call_is_sent_to_ask_again_and_keeps_its_part() -> None:
    job = Job(max_lag=0)
    first = job.ask(1)
    job.server.tick(max_wait_s=60.0)
    assert not first.done()
    time.sleep(0.01)
    job.server.tick(max_wait_s=0.005)
    assert kind_in(first) is Wait
    second = job.ask(2)
    assert not second.done()
    assert (batch_in(job.ask(1)), batch_in(second)) == (0, 1)


def test_what_a_trainer_that_left_held_goes_to_one_that_waits() -> None:
    job = Job(plan_of(train=4))
    job.ask(1)
    waiting = job.ask(2)
    job.server.leave(1)
    assert batch_in(waiting) == 0


def test_a_round_waits_for_all_and_closes_when_the_last_that_works_leaves() -> None:
    job = Job(max_lag=0)
    for trainer in (1, 2):
        job.ask(trainer)
    waiting = job.ask(1, 1.0)
    assert not waiting.done() and job.state.store.version == 0
    job.server.leave(2)
    assert batch_in(waiting) == 1
    assert job.state.store.version == 1


def test_while_an_epoch_is_shuffled_nobody_gets_a_batch_and_nothing_waits_for_it() -> None:
    made: dict[int, Sequence[int]] = {}
    plan = plan_of(train=8)
    job = Job(plan, trainers=(1, 2, 3), orders=Orders(plan, made.get))
    waiting = {trainer: job.ask(trainer) for trainer in (1, 2, 3)}
    job.server.answer_waiting()
    job.server.leave(3)
    assert job.state.snapshot().version == 0
    assert not any(future.done() for future in waiting.values())
    made[0] = range(8)
    job.server.answer_waiting()
    assert [batch_in(waiting[trainer]) for trainer in (1, 2)] == [0, 1]
    job = Job(plan, orders=Orders(plan, {}.get))
    future = job.ask(1)
    job.server.stop(Outcome("interrupted", 143, "stopped by SIGTERM"))
    assert kind_in(future) is Finished


def test_all_are_sent_home_when_the_work_is_done_and_it_is_over_when_they_left() -> None:
    job = Job(plan_of(train=4, test=4, epochs=1))
    job.ask(1)
    waiting = job.ask(2)
    others = job.ask(1, 1.0)
    assert order_in(waiting) == Evaluate(0, 0, 0, 4)
    assert not others.done()
    assert [kind_in(future) for future in (job.ask(2, 1.0), others)] == [Finished, Finished]
    job.server.leave(1)
    assert not job.server.ended.is_set()
    job.server.leave(2)
    assert job.server.ended.is_set() and job.server.roll.all_left
    outcome, numbers = job.server.result()
    assert (outcome, numbers["updates"]) == (Outcome("done"), 1)


# --- nothing runs under the lock that may block


class Blocking(logging.Handler):
    """Blocks where a line is written, until it is let go on."""

    def __init__(self) -> None:
        super().__init__()
        self.is_writing, self.may_go_on = threading.Event(), threading.Event()

    def handle(self, record: logging.LogRecord) -> bool:
        self.is_writing.set()
        return self.may_go_on.wait(BOUND_S)


@pytest.fixture
def blocking(caplog: pytest.LogCaptureFixture) -> Iterator[Blocking]:
    handler = Blocking()
    log.addHandler(handler)
    with caplog.at_level(logging.INFO, logger="ps"):
        yield handler
    handler.may_go_on.set()
    log.removeHandler(handler)


def with_a_line_to_write() -> Job:
    """What trainer 1 has done is in no progress line yet."""
    job = Job()
    job.training.assign([1], 0.0)
    result: Any = result_of(job.training.held_by(1), 1.0, torch.tensor(1.0))
    job.training.take_trained(1, result, job.training.contribution(1, result), 0.0)
    return job


LINES: dict[str, tuple[Callable[[], Job], Callable[[Job], object]]] = {
    "result": (lambda: Job(are_at_work=True), lambda job: job.ask(1, 1.0)),
    "tick": (with_a_line_to_write, lambda job: job.server.tick(60.0)),
    "report": (Job, lambda job: job.server.report(Finding(1, "little memory is left"))),
}


@pytest.mark.parametrize("line", LINES)
def test_a_line_whose_writing_blocks_holds_up_no_other_call(blocking: Blocking, line: str) -> None:
    make, write = LINES[line]
    job = make()
    thread = threading.Thread(target=write, args=(job,))
    thread.start()
    assert blocking.is_writing.wait(BOUND_S)
    assert job.state.lock.acquire(timeout=BOUND_S)
    job.state.lock.release()
    blocking.may_go_on.set()
    thread.join(BOUND_S)
    assert not thread.is_alive()


def test_what_waits_for_a_future_may_call_the_server() -> None:
    job = Job(plan_of(train=4))
    job.ask(1)
    seen: list[int] = []
    job.ask(2).add_done_callback(lambda _: seen.append(job.state.snapshot().version))
    job.server.leave(1)
    assert seen == [0]


# --- how a job ends, and why


def at_work() -> Job:
    """Both trainers have an order."""
    return Job(are_at_work=True)


OUTCOMES: list[tuple[Callable[[ParameterServer], None], Outcome]] = [
    (
        lambda server: server.fail(1, "ValueError: boom", 7),
        Outcome("failed", 7, "trainer rank 1: ValueError: boom", 1, rank_ends=True),
    ),
    (
        lambda server: server.internal_error("RuntimeError: boom", 1),
        Outcome("failed", 1, "server rank 0: RuntimeError: boom", 0),
    ),
    (
        lambda server: server.report(gone(2, "ended", 6)),
        Outcome("failed", 6, "lost trainer rank 2: ended", 2, rank_ends=True),
    ),
    (
        lambda server: server.report(replace(gone(2, "ended"), is_quiet=True)),
        Outcome("failed", 4, "lost trainer rank 2: ended", 2),
    ),
    (
        lambda server: server.report(Finding(2, "it stands still", 5)),
        Outcome("failed", 5, "trainer rank 2: it stands still", 2),
    ),
    (
        lambda server: server.report(Finding(0, "it stands still", 5)),
        Outcome("failed", 5, "server rank 0: it stands still", 0),
    ),
    (
        lambda server: server.stop(Outcome("interrupted", 143, "stopped by SIGTERM")),
        Outcome("interrupted", 143, "stopped by SIGTERM"),
    ),
]


@pytest.mark.parametrize(("end", "outcome"), OUTCOMES)
def test_what_ends_a_job_is_its_outcome_and_nothing_more_is_applied(
    end: Callable[[ParameterServer], None], outcome: Outcome
) -> None:
    job = at_work()
    end(job.server)
    assert (job.outcome, job.consequences) == (outcome, [])
    assert kind_in(job.ask(1, 1.0) if outcome.rank != 1 else job.ask(2, 1.0)) is Finished
    assert (job.state.store.version, job.state.metrics.samples_trained) == (0, 0)


@pytest.mark.parametrize("end", [end for end, _ in OUTCOMES])
def test_who_waits_when_a_job_ends_is_sent_home(end: Callable[[ParameterServer], None]) -> None:
    job = Job(plan_of(train=4), trainers=(1, 2, 3))
    waiting = [job.ask(trainer) for trainer in (1, 2, 3)][2]
    end(job.server)
    assert kind_in(waiting) is Finished


@pytest.mark.parametrize(
    ("finding", "left", "is_over"),
    [
        (gone(2), [1], True),
        (Finding(2, "it stands still", 5), [1], True),
        (Finding(0, "it stands still", 5), [1], False),
        (Finding(0, "it stands still", 5), [1, 2], True),
    ],
)
def test_a_rank_that_is_gone_or_stands_still_is_not_waited_for(
    finding: Finding, left: list[int], is_over: bool
) -> None:
    job = at_work()
    job.server.report(finding)
    assert not job.server.ended.is_set()
    for trainer in left:
        job.server.leave(trainer)
    assert (job.server.ended.is_set(), job.server.roll.all_left) == (is_over, False)


def test_a_job_that_waits_for_nobody_is_over_when_it_is_stopped() -> None:
    job = at_work()
    job.server.stop(Outcome("failed", 9, "torchrun is gone"), abandoned={1, 2})
    assert job.server.ended.is_set() and not job.server.roll.all_left


def test_all_have_left_when_each_has_said_goodbye_or_has_told_why() -> None:
    job = at_work()
    job.server.fail(1, "boom", 1)
    assert not job.server.roll.all_left
    job.server.leave(2)
    assert job.server.roll.all_left and job.server.ended.is_set()


def test_all_trainers_leaving_early_is_a_failure() -> None:
    job = at_work()
    job.server.leave(1)
    assert job.server.outcome is None
    job.server.leave(2)
    assert job.server.ended.is_set()
    assert (job.outcome.status, job.outcome.exit_code, job.outcome.rank) == ("failed", 4, 0)


def test_a_warning_is_logged_and_the_job_goes_on(warnings: pytest.LogCaptureFixture) -> None:
    job = at_work()
    for rank in (1, 0):
        job.server.report(Finding(rank, "little memory is left"))
    assert [record.getMessage() for record in warnings.records] == [
        "trainer rank 1: little memory is left",
        "server rank 0: little memory is left",
    ]
    assert (job.server.outcome, job.consequences) == (None, [])


def test_the_end_of_a_trainer_that_has_left_or_has_told_why_is_no_finding() -> None:
    job = at_work()
    job.server.leave(1)
    job.server.report(gone(1))
    assert job.server.outcome is None
    job.server.fail(2, "ValueError: boom", 1)
    job.server.report(gone(2))
    assert job.outcome.cause == "trainer rank 2: ValueError: boom"
    assert job.consequences == []


def test_one_loss_that_two_threads_find_at_once_is_one() -> None:
    """The link's, and the one that watches."""
    job = at_work()
    findings = [gone(1, "its connection closed"), gone(1, "killed by SIGKILL")]
    threads = [threading.Thread(target=job.server.report, args=(f,)) for f in findings]
    with job.state.lock:
        for thread in threads:
            thread.start()
        time.sleep(0.02)
    for thread in threads:
        thread.join(BOUND_S)
    assert (job.outcome.rank, job.consequences) == (1, [])


def test_what_goes_wrong_after_the_cause_is_a_consequence_once() -> None:
    job = at_work()
    job.server.report(Finding(1, "it has been stopped for 60 s", 5))
    job.server.report(Finding(1, "it has been stopped for 60 s", 5))
    job.server.report(gone(2))
    job.server.fail(1, "PeerLost: lost the server", 4)
    for _ in range(2):
        job.server.stop(Outcome("interrupted", 143, "stopped by SIGTERM"))
    job.server.internal_error("RuntimeError: late", 1)
    assert job.outcome.cause == "trainer rank 1: it has been stopped for 60 s"
    assert job.consequences == [
        "lost trainer rank 2: killed by SIGKILL",
        "trainer rank 1: PeerLost: lost the server",
        "stopped by SIGTERM",
        "server rank 0: RuntimeError: late",
    ]


def test_at_world_size_1_the_cause_is_named_once_as_the_servers_which_does_not_wait() -> None:
    job = Job(trainers=(0,), are_at_work=True)
    job.server.fail(0, "ValueError: boom", 1)
    job.server.internal_error("ValueError: boom", 1)
    assert job.outcome == Outcome("failed", 1, "server rank 0: ValueError: boom", 0)
    assert job.consequences == [] and job.server.ended.is_set()


def test_where_training_must_not_go_on_the_job_ends_for_all() -> None:
    job = Job(max_lag=0, are_at_work=True)
    waiting = job.ask(1, 1.0)
    assert kind_in(job.ask(2, float("nan"))) is kind_in(waiting) is Finished
    assert (job.outcome.exit_code, job.outcome.rank, job.outcome.rank_ends) == (8, 2, False)
    assert job.outcome.cause is not None and "trainer rank 2, epoch 1, batch 1" in job.outcome.cause


# --- what a rank was doing


def test_the_order_and_the_time_of_who_holds_the_cause_are_kept() -> None:
    job = at_work()
    held = job.training.held_by(2)
    assert isinstance(held, Train)
    time.sleep(0.02)
    job.server.report(gone(2))
    job.server.report(gone(1))
    circumstances = job.server.roll.circumstances()
    since_s = circumstances.pop("since_s")
    assert circumstances == {
        "last_order": {"epoch": 1, "batch": 1, "samples": list(held.indices)},
        "doing": "works on an order",
        "consequences": ["lost trainer rank 1: killed by SIGKILL"],
    }
    assert isinstance(since_s, float) and 0.02 <= since_s < 5


@pytest.mark.parametrize("finding", [Finding(0, "it stands still", 5), gone(2)])
def test_nothing_is_known_of_what_the_server_or_one_that_never_joined_was_doing(
    finding: Finding,
) -> None:
    job = Job()
    job.server.report(finding)
    nothing = dict.fromkeys(("last_order", "doing", "since_s"))
    assert job.server.roll.circumstances() == {**nothing, "consequences": []}


def test_whose_turn_it_is_is_known_from_joining_to_leaving() -> None:
    job = Job(plan_of(train=4))
    assert job.activities == {}
    job.server.join(1, None)
    assert job.activities == {1: Activity.WORKING}
    job.ask(1)
    job.ask(2)
    assert job.activities == {1: Activity.WORKING, 2: Activity.WAITING}
    job.server.tick(max_wait_s=-1.0)
    assert job.activities == {1: Activity.WORKING, 2: Activity.WAITING}
    job.ask(2)
    job.ask(1, 1.0)
    assert job.activities == {1: Activity.WORKING, 2: Activity.WORKING}
    job.server.leave(1)
    assert job.activities == {2: Activity.WORKING}


def test_from_when_all_are_there_each_that_has_not_left_is_expected_to_make_progress() -> None:
    job = Job(trainers=(1, 2, 3))
    job.server.leave(3)
    job.server.expect_progress()
    assert job.activities == {1: Activity.WORKING, 2: Activity.WORKING}


def test_a_mark_is_since_when_the_turn_changed() -> None:
    job = Job()
    job.server.join(1, None)
    joined = job.server.progress()[1]
    time.sleep(0.01)
    job.ask(1)
    ordered = job.server.progress()[1]
    assert 0.01 <= ordered.since - joined.since < 5
    assert job.server.progress()[1] == ordered


class Watched(nn.Module):
    """Tells where it is computed with."""

    def __init__(self, seen: Callable[[], None]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.seen = [seen]

    def __deepcopy__(self, memo: dict[int, object]) -> Watched:
        copied = Watched(self.seen[0])
        copied.load_state_dict(self.state_dict())
        return copied

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen[0]()
        outputs: Tensor = self.layer(inputs)
        outputs.register_hook(lambda gradient: self.seen[0]()) if outputs.requires_grad else None
        return outputs.log_softmax(1)


def test_while_the_server_computes_it_is_the_servers_turn() -> None:
    """In forward, backward and evaluate, and in the rest of backward."""
    known: list[Parts] = []
    seen: list[Activity] = []

    def see() -> None:
        seen.extend(mark.activity for parts in known for mark in parts.server.progress().values())

    parts = server_of(replace(perceptron(num_train=8), model=lambda: Watched(see)))
    known.append(parts)
    server = parts.server
    server.join(1, None)
    outputs = server.forward(1, 0, 0, torch.randn(8, 6))
    server.backward(1, torch.ones_like(outputs))
    server.evaluate(1, torch.randn(8, 6))
    assert seen == [Activity.SERVED] * 3
    assert server.progress()[1].activity is Activity.WORKING
    seen.clear()
    train_all(parts)
    assert set(seen) == {Activity.SERVED}


# --- whole jobs


@pytest.mark.parametrize("compute", COMPUTE)
def test_evaluation_sees_the_weights_that_the_epoch_ended_with(compute: str) -> None:
    parts = server_of(perceptron(num_train=8), compute=compute, epochs=2)
    work = parts.worker()
    assignment = parts.server.next_order(1, None).wait()
    results: list[Evaluated] = []
    ended_with: dict[str, Tensor] = {}
    while isinstance(assignment, Assignment) and assignment.order.epoch == 0:
        result = work.do(assignment)
        assignment = parts.server.next_order(1, result).wait()
        if isinstance(result, Evaluated):
            results.append(result)
        else:
            state = parts.store.state_dict()
            ended_with = {name: value.clone() for name, value in state.items()}
    model = parts.workload.model().eval()
    model.load_state_dict(ended_with)
    inputs, targets = fetch(parts.workload.test, range(97))
    with torch.inference_mode():
        outputs = model(inputs)
    assert [result.samples for result in results] == [40, 40, 17]
    assert sum(r.correct for r in results) == parts.workload.correct(outputs, targets)
    loss_sum = parts.workload.loss(outputs, targets).item() * 97
    assert sum(r.loss_sum for r in results) == pytest.approx(loss_sum)


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize(("num_trainers", "max_lag"), [(1, None), (2, 0), (5, None)])
def test_threads_of_many_trainers_lose_no_update_and_no_sample(
    num_trainers: int, max_lag: int | None, compute: str
) -> None:
    """Each gradient is exactly one per weight, so each update takes exactly lr off."""
    parts = server_of(
        fixed_gradients(None),  # type: ignore[arg-type]
        compute=compute,
        trainers=range(1, num_trainers + 1),
        epochs=3,
        max_lag=max_lag,
        prefetch=2,
        optimizer=lambda model: sgd(model, lr=1.0),
    )
    train_all(parts)
    updates = 75 if max_lag == 0 else 150
    assert parts.store.version == updates
    assert parts.store.state_dict()["weight"].tolist() == [[-float(updates)] * 4]
    assert parts.metrics.samples_trained == 1200
    assert [record.epoch for record in parts.metrics.history] == [1, 2, 3]
    assert isinstance(parts.server.next_order(1, None).wait(), Finished)


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
    work, assignment = parts.worker(), parts.server.next_order(1, None).wait()
    assert isinstance(assignment, Assignment)
    assert isinstance(parts.server.next_order(1, work.do(assignment)).wait(), Finished)
    assert (parts.outcome.exit_code, parts.outcome.rank) == (8, 1)
    assert "no gradient reached any parameter" in str(parts.outcome.cause)


@pytest.mark.parametrize("compute", COMPUTE)
def test_what_is_skipped_reaches_neither_weights_nor_statistics(compute: str) -> None:
    """The result is that of training on the other batches alone."""
    spoiled = iter([False, True, False, False])

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        value = nn.functional.nll_loss(outputs, targets)
        return value * float("inf") if next(spoiled, False) else value

    def model() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3), nn.LogSoftmax(1))

    workload = replace(perceptron(num_train=32), model=model)
    parts = server_of(replace(workload, loss=loss), compute=compute, skip_nonfinite=True)
    train_all(parts)
    assert (parts.store.version, parts.metrics.orders_skipped) == (3, 1)
    orders, alone = server_of(workload).orders, make_model(workload, 0)
    optimizer = sgd(alone)
    for batch in range(4):
        order = orders.take_batch(batch)
        assert order is not None
        if batch != 1:
            inputs, targets = fetch(workload.train, order.indices)
            optimizer.zero_grad()
            workload.loss(alone(inputs), targets).backward()
            optimizer.step()
    assert_equal(parts.store.state_dict(), dict(alone.state_dict()))
