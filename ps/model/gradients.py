"""The mean of the gradients of several orders."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def mean_gradients(
    contributions: Sequence[tuple[Sequence[Tensor | None], int]],
) -> Sequence[Tensor | None]:
    """The mean of several lists of gradients, each weighted by its number of samples.

    They are summed in the order given; a missing one counts as zero, unless all are missing. The
    first list's tensors may be changed.
    """
    if len(contributions) == 1:
        return contributions[0][0]
    total = sum(samples for _, samples in contributions)
    shares = [samples / total for _, samples in contributions]
    columns = zip(*(gradients for gradients, _ in contributions), strict=True)
    return [_weighted_sum(column, shares) for column in columns]


def _weighted_sum(gradients: Sequence[Tensor | None], shares: Sequence[float]) -> Tensor | None:
    if all(gradient is None for gradient in gradients):
        return None
    summed = gradients[0]
    summed = torch.zeros_like(_first(gradients)) if summed is None else summed.mul_(shares[0])
    for gradient, share in zip(gradients[1:], shares[1:], strict=True):
        if gradient is not None:
            summed.add_(gradient, alpha=share)
    return summed


def _first(gradients: Sequence[Tensor | None]) -> Tensor:
    return next(gradient for gradient in gradients if gradient is not None)
