"""The optimizer: found by its name, refused by its name, and its learning rates."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ps.model.optimizer import ScheduledOptimizer, make_optimizer
from ps.settings.errors import ConfigError


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2))]


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad"])
def test_any_optimizer_is_found_by_its_name(name: str) -> None:
    optimizer = make_optimizer(name, weights(), lr=0.25, weight_decay=0.5)
    assert type(optimizer) is getattr(torch.optim, name)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert optimizer.param_groups[0]["weight_decay"] == 0.5


def test_a_typed_zero_wins_over_the_optimizers_own_default() -> None:
    assert make_optimizer("AdamW", weights(), lr=0.1).param_groups[0]["weight_decay"] == 0.01
    without = make_optimizer("AdamW", weights(), lr=0.1, weight_decay=0.0)
    assert without.param_groups[0]["weight_decay"] == 0.0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Sgd", {}, "--optimizer Sgd .*SGD"),
        ("adamw", {}, "--optimizer adamw .*AdamW"),
        ("Unlike", {}, "--optimizer Unlike .*Adam, .*SGD"),
        ("Optimizer", {}, "--optimizer Optimizer "),
        ("Adam", {"momentum": 0.9}, "--optimizer Adam .*--momentum"),
        ("Rprop", {"weight_decay": 0.1}, "--optimizer Rprop .*--weight-decay"),
        ("LBFGS", {}, "--optimizer LBFGS "),
        ("SGD", {"momentum": -1.0}, "--optimizer SGD: .*-1.0"),
    ],
)
def test_an_unusable_optimizer_is_refused(
    name: str, options: dict[str, float], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_optimizer(name, weights(), lr=0.1, **options)


def test_the_schedule_scales_the_rate_of_each_group_by_the_number_of_updates() -> None:
    first, second = weights(), weights()
    groups = [{"params": first, "lr": 1.0}, {"params": second, "lr": 0.5}]
    scheduled = ScheduledOptimizer(torch.optim.SGD(groups), lambda version: 0.5**version)
    for version in range(3):
        for parameter in (*first, *second):
            parameter.grad = torch.ones(2)
        scheduled.set_lr(version)
        scheduled.step()
    assert [options["lr"] for options in scheduled.options] == [0.25, 0.125]
    assert first[0].tolist() == [1 - 1.75] * 2
    assert second[0].tolist() == [1 - 1.75 / 2] * 2
