"""What is done with gradients between backward and the update: check, average, clip.

A list of gradients belongs to a list of parameters: each is of its parameter's shape, dtype and
device, or None where backward has not reached the parameter.
"""

from __future__ import annotations

import cmath
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ps.settings.errors import TrainingFailed


def check_gradients(
    gradients: Sequence[Tensor | None],
    names: Sequence[str],
    blocks: Sequence[Tensor] | None = None,
) -> None:
    """Refuse gradients that must not reach the weights; changes nothing.

    gradients: of any shape, dtype and device, dense or sparse; names are their parameters'.
    blocks: fewer, larger tensors that contain the elements of all gradients, and perhaps others,
    as Layout.blocks gives them. If these are finite, no gradient is looked at.

    Raises:
        TrainingFailed: one is not finite, or all are None.
    """
    if all(gradient is None for gradient in gradients):
        raise TrainingFailed("no gradient reached any parameter")
    # One pass in the common case; a sum of finite numbers may overflow.
    if all(map(_has_finite_sum, gradients if blocks is None else blocks)):
        return
    for name, gradient in zip(names, gradients, strict=True):
        if gradient is None or _has_finite_sum(gradient):
            continue
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        if not torch.isfinite(values).all():
            raise TrainingFailed(f"the gradient of {name} is not finite")


def _has_finite_sum(tensor: Tensor | None) -> bool:
    return tensor is None or cmath.isfinite(tensor.sum().item())


def mean_gradients(
    contributions: Sequence[tuple[Sequence[Tensor | None], int]],
) -> Sequence[Tensor | None]:
    """The mean of several lists of gradients, each weighted by its number of samples.

    The lists are those of the same parameters: gradients in one place have one shape, dtype and
    device, which the mean has too. They are summed in the order given; None counts as zero, unless
    all in that place are None. The first list's tensors may be changed.
    """
    if len(contributions) == 1:
        return contributions[0][0]
    total = sum(samples for _, samples in contributions)
    shares = [samples / total for _, samples in contributions]
    columns = zip(*(gradients for gradients, _ in contributions), strict=True)
    return [_weighted_sum(column, shares) for column in columns]


def _weighted_sum(gradients: Sequence[Tensor | None], shares: Sequence[float]) -> Tensor | None:
    present = [gradient for gradient in gradients if gradient is not None]
    if not present:
        return None
    first = gradients[0]
    summed = torch.zeros_like(present[0]) if first is None else first.mul_(shares[0])
    for gradient, share in zip(gradients[1:], shares[1:], strict=True):
        if gradient is not None:
            summed.add_(gradient, alpha=share)
    return summed


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float) -> None:
    """Scale the .grad of all parameters together, in place, so that their norm is max_norm at most.

    Parameters and their gradients may have any shape, floating dtype and device. As
    torch.nn.utils.clip_grad_norm_, bit for bit, but for gradients so large that their squares
    overflow: these are scaled too.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if not torch.isfinite(norm):  # each element is finite, but their squares overflow
        norm = torch.nn.utils.get_total_norm([gradient.double() for gradient in gradients])
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
