"""One suite over every link, wherever forward and backward run.

The local link is a real socket and real shared memory, with the server in threads of this
process; RPC is a real group of one, over loopback.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ps.links import rpc
from ps.links.calls import ServerError, answer, value
from ps.links.choice import Link, choose
from ps.links.rendezvous import Rendezvous
from ps.links.rpc import RpcGroup, RpcLink, RpcServer
from ps.protocol import Assignment, Evaluate, Finished, Result, Train, Trained
from ps.server.pacing import staleness_bound
from ps.settings.config import Config
from ps.settings.errors import PeerLost
from ps.trainer.trainer import train
from ps.trainer.worker import Worker
from tests.helpers import (
    COMPUTE,
    Parts,
    assert_equal,
    momentum_sgd,
    run_threads,
    server_of,
    sgd,
    topology_of,
    train_all,
    train_alone,
    worker,
)
from tests.links.helpers import connect_to, invitation_of, open_local
from tests.plugins import one_weight_for_each_sample, perceptron


class Borrowed(RpcGroup):
    """The group of the whole module, which no link closes."""

    def __init__(self) -> None:
        pass

    def close(self, timeout_s: float = 0.0) -> None:
        pass


@pytest.fixture(scope="module")
def rpc_group() -> Iterator[RpcGroup]:
    """torch allows RPC once per process, and a group of one calls itself."""
    group = RpcGroup(Rendezvous(topology_of(), 10.0), Config(rpc_timeout=20.0))
    yield Borrowed()
    warned: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rpc.log, "warning", lambda *args: warned.append(str(args)))
        group.close()
    assert warned == []


@dataclass
class Connected:
    """A server, and the way to it."""

    parts: Parts
    link: Callable[[int], Link]


class Connect:
    """Makes a server that is reached over the link of that name."""

    def __init__(self, link: str, compute: str, group: RpcGroup | None = None) -> None:
        self.compute = compute
        self._link = link
        self._group = group
        self._opened: list[Any] = []

    def __call__(self, **options: Any) -> Connected:
        parts = server_of(compute=self.compute, **options)
        if self._link == "in-process":
            return Connected(parts, parts.link)
        if self._link == "rpc":
            end = choose(parts.server, parts.compute, parts.trainers, "rpc")
            assert isinstance(end, RpcServer) and self._group is not None
            rpc.serve(end)
            group = self._group
            return Connected(parts, lambda trainer: RpcLink(group))
        local = open_local(parts)
        self._opened.append(local)
        return Connected(parts, lambda trainer: self._local(invitation_of(local), trainer))

    def _local(self, invitation: str, trainer: int) -> Link:
        link = connect_to(invitation, trainer)
        self._opened.append(link)
        return link

    def close(self) -> None:
        for opened in reversed(self._opened):
            opened.close()


def ways(*computes: str) -> list[Any]:
    """Every link; RPC takes seconds to start."""
    slow = {"rpc": [pytest.mark.slow]}
    return [
        pytest.param((link, compute), id=f"{link}-{compute}", marks=slow.get(link, []))
        for compute in computes
        for link in ("in-process", "local", "rpc")
    ]


@pytest.fixture(params=ways(*COMPUTE))
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    link, compute = request.param
    group = request.getfixturevalue("rpc_group") if link == "rpc" else None
    connect = Connect(link, compute, group)
    yield connect
    connect.close()


def order_from(link: Link, trainer: int, result: Result | None = None) -> Assignment:
    """The next one, which is a batch."""
    reply = link.next_order(trainer, result)
    assert isinstance(reply, Assignment) and isinstance(reply.order, Train)
    return reply


def test_an_order_done_is_an_update_and_brings_the_next_order(connect: Connect) -> None:
    server = connect(workload=perceptron(), prefetch=2)
    link = server.link(1)
    work = worker(1, link, server.parts)
    first = order_from(link, 1)
    result = work.do(first)
    following = order_from(link, 1, result)
    orders = [reply.order for reply in (first, following)]
    assert [(order.epoch, order.batch, len(order.indices)) for order in orders] == [  # type: ignore[union-attr]
        (0, 0, 8),
        (0, 1, 8),
    ]
    assert [order.batch for order in first.prefetch] == [1, 2]
    assert list(first.prefetch[0].indices) == list(following.order.indices)  # type: ignore[union-attr]
    assert (first.weights.version, following.weights.version) == (0, 1)
    assert server.parts.store.version == 1


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_one_trainer_equals_a_plain_loop_after_50_updates(connect: Connect, dropout: float) -> None:
    workload = perceptron(dropout=dropout)
    server = connect(workload=workload, optimizer=momentum_sgd)
    train_all(server.parts, server.link)
    expected = train_alone(workload, updates=50, optimizer=momentum_sgd)
    assert server.parts.store.version == 50
    assert_equal(server.parts.store.state_dict(), expected)


def test_buffers_and_frozen_parameters_reach_the_other_side_too(connect: Connect) -> None:
    def model() -> nn.Module:
        frozen = nn.Linear(6, 5)
        frozen.requires_grad_(False)
        return nn.Sequential(frozen, nn.BatchNorm1d(5), nn.Linear(5, 3), nn.LogSoftmax(1))

    workload = replace(perceptron(), model=model)
    server = connect(workload=workload)
    train_all(server.parts, server.link)
    state = server.parts.store.state_dict()
    assert state["1.num_batches_tracked"].item() == 50
    assert_equal(state, train_alone(workload, updates=50))


def test_staleness_is_the_updates_between_computing_and_applying(connect: Connect) -> None:
    server = connect(workload=perceptron(), trainers=(1, 2))
    links = {trainer: server.link(trainer) for trainer in (1, 2)}
    workers = {trainer: worker(trainer, link, server.parts) for trainer, link in links.items()}
    first, second = (order_from(link, trainer) for trainer, link in links.items())
    stale = workers[1].do(first)
    for _ in range(3):
        second = order_from(links[2], 2, workers[2].do(second))
    links[1].next_order(1, stale)
    assert server.parts.metrics.updates == 4
    assert dict(server.parts.metrics.staleness) == {0: 3, 3: 1}


def test_an_error_of_the_server_reaches_the_trainer_with_its_words(
    connect: Connect, capfd: pytest.CaptureFixture[str]
) -> None:
    server = connect(workload=perceptron())
    link = server.link(1)
    work = worker(1, link, server.parts)
    result = work.do(order_from(link, 1))
    assert isinstance(result, Trained)
    with pytest.raises(
        ServerError, match=r"^on the server, next_order: AssertionError: .*\n\nTrac"
    ):
        link.next_order(1, replace(result, batch=7))
    assert (server.parts.outcome.status, server.parts.outcome.exit_code) == ("failed", 1)
    assert capfd.readouterr().err == ""  # to print it, once, is the trainer's part


def test_a_model_that_would_end_the_process_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = server_of(perceptron())

    def leave(*args: object) -> None:
        sys.exit("no licence")

    monkeypatch.setattr(parts.server, "evaluate", leave)
    answered = answer(parts.server, "evaluate", 1, torch.ones(1))
    with pytest.raises(ServerError, match="on the server, evaluate: SystemExit: no licence"):
        value("evaluate", answered)
    assert parts.outcome.cause == "server rank 0: SystemExit: no licence"


@pytest.mark.parametrize("connect", ways("server"), indirect=True)
def test_an_error_in_the_model_reaches_a_trainer_that_leaves_computing_to_the_server(
    connect: Connect, capfd: pytest.CaptureFixture[str]
) -> None:
    link = connect(workload=perceptron()).link(1)
    link.next_order(1, None)
    with pytest.raises(ServerError, match="mat1 and mat2 shapes cannot be multiplied"):
        link.forward(1, 0, 0, torch.ones(2, 5))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("connect", ways("trainer"), indirect=True)
def test_a_model_of_another_layout_is_refused_when_its_trainer_joins(connect: Connect) -> None:
    server = connect(workload=perceptron())
    other = replace(server.parts, workload=perceptron(hidden=7))
    with pytest.raises(ServerError, match=r"ConfigError: .* trainer rank 1 "):
        worker(1, server.link(1), other)
    assert server.parts.outcome.exit_code == 2


def test_a_gradient_that_is_not_finite_ends_the_job_and_sends_everybody_home(
    connect: Connect,
) -> None:
    workload = perceptron()
    broken = replace(workload, loss=lambda *args: workload.loss(*args) * float("inf"))
    server = connect(workload=broken, trainers=(1, 2))
    before = {name: value.clone() for name, value in server.parts.store.state_dict().items()}
    links = {trainer: server.link(trainer) for trainer in (1, 2)}
    workers = {trainer: worker(trainer, link, server.parts) for trainer, link in links.items()}
    result = workers[1].do(order_from(links[1], 1))
    assert isinstance(links[1].next_order(1, result), Finished)
    assert isinstance(links[2].next_order(2, None), Finished)
    outcome = server.parts.outcome
    assert (outcome.status, outcome.exit_code, outcome.rank) == ("failed", 8, 1)
    assert outcome.cause == "trainer rank 1, epoch 1, batch 0: the loss is inf"
    assert server.parts.store.version == 0
    assert_equal(server.parts.store.state_dict(), before, within=0)


def test_evaluating_twice_is_identical_and_changes_nothing(connect: Connect) -> None:
    workload = perceptron(dropout=0.5, num_train=40)
    server = connect(workload=workload, epochs=2)
    link = server.link(1)
    work = worker(1, link, server.parts)
    evaluations, reply = 0, link.next_order(1, None)
    while not isinstance(reply, Finished):
        assert isinstance(reply, Assignment)
        result = work.do(reply)
        if isinstance(reply.order, Evaluate):
            evaluations += 1
            assert work.do(reply) == result
        reply = link.next_order(1, result)
    assert evaluations == 2 * 3
    assert_equal(server.parts.store.state_dict(), train_alone(workload, updates=10))


def test_a_trainer_that_fails_is_named_and_the_others_go_home(connect: Connect) -> None:
    server = connect(workload=perceptron(), trainers=(1, 2))
    links = {trainer: server.link(trainer) for trainer in (1, 2)}
    for trainer, link in links.items():
        worker(trainer, link, server.parts)
    links[1].next_order(1, None)
    links[1].fail(1, "ValueError: boom", 1)
    assert isinstance(links[2].next_order(2, None), Finished)
    links[2].leave(2)
    assert server.parts.server.ended.is_set()
    outcome = server.parts.outcome
    assert (outcome.cause, outcome.rank) == ("trainer rank 1: ValueError: boom", 1)


def _in_step(connect: Connect, prefetch: int = 0) -> Parts:
    """Each epoch has 24 rounds of three whole batches, and one of 8 and 6 samples."""
    server = connect(
        workload=perceptron(num_train=590),
        trainers=(1, 2, 3),
        epochs=2,
        max_lag=0,
        prefetch=prefetch,
        optimizer=momentum_sgd,
    )
    train_all(server.parts, server.link)
    return server.parts


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 3])
def test_three_trainers_in_step_equal_one_process_on_the_joint_batch(
    connect: Connect, prefetch: int
) -> None:
    parts = _in_step(connect, prefetch)
    expected = train_alone(parts.workload, updates=50, batch_size=24, optimizer=momentum_sgd)
    assert (parts.store.version, parts.metrics.samples_trained) == (50, 2 * 590)
    assert dict(parts.metrics.staleness) == {0: 2 * 74}
    assert_equal(parts.store.state_dict(), expected)


@pytest.mark.slow
def test_training_in_step_twice_is_bit_for_bit_the_same(connect: Connect) -> None:
    first, second = (_in_step(connect).store.state_dict() for _ in range(2))
    assert_equal(first, second, within=0)


class Slow:
    """A worker that takes longer."""

    def __init__(self, inner: Worker, seconds: float) -> None:
        self._inner = inner
        self._seconds = seconds

    def do(self, assignment: Assignment) -> Result:
        time.sleep(self._seconds)
        return self._inner.do(assignment)


class Leads:
    """How many orders each trainer was ahead of the slowest when it got another, as seen under the
    server's lock."""

    def __init__(self, parts: Parts, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[int] = []
        metrics, finished = parts.metrics, dict.fromkeys(parts.trainers, 0)
        returned, dispatched = metrics.returned, metrics.dispatched

        def count(trainer: int, now: float) -> None:
            finished[trainer] += 1
            returned(trainer, now)

        def look(trainer: int, now: float) -> None:
            self.seen.append(finished[trainer] - min(finished.values()))
            dispatched(trainer, now)

        patch.setattr(metrics, "returned", count)
        patch.setattr(metrics, "dispatched", look)


@pytest.mark.slow
@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_no_trainer_is_ever_further_ahead_than_it_may_be(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, max_lag: int
) -> None:
    delays_s = {1: 0.0, 2: 0.004, 3: 0.012}

    def be(trainer: int) -> None:
        link = server.link(trainer)
        work = worker(trainer, link, server.parts)
        train(trainer, link, Slow(work, delays_s[trainer]))

    server = connect(
        workload=perceptron(num_train=168), trainers=delays_s, epochs=2, max_lag=max_lag
    )
    leads = Leads(server.parts, monkeypatch)
    run_threads(be, delays_s)
    bound = staleness_bound(max_lag, len(delays_s))
    assert bound is not None
    assert server.parts.metrics.samples_trained == 2 * 168
    assert max(leads.seen) == max_lag
    assert max(server.parts.metrics.staleness) <= bound


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("max_lag", [None, 1, 0])
def test_trainers_that_leave_hold_nobody_up_and_every_sample_is_trained_once(
    connect: Connect, max_lag: int | None, prefetch: int
) -> None:
    """Trainer 2 leaves with its fourth order in hand, trainer 3 with its second."""
    orders_done = {2: 3, 3: 1}
    server = connect(
        workload=one_weight_for_each_sample(),
        trainers=(1, 2, 3, 4),
        optimizer=lambda model: sgd(model, lr=8.0),
        max_lag=max_lag,
        prefetch=prefetch,
    )

    def be(trainer: int) -> None:
        link = server.link(trainer)
        work = worker(trainer, link, server.parts)
        if trainer not in orders_done:
            train(trainer, link, work)
            return
        reply = link.next_order(trainer, None)
        for _ in range(orders_done[trainer]):  # fewer if the others were much faster
            if isinstance(reply, Assignment) and isinstance(reply.order, Train):
                reply = link.next_order(trainer, work.do(reply))
        link.leave(trainer)

    parts = server.parts
    run_threads(be, parts.trainers)
    assert parts.outcome.status == "done"
    assert parts.metrics.samples_trained == 400
    moved = -parts.store.state_dict()["weight"].flatten()
    if max_lag == 0:  # by 1 / members of the round that the sample was in
        assert bool((moved > 0).all())
    else:
        assert torch.equal(moved, torch.ones(400))


class Late:
    def evaluate(self, trainer: int, inputs: Tensor) -> Tensor:
        time.sleep(2)
        return inputs


@pytest.mark.slow
def test_an_rpc_that_takes_longer_than_its_limit_names_call_and_option(
    rpc_group: RpcGroup,
) -> None:
    rpc.serve(RpcServer(Late()))  # type: ignore[arg-type]
    rpc.rpc._set_rpc_timeout(1.0)
    try:
        with pytest.raises(PeerLost, match=r"^evaluate .* 1 s \(--rpc-timeout\)"):
            RpcLink(rpc_group).evaluate(1, torch.ones(1))
    finally:
        rpc.rpc._set_rpc_timeout(20.0)
