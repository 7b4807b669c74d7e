"""Workloads for the benchmarks."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.idle import BATCH_SIZE, SLEEP_S
from ps.settings.config import Config
from ps.workload import Samples, Workload, fetch
from ps.workloads import digits

UPDATES_VARIABLE = "BENCH_UPDATES"


class First:
    """The first samples of a data set."""

    def __init__(self, samples: Samples, count: int) -> None:
        self._samples = samples
        self._count = min(count, len(samples))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._samples[index]

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        return fetch(self._samples, indices)


def some_digits(config: Config) -> Workload:
    """The workload digits with an epoch of BENCH_UPDATES updates, and few test samples."""
    count = config.batch_size * int(os.environ[UPDATES_VARIABLE])
    whole = digits.build(config)
    return replace(whole, train=First(whole.train, count), test=First(whole.test, 200))


def small_perceptron(config: Config) -> Workload:
    """The digits with a net whose step takes well below a millisecond: the rest is overhead."""
    return replace(
        digits.build(config), name="small perceptron", model=_perceptron, channels_last=False
    )


def _perceptron() -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10), nn.LogSoftmax(dim=1)
    )


def sleeping(config: Config) -> Workload:
    """Rank 1 sleeps in its first batch."""
    samples = torch.utils.data.TensorDataset(torch.ones(4000, 4), torch.zeros(4000))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if os.environ.get("RANK") == "1" and len(targets) == BATCH_SIZE:
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


EVALUATING = "a slice is being evaluated"
SPOILED = 777
"""The sample that is not a number, or whose gradient is infinite."""


def steady(config: Config) -> Workload:
    """The small perceptron, with an evaluation that says that it runs and takes a while."""
    workload = small_perceptron(config)

    def correct(outputs: Tensor, targets: Tensor) -> int:
        if len(targets) > 1:  # one is the check of the plug-in
            print(f"{EVALUATING}, rank {os.environ.get('RANK')}", flush=True)
            time.sleep(0.5)
        return workload.correct(outputs, targets)

    return replace(workload, correct=correct)


def other_model(config: Config) -> Workload:
    """The small perceptron with one layer more."""
    return replace(
        small_perceptron(config),
        model=lambda: nn.Sequential(*_perceptron()[:-1], nn.Linear(10, 10), nn.LogSoftmax(dim=1)),
    )


class _Spoiled:
    """A data set of which one sample is not a number."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        inputs, target = self._samples[index]
        return (inputs * float("nan") if index == SPOILED else inputs), target


def nan_in_the_data(config: Config) -> Workload:
    workload = small_perceptron(config)
    return replace(workload, train=_Spoiled(workload.train))


class _Infinite(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * float("inf")


def infinite_gradient(config: Config) -> Workload:
    """A gradient is infinite in the fifth batch of rank 1, at a loss that is finite."""
    workload, calls = small_perceptron(config), 0

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        value = workload.loss(outputs, targets)
        calls += os.environ.get("RANK") == "1" and outputs.requires_grad
        spoil = calls == 5 and outputs.requires_grad
        return _Infinite.apply(value) if spoil else value  # type: ignore[no-any-return]

    return replace(workload, loss=loss)
