"""Memory and disk that a run takes: the sums, and what is measured on model and optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from ps.job.footprint import RANK_BYTES, Footprint, disk_bytes, measure, memory_bytes
from ps.model.optimizer import make_optimizer
from ps.settings.config import Config
from ps.settings.errors import ConfigError
from ps.workload import Workload
from ps.workloads import catalogue
from tests.plugins import perceptron

MODEL = Footprint(weights=100, gradients=90, optimizer=200)
NAME = "some:plug_in"


def sized(
    monkeypatch: pytest.MonkeyPatch, model: Callable[[], nn.Module], **options: object
) -> Footprint:
    workload: Workload = replace(perceptron(), model=model)
    monkeypatch.setattr(catalogue, "load", lambda name, config: workload)
    return measure(NAME, Config(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("compute", "world_size", "needed"),
    [
        # server, optimizer; replica and gradients for each trainer; one to evaluate; the snapshot
        ("server", 3, 100 + 200 + 2 * (100 + 90) + 100 + 300),
        ("server", 1, 100 + 200 + 1 * (100 + 90) + 100 + 300),
        # server, optimizer; the mailbox of each trainer; the snapshot
        ("trainer", 3, 100 + 200 + 2 * (100 + 90) + 300),
        ("trainer", 5, 100 + 200 + 4 * (100 + 90) + 300),
    ],
)
def test_memory_is_that_of_the_ranks_the_copies_and_a_checkpoint_being_written(
    compute: str, world_size: int, needed: int
) -> None:
    config = Config(compute=compute)
    assert memory_bytes(MODEL, config, world_size) == world_size * RANK_BYTES + needed


def test_a_model_on_a_gpu_takes_memory_of_the_host_for_the_checkpoint_alone() -> None:
    assert memory_bytes(MODEL, Config(num_gpus=1), 3) == 3 * RANK_BYTES + 300


def test_the_disk_holds_one_checkpoint_more_than_is_kept_and_the_weights() -> None:
    assert disk_bytes(MODEL, keep=2) == 3 * 300 + 100


def test_frozen_parameters_have_no_gradients_and_buffers_are_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def model() -> nn.Module:
        layers = nn.Sequential(nn.Linear(6, 10, bias=False), nn.BatchNorm1d(10, affine=False))
        layers.append(nn.Linear(10, 3, bias=False).requires_grad_(False))
        return layers

    found = sized(monkeypatch, model)
    buffers = 10 * 4 + 10 * 4 + 8  # mean, variance, and an int64 count
    assert found == Footprint(weights=60 * 4 + 30 * 4 + buffers, gradients=60 * 4, optimizer=0)


def test_tied_weights_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def model() -> nn.Module:
        layer = nn.Linear(6, 6, bias=False)
        return nn.Sequential(layer, layer)

    found = sized(monkeypatch, model)
    assert (found.weights, found.gradients) == (144, 144)


@pytest.mark.parametrize(
    ("optimizer", "momentum"),
    [("SGD", None), ("SGD", 0.9), ("Adam", None), ("Adagrad", None), ("RMSprop", 0.9)],
)
def test_the_optimizer_counts_with_what_it_really_holds_after_an_update(
    monkeypatch: pytest.MonkeyPatch, optimizer: str, momentum: float | None
) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    real = make_optimizer(optimizer, list(model.parameters()), lr=0.1, momentum=momentum)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    real.step()
    held = sum(
        value.numel() * value.element_size()
        for state in real.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    found = sized(monkeypatch, lambda: copy.deepcopy(model), optimizer=optimizer, momentum=momentum)
    assert found.optimizer == held


def test_an_optimizer_that_cannot_be_tried_counts_as_twice_the_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = sized(monkeypatch, lambda: nn.Linear(6, 3, bias=False), optimizer="SparseAdam")
    assert found.optimizer == 2 * found.gradients == 2 * 72


def test_a_model_that_no_memory_could_hold_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    found = sized(monkeypatch, lambda: nn.Linear(10**6, 10**7, bias=False), optimizer="Adam")
    assert found.weights == 4 * 10**13
    assert found.optimizer == pytest.approx(8 * 10**13, rel=1e-9)


def test_lazy_layers_are_measured_with_the_sizes_that_a_sample_gives_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(3, bias=False), nn.LogSoftmax(1))

    assert sized(monkeypatch, model).weights == 6 * 3 * 4


def test_a_model_that_needs_values_is_made_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def model() -> nn.Module:
        layers = nn.Sequential(nn.Linear(6, 3, bias=False), nn.LogSoftmax(1))
        assert layers[0].weight.sum().item() != 0
        return layers

    assert sized(monkeypatch, model).weights == 6 * 3 * 4


def test_what_cannot_be_made_is_refused_as_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def model() -> nn.Module:
        raise ValueError("no such layer")

    with pytest.raises(ConfigError, match=r"model\(\) raised ValueError: no such layer"):
        sized(monkeypatch, model)
    with pytest.raises(ConfigError, match="--optimizer Sgd is not in"):
        sized(monkeypatch, lambda: nn.Linear(6, 3), optimizer="Sgd")
