"""What a plug-in is made of. Plug-ins import these names from `ps`.

A plug-in is a function that takes the ps.Config and returns a ps.Workload. It is called once in
every rank, after torch is loaded, and must return the same on each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.data import default_collate

Make = Callable[[], Sequence[Tensor]]
Share = Callable[[str, Make], Sequence[Tensor]]


class Samples(Protocol):
    """A data set of (input, target) pairs, such as any map-style torch Dataset.

    torch's default_collate must be able to stack the inputs to one tensor [n, ...], and the targets
    to another, each of any dtype, on the CPU.

    If the data set also has a method `batch(indices)`, that is called instead, with a sequence of n
    indices. It returns the stacked tensors (inputs [n, ...], targets [n, ...]).
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained, and on which data. A plug-in returns one."""

    name: str
    """For messages and the report."""
    model: Callable[[], nn.Module]
    """Makes the untrained model, float32 on the CPU. It maps inputs [n, ...] to outputs [n, ...].

    torch's random numbers are seeded before the call, so that the weights depend on --seed alone.
    """
    train: Samples
    test: Samples
    loss: Callable[[Tensor, Tensor], Tensor]
    """loss(outputs, targets): the mean over the n samples, a float tensor with one element."""
    correct: Callable[[Tensor, Tensor], int]
    """correct(outputs, targets): how many of the n samples are predicted correctly, 0 to n."""
    channels_last: bool = False
    """Whether the model is faster with images and weights in torch's channels_last format."""


def once_per_host(name: str, make: Make) -> Sequence[Tensor]:
    """Tensors that are made by one process and shared by all ranks, for data sets in memory.

    name identifies them within the job. make() returns dense CPU tensors of any shapes and dtypes,
    the same on every rank: rank 0 calls it, and the others only where sharing is not possible.
    Treat the result as read-only: whether other ranks see what is written to it is not defined.

    Blocks while rank 0 makes the tensors.
    """
    return _share(name, make)


def share_by(share: Share | None) -> None:
    """Set how once_per_host() gets its tensors in this process. None: each process makes its own.

    For this program itself; plug-ins have no use for it.
    """
    global _share
    _share = share or _make


def _make(name: str, make: Make) -> Sequence[Tensor]:
    return make()


_share: Share = _make


def fetch(samples: Samples, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The batch of these n samples: inputs [n, ...] and targets [n, ...], of the data set's dtypes.

    Raises what the data set raises.
    """
    batch = getattr(samples, "batch", None)
    if batch is not None:
        inputs, targets = batch(indices)
    else:
        inputs, targets = default_collate([samples[index] for index in indices])
    return inputs, targets
