"""Workload `digits`: generated, deterministic, shaped like MNIST, needs no network.

Each image is a glyph of a small font under a random affine map, with random contrast, noise and
a stray stroke: a linear model stays far below the accuracy of the convolutional net.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from ps.settings.config import Config
from ps.workload import Workload, once_per_host
from ps.workloads.images import Images, image_workload

_Uniform = Callable[[float, float], Tensor]

NUM_TRAIN = 12800
NUM_TEST = 2000
SEED = 20_000

# Ten glyphs of 7 rows by 5 columns; each hexadecimal pair is a row, the highest bit of five left.
_GLYPHS = (
    "0e11131519110e",
    "040c040404040e",
    "0e11010204081f",
    "1f02040201110e",
    "02060a121f0202",
    "1f101e0101110e",
    "0608101e11110e",
    "1f010204080808",
    "0e11110e11110e",
    "0e11110f01020c",
)


def build(config: Config) -> Workload:
    """The workload; it does not depend on the config."""
    images, classes = once_per_host("digits", lambda: generate(NUM_TRAIN + NUM_TEST, SEED))
    mean, std = 0.25, 0.25
    train = Images(images[:NUM_TRAIN], classes[:NUM_TRAIN], mean=mean, std=std)
    test = Images(images[NUM_TRAIN:], classes[NUM_TRAIN:], mean=mean, std=std)
    return image_workload("digits", train, test)


def generate(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """uint8 images [count, 28, 28] and uint8 classes [count]; each class comes equally often."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.arange(count) % 10
    classes = classes[torch.randperm(count, generator=generator)]

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(count, generator=generator) * (high - low) + low

    grid = functional.affine_grid(_maps(uniform), [count, 1, 28, 28], align_corners=False)
    glyphs = _canvases()[classes]
    ink = functional.grid_sample(glyphs, grid, align_corners=False).squeeze(1)
    ink = torch.maximum(ink, 0.4 * _strokes(uniform))
    noise = torch.rand(count, 28, 28, generator=generator)
    pixels = ink * uniform(0.5, 1.0).view(-1, 1, 1) + 0.3 * noise
    return pixels.mul(255).clamp(0, 255).to(torch.uint8), classes.to(torch.uint8)


def _canvases() -> Tensor:
    """The glyphs, drawn large in the middle: float32 [10, 1, 28, 28] in 0..1."""
    rows = [[int(glyph[i : i + 2], 16) for i in range(0, 14, 2)] for glyph in _GLYPHS]
    bits = torch.tensor([[[row >> (4 - x) & 1 for x in range(5)] for row in g] for g in rows])
    large = functional.interpolate(bits.unsqueeze(1).float(), size=(20, 14), mode="bilinear")
    return functional.pad(large, (7, 7, 4, 4))


def _maps(uniform: _Uniform) -> Tensor:
    """Affine maps, float32 [count, 2, 3], from output to input: rotate, shear, scale, move."""
    angle, shear = uniform(-0.25, 0.25), uniform(-0.15, 0.15)
    width, height = 1 / uniform(0.85, 1.1), 1 / uniform(0.85, 1.1)
    cos, sin = angle.cos(), angle.sin()
    first = torch.stack([width * cos, width * (shear * cos - sin), uniform(-0.3, 0.3)], dim=1)
    second = torch.stack([height * sin, height * (shear * sin + cos), uniform(-0.2, 0.2)], dim=1)
    return torch.stack([first, second], dim=1)


def _strokes(uniform: _Uniform) -> Tensor:
    """One straight stroke per image, anywhere: float32 [count, 28, 28] in 0..1."""
    angle = uniform(0.0, math.pi).view(-1, 1, 1)
    offset = uniform(-16.0, 16.0).view(-1, 1, 1)
    axis = torch.arange(28.0) - 13.5
    distance = axis.view(1, 28, 1) * angle.cos() + axis.view(1, 1, 28) * angle.sin() - offset
    return (1.5 - distance.abs()).clamp(0, 1)
