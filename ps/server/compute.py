"""Where forward and backward run: on the server, or on the trainers. The server's part of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ps.model.mailbox import Mailbox
from ps.model.passes import Passes
from ps.model.randomness import SeededForward, step_seed
from ps.model.store import Replica, Store
from ps.protocol import Evaluate, Push, Train, Trained, Weights
from ps.settings.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one order gives to an update."""

    gradients: Sequence[Tensor | None]
    """In the order of Store.names."""
    version: int
    """Of the weights they were computed on."""
    buffers: Sequence[Tensor]
    blocks: Sequence[Tensor] | None = None
    """The elements of the gradients in fewer tensors, if there are such."""


class Compute(Protocol):
    """The calls for one trainer come one at a time, those for several at once."""

    def check_layout(self, trainer: int, layout: str | None) -> None:
        """See protocol.Calls.join."""

    def contribution(self, trainer: int, result: Trained) -> Contribution:
        """What the trainer hands in. Valid until its next order."""

    def hand_out(self, trainer: int, order: Train | Evaluate) -> Train | Evaluate:
        """Add what the trainer needs for the order. The caller holds the store's lock."""

    def open_evaluation(self) -> None:
        """The weights stand still from now until the next update. The caller holds the lock."""


class OnServer:
    """--compute server: a replica of the model for each trainer."""

    def __init__(
        self,
        store: Store,
        trainers: Iterable[int],
        passes: Passes,
        input_device: torch.device | str = "cpu",
    ) -> None:
        self._store = store
        self._passes = passes
        self._input_device = input_device
        self._replicas: dict[int, Replica] = {trainer: store.replica() for trainer in trainers}
        self._outputs: dict[int, Tensor] = {}
        self._parts = dict.fromkeys(self._replicas, 0)
        self._evaluation = store.replica()
        self._evaluation.module.eval()

    def forward(self, trainer: int, epoch: int, batch: int, inputs: Tensor) -> Tensor:
        """See protocol.Calls. All parts of an order see the same weights."""
        replica = self._replicas[trainer]
        part = self._parts[trainer]
        if part == 0:
            with self._store.lock:
                self._store.refresh(replica)
        with SeededForward(step_seed(self._passes.seed, epoch, batch, part)):
            outputs = self._passes.run(replica.module, inputs.to(self._input_device))
        self._parts[trainer] += 1
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
        self._parts[trainer] = 0
        replica = self._replicas[trainer]
        gradients = [parameter.grad for parameter in replica.parameters]
        for parameter in replica.parameters:
            parameter.grad = None
        return Contribution(gradients, replica.version, replica.buffers)

    def check_layout(self, trainer: int, layout: str | None) -> None:
        """Trainers have no model."""

    def hand_out(self, trainer: int, order: Train | Evaluate) -> Train | Evaluate:
        return replace(order, weights=Weights(self._store.version))

    def open_evaluation(self) -> None:
        self._store.refresh(self._evaluation)


@dataclass(frozen=True, slots=True)
class _Views:
    gradients: Sequence[Tensor]
    buffers: Sequence[Tensor]
    blocks: Sequence[Tensor]


_CHANGED = -1  # a step changes the buffers of the trainer's copy


class OnTrainers:
    """--compute trainer: weights go out with the orders, gradients come in with the results."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.flat = store.flatten()
        self._mailboxes: dict[int, Mailbox] = {}
        self._views: dict[int, _Views] = {}
        self._held: dict[int, int] = {}  # the version that each trainer's weights have

    def attach(self, trainer: int, mailbox: Mailbox) -> None:
        """Exchange tensors through a mailbox with this trainer, instead of in the messages."""
        self._mailboxes[trainer] = mailbox
        self._views[trainer] = _Views(
            self.flat.trained.views(mailbox.gradients),
            self.flat.buffers.views(mailbox.weights),
            self.flat.trained.blocks(mailbox.gradients),
        )

    def check_layout(self, trainer: int, layout: str | None) -> None:
        if layout != self.flat.describe():
            raise ConfigError(
                f"the model that trainer rank {trainer} made differs from the server's in shapes, "
                "dtypes or order of its tensors; model() must give the same on every rank"
            )

    def contribution(self, trainer: int, result: Trained) -> Contribution:
        push = result.gradient
        assert isinstance(push, Push)
        views = self._views.get(trainer) or self._views_of(push)
        self._held[trainer] = _CHANGED
        gradients: Sequence[Tensor | None] = views.gradients
        if push.unused:
            unused = set(push.unused)
            gradients = [None if place in unused else g for place, g in enumerate(gradients)]
        return Contribution(gradients, push.version, views.buffers, views.blocks)

    def _views_of(self, push: Push) -> _Views:
        assert push.gradients is not None and push.buffers is not None
        return _Views(
            self.flat.trained.views(push.gradients),
            self.flat.buffers.views(push.buffers, base=self.flat.buffers.start),
            self.flat.trained.blocks(push.gradients),
        )

    def hand_out(self, trainer: int, order: Train | Evaluate) -> Train | Evaluate:
        version = self._store.version
        values = self._values(trainer) if self._held.get(trainer) != version else None
        self._held[trainer] = version
        return replace(order, weights=Weights(version, values))

    def _values(self, trainer: int) -> Tensor | None:
        """The weights for a message, or None where they went into the mailbox."""
        whole = trainer not in self._held
        mailbox = self._mailboxes.get(trainer)
        num_bytes = self.flat.total_bytes if whole else self.flat.moving_bytes
        into = mailbox.weights[:num_bytes] if mailbox else torch.empty(num_bytes, dtype=torch.uint8)
        self._store.copy_weights(into)
        return None if mailbox else into

    def open_evaluation(self) -> None:
        """Each trainer evaluates with the weights that come with its order."""
