"""Memory that a trainer and the server both see."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ps.model.flat import FlatModel


@dataclass(frozen=True, slots=True)
class Mailbox:
    """One trainer's weights and gradients. The server writes only while it answers a call of the
    trainer, and the trainer only between its calls, so that neither reads what is half written.
    """

    weights: Tensor
    """uint8 [FlatModel.total_bytes] on the CPU, written by the server."""
    gradients: Tensor
    """uint8 [FlatModel.trained.stop] on the CPU, written by the trainer."""


def private_mailbox(flat: FlatModel) -> Mailbox:
    """A mailbox of zeros in this process's own memory, which no other process sees."""
    sizes = (flat.total_bytes, flat.trained.stop)
    return Mailbox(*(torch.zeros(size, dtype=torch.uint8) for size in sizes))
