"""Batches ahead, by real processes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import psutil
import pytest
import torch
from torch import Tensor

from ps.model.passes import Passes
from ps.protocol import Train
from ps.trainer.loading import Loader
from tests.jobs import ROOT


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


def order_of(batch: int, samples: int = 4, ahead: Sequence[Train] = ()) -> Train:
    return Train(0, batch, range(samples * batch, samples * (batch + 1)), ahead)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2])
def test_what_a_data_set_draws_depends_on_the_batch_alone(num_workers: int) -> None:
    passes = Passes(seed=7, batch_size=2)
    orders = [order_of(batch) for batch in range(5)]
    here, ahead = Loader(Noisy(), passes), Loader(Noisy(), passes, num_workers)
    ahead.expect(order_of(9, ahead=orders))
    for order in reversed(orders):
        for part, indices in enumerate(passes.micro_batches(order.indices)):
            inputs, targets = here.batch(order, part, indices)
            loaded_inputs, loaded_targets = ahead.batch(order, part, indices)
            assert torch.equal(inputs[:, :2], loaded_inputs[:, :2])
            assert torch.equal(targets, loaded_targets)
            assert set(inputs[:, 2].tolist()) == {float(os.getpid())}
            assert float(os.getpid()) not in loaded_inputs[:, 2].tolist()
    ahead.close()


@pytest.mark.slow
def test_loading_overlaps_with_computing() -> None:
    """Ten batches of 0.1 s of loading and 0.1 s of computing take about 1.1 s instead of 2."""
    loader = Loader(Noisy(fetch_s=0.025), Passes(), num_processes=1)
    start = time.monotonic()
    for batch in range(10):
        order = order_of(batch, ahead=[order_of(batch + 1), order_of(batch + 2)])
        loader.expect(order)
        loader.batch(order, 0, order.indices)
        time.sleep(0.1)
    took_s = time.monotonic() - start
    loader.close()
    assert took_s < 1.6


@pytest.mark.slow
def test_what_is_not_expected_any_more_is_dropped_and_fetched_here_if_it_comes() -> None:
    loader = Loader(Noisy(), Passes(), num_processes=1)
    loader.expect(order_of(9, ahead=[order_of(0), order_of(1)]))
    loader.expect(order_of(1, ahead=[order_of(2)]))
    assert {batch for _, batch, _ in loader._ahead} == {1, 2}
    inputs, _ = loader.batch(order_of(0), 0, order_of(0).indices)
    assert inputs[:, 2].tolist() == [float(os.getpid())] * 4
    loader.close()


@pytest.mark.slow
def test_an_error_in_the_data_set_reaches_the_trainer_with_its_words() -> None:
    loader = Loader(Noisy(), Passes(), num_processes=1)
    order = Train(0, 1, [98, 99])
    loader.expect(order_of(0, ahead=[order]))
    with pytest.raises(ValueError, match="sample 99 is broken"):
        loader.batch(order, 0, order.indices)
    loader.close()


@pytest.mark.slow
def test_the_processes_end_with_a_trainer_that_is_killed() -> None:
    code = (
        "import time\n"
        "from ps.trainer.loading import Loader\n"
        "from ps.model.passes import Passes\n"
        "from tests.trainer.test_loading import Noisy\n"
        "loader = Loader(Noisy(), Passes(), num_processes=2)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdout is not None and trainer.stdout.readline() == "ready\n"
    workers = psutil.Process(trainer.pid).children()
    assert len(workers) == 2
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    trainer.stdout.close()
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert not alive


@pytest.mark.slow
def test_the_processes_do_not_end_for_a_signal_to_the_group_of_the_trainer() -> None:
    """As torchrun sends it: the trainer has an order to finish, or to give up."""
    loader = Loader(Noisy(), Passes(), num_processes=2)
    groups = {os.getpgid(worker.pid) for worker in psutil.Process().children()}
    assert len(groups) == 2
    assert os.getpgid(0) not in groups
    loader.close()
