"""RPC between real processes. test_links.py has what all links do, in a group of one."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from array import array
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.futures import Future

from ps.links import rpc
from ps.links.calls import ServerError, value
from ps.links.choice import choose, connect
from ps.links.rendezvous import Rendezvous
from ps.links.rpc import RpcGroup, RpcLink, RpcServer
from ps.protocol import (
    Assignment,
    Finished,
    Push,
    Reply,
    Result,
    Train,
    Trained,
    Wait,
    Weights,
)
from ps.server.compute import TrainerCompute
from ps.settings.config import Config
from ps.settings.errors import LaunchError, PeerLost
from ps.settings.log import log
from tests.helpers import (
    COMPUTE,
    Parts,
    end_processes,
    free_port,
    next_line,
    server_of,
    start,
    topology_of,
    train_all,
    until,
)
from tests.plugins import perceptron

SAMPLES = 100_000


def say(*words: object) -> None:
    print(*words, flush=True)


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
    rendezvous = Rendezvous(topology_of(), 10.0)
    group = RpcGroup(rendezvous, Config(rpc_timeout=20.0), num_threads=1)
    for compute in COMPUTE:
        parts = server_of(perceptron(), compute=compute, trainers=range(1, 9), max_lag=0)
        rpc.serve(end_of(parts))
        train_all(parts, lambda trainer: RpcLink(group))
        metrics = parts.metrics
        say(f"{compute}: {metrics.updates} updates, {metrics.samples_trained} samples")
    group.close()


class Postman:
    """Trainer 1 gets its replies at once, and trainer 2 a large one when trainer 1 calls."""

    def __init__(self) -> None:
        self._waiting: Future[Reply] | None = None

    def next_order(self, trainer: int, result: Result | None) -> Future[Reply]:
        reply: Future[Reply] = Future()
        if trainer == 2:
            self._waiting = reply
            say("2 waits")
            return reply
        if self._waiting is not None:
            order = Train(0, 0, array("q", range(SAMPLES)))
            self._waiting.set_result(Assignment(order, Weights(0)))
            self._waiting = None
        reply.set_result(Wait())
        return reply


def be_server(port: int) -> None:
    end = RpcServer(Postman())  # type: ignore[arg-type]
    end.open(Rendezvous(topology_of(0, 3, port), 30.0), Config(), lambda trainer, how: None)
    time.sleep(60)


def be_trainer_2(port: int) -> None:
    link = connect({"link": "rpc"}, Rendezvous(topology_of(2, 3, port), 30.0), Config())
    reply = link.next_order(2, None)
    assert isinstance(reply, Assignment) and isinstance(reply.order, Train)
    say(len(reply.order.indices), sum(reply.order.indices))
    time.sleep(60)


def be_trainer_1(port: int, go: str) -> None:
    """Tells how long the slowest of its calls took; then calls until the server is lost."""
    log.addHandler(logging.StreamHandler(sys.stdout))
    group = RpcGroup(Rendezvous(topology_of(1, 3, port), 30.0), Config())
    link, took_s = RpcLink(group), []
    until(Path(go).exists, 30.0)
    for _ in range(5):
        started = time.monotonic()
        link.next_order(1, None)
        took_s.append(time.monotonic() - started)
    say(max(took_s))
    try:
        while True:
            link.next_order(1, None)
    except PeerLost as error:
        say(error)
    group.close(0.2)
    os._exit(0)


@pytest.mark.slow
def test_a_stopped_trainer_holds_nobody_up_over_rpc_and_a_killed_server_is_lost(
    tmp_path: Path,
) -> None:
    port, go = free_port(), tmp_path / "go"
    server = start(be_server, port)
    healthy, stopped = start(be_trainer_1, port, str(go)), start(be_trainer_2, port)
    try:
        assert next_line(server) == "2 waits"
        stopped.send_signal(signal.SIGSTOP)
        go.touch()
        assert float(next_line(healthy)) < 2
        stopped.send_signal(signal.SIGCONT)
        assert next_line(stopped) == f"{SAMPLES} {SAMPLES * (SAMPLES - 1) // 2}"
        server.kill()
        assert next_line(healthy).startswith("lost the server during next_order: ")
        assert next_line(healthy).startswith("RPC did not close: ")
    finally:
        end_processes(server, healthy, stopped)


@pytest.mark.slow
def test_a_group_that_not_all_join_is_an_error_of_one_line() -> None:
    process = start(be_alone)
    try:
        assert next_line(process).startswith("RPC did not start: ")
    finally:
        end_processes(process)


def be_alone() -> None:
    short = SimpleNamespace(start_timeout=1.0, rpc_timeout_s=5.0)  # shorter than can be typed
    try:
        RpcGroup(Rendezvous(topology_of(0, 2), 5.0), short)  # type: ignore[arg-type]
    except LaunchError as error:
        say(error)
    os._exit(0)


def test_a_torch_without_rpc_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "rpc", None)
    with pytest.raises(LaunchError, match="--link local"):
        rpc.check_rpc()
    with pytest.raises(LaunchError, match="--link local"):
        connect({"link": "rpc"}, Rendezvous(topology_of(), 5.0), Config())


def end_of(parts: Parts) -> RpcServer:
    end = choose(parts.server, parts.compute, parts.trainers, "rpc")
    assert isinstance(end, RpcServer) and end.invitation["link"] == end.name == "rpc"
    return end


def test_gradients_come_in_with_the_call_and_new_weights_go_out_with_the_reply() -> None:
    parts = server_of(perceptron(), compute="trainer", trainers=(1, 2))
    end, compute = end_of(parts), parts.compute
    assert isinstance(compute, TrainerCompute)
    trained, buffers = compute.flat.trained, compute.flat.buffers
    _, weights = end.next_order(1, None, None).wait()
    before = [view.clone() for view in trained.views(weights)]
    gradients = torch.zeros(trained.stop, dtype=torch.uint8)
    for view in trained.views(gradients):
        view.fill_(1.0)
    sent = gradients, torch.empty(buffers.stop - buffers.start, dtype=torch.uint8)
    result = Trained(0, 0, 8, 0.5, Push(0))
    reply, weights = end.next_order(1, result, sent).wait()
    assert (reply.order.batch, reply.weights.version, len(weights)) == (1, 1, buffers.stop)
    for old, new in zip(before, trained.views(weights), strict=True):
        torch.testing.assert_close(new, old - 0.1)
    answered, nothing = end.next_order(1, result, sent).wait()  # batch 0 once more
    with pytest.raises(ServerError, match="next_order"):
        value("next_order", answered)
    assert nothing is None
    reply, nothing = end.next_order(2, None, None).wait()
    assert isinstance(reply, Finished) and nothing is None
    end.close()


def test_no_weights_go_out_where_the_server_computes() -> None:
    end = end_of(server_of(perceptron()))
    reply, weights = end.next_order(1, None, None).wait()
    assert isinstance(reply, Assignment) and weights is None
