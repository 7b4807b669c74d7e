"""One suite over every link, wherever forward and backward run.

The local link is a real socket and real shared memory, with the server in threads of this
process; RPC is a real group of one, over loopback.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from ps.links import rpc
from ps.links.calls import ServerError, answer, value
from ps.links.channel import Address
from ps.links.choice import Link, choose
from ps.links.local import LocalLink, LocalServer
from ps.links.rendezvous import Rendezvous
from ps.protocol import Evaluate, Finished, Result, Train, Trained
from ps.server.pacing import Pacing, staleness_bound
from ps.settings.config import Config
from ps.settings.errors import ConfigError, LaunchError, PeerLost
from ps.trainer.trainer import train
from ps.trainer.worker import Worker
from tests.helpers import (
    COMPUTE,
    Parts,
    assert_equal,
    end_processes,
    momentum_sgd,
    next_line,
    run_threads,
    server_of,
    sgd,
    start,
    topology_of,
    train_all,
    train_alone,
    worker,
)
from tests.plugins import one_weight_for_each_sample, perceptron

pytestmark = pytest.mark.slow


class LinkOfOne(rpc.RpcLink):
    """In the group that this process has opened already."""

    def __init__(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def rpc_group() -> Iterator[None]:
    """torch allows RPC once per process, and a group of one calls itself."""
    group = rpc.RpcGroup(Rendezvous(topology_of(), 10.0), Config(rpc_timeout=20.0))
    yield
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


class _Connect:
    """Makes a server that is reached over the link of that name."""

    def __init__(self, link: str, compute: str) -> None:
        self.compute = compute
        self._link = link
        self._opened: list[Link | LocalServer] = []

    def __call__(self, **options: object) -> Connected:
        parts = server_of(compute=self.compute, **options)  # type: ignore[arg-type]
        if self._link == "in-process":
            return Connected(parts, parts.link)
        if self._link == "rpc":
            rpc.serve(parts.server)
            return Connected(parts, lambda trainer: LinkOfOne())
        end = choose(parts.server, parts.compute, parts.trainers, "local")
        assert isinstance(end, LocalServer)
        end.open()
        self._opened.append(end)
        return Connected(parts, lambda trainer: self._local(end, trainer))

    def _local(self, end: LocalServer, trainer: int) -> Link:
        address = Address(end.invitation["name"], end.invitation["key"])
        link = LocalLink(address, trainer, 20.0)
        self._opened.append(link)
        return link

    def close(self) -> None:
        for opened in reversed(self._opened):
            opened.close()


WAYS = {
    compute: [f"{link}-{compute}" for link in ("in-process", "local", "rpc")] for compute in COMPUTE
}


@pytest.fixture(params=[way for compute in COMPUTE for way in WAYS[compute]])
def connect(request: pytest.FixtureRequest) -> Iterator[_Connect]:
    link, compute = request.param.rsplit("-", 1)
    if link == "rpc":
        request.getfixturevalue("rpc_group")
    connect = _Connect(link, compute)
    yield connect
    connect.close()


def test_an_order_done_is_an_update_and_brings_the_next_order(connect: _Connect) -> None:
    server = connect(workload=perceptron())
    link = server.link(1)
    work = worker(1, link, server.parts)
    order = link.next_order(1, None)
    assert isinstance(order, Train) and (order.epoch, order.batch) == (0, 0)
    following = link.next_order(1, work.do(order))
    assert isinstance(following, Train) and following.batch == 1
    assert server.parts.store.version == 1


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_one_trainer_equals_a_plain_loop_after_50_updates(
    connect: _Connect, dropout: float
) -> None:
    workload = perceptron(dropout=dropout)
    server = connect(workload=workload, optimizer=momentum_sgd)
    train_all(server.parts, server.link)
    expected = train_alone(workload, updates=50, optimizer=momentum_sgd)
    assert server.parts.store.version == 50
    assert_equal(server.parts.store.state_dict(), expected)


def test_staleness_is_the_updates_between_computing_and_applying(connect: _Connect) -> None:
    server = connect(workload=perceptron(), trainers=(1, 2))
    links = {trainer: server.link(trainer) for trainer in (1, 2)}
    workers = {trainer: worker(trainer, link, server.parts) for trainer, link in links.items()}
    orders = {trainer: link.next_order(trainer, None) for trainer, link in links.items()}
    first, second = orders[1], orders[2]
    assert isinstance(first, Train) and isinstance(second, Train)
    stale = workers[1].do(first)
    for _ in range(3):
        result = workers[2].do(second)
        second = links[2].next_order(2, result)
        assert isinstance(second, Train)
    links[1].next_order(1, stale)
    assert server.parts.metrics.updates == 4
    assert dict(server.parts.metrics.staleness) == {0: 3, 3: 1}


def test_an_error_of_the_server_reaches_the_trainer_with_its_words(
    connect: _Connect, capfd: pytest.CaptureFixture[str]
) -> None:
    server = connect(workload=perceptron())
    link = server.link(1)
    work = worker(1, link, server.parts)
    order = link.next_order(1, None)
    assert isinstance(order, Train)
    result = work.do(order)
    assert isinstance(result, Trained)
    wrong = replace(result, batch=7)
    with pytest.raises(
        (AssertionError, ServerError), match=r"trainer 1 holds \('batch', 0, 0\), not"
    ):
        link.next_order(1, wrong)
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


@pytest.mark.parametrize("connect", WAYS["server"], indirect=True)
def test_an_error_in_the_model_reaches_a_trainer_that_leaves_computing_to_the_server(
    connect: _Connect, capfd: pytest.CaptureFixture[str]
) -> None:
    link = connect(workload=perceptron()).link(1)
    link.next_order(1, None)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        link.forward(1, 0, 0, torch.ones(2, 5))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("connect", WAYS["trainer"], indirect=True)
def test_a_model_of_another_layout_is_refused_when_its_trainer_joins(connect: _Connect) -> None:
    server = connect(workload=perceptron())
    other = replace(server.parts, workload=perceptron(hidden=7))
    with pytest.raises(
        (ConfigError, ServerError), match="trainer rank 1 made differs from the server's in shapes"
    ):
        worker(1, server.link(1), other)


def test_a_gradient_that_is_not_finite_ends_the_job_and_sends_everybody_home(
    connect: _Connect,
) -> None:
    workload = perceptron()
    broken = replace(workload, loss=lambda *args: workload.loss(*args) * float("inf"))
    server = connect(workload=broken, trainers=(1, 2))
    before = {name: value.clone() for name, value in server.parts.store.state_dict().items()}
    links = {trainer: server.link(trainer) for trainer in (1, 2)}
    workers = {trainer: worker(trainer, link, server.parts) for trainer, link in links.items()}
    order = links[1].next_order(1, None)
    assert isinstance(order, Train)
    assert isinstance(links[1].next_order(1, workers[1].do(order)), Finished)
    assert isinstance(links[2].next_order(2, None), Finished)
    outcome = server.parts.outcome
    assert (outcome.status, outcome.exit_code) == ("failed", 8)
    assert outcome.cause == "trainer rank 1, epoch 1, batch 0: the loss is inf"
    assert server.parts.store.version == 0
    assert_equal(server.parts.store.state_dict(), before, within=0)


def test_evaluating_twice_is_identical_and_changes_nothing(connect: _Connect) -> None:
    workload = perceptron(dropout=0.5, num_train=40)
    server = connect(workload=workload, epochs=2)
    link = server.link(1)
    work = worker(1, link, server.parts)
    evaluations, order = 0, link.next_order(1, None)
    while not isinstance(order, Finished):
        assert isinstance(order, Train | Evaluate)
        result = work.do(order)
        if isinstance(order, Evaluate):
            evaluations += 1
            assert work.do(order) == result
        order = link.next_order(1, result)
    assert evaluations == 2 * 3
    assert_equal(server.parts.store.state_dict(), train_alone(workload, updates=10))


def test_a_trainer_that_fails_is_named_and_the_others_go_home(connect: _Connect) -> None:
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


def _in_step(connect: _Connect, lookahead: int = 0) -> Parts:
    """Each epoch has 24 rounds of three whole batches, and one of 8 and 6 samples."""
    server = connect(
        workload=perceptron(num_train=590),
        trainers=(1, 2, 3),
        epochs=2,
        max_lag=0,
        lookahead=lookahead,
        optimizer=momentum_sgd,
    )
    train_all(server.parts, server.link)
    return server.parts


@pytest.mark.parametrize("lookahead", [0, 3])
def test_three_trainers_in_step_equal_one_process_on_the_joint_batch(
    connect: _Connect, lookahead: int
) -> None:
    parts = _in_step(connect, lookahead)
    expected = train_alone(parts.workload, updates=50, batch_size=24, optimizer=momentum_sgd)
    assert (parts.store.version, parts.metrics.samples_trained) == (50, 2 * 590)
    assert dict(parts.metrics.staleness) == {0: 2 * 74}
    assert_equal(parts.store.state_dict(), expected)


def test_training_in_step_twice_is_bit_for_bit_the_same(connect: _Connect) -> None:
    first, second = (_in_step(connect).store.state_dict() for _ in range(2))
    assert_equal(first, second, within=0)


class _Slow:
    """A worker that takes longer."""

    def __init__(self, inner: Worker, seconds: float) -> None:
        self._inner = inner
        self._seconds = seconds

    def do(self, order: Train | Evaluate) -> Result:
        time.sleep(self._seconds)
        return self._inner.do(order)


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_no_trainer_is_ever_further_ahead_than_it_may_be(
    connect: _Connect, monkeypatch: pytest.MonkeyPatch, max_lag: int
) -> None:
    leads: list[int] = []
    delays_s = {1: 0.0, 2: 0.004, 3: 0.012}

    class Watched(Pacing):
        def start(self, trainer: int) -> None:
            leads.append(self._finished[trainer] - min(self._finished.values()))
            super().start(trainer)

    def be(trainer: int) -> None:
        link = server.link(trainer)
        work = worker(trainer, link, server.parts)
        train(trainer, link, _Slow(work, delays_s[trainer]))

    monkeypatch.setattr("ps.server.server.Pacing", Watched)
    server = connect(
        workload=perceptron(num_train=168), trainers=delays_s, epochs=2, max_lag=max_lag
    )
    run_threads(be, delays_s)
    bound = staleness_bound(max_lag, len(delays_s))
    assert bound is not None
    assert server.parts.metrics.samples_trained == 2 * 168
    assert max(leads) == max_lag
    assert max(server.parts.metrics.staleness) <= bound


@pytest.mark.parametrize("lookahead", [0, 3])
@pytest.mark.parametrize("max_lag", [None, 1, 0])
def test_trainers_that_leave_hold_nobody_up_and_every_sample_is_trained_once(
    connect: _Connect, max_lag: int | None, lookahead: int
) -> None:
    """Trainer 2 leaves with its fourth order in hand, trainer 3 with its second."""
    orders_done = {2: 3, 3: 1}
    server = connect(
        workload=one_weight_for_each_sample(),
        trainers=(1, 2, 3, 4),
        optimizer=lambda model: sgd(model, lr=8.0),
        max_lag=max_lag,
        lookahead=lookahead,
    )

    def be(trainer: int) -> None:
        link = server.link(trainer)
        work = worker(trainer, link, server.parts)
        if trainer not in orders_done:
            train(trainer, link, work)
            return
        order = link.next_order(trainer, None)
        for _ in range(orders_done[trainer]):
            if isinstance(order, Train):  # not if the others were much faster
                order = link.next_order(trainer, work.do(order))
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


@pytest.mark.slow
def test_eight_trainers_in_step_do_with_one_rpc_thread() -> None:
    """Who waits for an order must not hold the thread that the others need."""
    process = start(be_nine_ranks_on_one_thread)
    try:
        assert next_line(process) == "server: 7 updates, 400 samples"
        assert next_line(process) == "trainer: 7 updates, 400 samples"
    finally:
        end_processes(process)


def be_nine_ranks_on_one_thread() -> None:
    rpc._num_threads = lambda topology: 1
    group = rpc.RpcGroup(Rendezvous(topology_of(), 10.0), Config(rpc_timeout=20.0))
    for compute in COMPUTE:
        server = _Connect("rpc", compute)(workload=perceptron(), trainers=range(1, 9), max_lag=0)
        train_all(server.parts, server.link)
        metrics = server.parts.metrics
        print(
            f"{compute}: {metrics.updates} updates, {metrics.samples_trained} samples", flush=True
        )
    group.close()


def test_a_call_that_takes_longer_than_its_limit_names_call_and_option(rpc_group: None) -> None:
    class Slow:
        def evaluate(self, trainer: int, inputs: Tensor) -> Tensor:
            time.sleep(2)
            return inputs

    rpc.serve(Slow())  # type: ignore[arg-type]
    rpc.rpc._set_rpc_timeout(1.0)
    try:
        with pytest.raises(PeerLost, match=r"^evaluate got no answer .* in 1 s \(--rpc-timeout\)"):
            LinkOfOne().evaluate(1, torch.ones(1))
    finally:
        rpc.rpc._set_rpc_timeout(20.0)


def test_a_torch_without_rpc_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "rpc", None)
    with pytest.raises(LaunchError, match="this build of torch has no TensorPipe RPC"):
        rpc.check_rpc()
