"""Randomness inside a step, seeded from (seed, epoch, batch): who does an order does not matter.

torch has one default CPU generator per process, and the server runs the forward passes of all
trainers in threads of one process. So each pass draws from a generator of its own: below
autograd, every operator that takes a generator and was given none is handed that one.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_FUSED_DROPOUT = torch.ops.aten.native_dropout.default


def step_seed(seed: int, epoch: int, batch: int) -> int:
    """A seed for one step, of 63 bits; the same in every process and Python version."""
    return random.Random(f"{seed}-{epoch}-{batch}").getrandbits(63)


def seed_process(seed: int) -> None:
    """Seed the default CPU generator and Python's random, for a process that computes alone.

    torch.manual_seed does more (all devices, a recorded traceback each) and costs more.
    """
    torch.default_generator.manual_seed(seed)
    random.seed(seed)


class SeededForward(TorchDispatchMode):
    """A context for one thread in which random operators draw as after manual_seed(seed).

    The numbers are those of a plain `torch.manual_seed(seed)` before the same operators, bit
    for bit. Not covered: operators that draw without taking a generator, such as dropout
    inside a fused CUDA attention kernel.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nobody compiles this; the wrapper costs seconds of imports at the first operator."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        if not _draws(func):
            return func(*args, **options)
        if func is _FUSED_DROPOUT:
            return self._dropout(*args, **options)
        if options.get("generator") is None:
            options = {**options, "generator": self._generator(_device_of(args, options))}
        return func(*args, **options)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            generator = torch.Generator(device)
            self._generators[device] = generator.manual_seed(self._seed)
        return self._generators[device]

    def _dropout(
        self, inputs: torch.Tensor, p: float, train: bool | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The fused kernel of GPUs takes no generator; this is what it computes."""
        keep = torch.ones_like(inputs, dtype=torch.bool)
        if train is False:
            return inputs.clone(), keep
        keep.bernoulli_(1.0 - p, generator=self._generator(inputs.device))
        scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
        return inputs * keep * scale, keep


@functools.cache
def _draws(func: Any) -> bool:
    takes_generator = any(argument.name == "generator" for argument in func._schema.arguments)
    return takes_generator or func is _FUSED_DROPOUT


def _device_of(args: Sequence[Any], options: Mapping[str, Any]) -> torch.device:
    for value in args:
        if isinstance(value, torch.Tensor):
            return value.device
    return torch.device(options.get("device") or "cpu")
