"""How a forward pass is run: precision, memory format, and the seed of its randomness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ps.settings.config import Config
from ps.workload import Workload


@dataclass(frozen=True, slots=True)
class Passes:
    """The same on the server and on every trainer."""

    seed: int = 0
    bfloat16: bool = False
    channels_last: bool = False
    batch_size: int = 1 << 62
    """Samples that are computed at once; an order with more is computed part by part."""

    @classmethod
    def of(cls, config: Config, workload: Workload) -> Passes:
        """What was asked for, or what is best for the workload."""
        wanted = config.channels_last
        return cls(
            seed=config.seed,
            bfloat16=config.precision == "bfloat16",
            channels_last=workload.channels_last if wanted is None else wanted,
            batch_size=config.batch_size,
        )

    def prepare(self, model: nn.Module) -> nn.Module:
        """Bring the model's weights of images, which have four dimensions, into the format."""
        if self.channels_last:
            for parameter in model.parameters():
                if parameter.dim() == 4:
                    parameter.data = parameter.data.to(memory_format=torch.channels_last)
        return model

    def run(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """The outputs, in float32 where the model computes in bfloat16.

        Weights stay as they are: autocast casts what it computes with.
        """
        if self.channels_last and inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        if not self.bfloat16:
            outputs: Tensor = model(inputs)
            return outputs
        with torch.autocast(inputs.device.type, torch.bfloat16):
            outputs = model(inputs)
        return outputs.float() if isinstance(outputs, Tensor) else outputs

    def parts(self, indices: Sequence[int]) -> list[Sequence[int]]:
        """The samples of an order in portions of batch_size."""
        size = self.batch_size
        return [indices[start : start + size] for start in range(0, len(indices), size)]
