"""One suite over every link; and the rendezvous. RPC here is a real group of one, over loopback."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import psutil
import pytest
import torch
from torch import Tensor, nn

from ps import link
from ps.config import Config
from ps.errors import LaunchError, PeerLost
from ps.log import log
from ps.protocol import Evaluate, Finished, Server, Train, Trained
from ps.step import ServerSideWorker
from ps.topology import Topology
from ps.trainer import train
from tests.helpers import Parts, server_of, sgd, train_alone
from tests.plugins import perceptron


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def topology_of(rank: int = 0, world_size: int = 1, port: int = 0, attempt: int = 0) -> Topology:
    return Topology(
        rank=rank,
        world_size=world_size,
        master_addr="127.0.0.1",
        master_port=port or free_port(),
        restart_count=attempt,
    )


@pytest.fixture(scope="module")
def rpc_group() -> Iterator[None]:
    """torch allows RPC once per process, and a group of one calls itself."""
    topology = topology_of()
    rendezvous = link.Rendezvous(topology, 10.0)
    group = link.RpcGroup(topology, rendezvous, Config(rpc_timeout=20.0))
    yield
    assert group.close()


@pytest.fixture(params=["in-process", "rpc"])
def connect(request: pytest.FixtureRequest) -> Callable[..., tuple[Server, Parts]]:
    if request.param == "rpc":
        request.getfixturevalue("rpc_group")

    def connected(**options: object) -> tuple[Server, Parts]:
        parts = server_of(**options)  # type: ignore[arg-type]
        if request.param == "in-process":
            return link.InProcessLink(parts.server), parts
        link.serve(parts.server)
        return link.RpcLink(), parts

    return connected


Connect = Callable[..., tuple[Server, Parts]]


def step(server: Server, parts: Parts, order: Train, trainer: int = 1) -> Trained:
    worker = ServerSideWorker(trainer, server, parts.workload, seed=0)
    result = worker.do(order)
    assert isinstance(result, Trained)
    return result


def test_an_order_done_is_an_update_and_brings_the_next_order(connect: Connect) -> None:
    server, parts = connect(workload=perceptron())
    order = server.next_order(1, None)
    assert isinstance(order, Train) and (order.epoch, order.batch) == (0, 0)
    following = server.next_order(1, step(server, parts, order))
    assert isinstance(following, Train) and following.batch == 1
    assert parts.store.version == 1


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_one_trainer_equals_a_plain_loop_after_50_updates(connect: Connect, dropout: float) -> None:
    workload = perceptron(dropout=dropout)
    server, parts = connect(workload=workload, optimizer=lambda m: sgd(m, momentum=0.9))
    train(1, server, ServerSideWorker(1, server, workload, seed=0))
    expected = train_alone(workload, updates=50, optimizer=lambda m: sgd(m, momentum=0.9))
    assert parts.store.version == 50
    for name, value in parts.store.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)
    outcome = parts.server.outcome
    assert outcome is not None and outcome.status == "done"


def test_staleness_is_the_updates_between_forward_and_apply(connect: Connect) -> None:
    server, parts = connect(workload=perceptron(), trainers=(1, 2))
    first, second = server.next_order(1, None), server.next_order(2, None)
    assert isinstance(first, Train) and isinstance(second, Train)
    stale = step(server, parts, first, trainer=1)
    server.next_order(2, step(server, parts, second, trainer=2))
    server.next_order(1, stale)
    assert (parts.metrics.updates, parts.metrics.staleness_sum) == (2, 1)
    assert parts.metrics.staleness_max == 1


def test_an_error_in_the_model_reaches_the_trainer_with_its_words(
    connect: Connect, capfd: pytest.CaptureFixture[str]
) -> None:
    server, _ = connect(workload=perceptron())
    order = server.next_order(1, None)
    assert isinstance(order, Train)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        server.forward(1, order.epoch, order.batch, torch.ones(2, 5))
    assert capfd.readouterr().err == ""  # once, and that is the trainer's part


def test_a_gradient_that_is_not_finite_ends_the_job_and_sends_everybody_home(
    connect: Connect,
) -> None:
    server, parts = connect(workload=perceptron(), trainers=(1, 2))
    before = parts.store.state_dict()["0.weight"].clone()
    order = server.next_order(1, None)
    assert isinstance(order, Train)
    outputs = server.forward(1, 0, 0, torch.ones(8, 6))
    result = Trained(0, 0, 8, 1.0, torch.full_like(outputs, float("inf")))
    assert isinstance(server.next_order(1, result), Finished)
    assert isinstance(server.next_order(2, None), Finished)
    outcome = parts.server.outcome
    assert outcome is not None
    assert (outcome.status, outcome.exit_code) == ("failed", 8)
    assert outcome.cause == (
        "trainer rank 1, epoch 1, batch 0: the gradient of 0.weight is not finite"
    )
    assert parts.store.version == 0
    assert torch.equal(parts.store.state_dict()["0.weight"], before)


def test_a_parameter_without_gradient_ends_the_job_with_its_name(connect: Connect) -> None:
    class HalfUsed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(6, 3)
            self.forgotten = nn.Linear(6, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.used(inputs)
            return outputs

    workload = replace(perceptron(), model=HalfUsed)
    server, parts = connect(workload=workload)
    order = server.next_order(1, None)
    assert isinstance(order, Train)
    assert isinstance(server.next_order(1, step(server, parts, order)), Finished)
    outcome = parts.server.outcome
    assert outcome is not None and outcome.exit_code == 8
    assert str(outcome.cause).endswith("no gradient reached forgotten.weight, forgotten.bias")
    assert parts.store.version == 0


def test_evaluating_twice_is_identical_and_changes_nothing(connect: Connect) -> None:
    workload = perceptron(dropout=0.5, num_train=40)
    server, parts = connect(workload=workload, epochs=2)
    worker = ServerSideWorker(1, server, workload, seed=0)
    evaluations, order = 0, server.next_order(1, None)
    while not isinstance(order, Finished):
        assert isinstance(order, Train | Evaluate)
        result = worker.do(order)
        if isinstance(order, Evaluate):
            evaluations += 1
            assert worker.do(order) == result
        order = server.next_order(1, result)
    assert evaluations == 2 * 3
    expected = train_alone(workload, updates=10)
    for name, value in parts.store.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)


def test_a_trainer_that_fails_is_named_and_the_others_go_home(connect: Connect) -> None:
    server, parts = connect(workload=perceptron(), trainers=(1, 2))
    server.next_order(1, None)
    server.fail(1, "ValueError: boom", 1)
    assert isinstance(server.next_order(2, None), Finished)
    server.leave(2)
    assert parts.server.ended.is_set()
    outcome = parts.server.outcome
    assert outcome is not None
    assert (outcome.cause, outcome.rank) == ("trainer rank 1: ValueError: boom", 1)


def test_a_call_that_takes_longer_than_its_limit_names_call_and_option(rpc_group: None) -> None:
    class Slow:
        def evaluate(self, trainer: int, inputs: Tensor) -> Tensor:
            time.sleep(2)
            return inputs

    link.serve(Slow())  # type: ignore[arg-type]
    link.rpc._set_rpc_timeout(1.0)
    try:
        with pytest.raises(PeerLost, match=r"^evaluate got no answer .* in 1 s \(--rpc-timeout\)"):
            link.RpcLink().evaluate(1, torch.ones(1))
    finally:
        link.rpc._set_rpc_timeout(20.0)


def test_a_rank_that_is_connected_has_not_arrived_before_it_is_ready() -> None:
    port = free_port()
    server = link.Rendezvous(topology_of(0, 2, port), bound_s=0.3)
    link.Rendezvous(topology_of(1, 2, port), bound_s=0.3)
    with pytest.raises(LaunchError, match=r"^gave up waiting for rank 1 to arrive after 0 s"):
        server.gather()


def test_the_ranks_that_are_missing_are_named() -> None:
    rendezvous = link.Rendezvous(topology_of(0, 3), bound_s=0.5)
    with pytest.raises(LaunchError, match=r"^gave up waiting for ranks 1, 2 to arrive after 0 s"):
        rendezvous.gather()


def test_waiting_is_said_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "REMIND_INTERVAL_S", 0.2)
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    log.addHandler(keep := Keep())
    log.setLevel("INFO")
    try:
        rendezvous = link.Rendezvous(topology_of(0, 2), bound_s=0.7)
        with pytest.raises(LaunchError):
            rendezvous.gather()
    finally:
        log.removeHandler(keep)
    assert len(lines) == 3
    assert all(line.startswith("waiting for rank 1 to arrive, ") for line in lines)


def test_all_ranks_meet_and_hear_what_is_announced() -> None:
    port = free_port()
    server = link.Rendezvous(topology_of(0, 3, port), bound_s=10.0)
    heard: dict[int, str] = {}

    def be(rank: int) -> None:
        rendezvous = link.Rendezvous(topology_of(rank, 3, port), bound_s=10.0)
        heard[rank] = rendezvous.announced(10.0)
        rendezvous.gather()

    threads = [threading.Thread(target=be, args=(rank,)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    server.announce("digits")
    server.gather()
    for thread in threads:
        thread.join(10)
    assert heard == {1: "digits", 2: "digits"}


def test_a_second_attempt_does_not_see_what_the_first_one_left() -> None:
    port = free_port()
    first = link.Rendezvous(topology_of(0, 2, port, attempt=0), bound_s=5.0)
    first.announce("digits")
    second = link.Rendezvous(topology_of(1, 2, port, attempt=1), bound_s=0.3)
    with pytest.raises(LaunchError, match="gave up waiting for rank 0 to be ready after 0 s"):
        second.announced(0.3)


def test_a_store_that_rank_0_serves_listens_on_loopback_only() -> None:
    me = psutil.Process()
    before = {c.laddr.port for c in me.net_connections() if c.status == psutil.CONN_LISTEN}
    rendezvous = link.Rendezvous(topology_of(0, 2), bound_s=5.0)
    new = [
        c.laddr
        for c in me.net_connections()
        if c.status == psutil.CONN_LISTEN and c.laddr.port not in before
    ]
    assert [address.ip for address in new] == ["127.0.0.1"], rendezvous


def test_no_store_within_the_bound_is_an_error_with_the_address() -> None:
    port = free_port()
    start = time.monotonic()
    with pytest.raises(LaunchError, match=rf"^no store at 127.0.0.1:{port}: "):
        link.Rendezvous(topology_of(1, 2, port), bound_s=0.5)
    assert time.monotonic() - start < 3


def test_a_call_that_hangs_or_raises_is_told_apart_from_one_that_works() -> None:
    def fail() -> None:
        raise ValueError("no")

    assert link._within(1.0, lambda: None) == (True, None)
    worked, error = link._within(1.0, fail)
    assert (worked, str(error)) == (False, "no")
    assert link._within(0.05, lambda: time.sleep(0.5)) == (False, None)


def test_a_torch_without_rpc_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "rpc", None)
    with pytest.raises(LaunchError, match="this build of torch has no TensorPipe RPC"):
        link.check_rpc()
