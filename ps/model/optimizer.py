"""The optimizer: found by its name, with a schedule for its learning rate."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ps.settings.errors import ConfigError

Optimizer = torch.optim.Optimizer  # noqa: TID251


def make_optimizer(
    name: str,
    parameters: Sequence[nn.Parameter],
    *,
    lr: float,
    momentum: float | None = None,
    weight_decay: float | None = None,
) -> Optimizer:
    """Build an optimizer of torch.optim by its name; None leaves the optimizer's own default.

    parameters may have any shape, dtype and device that the optimizer takes.

    Raises:
        ConfigError: there is none of that name, or it does not take what was given.
    """
    kind = _class_of(name)
    options = {"lr": lr} | {
        key: value
        for key, value in (("momentum", momentum), ("weight_decay", weight_decay))
        if value is not None
    }
    for key in options:
        if key not in inspect.signature(kind).parameters:
            raise ConfigError(f"--optimizer {name} takes no --{key.replace('_', '-')}")
    try:
        return kind(parameters, **options)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"--optimizer {name}: {error}") from None


def _class_of(name: str) -> Callable[..., Optimizer]:
    members = vars(torch.optim).items()  # noqa: TID251
    classes: dict[str, Any] = {n: kind for n, kind in members if inspect.isclass(kind)}
    del classes["Optimizer"]
    if name not in classes:
        by_lower = {known.lower(): known for known in sorted(classes)}
        close = difflib.get_close_matches(name.lower(), by_lower, n=1)
        hint = f"did you mean {by_lower[close[0]]}?" if close else f"known: {', '.join(classes)}"
        raise ConfigError(f"--optimizer {name} is not in torch.optim; {hint}")
    kind: Callable[..., Optimizer] = classes[name]
    closure = inspect.signature(classes[name].step).parameters["closure"]
    if closure.default is inspect.Parameter.empty:
        raise ConfigError(f"--optimizer {name} evaluates the model itself and cannot be served")
    return kind


class ScheduledOptimizer:
    """An optimizer whose learning rates follow a schedule of the number of updates made."""

    def __init__(
        self, optimizer: Optimizer, lr_factor: Callable[[int], float] | None = None
    ) -> None:
        """lr_factor maps the number of updates made to the factor on each group's own rate."""
        self._optimizer = optimizer
        # Without the wrappers for profiler and compiler, which cost as much as a small update.
        self._step = inspect.unwrap(type(optimizer).step)
        self._base_lrs = [group["lr"] for group in optimizer.param_groups]
        self._lr_factor = lr_factor

    @property
    def options(self) -> list[dict[str, Any]]:
        """What each group of parameters is trained with at the moment: "lr" and the like."""
        return [
            {name: value for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]

    def set_lr(self, version: int) -> None:
        """Set the learning rates for the update that follows `version` others."""
        if self._lr_factor is None:
            return
        factor = self._lr_factor(version)
        for group, base in zip(self._optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = base * factor

    def step(self) -> None:
        """Change the parameters by their .grad. One that has none is left alone."""
        with torch.no_grad():
            self._step(self._optimizer)

    def state(self) -> Any:
        """What the optimizer remembers of each parameter, by its place; tensors are not copied."""
        return self._optimizer.state_dict()["state"]

    def restore(self, state: Mapping[int, Any]) -> None:
        """Go on from state(), with the options that this optimizer was made with.

        Tensors are copied to the device and dtype of their parameter, but for step counters.
        """
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})
