"""An optimizer of torch.optim by its name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Sequence

import torch
from torch import nn

from ps.settings.errors import ConfigError


def make_optimizer(
    name: str,
    parameters: Sequence[nn.Parameter],
    *,
    lr: float,
    momentum: float | None = None,
    weight_decay: float | None = None,
) -> torch.optim.Optimizer:  # noqa: TID251
    """Build an optimizer of torch.optim by its name; None leaves the optimizer's own default.

    Raises:
        ConfigError: there is none of that name, or it does not take what was given.
    """
    kind = getattr(torch.optim, name, None)  # noqa: TID251
    names = [n for n, k in vars(torch.optim).items() if inspect.isclass(k) and n != "Optimizer"]  # noqa: TID251
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
        optimizer: torch.optim.Optimizer = kind(parameters, **options)  # noqa: TID251
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"--optimizer {name}: {error}") from None
    return optimizer
