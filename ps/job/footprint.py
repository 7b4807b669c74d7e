"""What a job takes in memory and on disk, estimated before it runs. Loads torch only in measure().

Not counted: activations, data sets, and what the messages of RPC hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ps.settings.config import Config
from ps.workloads import catalogue

if TYPE_CHECKING:
    from torch import Tensor, nn

RANK_BYTES = 250 << 20
"""What a process roughly takes for itself once it has loaded torch: 280 MiB with a build for CUDA
was measured, and builds for CPUs alone take less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Of one model with its optimizer, in bytes."""

    weights: int
    """Parameters and buffers."""
    gradients: int
    optimizer: int

    @property
    def checkpoint(self) -> int:
        return self.weights + self.optimizer


def memory_bytes(model: Footprint, config: Config, world_size: int) -> int:
    """Of the host, by all ranks together, while a checkpoint is written."""
    least = world_size * RANK_BYTES + model.checkpoint
    if config.num_gpus:
        return least
    num_trainers = max(1, world_size - 1)
    evaluation = model.weights if config.compute == "server" else 0
    copies = num_trainers * (model.weights + model.gradients) + evaluation
    return least + model.checkpoint + copies


def disk_bytes(model: Footprint, keep: int) -> int:
    """In the run directory, while one more checkpoint than is kept is there."""
    return (keep + 1) * model.checkpoint + model.weights


def measure(name: str, config: Config) -> Footprint:
    """Make the workload and its model; the model without values, if it can be made so.

    Raises:
        ConfigError: workload, model or optimizer cannot be made.
    """
    import torch

    from ps.workloads.checks import make_model, try_out

    workload = catalogue.load(name, config)
    try:
        with torch.device("meta"):
            model = make_model(workload, config.seed)
        return _footprint(model, config)
    except Exception:  # it has lazy layers, or needs values: then it is made as for a run
        model = make_model(workload, config.seed)
    try_out(workload, model, torch.device("cpu"), lambda module, inputs: module(inputs))
    return _footprint(model, config)


def _footprint(model: nn.Module, config: Config) -> Footprint:
    import torch
    from torch import nn

    trained = [
        nn.Parameter(torch.empty_like(parameter, device="meta"))
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    return Footprint(
        weights=_bytes([*model.parameters(), *model.buffers()]),
        gradients=_bytes(trained),
        optimizer=_optimizer_bytes(trained, config),
    )


def _optimizer_bytes(trained: Sequence[nn.Parameter], config: Config) -> int:
    """What the optimizer holds after an update, which is tried without values."""
    import torch

    from ps.model.optimizer import make_optimizer

    optimizer = make_optimizer(
        config.optimizer,
        trained,
        lr=config.lr_of(1),
        momentum=config.momentum,
        weight_decay=config.weight_decay,
    )
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    try:
        optimizer.step()
    except Exception:  # it needs values, or sparse gradients; hardly any holds more than Adam
        return 2 * _bytes(trained)
    held = [value for state in optimizer.state.values() for value in state.values()]
    return _bytes(value for value in held if isinstance(value, torch.Tensor))


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
