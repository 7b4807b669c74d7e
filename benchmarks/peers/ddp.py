"""DistributedDataParallel over gloo: every rank averages its gradients with all others."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from datetime import timedelta

from benchmarks.peers.processes import START_BOUND_S, Gate, total_rate
from benchmarks.peers.task import Task


def rate(task: Task) -> float:
    """Samples per second of all ranks; see the package on what is summed.

    Raises:
        MeasurementError: a rank failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        common = replace(task, folder=folder)
        tasks = [replace(common, index=index) for index in range(task.num_processes)]
        return total_rate(__name__, tasks)


def part(task: Task, gate: Gate) -> float:
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    from benchmarks.peers import training

    workload = training.prepare(task)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{task.folder}/ranks",  # a store over TCP would listen everywhere
        rank=task.index,
        world_size=task.num_processes,
        timeout=timedelta(seconds=START_BOUND_S),
    )
    model = DistributedDataParallel(training.new_model(task, workload))
    try:
        return training.timed(task, gate, training.sgd_step(task, workload, model))
    finally:
        distributed.destroy_process_group()
