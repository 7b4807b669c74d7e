"""Randomness inside a step, seeded from (seed, epoch, batch): who does an order does not matter.

torch has one default CPU generator per process, and the server runs the forward passes of all
trainers in threads of one process. So each pass draws from a generator of its own: below
autograd, every operator that takes a generator and was given none is handed that one, and for
one that takes none the default generator is lent its state.
"""

from __future__ import annotations

import enum
import functools
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@functools.lru_cache(maxsize=16)
def step_seed(seed: int, epoch: int, batch: int, part: int = 0) -> int:
    """A seed for one pass, of 63 bits; the same in every process and Python version.

    part tells the passes of one order apart.
    """
    text = f"{seed}-{epoch}-{batch}-{part}" if part else f"{seed}-{epoch}-{batch}"
    return random.Random(text).getrandbits(63)


def seed_process(seed: int) -> None:
    """Seed the default CPU generator and Python's random, for a process that computes alone.

    torch.manual_seed does more (all devices, a recorded traceback each) and costs more.
    """
    torch.default_generator.manual_seed(seed)
    random.seed(seed)


class SeededForward(TorchDispatchMode):
    """A context for one thread in which random operators draw as after manual_seed(seed).

    The numbers are those of a plain `torch.manual_seed(seed)` before the same operators, bit
    for bit.
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
        kind = _kind(func)
        if kind is _Kind.PLAIN or options.get("generator") is not None:
            return func(*args, **options)
        generator = self._generator(_device_of(args, options))
        if kind is _Kind.TAKES_GENERATOR:
            return func(*args, **{**options, "generator": generator})
        with _lending(generator):
            return func(*args, **options)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


class _Kind(enum.Enum):
    PLAIN = enum.auto()
    TAKES_GENERATOR = enum.auto()
    DRAWS_BY_DEFAULT = enum.auto()


@functools.cache
def _kind(func: Any) -> _Kind:
    if any(argument.name == "generator" for argument in func._schema.arguments):
        return _Kind.TAKES_GENERATOR
    draws = torch.Tag.nondeterministic_seeded in func.tags
    return _Kind.DRAWS_BY_DEFAULT if draws else _Kind.PLAIN


_default_generators = threading.Lock()


@contextmanager
def _lending(generator: torch.Generator) -> Iterator[None]:
    """Lend the generator's state to the device's default one, for one operator at a time."""
    if generator.device.type == "cuda":
        default = torch.cuda.default_generators[generator.device.index or 0]
    else:
        default = torch.default_generator
    with _default_generators:
        saved = default.get_state()
        default.set_state(generator.get_state())
        try:
            yield
        finally:
            generator.set_state(default.get_state())
            default.set_state(saved)


def _device_of(args: Sequence[Any], options: Mapping[str, Any]) -> torch.device:
    for value in args:
        if isinstance(value, torch.Tensor):
            return value.device
    return torch.device(options.get("device") or "cpu")


def permutation(seed: int, epoch: int, length: int) -> Sequence[int]:
    """temporary"""
    from array import array

    draw = random.Random(f"{seed}-{epoch}").random
    keys = [draw() for _ in range(length)]
    return array("q", sorted(range(length), key=keys.__getitem__))
