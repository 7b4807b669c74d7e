"""Whole jobs whose result is known in advance, between real processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ps.model.passes import Passes
from ps.model.randomness import permutation
from ps.settings.config import Config
from ps.workload import fetch
from tests import plugins
from tests.helpers import (
    COMPUTE,
    assert_equal,
    end_processes,
    momentum_sgd,
    next_line,
    sgd,
    start,
    train_alone,
)
from tests.jobs import Done, free_port, run_ranks

pytestmark = pytest.mark.slow
share_jobs = pytest.mark.xdist_group("in-step")
"""They share what in_step has run."""

COMMON = ("--batch-size", "8", "--momentum", "0.9", "--lr", "0.1")


@pytest.mark.parametrize(
    ("plugin", "dropout", "compute"),
    [("plain", 0.0, "server"), ("with_dropout", 0.5, "server"), ("with_dropout", 0.5, "trainer")],
)
def test_one_trainer_equals_a_plain_loop_after_50_updates(
    tmp_path: Path, plugin: str, dropout: float, compute: str
) -> None:
    workload = ("--workload", f"tests.plugins:{plugin}", "--compute", compute)
    done = run_ranks(tmp_path, *workload, *COMMON, world_size=2)
    assert done.exit_code == 0, done.text
    assert done.report["updates"] == 50
    expected = train_alone(plugins.perceptron(dropout=dropout), updates=50, optimizer=momentum_sgd)
    assert_equal(done.model, expected)


def test_the_conv_net_with_dropout_equals_a_plain_loop_after_50_updates(tmp_path: Path) -> None:
    args = ("--workload", "tests.plugins:few_digits", "--threads", "1")
    done = run_ranks(tmp_path, *args, world_size=2)
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
            passes=Passes(channels_last=True),
        )
    finally:
        torch.set_num_threads(threads)
    assert_equal(done.model, expected)


@pytest.mark.parametrize("compute", COMPUTE)
def test_two_trainers_with_momentum_equal_the_reference_bit_for_bit(
    tmp_path: Path, compute: str
) -> None:
    """All gradients are equal, so their order does not matter, and lost or split momentum does."""
    workload = ("--workload", "tests.plugins:fixed_gradients", "--compute", compute)
    done = run_ranks(tmp_path, *workload, *COMMON, world_size=3)
    assert done.exit_code == 0, done.text
    weight = nn.Parameter(torch.zeros(1, 4))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    for _ in range(50):
        weight.grad = torch.ones(1, 4)
        optimizer.step()
    assert done.report["updates"] == 50
    assert torch.equal(done.model["weight"], weight.detach())


def test_no_gradient_is_lost_with_four_trainers_over_rpc(tmp_path: Path) -> None:
    done = run_ranks(
        tmp_path,
        *("--workload", "tests.plugins:fixed_gradients", "--link", "rpc"),
        *("--batch-size", "8", "--lr", "1", "--epochs", "6"),
        world_size=5,
    )
    assert done.exit_code == 0, done.text
    assert done.report["updates"] == 300
    assert done.model["weight"].tolist() == [[-300.0] * 4]
    assert done.report["samples_trained"] == 6 * 400


@pytest.fixture(scope="module")
def in_step(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Done]:
    """A job of two trainers in step: 50 updates in two epochs, each from 2 times 8 samples."""
    kept: dict[tuple[str, int], Done] = {}

    def run(compute: str, time: int = 1) -> Done:
        if (compute, time) not in kept:
            done = run_ranks(
                tmp_path_factory.mktemp("in-step"),
                *("--workload", "tests.plugins:plain", "--compute", compute, "--staleness", "0"),
                *("--epochs", "2", *COMMON),
            )
            assert done.exit_code == 0, done.text
            kept[compute, time] = done
        return kept[compute, time]

    return run


@share_jobs
@pytest.mark.parametrize("compute", COMPUTE)
def test_two_trainers_in_step_equal_one_process_on_the_joint_batch(
    in_step: Callable[..., Done], compute: str
) -> None:
    done = in_step(compute)
    assert (done.report["updates"], done.report["samples_trained"]) == (50, 800)
    assert done.report["staleness_max"] == 0
    expected = train_alone(plugins.perceptron(), updates=50, batch_size=16, optimizer=momentum_sgd)
    assert_equal(done.model, expected)


@share_jobs
@pytest.mark.parametrize("compute", COMPUTE)
def test_two_jobs_in_step_are_bit_for_bit_the_same(
    in_step: Callable[..., Done], compute: str
) -> None:
    first, second = in_step(compute), in_step(compute, time=2)
    assert first.run_dir != second.run_dir
    assert_equal(first.model, second.model, within=0)


@share_jobs
def test_trainers_in_step_equal_distributed_data_parallel(
    in_step: Callable[..., Done], tmp_path: Path
) -> None:
    saved, port = tmp_path / "model.pt", free_port()
    ranks = [start(be_data_parallel, rank, port, str(saved)) for rank in (0, 1)]
    try:
        assert [next_line(rank) for rank in ranks] == ["50 updates", "50 updates"]
    finally:
        end_processes(*ranks)
    expected: dict[str, Tensor] = torch.load(saved, weights_only=True)
    for compute in COMPUTE:
        assert_equal(in_step(compute).model, expected)


def be_data_parallel(rank: int, port: int, saved: str) -> None:
    """One of two ranks that train the same batches with torch's own means."""
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    workload = plugins.perceptron()
    torch.manual_seed(0)
    model = DistributedDataParallel(workload.model())
    optimizer = momentum_sgd(model)
    for update in range(50):
        epoch, step = divmod(update, 25)
        first = (2 * step + rank) * 8
        batch = permutation(0, epoch, 400)[first : first + 8]
        inputs, targets = fetch(workload.train, batch)
        optimizer.zero_grad()
        workload.loss(model(inputs), targets).backward()
        optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), saved)
    print(f"{update + 1} updates", flush=True)
    dist.barrier()
