"""What faults do to a process: real ones, where it would not survive."""

from __future__ import annotations

import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from ps.host.processes import Identity, Peer
from ps.job.injection import Injection, check
from ps.protocol import Assignment, Evaluate, Evaluated, Finished, Order, Result, Train, Weights
from ps.settings.errors import ConfigError
from ps.settings.faults import parse_fault
from ps.trainer.worker import Worker
from tests.helpers import COMPUTE, Parts, server_of, topology_of, until
from tests.plugins import perceptron

BOUND_S = 5.0
WENT_ON = 7
MIB = 1 << 20
FOR_ALL = ("kill", "stop", "raise", "hang", "deadlock", "exit0", "leak")


def injected(*faults: str, rank: int = 1, world_size: int = 3, attempt: int = 0) -> Injection:
    topology = topology_of(rank, world_size, port=1, attempt=attempt)
    return Injection([parse_fault(fault) for fault in faults], topology)


@contextmanager
def forked(be: Callable[[], object]) -> Iterator[int]:
    """A copy of this process that does that, and then ends with WENT_ON."""
    pid = os.fork()
    if pid == 0:
        try:
            be()
        finally:
            os._exit(WENT_ON)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def status_of(pid: int) -> int:
    """As of wait(2), which can be asked for again."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
    assert found is not None
    return found.si_status


class Clock:
    """Time that passes when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Fake:
    """A worker that does nothing else."""

    def __init__(self, act: Callable[[], None] = lambda: None) -> None:
        self.act = act
        self.done: list[Order] = []

    def do(self, assignment: Assignment) -> Result:
        self.act()
        self.done.append(assignment.order)
        return Evaluated(0, 0, 1, 0.0, 0)


ORDERS = [Train(0, 0, (0,)), Evaluate(0, 0, 0, 1)]


@pytest.mark.parametrize(
    ("kind", "status"),
    [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP), ("exit0", 0)],
)
def test_a_process_ends_or_stops_by_itself_when_its_fault_is_due(kind: str, status: int) -> None:
    injection = injected(f"{kind}:1@5")

    def be() -> None:
        injection.at_update(4)
        injection.at_update(5)

    with forked(be) as pid:
        assert status_of(pid) == status


@pytest.mark.parametrize("passed", [5, 9])
def test_a_fault_that_raises_does_so_once_also_if_its_update_was_passed_over(passed: int) -> None:
    injection = injected("raise:1@5")
    injection.at_update(4)
    with pytest.raises(RuntimeError, match="raise"):
        injection.at_update(passed)
    injection.at_update(passed + 1)


def test_faults_that_are_due_together_happen_one_after_the_other() -> None:
    injection = injected("raise:1@5", "raise:1@5", "raise:1@6")
    for _ in range(2):
        with pytest.raises(RuntimeError):
            injection.at_update(5)
    injection.at_update(5)
    with pytest.raises(RuntimeError):
        injection.at_update(6)


@contextmanager
def ticking(fault: str) -> Iterator[tuple[int, int]]:
    """The pid of a process to which that happens, and where a thread of it writes as it runs."""
    injection = injected(fault)
    reader, writer = os.pipe()

    def tick() -> None:
        while True:
            os.write(writer, b".")
            time.sleep(0.01)

    def be() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, lambda number, frame: None)
        threading.Thread(target=tick, daemon=True).start()
        time.sleep(0.1)
        injection.at_update(0)

    with forked(be) as pid:
        yield pid, reader
    os.close(reader)
    os.close(writer)


@pytest.mark.slow
def test_a_deadlock_lets_no_thread_run_and_a_signal_still_ends_it() -> None:
    with ticking("deadlock:1@0") as (pid, reader):

        def is_silent() -> bool:
            ready, _, _ = select.select([reader], [], [], 0.3)
            return not ready or not os.read(reader, 1000)

        assert os.read(reader, 1) == b"."
        until(is_silent, BOUND_S)
        os.kill(pid, signal.SIGUSR1)
        assert is_silent()
        os.kill(pid, signal.SIGTERM)
        assert status_of(pid) == signal.SIGTERM


@pytest.mark.slow
def test_one_that_hangs_lets_the_other_threads_run() -> None:
    with ticking("hang:1@0") as (pid, reader):
        time.sleep(0.5)
        for _ in range(100):  # more than before it hung
            assert select.select([reader], [], [], BOUND_S)[0]
            os.read(reader, 1)
        os.kill(pid, signal.SIGTERM)
        assert status_of(pid) == signal.SIGTERM


@pytest.mark.slow
def test_a_leak_takes_so_much_memory_each_second_and_keeps_it() -> None:
    def be() -> None:
        assert injected("leak:1@100")
        time.sleep(60)

    def held() -> int:
        return peer.read().private_bytes or 0

    with forked(be) as pid:
        peer = Peer(Identity.of(pid))
        before, start = held(), time.monotonic()
        until(lambda: held() - before > 50 * MIB, BOUND_S)
        took_s = time.monotonic() - start
    assert 0.3 < took_s < 2.0


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("faults", "total_s"),
    [(["slow:1x4"], 8.0), (["slow:1x1"], 2.0), (["slow:1x2", "slow:1x2.5", "slow:1x1"], 5.0)],
)
def test_a_slow_rank_takes_so_many_times_as_long_for_every_order(
    order: Order, faults: list[str], total_s: float
) -> None:
    """The slowest of several factors counts."""
    clock = Clock()
    fake = Fake(lambda: clock.sleep(2.0))
    worker = injected(*faults, "raise:1@9").worker(
        fake, monotonic=lambda: clock.now, sleep=clock.sleep
    )
    worker.do(Assignment(order, Weights(0)))
    assert clock.now == total_s


@pytest.mark.parametrize("order", ORDERS)
def test_a_trainer_acts_before_its_first_order_with_weights_of_that_update(order: Order) -> None:
    fake = Fake()
    worker = injected("raise:1@5").worker(fake)
    worker.do(Assignment(order, Weights(4)))
    with pytest.raises(RuntimeError):
        worker.do(Assignment(order, Weights(5)))
    assert fake.done == [order]
    worker.do(Assignment(order, Weights(6)))


def test_nan_spoils_exactly_one_loss() -> None:
    injection = injected("nan:1@5")
    workload = injection.workload(perceptron())
    outputs, targets = torch.zeros(2, 3, requires_grad=True), torch.zeros(2, dtype=torch.long)
    losses = []
    for version in (4, 5, 6, 7):
        injection.at_update(version)
        losses.append(workload.loss(outputs, targets).item())
    assert [math.isnan(loss) for loss in losses] == [False, True, False, False]


def job_with_nan(compute: str, fault: str) -> tuple[Parts, list[Result]]:
    """Two epochs of two batches and three slices, by one trainer, which skips."""
    injection = injected(fault)
    workload = injection.workload(perceptron(num_train=16))
    parts = server_of(workload, compute=compute, epochs=2, skip_nonfinite=True)
    worker: Worker = injection.worker(parts.worker())
    results: list[Result] = []
    reply = parts.server.next_order(1, None).wait()
    while isinstance(reply, Assignment):
        results.append(worker.do(reply))
        reply = parts.server.next_order(1, results[-1]).wait()
    assert isinstance(reply, Finished)
    return parts, results


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("due", [0, 1, 2, 3])
def test_nan_spoils_one_training_order_and_no_evaluation(compute: str, due: int) -> None:
    """After two updates the next order is a slice."""
    parts, results = job_with_nan(compute, f"nan:1@{due}")
    assert parts.metrics.orders_skipped == 1
    assert parts.store.version == 3
    spoiled = [number for number, result in enumerate(results) if math.isnan(loss_of(result))]
    assert spoiled == [{0: 0, 1: 1, 2: 5, 3: 6}[due]]
    assert all(math.isfinite(record.test_loss) for record in parts.metrics.history)


def loss_of(result: Result) -> float:
    return result.loss_sum if isinstance(result, Evaluated) else result.loss


@pytest.mark.parametrize(("rank", "attempt"), [(2, 0), (1, 1)])
def test_faults_of_other_ranks_and_of_later_attempts_do_not_happen(
    rank: int, attempt: int, said: list[str]
) -> None:
    injection = injected("raise:1@0", "slow:1x9", "leak:1@1", rank=rank, attempt=attempt)
    assert not injection
    injection.at_update(0)
    assert said == []


def test_a_process_says_which_faults_it_will_have(said: list[str]) -> None:
    assert injected("raise:1@7", "kill:2@3", "slow:1x2")
    assert [line.rpartition(" ")[2] for line in said] == ["raise:1@7", "slow:1x2"]


@pytest.mark.parametrize(
    ("fault", "world_size", "parts"),
    [
        ("kill:3@1", 3, "--inject.* rank 3"),
        ("kill:1@1", 1, "--inject.* rank 1"),
        ("slow:0x2", 3, "--inject.* slow .*rank 0"),
        ("nan:0@1", 2, "--inject.* nan .*rank 0"),
    ],
)
def test_a_fault_of_a_rank_that_cannot_have_it_is_a_bad_option(
    fault: str, world_size: int, parts: str
) -> None:
    with pytest.raises(ConfigError, match=parts):
        check([parse_fault("kill:0@1"), parse_fault(fault)], topology_of(0, world_size, port=1))


@pytest.mark.parametrize(
    ("fault", "world_size"),
    [
        *((f"{kind}:{rank}@1", 3) for kind in FOR_ALL for rank in (0, 2)),
        *(("nan:0@1", 1), ("slow:0x2", 1), ("nan:1@1", 2), ("slow:2x2", 3)),
    ],
)
def test_every_rank_can_have_the_other_faults(fault: str, world_size: int) -> None:
    check([parse_fault(fault)], topology_of(0, world_size, port=1))
