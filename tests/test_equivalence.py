"""Whole jobs whose result is known in advance, over real RPC between real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.jobs import run_job
from ps.config import Config
from tests import plugins
from tests.helpers import sgd, train_alone

pytestmark = pytest.mark.torchrun

COMMON = ("--batch-size", "8", "--momentum", "0.9", "--lr", "0.1")


def momentum_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return sgd(model, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(("plugin", "dropout"), [("plain", 0.0), ("with_dropout", 0.5)])
def test_one_trainer_equals_a_plain_loop_after_50_updates(
    tmp_path: Path, plugin: str, dropout: float
) -> None:
    done = run_job(tmp_path, "--workload", f"tests.plugins:{plugin}", *COMMON, world_size=2)
    assert done.exit_code == 0, done.text
    assert done.report["updates"] == 50
    workload = plugins.perceptron(dropout=dropout)
    expected = train_alone(workload, updates=50, optimizer=momentum_sgd)
    for name, value in done.model.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)


def test_the_conv_net_with_dropout_equals_a_plain_loop_after_50_updates(tmp_path: Path) -> None:
    done = run_job(
        tmp_path, "--workload", "tests.plugins:few_digits", "--threads", "1", world_size=2
    )
    assert done.exit_code == 0, done.text
    assert done.report["updates"] == 50
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = train_alone(
            plugins.few_digits(Config()),
            updates=50,
            batch_size=32,
            optimizer=lambda model: sgd(model, lr=0.03),
        )
    finally:
        torch.set_num_threads(threads)
    for name, value in done.model.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)


def test_two_trainers_with_momentum_equal_the_reference_bit_for_bit(tmp_path: Path) -> None:
    """All gradients are equal, so their order does not matter, and lost or split momentum does."""
    done = run_job(tmp_path, "--workload", "tests.plugins:fixed_gradients", *COMMON, world_size=3)
    assert done.exit_code == 0, done.text
    weight = nn.Parameter(torch.zeros(1, 4))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    for _ in range(50):
        weight.grad = torch.ones(1, 4)
        optimizer.step()
    assert done.report["updates"] == 50
    assert torch.equal(done.model["weight"], weight.detach())


def test_no_gradient_is_lost_with_four_trainers_on_two_rpc_threads(tmp_path: Path) -> None:
    done = run_job(
        tmp_path,
        *("--workload", "tests.plugins:fixed_gradients_on_two_threads"),
        *("--batch-size", "8", "--lr", "1", "--epochs", "6"),
        world_size=5,
    )
    assert done.exit_code == 0, done.text
    assert done.report["updates"] == 300
    assert done.model["weight"].tolist() == [[-300.0] * 4]
    assert done.report["samples_trained"] == 6 * 400
