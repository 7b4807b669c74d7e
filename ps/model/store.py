"""The state of training: the weights, the buffers, the one optimizer and the version."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from ps.model.flat import FlatModel
from ps.model.gradients import clip_gradients
from ps.model.optimizer import Optimizer, ScheduledOptimizer
from ps.model.snapshots import difference, in_own_storage, to_cpu
from ps.settings.errors import CheckpointUnusable, TrainingFailed


@dataclass(slots=True)
class Replica:
    """A copy of the model for one user, and the version of the weights it holds."""

    module: nn.Module
    version: int
    parameters: list[nn.Parameter] = field(init=False)
    """Those that are trained, in the order of Store.names."""
    _all_parameters: list[Tensor] = field(init=False)
    _has_buffers: bool = field(init=False)

    def __post_init__(self) -> None:
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        self._all_parameters = [p.detach() for p in self.module.parameters()]
        self._has_buffers = any(True for _ in self.module.buffers())

    @property
    def tensors(self) -> list[Tensor]:
        """All parameters, then all buffers, themselves: of the model's shapes, dtypes, devices."""
        return self._all_parameters + self.buffers

    @property
    def buffers(self) -> list[Tensor]:
        """The buffers themselves, read anew: a forward pass may have replaced them."""
        return list(self.module.buffers()) if self._has_buffers else []


class Store:
    """The state of training. Not thread-safe: callers hold `lock` around every call."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        lr_factor: Callable[[int], float] | None = None,
        clip_norm: float = 0.0,
    ) -> None:
        """The model's tensors may have any shape, dtype and device, and stay where they are.

        lr_factor maps the version to the factor on each group's learning rate. clip_norm limits
        the norm of all gradients of an update together; 0 does not.
        """
        self.lock = threading.Lock()
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.names = [name for name, _ in trained]
        """Of the trained parameters, in the order of the model."""
        self.untrained = set(self.names)
        """Names of parameters that no gradient has reached yet."""
        self.version = 0
        self.optimizer = ScheduledOptimizer(optimizer, lr_factor)
        self._clip_norm = clip_norm
        self._model = model
        self._parameters = [parameter for _, parameter in trained]
        self._buffers = list(model.buffers())
        self._tensors = _tensors(model)
        self._flat_buffer: Tensor | None = None
        self._consistent = True
        """Whether all weights and buffers are of the same version."""

    def apply(self, gradients: Sequence[Tensor | None]) -> int:
        """Take one optimizer step and return the new version.

        gradients: in the order of `names`, each of its parameter's shape, dtype and device, or
        None: then the optimizer leaves the parameter alone. They have passed check_gradients(),
        are the parameters' .grad during the call, may be clipped in place, and are not kept.
        """
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        if self._clip_norm:
            clip_gradients(self._parameters, self._clip_norm)
        self.optimizer.set_lr(self.version)
        self._consistent = False
        self.optimizer.step()
        self._consistent = True
        for parameter in self._parameters:
            parameter.grad = None
        if self.untrained:
            pairs = zip(self.names, gradients, strict=True)
            self.untrained -= {name for name, gradient in pairs if gradient is not None}
        self.version += 1
        return self.version

    def take_buffers(self, buffers: Iterable[Tensor]) -> None:
        """Copy the buffers of a model that has done a step.

        buffers: all of the model's, in its order, each of its shape and dtype, on any device.
        """
        if not self._buffers:
            return
        self._consistent = False
        with torch.no_grad():
            for buffer, updated in zip(self._buffers, buffers, strict=True):
                buffer.copy_(updated)
        self._consistent = True

    def replica(self) -> Replica:
        """A copy of the model as it is now, with the same shapes, dtypes and devices."""
        return Replica(copy.deepcopy(self._model), self.version)

    def refresh(self, replica: Replica) -> None:
        """Copy the weights and buffers into a replica."""
        with torch.no_grad():
            torch._foreach_copy_(replica.tensors, self._tensors)
        replica.version = self.version

    def flatten(self) -> FlatModel:
        """Lay the model out in one buffer, for copy_weights(). Only for a model on the CPU.

        Its parameters and buffers stay the same objects and keep shape, dtype and values.
        """
        flat = FlatModel(self._model)
        # Filled as the tensors move: zeros would take all of it while the first ones are held.
        self._flat_buffer = torch.empty(flat.total_bytes, dtype=torch.uint8)
        self._tensors = []
        flat.move_to(self._flat_buffer, keep_values=True)
        self._tensors = _tensors(self._model)
        return flat

    def copy_weights(self, into: Tensor) -> None:
        """Fill `into` with the first bytes of the weights. Only after flatten().

        into: uint8 [flatten().total_bytes or moving_bytes] on the CPU.
        """
        assert self._flat_buffer is not None
        into.copy_(self._flat_buffer[: into.numel()])

    def state_dict(self) -> dict[str, Tensor]:
        """The model's state_dict(): on the CPU, of the model's shapes and dtypes.

        Where the model is on the CPU these are its own tensors, not copies. Each has its own
        storage, so that a file holds no more than it; tied tensors share theirs.
        """
        state = self._model.state_dict()
        if self._flat_buffer is None:
            return {name: value.detach().cpu() for name, value in state.items()}
        return in_own_storage(state, self._flat_buffer)

    def state(self, *, copy: bool = True) -> dict[str, Any]:
        """All that training goes on from: plain values, and tensors on the CPU.

        With copy=False these change with the next update.

        Raises:
            TrainingFailed: an update was broken off, and the weights are of no version.
        """
        if not self._consistent:
            raise TrainingFailed("the last update was broken off")
        state = {
            "version": self.version,
            "trained": list(self.names),
            "untrained": sorted(self.untrained),
            "model": self.state_dict(),
            "optimizer": self.optimizer.state(),
        }
        on_cpu: dict[str, Any] = to_cpu(state, copy=copy)
        return on_cpu

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from state(), with the learning rate and the like that this store was made with.

        Raises:
            CheckpointUnusable: it is of another model; nothing was changed.
        """
        if differing := difference(self._model.state_dict(), state["model"]):
            raise CheckpointUnusable(f"it is of another model: {differing}")
        for there, here in zip_longest(state["trained"], self.names):
            if there != here:  # the optimizer knows them by their places
                raise CheckpointUnusable(
                    f"it is of another model: it trains {there} in the place of {here}"
                )
        self._model.load_state_dict(state["model"])
        self.optimizer.restore(state["optimizer"])
        self.version = state["version"]
        self.untrained = set(state["untrained"]) & set(self.names)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [p.detach() for p in module.parameters()] + list(module.buffers())
