"""Hogwild: processes that write to one model in shared memory, without a lock between them."""

from __future__ import annotations

from dataclasses import replace
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from typing import TYPE_CHECKING

from benchmarks.peers.processes import START_BOUND_S, TRAIN_BOUND_S, Gate, total_rate
from benchmarks.peers.task import Task

if TYPE_CHECKING:
    from torch import nn


def rate(task: Task) -> float:
    """Samples per second of all processes; see the package on what is summed.

    Raises:
        MeasurementError: a process failed.
    """
    return total_rate(__name__, [task])


def part(task: Task, gate: Gate) -> float:
    """The process that owns the model: starts those that train, and adds up their rates."""
    import torch.multiprocessing

    from benchmarks.peers import training

    model = training.new_model(task, training.prepare(task)).share_memory()
    gate()
    context = torch.multiprocessing.get_context("spawn")
    barrier, rates = context.Barrier(task.num_processes), context.SimpleQueue()
    trainers = [
        context.Process(
            target=_train, args=(replace(task, index=index), model, barrier, rates), daemon=True
        )
        for index in range(task.num_processes)
    ]
    for trainer in trainers:
        trainer.start()
    for trainer in trainers:
        trainer.join(TRAIN_BOUND_S)
        assert trainer.exitcode == 0, f"a trainer ended with {trainer.exitcode}"
    return float(sum(rates.get() for _ in trainers))


def _train(task: Task, model: nn.Module, barrier: Barrier, rates: SimpleQueue[float]) -> None:
    from benchmarks.peers import training

    workload = training.prepare(task)

    def gate() -> None:
        barrier.wait(timeout=START_BOUND_S)

    rates.put(training.timed(task, gate, training.sgd_step(task, workload, model)))
