"""Where forward and backward run: on the server, or on the trainers. The server's half of each.

The trainer's halves are in ps.trainer.worker, under the same names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ps.model.mailbox import Mailbox
from ps.model.passes import Passes
from ps.model.randomness import SeededForward, step_seed
from ps.model.store import Replica
from ps.protocol import Push, Trained, Weights
from ps.server.state import TrainingState
from ps.settings.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one order gives to an update."""

    gradients: Sequence[Tensor | None]
    """In the order of Store.names, each of its parameter's shape, dtype and device."""
    version: int
    """Of the weights they were computed on."""
    buffers: Sequence[Tensor]
    """In the model's order."""
    blocks: Sequence[Tensor] | None = None
    """The elements of the gradients in fewer tensors, if there are such."""


class Compute(Protocol):
    """The calls for one trainer come one at a time, those for several at once."""

    def check_layout(self, trainer: int, layout: str | None) -> None:
        """See protocol.Calls.join."""

    def contribution(self, trainer: int, result: Trained) -> Contribution:
        """What the trainer hands in. Valid until its next order."""

    def dispatch(self, trainer: int) -> Weights:
        """Have the newest weights ready for the trainer's order. The caller holds the lock."""

    def open_evaluation(self) -> None:
        """The weights stand still from now until the next update. The caller holds the lock."""


class ServerCompute:
    """--compute server: a replica of the model for each trainer."""

    def __init__(
        self,
        state: TrainingState,
        trainers: Iterable[int],
        passes: Passes,
        input_device: torch.device | str = "cpu",
    ) -> None:
        store = state.store
        self._store = store
        self._lock = state.lock
        self._passes = passes
        self._input_device = input_device
        self._replicas: dict[int, Replica] = {trainer: store.replica() for trainer in trainers}
        self._outputs: dict[int, Tensor] = {}
        self._micro_batches = dict.fromkeys(self._replicas, 0)
        """By trainer: how many of its order have been forward."""
        self._evaluation = store.replica()
        self._evaluation.module.eval()

    def forward(self, trainer: int, epoch: int, batch: int, inputs: Tensor) -> Tensor:
        """See protocol.Calls. All micro-batches of an order see the same weights."""
        replica = self._replicas[trainer]
        micro_batch = self._micro_batches[trainer]
        if micro_batch == 0:
            with self._lock:
                self._store.refresh(replica)
        with SeededForward(step_seed(self._passes.seed, epoch, batch, micro_batch)):
            outputs = self._passes.run(replica.module, inputs.to(self._input_device))
        self._micro_batches[trainer] += 1
        self._outputs[trainer] = outputs
        return outputs.detach().to("cpu")

    def backward(self, trainer: int, output_gradient: Tensor) -> None:
        """See protocol.Calls."""
        assert trainer in self._outputs, f"trainer {trainer} hands in a batch without forward"
        outputs = self._outputs.pop(trainer)
        outputs.backward(output_gradient.to(outputs.device))

    def evaluate(self, trainer: int, inputs: Tensor) -> Tensor:
        """See protocol.Calls."""
        with torch.inference_mode():
            outputs = self._passes.run(self._evaluation.module, inputs.to(self._input_device))
            return outputs.to("cpu")

    def contribution(self, trainer: int, result: Trained) -> Contribution:
        """Runs the rest of backward, in the caller's thread beside those of other trainers."""
        assert isinstance(result.gradient, Tensor)
        self.backward(trainer, result.gradient)
        self._micro_batches[trainer] = 0
        replica = self._replicas[trainer]
        gradients = [parameter.grad for parameter in replica.parameters]
        for parameter in replica.parameters:
            parameter.grad = None
        return Contribution(gradients, replica.version, replica.buffers)

    def check_layout(self, trainer: int, layout: str | None) -> None:
        """Trainers have no model."""

    def dispatch(self, trainer: int) -> Weights:
        """They stay here."""
        return Weights(self._store.version)

    def open_evaluation(self) -> None:
        self._store.refresh(self._evaluation)


@dataclass(frozen=True, slots=True)
class _Views:
    gradients: Sequence[Tensor]
    buffers: Sequence[Tensor]
    blocks: Sequence[Tensor]


_CHANGED = -1  # a step changes the buffers of the trainer's copy


class TrainerCompute:
    """--compute trainer: weights go out with the orders, gradients come in with the results.

    Both lie in a mailbox for each trainer, which the link attaches.
    """

    def __init__(self, state: TrainingState) -> None:
        self._store = state.store
        self.flat = state.store.flatten()
        self._mailboxes: dict[int, Mailbox] = {}
        self._views: dict[int, _Views] = {}
        self._held: dict[int, int] = {}  # the version that each trainer's weights have

    def attach(self, trainer: int, mailbox: Mailbox) -> None:
        """Exchange tensors with this trainer there. Again if they lie elsewhere later."""
        self._mailboxes[trainer] = mailbox
        self._views[trainer] = _Views(
            self.flat.trained.views(mailbox.gradients),
            self.flat.buffers.views(mailbox.weights),
            self.flat.trained.blocks(mailbox.gradients),
        )

    def receive(self, trainer: int, gradients: Tensor, buffers: Tensor) -> None:
        """For a link without shared memory: lay what came into the trainer's mailbox.

        gradients are uint8 [flat.trained.stop] and become the mailbox's own, buffers are uint8 of
        the layout flat.buffers and are copied; both on the CPU.
        """
        weights = self._mailboxes[trainer].weights
        weights[self.flat.buffers.start : self.flat.buffers.stop].copy_(buffers)
        self.attach(trainer, Mailbox(weights, gradients))

    def fresh_weights(self, trainer: int, num_bytes: int) -> Tensor:
        """For a link without shared memory: uint8 [num_bytes] on the CPU, a view that is written
        again for the trainer's next order."""
        return self._mailboxes[trainer].weights[:num_bytes]

    def check_layout(self, trainer: int, layout: str | None) -> None:
        if layout != self.flat.describe():
            raise ConfigError(
                f"the model that trainer rank {trainer} made differs from the server's in shapes, "
                "dtypes or order of its tensors; model() must give the same on every rank"
            )

    def contribution(self, trainer: int, result: Trained) -> Contribution:
        push, views = result.gradient, self._views[trainer]
        assert isinstance(push, Push)
        self._held[trainer] = _CHANGED
        gradients: Sequence[Tensor | None] = views.gradients
        if push.unused:
            unused = set(push.unused)
            gradients = [None if place in unused else g for place, g in enumerate(gradients)]
        return Contribution(gradients, push.version, views.buffers, views.blocks)

    def dispatch(self, trainer: int) -> Weights:
        """They are copied into its mailbox, unless it has them."""
        version, held = self._store.version, self._held.get(trainer)
        if held == version:
            return Weights(version)
        # Frozen parameters never change: they go out once.
        fresh_bytes = self.flat.total_bytes if held is None else self.flat.moving_bytes
        self._store.copy_weights(self._mailboxes[trainer].weights[:fresh_bytes])
        self._held[trainer] = version
        return Weights(version, fresh_bytes)

    def open_evaluation(self) -> None:
        """Each trainer evaluates with the weights that come with its order."""
