"""Workload `mnist`: the real data set."""

from __future__ import annotations

import torch
from torch import Tensor

from ps.settings.config import Config
from ps.workload import Workload, once_per_host
from ps.workloads import mnist_files
from ps.workloads.images import Images, image_workload

MEAN, STD = 0.1307, 0.3081
IMAGES_HEADER_BYTES = 16
LABELS_HEADER_BYTES = 8


def build(config: Config) -> Workload:
    """Read the data set from config.data_dir; nothing is fetched.

    Raises:
        ConfigError: a file is missing or damaged; names it.
    """
    names = [
        *("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
        *("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
    ]

    def make() -> list[Tensor]:
        return [_read(config, name) for name in names]

    train_images, train_classes, test_images, test_classes = once_per_host("mnist", make)
    return image_workload(
        "mnist",
        Images(train_images, train_classes, mean=MEAN, std=STD),
        Images(test_images, test_classes, mean=MEAN, std=STD),
    )


def _read(config: Config, name: str) -> Tensor:
    """The images of a file, uint8 [n, 28, 28], or its labels, uint8 [n]."""
    content = mnist_files.read(config.data_dir, name)
    header_bytes = IMAGES_HEADER_BYTES if "images" in name else LABELS_HEADER_BYTES
    values = torch.frombuffer(content, dtype=torch.uint8, offset=header_bytes)
    return values.view(-1, 28, 28) if "images" in name else values
