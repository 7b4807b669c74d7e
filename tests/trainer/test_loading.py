"""Batches: what a data set draws at random, and loader processes that load ahead."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import psutil
import pytest
import torch
from torch import Tensor, nn

from ps.model.passes import Passes
from ps.protocol import Assignment, Evaluate, Train, Weights
from ps.trainer.loading import Loader
from tests.helpers import COMPUTE, end_processes, next_line, server_of, start, train_all
from tests.plugins import perceptron


class Noisy:
    """Draws from torch and from random, takes a while, and tells who fetched."""

    def __init__(self, fetch_s: float = 0.0) -> None:
        self._fetch_s = fetch_s

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 99:
            raise ValueError("sample 99 is broken")
        time.sleep(self._fetch_s)
        drawn = torch.tensor([index, random.random(), os.getpid()], dtype=torch.float64)
        return drawn, torch.rand(2)


def order_of(batch: int, samples: int = 4) -> Train:
    return Train(0, batch, range(samples * batch, samples * (batch + 1)))


@contextmanager
def ahead_by(
    processes: int, fetch_s: float = 0.0, passes: Passes | None = None
) -> Iterator[Loader]:
    loader = Loader(Noisy(fetch_s), passes or Passes(), processes)
    yield loader
    loader.close()


def fetched_by(loader: Loader, order: Train) -> set[float]:
    return set(loader.batch(order, 0, order.indices)[0][:, 2].tolist())


@pytest.mark.parametrize("compute", COMPUTE)
def test_data_set_model_and_loss_never_draw_the_same_numbers(compute: str) -> None:
    drawn: list[float] = []

    def draw() -> float:
        drawn.append(torch.rand((), dtype=torch.float64).item())
        return 0.0

    class Drawing:
        def __len__(self) -> int:
            return 24

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return torch.full((3,), 1.0 + draw()), 0

    class Model(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs) + draw()

    workload = replace(
        perceptron(),
        model=lambda: Model(3, 2),
        train=Drawing(),
        test=Drawing(),
        loss=lambda outputs, targets: nn.functional.cross_entropy(outputs, targets) + draw(),
    )
    train_all(server_of(workload, compute=compute, passes=Passes(batch_size=2), slice_size=6))
    assert len(drawn) == 24 + 12 + 12 + 24 + 4 + 4
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("compute", COMPUTE)
def test_what_a_test_set_draws_depends_on_the_slice_alone(compute: str) -> None:
    drawn: list[float] = []

    class Drawing:
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            drawn.append(random.random() + torch.rand(()).item())
            return torch.zeros(6), 0

    worker = server_of(replace(perceptron(), test=Drawing()), compute=compute).worker()
    for epoch, index in ((0, 0), (0, 1), (1, 0), (0, 1)):
        worker.do(Assignment(Evaluate(epoch, index, 0, 1), Weights(0)))
        torch.rand(1)
    assert drawn[3] == drawn[1]
    assert len(set(drawn)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_what_a_data_set_draws_depends_on_the_micro_batch_alone(processes: int) -> None:
    passes = Passes(seed=7, batch_size=2)
    orders = [order_of(batch) for batch in range(5)]
    here = Loader(Noisy(), passes)
    with ahead_by(processes, passes=passes) as ahead:
        ahead.expect(order_of(9), orders)
        for order in reversed(orders):
            for number, indices in enumerate(passes.micro_batches(order.indices)):
                inputs, targets = here.batch(order, number, indices)
                loaded_inputs, loaded_targets = ahead.batch(order, number, indices)
                assert torch.equal(inputs[:, :2], loaded_inputs[:, :2])
                assert torch.equal(targets, loaded_targets)
                assert set(inputs[:, 2].tolist()) == {float(os.getpid())}
                assert float(os.getpid()) not in loaded_inputs[:, 2].tolist()


@pytest.mark.slow
def test_loading_overlaps_with_computing() -> None:
    """Ten batches of 0.1 s of loading and 0.1 s of computing take about 1.1 s instead of 2."""
    with ahead_by(1, fetch_s=0.025) as loader:
        begin = time.monotonic()
        for batch in range(10):
            order = order_of(batch)
            loader.expect(order, [order_of(batch + 1), order_of(batch + 2)])
            loader.batch(order, 0, order.indices)
            time.sleep(0.1)
        assert time.monotonic() - begin < 1.6


@pytest.mark.slow
def test_what_is_not_expected_any_more_is_dropped_and_what_fails_is_told() -> None:
    broken = Train(0, 7, [98, 99])
    with ahead_by(1) as loader:
        loader.expect(order_of(9), [order_of(0), order_of(1)])
        loader.expect(order_of(1), [order_of(2), broken])
        assert fetched_by(loader, order_of(0)) == {float(os.getpid())}
        for order in (order_of(1), order_of(2)):
            assert float(os.getpid()) not in fetched_by(loader, order)
        with pytest.raises(ValueError, match="sample 99 is broken"):
            loader.batch(broken, 0, broken.indices)


def be_a_trainer() -> None:
    loader = Loader(Noisy(), Passes(), num_processes=2)
    print("ready", flush=True)
    time.sleep(60)
    loader.close()


@pytest.mark.slow
def test_loader_processes_end_with_a_trainer_that_is_killed_but_are_not_in_its_group() -> None:
    """torchrun signals its group; the trainer then has an order to finish, or to give up."""
    trainer = start(be_a_trainer)
    assert next_line(trainer) == "ready"
    loading = psutil.Process(trainer.pid).children()
    groups = {os.getpgid(process.pid) for process in loading}
    assert len(groups) == 2
    assert os.getpgid(trainer.pid) not in groups
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    _, alive = psutil.wait_procs(loading, timeout=5)
    end_processes(trainer)
    assert not alive
