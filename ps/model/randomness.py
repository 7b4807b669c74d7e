"""Everything that is drawn at random in a job, each from a seed of its own.

A seed depends on the job's seed and on what is drawn (the order of an epoch's samples, or what one
micro-batch needs), never on the process that draws: which trainer works on an order does not
matter. No two purposes share a seed, because equal seeds give equal numbers.

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
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat, starmap
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_DRAWS_AT_ONCE = 10_000  # half a millisecond, in which no other thread of Python runs
# Bits that tell purposes apart. They cost a step less than a seed from a text of its own would.
_LOADING, _LOSS = 0x2B7E_1516_28AE_D2A6, 0x3C6E_F372_FE94_F82B


def permutation(seed: int, epoch: int, length: int) -> array[int]:
    """The order of the samples in an epoch: the numbers 0 to length - 1, as 64-bit integers.

    Sorts by random keys: Python promises random() to give the same numbers in every version,
    which it does not for shuffle(). Takes about 0.2 s per million samples, in which other threads
    go on.
    """
    order = array("q", [0]) * length
    if not length:  # torch has no view of an empty buffer
        return order
    draw = random.Random(f"{seed}-{epoch}").random
    keys = array("d")
    for start in range(0, length, _DRAWS_AT_ONCE):
        keys.extend(starmap(draw, repeat((), min(_DRAWS_AT_ONCE, length - start))))
    unsorted = torch.frombuffer(keys, dtype=torch.float64)
    indices = torch.frombuffer(order, dtype=torch.int64)
    torch.sort(unsorted, stable=True, out=(torch.empty_like(unsorted), indices))
    return order


@functools.lru_cache(maxsize=16)
def step_seed(seed: int, epoch: int, batch: int, micro_batch: int = 0) -> int:
    """The seed of one forward pass, and of the loss where the same process computes both.

    Like all seeds here it has 63 bits and is the same in every process and Python version.
    """
    text = f"{seed}-{epoch}-{batch}"
    return _seed(f"{text}-{micro_batch}" if micro_batch else text)


def loading_seed(seed: int, epoch: int, batch: int, micro_batch: int = 0) -> int:
    """The seed of what a data set draws while a micro-batch is loaded, such as augmentation."""
    return step_seed(seed, epoch, batch, micro_batch) ^ _LOADING


def loss_seed(seed: int, epoch: int, batch: int, micro_batch: int = 0) -> int:
    """The seed of a loss that is computed in another process than its forward pass."""
    return step_seed(seed, epoch, batch, micro_batch) ^ _LOSS


def evaluation_seed(seed: int, epoch: int, slice_index: int) -> int:
    """The seed of loading and evaluating one slice of the test set."""
    return _seed(f"evaluation-{seed}-{epoch}-{slice_index}")


def _seed(text: str) -> int:
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
    for bit, for tensors of any shape, dtype and device. An operator that was given a generator
    draws from that one.
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
