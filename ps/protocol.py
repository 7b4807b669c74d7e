"""What server and trainer say to each other: the calls, and the plain values in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor
from torch.futures import Future


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """The newest weights when an order is handed out.

    values are for a trainer that computes itself, and None where the server has written them into
    its mailbox.
    """

    version: int
    values: Tensor | None = None
    """uint8 on the CPU, of a flat.FlatModel's layout or the first part of it."""


@dataclass(frozen=True, slots=True)
class Train:
    """Train on batch `batch` of epoch `epoch` (both from 0): the samples at `indices`."""

    epoch: int
    batch: int
    indices: Sequence[int]
    ahead: Sequence[Train] = field(default=(), compare=False)
    """What the trainer gets next, if nobody else is faster."""
    weights: Weights | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Evaluate test samples start to stop-1: slice `slice` after epoch `epoch`."""

    epoch: int
    slice: int
    start: int
    stop: int
    weights: Weights | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Wait:
    """There is nothing to do at the moment; ask again. Sent before a call would time out."""


@dataclass(frozen=True, slots=True)
class Finished:
    """There will be nothing more to do: leave."""


Order = Train | Evaluate | Wait | Finished


@dataclass(frozen=True, slots=True, eq=False)
class Push:
    """The gradients of a trainer that computes itself.

    gradients and buffers are None where they lie in the trainer's mailbox.
    """

    version: int
    """Of the weights they were computed on."""
    unused: tuple[int, ...] = ()
    """Places of the parameters that got no gradient in this step."""
    gradients: Tensor | None = None
    """uint8 on the CPU, of the layout FlatModel.trained."""
    buffers: Tensor | None = None
    """uint8 on the CPU, of the layout FlatModel.buffers."""


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """The loss of that batch, and what the update is made from."""

    epoch: int
    batch: int
    samples: int
    loss: float
    gradient: Tensor | Push
    """All gradients; or, where the server computes, that of the loss by the outputs of the last
    forward: of their shape, on the CPU."""


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

    `trainer` is the rank of the caller. Each trainer makes one call at a time. forward, backward
    and evaluate are for trainers that leave computing to the server.
    """

    def join(self, trainer: int, layout: str | None) -> None:
        """Say hello, first of all. layout is FlatModel.describe() where the trainer computes.

        Raises:
            ConfigError: the server's model has another layout.
        """

    def forward(self, trainer: int, epoch: int, batch: int, inputs: Tensor) -> Tensor:
        """Run the model in training mode, on its newest weights if none is waiting for backward.

        The outputs are float32 on the CPU and carry no graph: that stays on the server until the
        gradient by these outputs comes, in backward() or in the Trained of the order.
        """

    def backward(self, trainer: int, output_gradient: Tensor) -> None:
        """Go on with backward from the outputs of the last forward; more of the order follows."""

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

    def lost(self, trainer: int, how: str) -> None:
        """A trainer is gone. Does nothing if it has left, or has told why."""

    def broke(self, cause: str, exit_code: int) -> None:
        """The server's own code raised while it answered. The job ends."""


class Server(Calls, Protocol):
    """The trainer's side: every call blocks, and may raise PeerLost."""

    def next_order(self, trainer: int, result: Result | None) -> Order:
        """Hand in the finished order (None at first), get the next. Waits for one."""
