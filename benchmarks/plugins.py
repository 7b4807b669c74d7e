"""Workloads for the benchmarks."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import torch
from torch import Tensor, nn

from benchmarks.idle import SLEEP_S
from ps.config import Config
from ps.workload import Workload
from ps.workloads import digits


def sleeping(config: Config) -> Workload:
    """Two batches; rank 1 sleeps in its own."""
    samples = torch.utils.data.TensorDataset(torch.ones(4000, 4), torch.zeros(4000))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if os.environ.get("RANK") == "1" and len(targets) == 2000:
            time.sleep(SLEEP_S)
        return outputs.mean()

    return replace(
        digits.build(config),
        model=lambda: nn.Linear(4, 1),
        train=samples,
        test=samples,
        loss=loss,
        correct=lambda outputs, targets: 0,
    )
