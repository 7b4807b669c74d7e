"""Memory that a trainer and the server both see."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ps.model.flat import FlatModel


@dataclass(frozen=True, slots=True)
class Mailbox:
    """Memory that a trainer and the server both see; whose turn it is to write, the calls tell.

    Both are uint8 on the CPU: weights [FlatModel.total_bytes], which the server writes during a
    call of the trainer, and gradients [FlatModel.trained.stop], which the trainer writes
    between its calls. So neither is ever torn.
    """

    weights: Tensor
    gradients: Tensor


def private_mailbox(flat: FlatModel) -> Mailbox:
    """One in this process's own memory."""
    sizes = (flat.total_bytes, flat.trained.stop)
    return Mailbox(*(torch.zeros(size, dtype=torch.uint8) for size in sizes))
