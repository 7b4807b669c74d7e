"""What the processes of all peers share: the net, its batches, one step, and the clock."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from benchmarks.peers.processes import Gate
from benchmarks.peers.task import BATCH_SIZE, LEARNING_RATE, Task
from benchmarks.plugins import small_perceptron
from ps.host import libc
from ps.settings.config import Config
from ps.workload import Workload, fetch
from ps.workloads import digits
from ps.workloads.checks import make_model

NETS = {"conv": digits.build, "small": small_perceptron}


def prepare(task: Task) -> Workload:
    """Set this process up and build what it trains. To be called first."""
    if task.tuned:
        libc.keep_freed_memory()
    torch.set_num_threads(1)
    return NETS[task.net](Config())


def new_model(task: Task, workload: Workload) -> nn.Module:
    """The untrained model, the same in every process."""
    model = make_model(workload, seed=0)
    return model.to(memory_format=torch.channels_last) if task.channels_last else model


def batches(task: Task, workload: Workload) -> Iterator[tuple[Tensor, Tensor]]:
    """This process's share of the batches, again and again."""
    for number in itertools.count(task.index, task.num_processes):
        first = number * BATCH_SIZE % (len(workload.train) - BATCH_SIZE + 1)
        inputs, targets = fetch(workload.train, range(first, first + BATCH_SIZE))
        if task.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        yield inputs, targets


def sgd_step(task: Task, workload: Workload, model: nn.Module) -> Callable[[], None]:
    """One step on the model with an SGD of its own, as anybody would write it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    source = batches(task, workload)

    def step() -> None:
        inputs, targets = next(source)
        loss = workload.loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def timed(task: Task, gate: Gate, step: Callable[[], None]) -> float:
    """Samples per second of this process, after its warm-up and once the others are ready."""
    for _ in range(task.warm_up):
        step()
    gate()
    start = time.perf_counter()
    for _ in range(task.own_steps):
        step()
    return BATCH_SIZE * task.own_steps / (time.perf_counter() - start)
