"""Workload `mnist`: the real data set."""

from __future__ import annotations

import torch

from ps.config import Config
from ps.workload import Workload
from ps.workloads import mnist_files
from ps.workloads.images import Images, image_workload

MEAN, STD = 0.1307, 0.3081
IMAGES_HEADER_BYTES = 16
LABELS_HEADER_BYTES = 8


def build(config: Config) -> Workload:
    """Read the data set from config.data_dir; nothing is fetched.

    Raises:
        ConfigError: a file is missing or damaged; it is named.
    """

    def read(part: str) -> Images:
        images = mnist_files.read(config.data_dir, f"{part}-images-idx3-ubyte")
        labels = mnist_files.read(config.data_dir, f"{part}-labels-idx1-ubyte")
        pixels = torch.frombuffer(images, dtype=torch.uint8, offset=IMAGES_HEADER_BYTES)
        classes = torch.frombuffer(labels, dtype=torch.uint8, offset=LABELS_HEADER_BYTES)
        return Images(pixels.view(-1, 28, 28), classes, mean=MEAN, std=STD)

    return image_workload("mnist", read("train"), read("t10k"))
