"""What the built-in workloads share: 28x28 grey images of ten classes, and the tutorial's net."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ps.workload import Workload


class Images:
    """Images and their classes, kept as uint8; a batch is normalised when it is fetched."""

    def __init__(self, images: Tensor, classes: Tensor, *, mean: float, std: float) -> None:
        """images is uint8 [n, 28, 28], classes uint8 [n]; mean and std are of pixels in 0..1."""
        self._images = images
        self._classes = classes
        self._mean = mean
        self._std = std

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.batch([index])
        return inputs[0], targets[0]

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Inputs, float32 [n, 1, 28, 28], and targets, int64 [n], of n indices."""
        if isinstance(indices, array) and indices.typecode == "q":
            chosen = torch.frombuffer(indices, dtype=torch.int64)
        else:
            chosen = torch.tensor(indices)
        pixels = self._images[chosen].unsqueeze(1).to(torch.float32)
        inputs = pixels.sub_(255 * self._mean).div_(255 * self._std)
        return inputs, self._classes[chosen].to(torch.int64)


def conv_net() -> nn.Sequential:
    """The net of PyTorch's RPC parameter-server tutorial.

    With nn.Dropout, not Dropout2d, on the flat layer, and as a Sequential, so that it can be
    divided over two GPUs. Maps float32 [n, 1, 28, 28] to log-probabilities, float32 [n, 10].
    """
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 32, 3),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(32, 64, 3),
            pool=nn.MaxPool2d(2),
            dropout1=nn.Dropout(0.25),
            flat=nn.Flatten(),
            fc1=nn.Linear(9216, 128),
            relu2=nn.ReLU(),
            dropout2=nn.Dropout(0.5),
            fc2=nn.Linear(128, 10),
            log_softmax=nn.LogSoftmax(dim=1),
        )
    )


def correct(outputs: Tensor, targets: Tensor) -> int:
    """How many rows of outputs [n, classes], of any dtype, are largest at targets, int64 [n]."""
    return int((outputs.argmax(dim=1) == targets).sum())


def image_workload(name: str, train: Images, test: Images) -> Workload:
    """The tutorial's net on these images."""
    return Workload(
        name=name,
        model=conv_net,
        train=train,
        test=test,
        loss=nn.functional.nll_loss,
        correct=correct,
        channels_last=True,
    )
