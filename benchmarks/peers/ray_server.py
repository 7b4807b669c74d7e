"""Ray's asynchronous parameter server: actors that pass weights and gradients as objects.

One actor holds the weights, one for each worker computes gradients. Whichever gradient is ready
first is applied, and its worker goes on from the weights that come back. Ray is no dependency of
this project: without it there is no figure.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.peers.processes import Gate, total_rate
from benchmarks.peers.task import BATCH_SIZE, LEARNING_RATE, Task

HINT = "pip install ray"
STORE_BYTES = 256 << 20
CALL_BOUND_S = 60.0


def rate(task: Task) -> float | None:
    """Samples per second of all workers, seen by the process that drives them; None without Ray.

    Raises:
        MeasurementError: Ray or a worker failed.
    """
    spec = importlib.util.find_spec("ray")
    if spec is None or spec.origin is None:  # without an origin it is a folder of that name
        return None
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        return total_rate(__name__, [replace(task, folder=folder)])


def part(task: Task, gate: Gate) -> float:
    """The process that drives the actors."""
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # loopback only, as it is on those two
        "RAY_AUTH_MODE": "token",  # its default; but then it writes the token into the home folder
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    import ray

    ray.init(
        num_cpus=task.num_processes + 1,
        object_store_memory=STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=task.folder,
    )
    try:
        server = ray.remote(num_cpus=1)(Server).remote(task)
        workers = [
            ray.remote(num_cpus=1)(Worker).remote(replace(task, index=index))
            for index in range(task.num_processes)
        ]
        _train(ray, server, workers, task.warm_up * task.num_processes)
        gate()
        start = time.perf_counter()
        _train(ray, server, workers, task.steps)
        return BATCH_SIZE * task.steps / (time.perf_counter() - start)
    finally:
        ray.shutdown()


def _train(ray: Any, server: Any, workers: Sequence[Any], steps: int) -> None:
    """Apply as many gradients as there are steps; none is on its way afterwards."""
    weights = server.weights.remote()
    started = min(steps, len(workers))
    pending = {worker.gradients.remote(weights): worker for worker in workers[:started]}
    while pending:
        ready, _ = ray.wait(list(pending), timeout=CALL_BOUND_S)
        assert ready, f"no gradient within {CALL_BOUND_S:.0f} s"
        worker = pending.pop(ready[0])
        weights = server.apply.remote(ready[0])
        if started < steps:
            pending[worker.gradients.remote(weights)] = worker
            started += 1
    ray.get(weights, timeout=CALL_BOUND_S)


class Server:
    """The actor that holds the weights. All that it takes and gives are numpy arrays."""

    def __init__(self, task: Task) -> None:
        import torch

        from benchmarks.peers import training

        self._model = training.new_model(task, training.prepare(task))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=LEARNING_RATE)

    def weights(self) -> list[Any]:
        return [weight.detach().numpy() for weight in self._model.parameters()]

    def apply(self, gradients: Sequence[Any]) -> list[Any]:
        import torch

        for weight, gradient in zip(self._model.parameters(), gradients, strict=True):
            weight.grad = torch.from_numpy(gradient)
        self._optimizer.step()
        return self.weights()


class Worker:
    """An actor that computes gradients on its own share of the batches."""

    def __init__(self, task: Task) -> None:
        from benchmarks.peers import training

        self._workload = training.prepare(task)
        self._model = training.new_model(task, self._workload)
        self._batches = training.batches(task, self._workload)

    def gradients(self, weights: Sequence[Any]) -> list[Any]:
        import torch

        with torch.no_grad():
            for own, new in zip(self._model.parameters(), weights, strict=True):
                own.copy_(torch.from_numpy(new))
        inputs, targets = next(self._batches)
        self._model.zero_grad()
        self._workload.loss(self._model(inputs), targets).backward()
        gradients: list[Any] = [weight.grad for weight in self._model.parameters()]
        return [gradient.numpy() for gradient in gradients]
