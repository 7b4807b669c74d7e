"""Hogwild: processes that write to one model in shared memory, without a lock between them."""

from __future__ import annotations

from dataclasses import replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

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
    context = torch.multiprocessing.get_context("spawn")
    pipes = []
    for index in range(task.num_processes):
        here, there = context.Pipe()
        target = (replace(task, index=index), model, there)
        context.Process(target=_train, args=target, daemon=True).start()
        there.close()
        pipes.append(here)
    for pipe in pipes:
        _receive(pipe, START_BOUND_S)
    gate()
    for pipe in pipes:
        pipe.send("go")
    return float(sum(_receive(pipe, TRAIN_BOUND_S) for pipe in pipes))


def _train(task: Task, model: nn.Module, pipe: Connection) -> None:
    from benchmarks.peers import training

    workload = training.prepare(task)

    def gate() -> None:
        pipe.send("ready")
        pipe.recv()

    pipe.send(training.timed(task, gate, training.sgd_step(task, workload, model)))


def _receive(pipe: Any, bound_s: float) -> Any:
    """Raises EOFError if the other end has died. Pipes leave nothing behind; locks would."""
    assert pipe.poll(bound_s), f"a trainer has said nothing for {bound_s:.0f} s"
    return pipe.recv()
