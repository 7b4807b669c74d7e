"""How a forward pass is run: precision, memory format, and how many samples at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ps.settings.config import Config
from ps.workload import Workload


@dataclass(frozen=True, slots=True)
class Passes:
    """The settings of every forward pass; the same on the server and on every trainer."""

    seed: int = 0
    bfloat16: bool = False
    channels_last: bool = False
    batch_size: int = 1 << 62
    """Samples of one forward pass; an order with more is computed in micro-batches of this size."""

    @classmethod
    def of(cls, config: Config, workload: Workload) -> Passes:
        """As the options say; where they leave the memory format open, as the workload says."""
        wanted = config.channels_last
        return cls(
            seed=config.seed,
            bfloat16=config.precision == "bfloat16",
            channels_last=workload.channels_last if wanted is None else wanted,
            batch_size=config.batch_size,
        )

    def prepare(self, model: nn.Module) -> nn.Module:
        """The model itself; with channels_last, its weights of four dimensions are in that format.

        Shapes, dtypes and devices stay as they are.
        """
        if self.channels_last:
            for parameter in model.parameters():
                if parameter.dim() == 4:
                    parameter.data = parameter.data.to(memory_format=torch.channels_last)
        return model

    def run(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """The model's outputs for a batch, on the model's device.

        inputs: of any shape and dtype that the model takes, on the device of its first layer. The
        outputs have the model's own shape and dtype, but are float32 where it computes in
        bfloat16. Weights stay as they are: autocast casts what it computes with.
        """
        if self.channels_last and inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        if not self.bfloat16:
            outputs: Tensor = model(inputs)
            return outputs
        with torch.autocast(inputs.device.type, torch.bfloat16):
            outputs = model(inputs)
        return outputs.float() if isinstance(outputs, Tensor) else outputs

    def micro_batches(self, indices: Sequence[int]) -> list[Sequence[int]]:
        """The samples of an order in micro-batches of batch_size; the last may be smaller."""
        size = self.batch_size
        return [indices[start : start + size] for start in range(0, len(indices), size)]
