"""The design of PyTorch's RPC parameter-server tutorial, with what it costs left in.

A server and one trainer: a second trainer crashes that design. The trainer loads its samples one
by one, sends each batch to the server for the forward pass, has distributed autograd go back over
the same way, fetches all gradients only to see that there are any, and has a distributed optimizer
step on the server. RPC keeps its default transports.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer
from torch.utils.data import DataLoader, Dataset

from benchmarks.peers import training
from benchmarks.peers.processes import START_BOUND_S, Gate, total_rate
from benchmarks.peers.task import BATCH_SIZE, LEARNING_RATE, Task
from ps.workload import Workload
from ps.workloads import digits

SERVER = "server"
BATCHES_PER_LINE = 5


def rate(task: Task) -> float:
    """Samples per second of the one trainer; task.num_processes must be 1.

    Raises:
        MeasurementError: the server or the trainer failed.
    """
    assert task.num_processes == 1, "the design crashes with more than one trainer"
    with tempfile.TemporaryDirectory() as folder:
        tasks = [replace(task, folder=folder, index=index) for index in range(2)]
        return total_rate(__name__, tasks)


def part(task: Task, gate: Gate) -> float:
    """Index 0 is the server, which trains nothing itself."""
    workload = training.prepare(task)
    _Served.task, _Served.workload = task, workload
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{task.folder}/ranks", rpc_timeout=START_BOUND_S
    )
    name = f"trainer-{task.index}" if task.index else SERVER
    rpc.init_rpc(name, rank=task.index, world_size=2, rpc_backend_options=options)
    if task.index:
        own_rate = training.timed(task, gate, _remote_step(workload))
    else:
        own_rate = 0.0
        gate()
    rpc.shutdown()
    return own_rate


class _Served(nn.Module):
    """What the server holds: the model, reached by reference from the trainer."""

    task: Task
    workload: Workload

    def __init__(self) -> None:
        super().__init__()
        self.model = training.new_model(self.task, self.workload)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.model(inputs)
        return outputs

    def weights(self) -> list[rpc.RRef[nn.Parameter]]:
        return [rpc.RRef(weight) for weight in self.model.parameters()]

    def gradients(self, context_id: int) -> dict[Tensor, Tensor]:
        return dict(dist_autograd.get_gradients(context_id))


def _on_owner(method: Callable[..., Any], served: rpc.RRef[_Served], *args: Any) -> Any:
    return method(served.local_value(), *args)


def _call(method: Callable[..., Any], served: rpc.RRef[_Served], *args: Any) -> Any:
    """Call a method of the object behind the reference, in the process that holds it."""
    return rpc.rpc_sync(served.owner(), _on_owner, args=(method, served, *args))


def _remote_step(workload: Workload) -> Callable[[], None]:
    served = rpc.remote(SERVER, _Served)
    optimizer = DistributedOptimizer(
        torch.optim.SGD, _call(_Served.weights, served), lr=LEARNING_RATE
    )
    source = _endless(DataLoader(_Pictures(), batch_size=BATCH_SIZE, shuffle=True))

    def step() -> None:
        number, (inputs, targets) = next(source)
        with dist_autograd.context() as context_id:
            loss = workload.loss(_call(_Served.forward, served, inputs), targets)
            if number % BATCHES_PER_LINE == 0:
                print(f"batch {number} loss {loss.item():.4f}")
            dist_autograd.backward(context_id, [loss])
            assert _call(_Served.gradients, served, context_id), "no gradient has arrived"
            optimizer.step(context_id)

    return step


def _endless(loader: DataLoader[Any]) -> Iterator[tuple[int, Any]]:
    while True:
        yield from enumerate(loader)


class _Pictures(Dataset[Any]):
    """The digits as torchvision serves MNIST: a picture and its transforms for each sample."""

    def __init__(self) -> None:
        from torchvision import transforms  # late: only the trainer reads pictures

        images, classes = digits.generate(digits.NUM_TRAIN, digits.SEED)
        self._images, self._classes = images.numpy(), classes
        self._transform = transforms.Compose(
            [transforms.ToTensor(), transforms.Normalize((0.25,), (0.25,))]
        )

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        return self._transform(Image.fromarray(self._images[index])), int(self._classes[index])
