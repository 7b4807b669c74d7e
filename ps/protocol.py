"""What server and trainer say to each other: the calls, and the plain values in them.

The two meet here alone. A trainer that computes shares a mailbox with the server (see
ps.model.mailbox), in which weights and gradients lie; how its content gets from one side to the
other is the link's affair, and no message says so.
"""

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


Order = Train | Evaluate


@dataclass(frozen=True, slots=True)
class Weights:
    """The newest weights when an order is assigned."""

    version: int
    fresh_bytes: int = 0
    """How much of the mailbox's weights was written for this order, from the start: 0 where the
    trainer has that version already, or has no model."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """An order, and what the trainer needs for it."""

    order: Order
    weights: Weights
    prefetch: Sequence[Train] = ()
    """What the trainer gets next, if nobody else is faster: their data can be loaded ahead."""


@dataclass(frozen=True, slots=True)
class Wait:
    """There is nothing to do at the moment; ask again. Sent before a call would time out."""


@dataclass(frozen=True, slots=True)
class Finished:
    """There will be nothing more to do: leave."""


Reply = Assignment | Wait | Finished


@dataclass(frozen=True, slots=True)
class Push:
    """The gradients of a trainer that computes, which lie in its mailbox."""

    version: int
    """Of the weights they were computed on."""
    unused: tuple[int, ...] = ()
    """Places of the parameters that got no gradient in this step."""


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """The loss of that batch, and what the update is made from."""

    epoch: int
    batch: int
    samples: int
    loss: float
    """The mean over the samples."""
    gradient: Tensor | Push
    """All gradients; or, where the server computes, that of the loss by the outputs of the last
    forward: float32 on the CPU, of their shape."""


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

        inputs are a batch on the CPU, the first dimension is the sample. The outputs are float32
        on the CPU and carry no graph: that stays on the server until the gradient by these outputs
        comes, in backward() or in the Trained of the order.
        """

    def backward(self, trainer: int, output_gradient: Tensor) -> None:
        """Go on with backward from the outputs of the last forward; more of the order follows.

        output_gradient is float32 on the CPU, of the shape of these outputs.
        """

    def evaluate(self, trainer: int, inputs: Tensor) -> Tensor:
        """Run the model in eval mode on the weights that the epoch ended with.

        inputs and outputs are as those of forward().
        """

    def leave(self, trainer: int) -> None:
        """Say goodbye; an order that the trainer holds goes back to the list."""

    def fail(self, trainer: int, cause: str, exit_code: int) -> None:
        """Report that this trainer ends with an error. The job ends."""


class Service(Calls, Protocol):
    """The server's side: answers from any number of threads, and no call waits for another."""

    def next_order(self, trainer: int, result: Result | None) -> Future[Reply]:
        """Take the finished order in (None at first); the future gives the next one."""

    def internal_error(self, cause: str, exit_code: int) -> None:
        """The server's own code raised while it answered. The job ends."""


class Server(Calls, Protocol):
    """The trainer's side: every call blocks, and may raise PeerLost."""

    def next_order(self, trainer: int, result: Result | None) -> Reply:
        """Hand in the finished order (None at first), get the next. Waits for one."""
