"""What server and trainer say to each other: the calls, and the plain values in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.futures import Future


@dataclass(frozen=True, slots=True)
class Train:
    """Train on batch `batch` of epoch `epoch` (both from 0): the samples at `indices`."""

    epoch: int
    batch: int
    indices: Sequence[int]


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Evaluate test samples start to stop-1: slice `slice` after epoch `epoch`."""

    epoch: int
    slice: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Wait:
    """There is nothing to do at the moment; ask again. Sent before a call would time out."""


@dataclass(frozen=True, slots=True)
class Finished:
    """There will be nothing more to do: leave."""


Order = Train | Evaluate | Wait | Finished


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """The loss of that batch, and what backward starts from on the server."""

    epoch: int
    batch: int
    samples: int
    loss: float
    output_gradient: Tensor
    """Gradient of the loss by the outputs of forward: of their shape and dtype, on the CPU."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What that slice gave: the sum of the losses, and how many were right."""

    epoch: int
    slice: int
    samples: int
    loss_sum: float
    correct: int


Result = Trained | Evaluated


class Calls(Protocol):
    """What a trainer may ask of the server, the same on both sides of a link.

    `trainer` is the rank of the caller. Each trainer makes one call at a time.
    """

    def forward(self, trainer: int, epoch: int, batch: int, inputs: Tensor) -> Tensor:
        """Run the model in training mode on its newest weights.

        The outputs are on the CPU and carry no graph: that stays on the server until the
        Trained of this batch is handed in.
        """

    def evaluate(self, trainer: int, inputs: Tensor) -> Tensor:
        """Run the model in eval mode on the weights that the epoch ended with."""

    def leave(self, trainer: int) -> None:
        """Say goodbye; an order that was handed out goes back to the list."""

    def fail(self, trainer: int, cause: str, exit_code: int) -> None:
        """Report that this trainer ends with an error. The job ends."""


class Service(Calls, Protocol):
    """The server's side: answers from any number of threads, and no call waits for another."""

    def next_order(self, trainer: int, result: Result | None) -> Future[Order]:
        """Take the finished order in (None at first); the future gives the next one."""


class Server(Calls, Protocol):
    """The trainer's side: every call blocks, and may raise PeerLost."""

    def next_order(self, trainer: int, result: Result | None) -> Order:
        """Hand in the finished order (None at first), get the next. Waits for one."""
