"""The yardstick: single-process loops side by side that know nothing of each other."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.peers.processes import Gate, total_rate
from benchmarks.peers.task import Task


def rate(task: Task) -> float:
    """Samples per second of all loops; see the package on what is summed.

    Raises:
        MeasurementError: a loop failed.
    """
    tasks = [replace(task, index=index) for index in range(task.num_processes)]
    return total_rate(__name__, tasks)


def part(task: Task, gate: Gate) -> float:
    from benchmarks.peers import training

    workload = training.prepare(task)
    model = training.new_model(task, workload)
    return training.timed(task, gate, training.sgd_step(task, workload, model))
