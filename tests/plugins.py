"""Workloads for tests: small, exact, and with faults that can be named on the command line."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from ps.settings.config import Config
from ps.workload import Workload
from ps.workloads import digits
from ps.workloads.images import Images, image_workload

RANK = int(os.environ.get("RANK", "0"))


class Points:
    """Deterministic inputs [n, width] and classes [n], as a plain map-style data set."""

    def __init__(self, count: int, width: int, num_classes: int) -> None:
        generator = torch.Generator().manual_seed(count)
        self.inputs = torch.randn(count, width, generator=generator)
        self.targets = torch.arange(count) % num_classes

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


def correct(outputs: Tensor, targets: Tensor) -> int:
    return int((outputs.argmax(dim=1) == targets).sum())


def perceptron(dropout: float = 0.0, num_train: int = 400, hidden: int = 16) -> Workload:
    def model() -> nn.Module:
        return nn.Sequential(
            *(nn.Linear(6, hidden), nn.ReLU(), nn.Dropout(dropout)),
            *(nn.Linear(hidden, 3), nn.LogSoftmax(1)),
        )

    return Workload(
        name="perceptron",
        model=model,
        train=Points(num_train, 6, 3),
        test=Points(97, 6, 3),
        loss=nn.functional.nll_loss,
        correct=correct,
    )


def plain(config: Config) -> Workload:
    return perceptron()


def with_dropout(config: Config) -> Workload:
    return perceptron(dropout=0.5)


def few_digits(config: Config) -> Workload:
    """The real net on 1600 of the digits: 50 batches of 32."""
    return some_digits(1600, 200)


def some_digits(num_train: int, num_test: int) -> Workload:
    images, classes = digits.generate(num_train + num_test, 1)
    return image_workload(
        "few digits",
        Images(images[:num_train], classes[:num_train], mean=0.25, std=0.25),
        Images(images[num_train:], classes[num_train:], mean=0.25, std=0.25),
    )


def fixed_gradients(config: Config) -> Workload:
    """Every batch gives a gradient of exactly one for each of the four weights."""

    def model() -> nn.Module:
        layer = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(layer.weight)
        return layer

    ones = torch.utils.data.TensorDataset(torch.ones(400, 4), torch.zeros(400))
    return replace(
        perceptron(), model=model, train=ones, test=ones, loss=_mean_output, correct=_none_correct
    )


def one_weight_for_each_sample(count: int = 400) -> Workload:
    """Training on sample i moves weight i alone: by lr / n, if n samples make the update."""

    def model() -> nn.Module:
        layer = nn.Linear(count, 1, bias=False)
        nn.init.zeros_(layer.weight)
        return layer

    samples = torch.utils.data.TensorDataset(torch.eye(count), torch.zeros(count))
    return replace(
        perceptron(),
        model=model,
        train=samples,
        test=torch.utils.data.Subset(samples, range(97)),
        loss=_mean_output,
        correct=_none_correct,
    )


def _mean_output(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.mean()


def _none_correct(outputs: Tensor, targets: Tensor) -> int:
    return 0


def raising(config: Config) -> Workload:
    """The trainer of rank 2 raises at its third batch."""
    return _with_fault(_raise)


def slow(config: Config) -> Workload:
    """The trainer of rank 1 takes SLOW_S seconds for its third batch."""

    def wait(loss: Tensor) -> Tensor:
        time.sleep(float(os.environ["SLOW_S"]))
        return loss

    return _with_fault(wait, rank=1)


def paced(config: Config) -> Workload:
    """Rank 1 sleeps 160 ms for each batch, all others 40 ms."""
    workload = perceptron(num_train=800)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if len(targets) == config.batch_size:
            time.sleep(0.16 if RANK == 1 else 0.04)
        return workload.loss(outputs, targets)

    return replace(workload, loss=loss)


def embedding(sparse: bool) -> Workload:
    def model() -> nn.Module:
        return nn.Sequential(nn.Embedding(50, 4, sparse=sparse), nn.Flatten(), nn.Linear(12, 3))

    words = torch.randint(50, (400, 3), generator=torch.Generator().manual_seed(0))
    samples = torch.utils.data.TensorDataset(words, torch.arange(400) % 3)
    return replace(
        perceptron(), model=model, train=samples, test=samples, loss=nn.functional.cross_entropy
    )


def with_sparse_gradients(config: Config) -> Workload:
    return embedding(sparse=True)


def hundred_million_parameters(config: Config) -> Workload:
    """Weights of 400 MB, in 100 layers."""
    return wide(1_000, layers=100)


def few_parameters(config: Config) -> Workload:
    return wide(10, layers=100)


def wide(width: int, layers: int = 1, num_train: int = 12) -> Workload:
    """Bare matrices, and a loss whose gradient is the same in every step."""

    def model() -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))

    inputs = torch.ones(1, width).expand(num_train, width)
    samples = torch.utils.data.TensorDataset(inputs, torch.zeros(num_train))
    return replace(
        perceptron(),
        model=model,
        train=samples,
        test=torch.utils.data.Subset(samples, range(2)),
        loss=_mean_output,
        correct=_none_correct,
    )


def _raise(loss: Tensor) -> Tensor:
    raise ValueError("boom in the loss")


def _with_fault(fault: Callable[[Tensor], Tensor], rank: int = 2) -> Workload:
    workload = perceptron()
    calls = 0

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        value = workload.loss(outputs, targets)
        return fault(value) if calls == 3 and rank == RANK else value

    return replace(workload, loss=loss)


def returning_a_number(config: Config) -> Workload:
    return 3  # type: ignore[return-value]


def loss_of_each_sample(config: Config) -> Workload:
    """The mean is forgotten."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.nll_loss(outputs, targets, reduction="none").repeat(2)

    return replace(perceptron(), loss=loss)
