"""The vocabulary of the tests: models, servers, trainers and other processes in one call each."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from ps.host.processes import Identity, Peer
from ps.links.choice import Link
from ps.links.in_process import InProcessLink
from ps.model.flat import FlatModel
from ps.model.passes import Passes
from ps.model.randomness import permutation, step_seed
from ps.model.store import Store
from ps.server.compute import Compute, ServerCompute, TrainerCompute
from ps.server.metrics import Metrics
from ps.server.orders import Orders, Plan
from ps.server.roll import Outcome
from ps.server.server import ParameterServer
from ps.server.shuffler import Shuffler
from ps.server.state import TrainingState, begin
from ps.server.training import Training
from ps.settings.topology import Topology
from ps.trainer.loading import Loader
from ps.trainer.trainer import train
from ps.trainer.worker import ServerComputeWorker, TrainerComputeWorker, Worker
from ps.workload import Workload, fetch
from ps.workloads.checks import make_model
from tests.jobs import ROOT, free_port

Optimizer = Callable[[nn.Module], torch.optim.Optimizer]
COMPUTE = ("server", "trainer")
THREADS_BOUND_S = 30.0


def sgd(
    model: nn.Module, lr: float = 0.1, momentum: float = 0.0, weight_decay: float = 0.0
) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=lr, momentum=momentum, weight_decay=weight_decay)


def momentum_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return sgd(model, momentum=0.9)


@dataclass
class Parts:
    """A server in this process, and what it is made of."""

    server: ParameterServer
    state: TrainingState
    compute: Compute
    workload: Workload
    passes: Passes
    trainers: tuple[int, ...]

    @property
    def store(self) -> Store:
        return self.state.store

    @property
    def orders(self) -> Orders:
        return self.state.orders

    @property
    def metrics(self) -> Metrics:
        return self.state.metrics

    @property
    def outcome(self) -> Outcome:
        """Of a job that has ended."""
        assert self.server.outcome is not None
        return self.server.outcome

    def link(self, trainer: int = 1) -> InProcessLink:
        return InProcessLink(self.server, self.compute, trainer)

    def worker(self, trainer: int = 1) -> Worker:
        """Over a link of this process."""
        return worker(trainer, self.link(trainer), self)


def server_of(
    workload: Workload,
    *,
    compute: str = "server",
    trainers: Iterable[int] = (1,),
    batch_size: int = 8,
    epochs: int = 1,
    optimizer: Optimizer = sgd,
    slice_size: int = 40,
    max_lag: int | None = None,
    prefetch: int = 0,
    passes: Passes | None = None,
    skip_nonfinite: bool = False,
    after_update: Callable[[int], None] = lambda version: None,
) -> Parts:
    """batch_size is the number of samples of an order, passes.batch_size that of one pass."""
    trainers, passes = tuple(trainers), passes or Passes()
    plan = Plan(
        num_train_samples=len(workload.train),
        num_test_samples=len(workload.test),
        batch_size=batch_size,
        epochs=epochs,
        seed=passes.seed,
        slice_size=slice_size,
        batches_per_update=len(trainers) if max_lag == 0 else 1,
    )
    model = passes.prepare(make_model(workload, passes.seed))
    orders = Orders(plan, Shuffler(plan.seed, plan.num_train_samples, plan.epochs))
    state = begin(
        plan,
        Store(model, optimizer(model)),
        orders,
        Metrics(plan, trainers),
        clock=time.monotonic,
    )
    place: Compute
    place = ServerCompute(state, trainers, passes) if compute == "server" else TrainerCompute(state)
    training = Training(
        *(state, place, trainers),
        max_lag=max_lag,
        prefetch=prefetch,
        skip_nonfinite=skip_nonfinite,
        after_update=after_update,
    )
    server = ParameterServer(training, trainers)
    return Parts(server, state, place, workload, passes, trainers)


def worker(trainer: int, link: Link, parts: Parts) -> Worker:
    """A trainer's worker, that has joined."""
    passes, loader = parts.passes, Loader(parts.workload.train, parts.passes)
    if isinstance(parts.compute, ServerCompute):
        link.join(trainer, None)
        return ServerComputeWorker(trainer, link, parts.workload, passes, loader)
    model = passes.prepare(make_model(parts.workload, passes.seed))
    flat = FlatModel(model)
    link.join(trainer, flat.describe())
    mailbox = link.open_mailbox(flat)
    flat.move_to(mailbox.weights, keep_values=False)
    return TrainerComputeWorker(parts.workload, model, flat, mailbox, passes, loader)


def run_threads(be: Callable[[int], object], trainers: Iterable[int]) -> None:
    """Call it for all at once, each in a thread of its own; raises the first error of any."""
    errors: list[BaseException] = []

    def run(trainer: int) -> None:
        try:
            be(trainer)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(trainer,), daemon=True) for trainer in trainers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(THREADS_BOUND_S)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), f"not within {THREADS_BOUND_S} s"


def until(condition: Callable[[], bool], bound_s: float) -> float:
    """Wait for it; gives the seconds that took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < bound_s, f"not within {bound_s} s"
        time.sleep(0.01)
    return time.monotonic() - start


def train_all(parts: Parts, connect: Callable[[int], Link] | None = None) -> None:
    """The whole job, each trainer in a thread of its own."""

    def be(trainer: int) -> None:
        link = (connect or parts.link)(trainer)
        train(trainer, link, worker(trainer, link, parts))

    run_threads(be, parts.trainers)
    assert parts.outcome.status == "done", parts.outcome


def train_alone(
    workload: Workload,
    *,
    updates: int,
    batch_size: int = 8,
    optimizer: Optimizer = sgd,
    passes: Passes | None = None,
) -> dict[str, Tensor]:
    """The reference: a plain loop over the same batches, as anybody would write it.

    N trainers in step with batches of B samples are one process with batches of N * B.
    """
    passes = passes or Passes()
    torch.manual_seed(passes.seed)
    model = workload.model().train()
    if passes.channels_last:
        model = model.to(memory_format=torch.channels_last)
    optim = optimizer(model)
    per_epoch = -(-len(workload.train) // batch_size)
    for update in range(updates):
        epoch, batch = divmod(update, per_epoch)
        order = permutation(passes.seed, epoch, len(workload.train))
        torch.manual_seed(step_seed(passes.seed, epoch, batch))
        inputs, targets = fetch(
            workload.train, order[batch * batch_size : (batch + 1) * batch_size]
        )
        if passes.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.bfloat16, enabled=passes.bfloat16):
            outputs = model(inputs)
        loss = workload.loss(outputs.float() if passes.bfloat16 else outputs, targets)
        optim.zero_grad()
        loss.backward()
        optim.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def assert_equal(
    got: Mapping[str, Tensor], expected: Mapping[str, Tensor], within: float = 1e-6
) -> None:
    """The same names, and values that differ by at most `within`; 0 is bit for bit."""
    assert got.keys() == expected.keys()
    for name, value in got.items():
        torch.testing.assert_close(
            value,
            expected[name],
            rtol=0,
            atol=within,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def topology_of(rank: int = 0, world_size: int = 1, port: int = 0, attempt: int = 0) -> Topology:
    return Topology(
        rank=rank,
        world_size=world_size,
        master_addr="127.0.0.1",
        master_port=port or free_port(),
        restart_count=attempt,
    )


def start(function: Callable[..., None], *args: object) -> subprocess.Popen[str]:
    """Run a function of a test module in a process of its own, with its output in a pipe."""
    module = function.__module__
    return subprocess.Popen(
        [sys.executable, "-c", f"import {module}; {module}.{function.__name__}(*{args!r})"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


def next_line(process: subprocess.Popen[str]) -> str:
    """What it prints next. Blocks."""
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


def end_processes(*processes: subprocess.Popen[str]) -> None:
    """Kill what still runs, and close the pipes."""
    for process in processes:
        process.kill()
        process.communicate()


@contextmanager
def spawned(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that does what the command says, and is gone at the end."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing, and is seen to."""
    with spawned("sleep", "60") as process:
        sleeping = psutil.STATUS_SLEEPING
        until(lambda: psutil.Process(process.pid).status() == sleeping, THREADS_BOUND_S)
        yield process


def peer_of(process: subprocess.Popen[Any]) -> Peer:
    """As another process holds it."""
    return Peer(Identity.of(process.pid))


def has_ended(process: subprocess.Popen[Any]) -> bool:
    """Without waiting for it: it stays a zombie."""
    return psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
