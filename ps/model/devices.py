"""Which device holds which layers. The choice is a plain function of the numbers."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn

from ps.settings.errors import ConfigError


def choose_devices(num_gpus: int, available: int) -> tuple[str, ...]:
    """The devices of the model, in the order of its layers: "cpu", or one or two of "cuda:0", ...

    num_gpus is the option, available the number of GPUs that this process can see.

    Raises:
        ConfigError: fewer are available than asked for.
    """
    if num_gpus > available:
        raise ConfigError(
            f"--num-gpus {num_gpus}, but this process sees {available}; "
            f"type --num-gpus {available}, or look at nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
    return tuple(f"cuda:{index}" for index in range(num_gpus)) or ("cpu",)


def split_point(sizes: Sequence[int]) -> int:
    """The number of layers that go to the first of two devices, so that both hold about as much.

    sizes are the parameter counts of the layers in order. Each side gets at least one layer
    that has parameters, if there are two such; among equals the second device gets the fewest,
    as what crosses tends to be smallest there.
    """
    total = sum(sizes)
    with_parameters = [index for index, size in enumerate(sizes) if size]
    if len(with_parameters) < 2:
        return len(sizes)
    choices = range(with_parameters[0] + 1, with_parameters[-1] + 1)
    return min(choices, key=lambda count: (abs(2 * sum(sizes[:count]) - total), -count))


def place(model: nn.Module, devices: Sequence[str]) -> torch.device:
    """Move the model to the devices, and return the one that its inputs must be on.

    With two devices the model must be an nn.Sequential: its layers are divided at split_point,
    and the second part moves its inputs over by itself; outputs are then on the second device.
    Names, shapes and dtypes of parameters and buffers do not change.

    Raises:
        ConfigError: the model cannot be divided.
    """
    if len(devices) == 1:
        model.to(devices[0])
        return torch.device(devices[0])
    if not isinstance(model, nn.Sequential):
        raise ConfigError(
            "--num-gpus 2 divides an nn.Sequential by its layers, but the model of this "
            f"workload is a {type(model).__name__}; type --num-gpus 1"
        )
    layers = list(model)
    count = split_point([sum(p.numel() for p in layer.parameters()) for layer in layers])
    if count == len(layers):
        raise ConfigError("--num-gpus 2 needs two layers with parameters; type --num-gpus 1")
    for index in range(count, len(layers)):
        if layers[index] in layers[:count]:
            model[index] = _second_copy(layers[index])
    model[:count].to(devices[0])
    model[count:].to(devices[1])
    model[count].register_forward_pre_hook(_Mover(devices[1]))
    return torch.device(devices[0])


def _second_copy(layer: nn.Module) -> nn.Module:
    if any(True for _ in layer.parameters()):
        raise ConfigError(
            "--num-gpus 2 would tear a layer that the model uses twice; type --num-gpus 1"
        )
    return copy.deepcopy(layer)


class _Mover:
    """Moves a layer's inputs to its device."""

    def __init__(self, device: str) -> None:
        self._device = device

    def __call__(
        self, module: nn.Module, args: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        return tuple(value.to(self._device) for value in args)
