"""The weights, the buffers, the one optimizer and the version. One lock, held by the caller."""

from __future__ import annotations

import copy
import difflib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ps.errors import ConfigError, TrainingFailed


@dataclass(slots=True)
class Replica:
    """A copy of the model for one user, and the version of the weights it holds."""

    module: nn.Module
    version: int
    parameters: list[nn.Parameter] = field(init=False)
    """Those that are trained, in the order of Store.names."""
    tensors: list[Tensor] = field(init=False)
    """All parameters and buffers, for refreshing."""

    def __post_init__(self) -> None:
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.tensors = _tensors(self.module)


class Store:
    """The state of training. Not thread-safe: the server holds its lock around every call."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        lr_factor: Callable[[int], float] | None = None,
        clip_norm: float = 0.0,
    ) -> None:
        """lr_factor maps the version to the factor on each group's learning rate."""
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.names = [name for name, _ in trained]
        self.version = 0
        self._model = model
        self._parameters = [parameter for _, parameter in trained]
        self._tensors = _tensors(model)
        self._optimizer = optimizer
        self._base_lrs = [group["lr"] for group in optimizer.param_groups]
        self._lr_factor = lr_factor
        self._clip_norm = clip_norm

    def apply(self, gradients: Sequence[Tensor | None]) -> int:
        """Take one optimizer step and return the new version.

        gradients are in the order of `names`, each of its parameter's shape, dtype and device.
        They are used as the parameters' .grad during the call, may be clipped in place, and
        are not kept.

        Raises:
            TrainingFailed: one is missing or not finite. Nothing has been changed.
        """
        present, norm = self._checked(gradients)
        for parameter, gradient in zip(self._parameters, present, strict=True):
            parameter.grad = gradient
        if self._clip_norm:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._clip_norm, norm)
        if self._lr_factor is not None:
            self._set_lr(self._lr_factor(self.version))
        self._optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None
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

    def take_buffers(self, replica: Replica) -> None:
        """Take over the buffers of a replica that has done a step: the latest step's stay."""
        with torch.no_grad():
            for buffer, updated in zip(
                self._model.buffers(), replica.module.buffers(), strict=True
            ):
                buffer.copy_(updated)

    def state_dict(self) -> dict[str, Tensor]:
        """The model's state on the CPU, as a plain module without a server would save it."""
        return {name: value.detach().cpu() for name, value in self._model.state_dict().items()}

    def _checked(self, gradients: Sequence[Tensor | None]) -> tuple[list[Tensor], Tensor]:
        missing = [n for n, g in zip(self.names, gradients, strict=True) if g is None]
        if missing:
            raise TrainingFailed(f"no gradient reached {', '.join(missing)}")
        present = [gradient for gradient in gradients if gradient is not None]
        norm = torch.nn.utils.get_total_norm(present)
        if not torch.isfinite(norm):
            self._refuse_non_finite(present)
            norm = torch.nn.utils.get_total_norm([gradient.double() for gradient in present])
        return present, norm

    def _refuse_non_finite(self, gradients: Sequence[Tensor]) -> None:
        """The norm of huge gradients overflows although each element is finite: look closely."""
        for name, gradient in zip(self.names, gradients, strict=True):
            if not torch.isfinite(gradient).all():
                raise TrainingFailed(f"the gradient of {name} is not finite")

    def _set_lr(self, factor: float) -> None:
        for group, base in zip(self._optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = base * factor


def make_optimizer(
    name: str,
    parameters: Sequence[nn.Parameter],
    *,
    lr: float,
    momentum: float | None = None,
    weight_decay: float | None = None,
) -> torch.optim.Optimizer:
    """Build an optimizer of torch.optim by its name; None leaves the optimizer's own default.

    Raises:
        ConfigError: there is none of that name, or it does not take what was given.
    """
    kind = getattr(torch.optim, name, None)
    names = [n for n, k in vars(torch.optim).items() if inspect.isclass(k) and n != "Optimizer"]
    if name not in names:
        by_lower = {known.lower(): known for known in sorted(names)}
        close = difflib.get_close_matches(name.lower(), by_lower, n=1)
        hint = f"did you mean {by_lower[close[0]]}?" if close else f"known: {', '.join(names)}"
        raise ConfigError(f"--optimizer {name} is not in torch.optim; {hint}")
    assert kind is not None
    if inspect.signature(kind.step).parameters["closure"].default is inspect.Parameter.empty:
        raise ConfigError(f"--optimizer {name} evaluates the model itself and cannot be served")
    options = {"lr": lr} | {
        key: value
        for key, value in (("momentum", momentum), ("weight_decay", weight_decay))
        if value is not None
    }
    for key in options:
        if key not in inspect.signature(kind).parameters:
            raise ConfigError(f"--optimizer {name} takes no --{key.replace('_', '-')}")
    try:
        optimizer: torch.optim.Optimizer = kind(parameters, **options)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"--optimizer {name}: {error}") from None
    return optimizer


def _tensors(module: nn.Module) -> list[Tensor]:
    return [p.detach() for p in module.parameters()] + list(module.buffers())
