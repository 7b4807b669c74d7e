"""The weights, the buffers, the one optimizer and the version."""

from __future__ import annotations

import cmath
import copy
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from ps.model.flat import FlatModel
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
        """All parameters and buffers. A forward pass may have replaced buffers."""
        return self._all_parameters + self.buffers

    @property
    def buffers(self) -> list[Tensor]:
        return list(self.module.buffers()) if self._has_buffers else []


class Store:
    """The state of training. Not thread-safe: callers hold `lock` around every call."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,  # noqa: TID251
        *,
        lr_factor: Callable[[int], float] | None = None,
        clip_norm: float = 0.0,
    ) -> None:
        """lr_factor maps the version to the factor on each group's learning rate."""
        self.lock = threading.Lock()
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.names = [name for name, _ in trained]
        self.untrained = set(self.names)
        """Names of parameters that no gradient has reached yet."""
        self.version = 0
        self._model = model
        self._parameters = [parameter for _, parameter in trained]
        self._tensors = _tensors(model)
        self._buffer: Tensor | None = None
        self._num_buffers = len(list(model.buffers()))
        self._optimizer = optimizer
        # Without the wrappers for profiler and compiler, which cost as much as a small update.
        self._step = inspect.unwrap(type(optimizer).step)
        self._base_lrs = [group["lr"] for group in optimizer.param_groups]
        self._lr_factor = lr_factor
        self._clip_norm = clip_norm
        self._whole = True

    def check(
        self, gradients: Sequence[Tensor | None], blocks: Sequence[Tensor] | None = None
    ) -> None:
        """Refuse gradients that must not reach the weights. Needs no lock: reads these alone.

        blocks are fewer tensors with the same elements, and perhaps more, to look at first.

        Raises:
            TrainingFailed: one is not finite, or there is none at all.
        """
        if all(gradient is None for gradient in gradients):
            raise TrainingFailed("no gradient reached any parameter")
        # One pass in the common case; a sum of finite numbers may overflow.
        if all(map(_has_finite_sum, gradients if blocks is None else blocks)):
            return
        for name, gradient in zip(self.names, gradients, strict=True):
            if gradient is None or _has_finite_sum(gradient):
                continue
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            if not torch.isfinite(values).all():
                raise TrainingFailed(f"the gradient of {name} is not finite")

    def apply(self, gradients: Sequence[Tensor | None]) -> int:
        """Take one optimizer step and return the new version.

        gradients have passed check(). They are in the order of `names`, each of its parameter's
        shape, dtype and device, or None: then the optimizer leaves the parameter alone. They are
        used as the parameters' .grad during the call, may be clipped in place, and are not kept.
        """
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        if self._clip_norm:
            self._clip([gradient for gradient in gradients if gradient is not None])
        if self._lr_factor is not None:
            self._set_lr(self._lr_factor(self.version))
        self._whole = False  # for as long as some weights are of this update and others are not
        with torch.no_grad():
            self._step(self._optimizer)
        self._whole = True
        for parameter in self._parameters:
            parameter.grad = None
        if self.untrained:
            pairs = zip(self.names, gradients, strict=True)
            self.untrained -= {name for name, gradient in pairs if gradient is not None}
        self.version += 1
        return self.version

    def replica(self) -> Replica:
        """A copy of the model as it is now, on the same devices."""
        return Replica(copy.deepcopy(self._model), self.version)

    def refresh(self, replica: Replica) -> None:
        """Copy the weights and buffers into a replica."""
        with torch.no_grad():
            torch._foreach_copy_(replica.tensors, self._tensors)
        replica.version = self.version

    def take_buffers(self, buffers: Iterable[Tensor]) -> None:
        """Take over the buffers of a model that has done a step, in the model's order."""
        if not self._num_buffers:
            return
        self._whole = False
        with torch.no_grad():
            for buffer, updated in zip(self._model.buffers(), buffers, strict=True):
                buffer.copy_(updated)
        self._whole = True

    def flatten(self) -> FlatModel:
        """Lay the model out in one buffer, for copy_weights. Before the first update."""
        flat = FlatModel(self._model)
        # Filled as the tensors move: zeros would take all of it while the first places are held.
        self._buffer = torch.empty(flat.total_bytes, dtype=torch.uint8)
        self._tensors = []
        flat.move_to(self._buffer, keep_values=True)
        self._tensors = _tensors(self._model)
        return flat

    def copy_weights(self, into: Tensor) -> None:
        """Fill the uint8 buffer `into` with the first part of flatten()'s buffer."""
        assert self._buffer is not None
        into.copy_(self._buffer[: into.numel()])

    def state_dict(self) -> dict[str, Tensor]:
        """The model's state on the CPU, as a plain module without a server would save it.

        After flatten() each tensor is alone in its storage, over the same memory: as a view it
        would bring the whole buffer into a file.
        """
        state = self._model.state_dict()
        if self._buffer is None:
            return {name: value.detach().cpu() for name, value in state.items()}
        memory = memoryview(self._buffer.numpy())  # type: ignore[arg-type]
        start = self._buffer.data_ptr()
        alone = {_place(v): _alone(v, memory, v.data_ptr() - start) for v in state.values()}
        return {name: alone[_place(value)] for name, value in state.items()}  # tied stay tied

    def state(self, *, copy: bool = True) -> dict[str, Any]:
        """All that training goes on from, on the CPU, in tensors and plain values.

        Without a copy it changes with the next update.

        Raises:
            TrainingFailed: an update was broken off, and the weights are of no version.
        """
        if not self._whole:
            raise TrainingFailed("the last update was broken off")
        state = {
            "version": self.version,
            "trained": list(self.names),
            "untrained": sorted(self.untrained),
            "model": self.state_dict(),
            "optimizer": self._optimizer.state_dict()["state"],
        }
        copied: dict[str, Any] = _copy(state, {}, always=copy)
        return copied

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from state(), with the learning rate and the like that this store was made with.

        Raises:
            CheckpointUnusable: it is of another model; nothing was changed.
        """
        if difference := _difference(self._model.state_dict(), state["model"]):
            raise CheckpointUnusable(f"it is of another model: {difference}")
        for there, here in zip_longest(state["trained"], self.names):
            if there != here:  # the optimizer knows them by their places
                raise CheckpointUnusable(
                    f"it is of another model: it trains {there} in the place of {here}"
                )
        self._model.load_state_dict(state["model"])
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state["optimizer"], "param_groups": groups})
        self.version = state["version"]
        self.untrained = set(state["untrained"]) & set(self.names)

    def _clip(self, gradients: Sequence[Tensor]) -> None:
        norm = torch.nn.utils.get_total_norm(gradients)
        if not torch.isfinite(norm):  # each element is finite, but their squares overflow
            norm = torch.nn.utils.get_total_norm([gradient.double() for gradient in gradients])
        torch.nn.utils.clip_grads_with_norm_(self._parameters, self._clip_norm, norm)

    def _set_lr(self, factor: float) -> None:
        for group, base in zip(self._optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = base * factor


def _copy(value: Any, copies: dict[tuple[object, ...], Tensor], *, always: bool) -> Any:
    """Dictionaries and lists with their tensors on the CPU; tied ones stay tied.

    always copies also those that are there.
    """
    if isinstance(value, Tensor) and value.layout is not torch.strided:
        return value.detach().to("cpu", copy=always)  # it has no one place in memory
    if isinstance(value, Tensor):
        place = _place(value)
        if place not in copies:
            copies[place] = value.detach().to("cpu", copy=always)
        return copies[place]
    if isinstance(value, dict):
        return {key: _copy(item, copies, always=always) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copy(item, copies, always=always) for item in value)
    return value


def _difference(own: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """What makes two models' states differ, but for the values."""
    for name in [*own, *other]:
        kinds = [_kind(state[name]) if name in state else "nothing" for state in (own, other)]
        if kinds[0] != kinds[1]:
            return f"{name} is {kinds[1]} there and {kinds[0]} here"
    return None


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _place(tensor: Tensor) -> tuple[object, ...]:
    """The same for tensors that are one and the same memory."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _alone(tensor: Tensor, memory: memoryview, start: int) -> Tensor:
    """The tensor, which is dense and lies at memory[start:], without what lies beside it."""
    if not tensor.numel():
        return tensor.detach().clone()
    part = memory[start : start + tensor.numel() * tensor.element_size()]
    return torch.frombuffer(part, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())


def _has_finite_sum(tensor: Tensor | None) -> bool:
    return tensor is None or cmath.isfinite(tensor.sum().item())


def _tensors(module: nn.Module) -> list[Tensor]:
    return [p.detach() for p in module.parameters()] + list(module.buffers())
