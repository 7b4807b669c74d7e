"""What is trained: the plug-in interface, how a plug-in is found, and the checks on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.data import default_collate


class Samples(Protocol):
    """A data set. Any map-style torch Dataset of (input, target) pairs is one.

    If it also has `batch(indices)`, which returns the collated (inputs, targets) pair, that is
    called instead of fetching and collating sample by sample.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a plug-in returns. A plug-in is a function that takes the Config and returns this."""

    name: str
    model: Callable[[], nn.Module]
    """Makes the untrained model; it maps one batch of inputs (a tensor) to outputs (a tensor)."""
    train: Samples
    test: Samples
    loss: Callable[[Tensor, Tensor], Tensor]
    """loss(outputs, targets): the mean over the batch, a scalar."""
    correct: Callable[[Tensor, Tensor], int]
    """correct(outputs, targets): how many samples of the batch are right."""
    channels_last: bool = False
    """Whether the model is faster with its images and weights in that memory format."""


def once_per_host(name: str, make: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
    """Tensors for data sets in memory: made by one process, and seen by all ranks of the host.

    name tells them apart in one job; make() must give the same on every rank. What is written to
    them is seen by this process alone, or by all.
    """
    return _share(name, make)


def share_by(share: Callable[[str, Callable[[], Sequence[Tensor]]], Sequence[Tensor]]) -> None:
    """Set what once_per_host() does in this process; without it, it calls make()."""
    global _share
    _share = share


def _make(name: str, make: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
    return make()


_share = _make


def fetch(samples: Samples, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The batch of these samples: inputs and targets, the first dimension is the sample."""
    batch = getattr(samples, "batch", None)
    if batch is not None:
        inputs, targets = batch(indices)
    else:
        inputs, targets = default_collate([samples[index] for index in indices])
    return inputs, targets
