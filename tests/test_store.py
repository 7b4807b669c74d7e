from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from ps.errors import ConfigError, TrainingFailed
from ps.store import Store, make_optimizer


def model_of(*values: float) -> nn.Module:
    return nn.ParameterList([nn.Parameter(torch.tensor([value, value])) for value in values])


def store_of(*values: float, lr: float = 1.0, momentum: float = 0.0, clip: float = 0.0) -> Store:
    model = model_of(*values)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    return Store(model, optimizer, clip_norm=clip)


def grads(*values: float) -> list[Tensor | None]:
    return [torch.tensor([value, value]) for value in values]


def test_apply_is_one_optimizer_step_and_raises_the_version_by_one() -> None:
    store = store_of(5.0, 7.0)
    assert store.version == 0
    assert store.apply(grads(1.0, 2.0)) == 1
    assert store.version == 1
    assert store.state_dict()["0"].tolist() == [4.0, 4.0]
    assert store.state_dict()["1"].tolist() == [5.0, 5.0]


def test_momentum_is_that_of_one_optimizer() -> None:
    store = store_of(0.0, momentum=0.5)
    store.apply(grads(1.0))
    store.apply(grads(1.0))
    assert store.state_dict()["0"].tolist() == [-2.5, -2.5]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_gradient_that_is_not_finite_is_named_and_changes_nothing(bad: float) -> None:
    store = store_of(5.0, 7.0, momentum=0.9)
    store.apply(grads(1.0, 1.0))
    before = copy.deepcopy(store.state_dict())
    with pytest.raises(TrainingFailed, match=r"^the gradient of 1 is not finite$"):
        store.apply([torch.ones(2), torch.tensor([1.0, bad])])
    assert store.version == 1
    assert all(torch.equal(store.state_dict()[name], before[name]) for name in before)
    store.apply(grads(1.0, 1.0))
    assert store.state_dict()["0"].tolist() == pytest.approx([5.0 - 1.0 - 1.9] * 2)


def test_a_missing_gradient_is_named_and_changes_nothing() -> None:
    store = store_of(5.0, 7.0)
    with pytest.raises(TrainingFailed, match=r"^no gradient reached 1$"):
        store.apply([torch.ones(2), None])
    assert store.version == 0
    assert store.state_dict()["0"].tolist() == [5.0, 5.0]


def test_huge_finite_gradients_whose_norm_overflows_are_applied() -> None:
    store = store_of(0.0)
    store.apply(grads(1e30))
    assert store.state_dict()["0"].tolist() == pytest.approx([-1e30, -1e30])


def test_clip_norm_limits_all_gradients_together() -> None:
    store = store_of(0.0, 0.0, clip=1.0)
    store.apply([torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])])
    assert store.state_dict()["0"].tolist() == pytest.approx([-0.6, 0.0], abs=1e-5)
    assert store.state_dict()["1"].tolist() == pytest.approx([0.0, -0.8], abs=1e-5)


def test_the_schedule_counts_updates() -> None:
    model = model_of(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    store = Store(model, optimizer, lr_factor=lambda version: 0.5**version)
    for _ in range(3):
        store.apply(grads(1.0))
    assert store.state_dict()["0"].tolist() == [-1.75, -1.75]


def test_a_frozen_parameter_needs_no_gradient_and_keeps_its_value() -> None:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    model[0].weight.requires_grad = False
    frozen = model[0].weight.item()
    store = Store(model, torch.optim.SGD([model[1].weight], lr=1.0))
    assert store.names == ["1.weight"]
    store.apply([torch.ones(1, 1)])
    assert store.state_dict()["0.weight"].item() == frozen


def test_a_replica_holds_the_version_it_was_refreshed_to_and_is_a_copy() -> None:
    store = store_of(5.0)
    replica = store.replica()
    store.apply(grads(1.0))
    assert replica.version == 0
    assert replica.parameters[0].tolist() == [5.0, 5.0]
    store.refresh(replica)
    assert replica.version == 1
    assert replica.parameters[0].tolist() == [4.0, 4.0]


def test_buffers_of_the_latest_step_become_the_stores() -> None:
    model = nn.BatchNorm1d(2)
    store = Store(model, torch.optim.SGD(model.parameters(), lr=0.1))
    replica = store.replica()
    replica.module(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
    store.take_buffers(replica)
    assert store.state_dict()["running_mean"].tolist() == pytest.approx([0.2, 0.4])
    assert store.state_dict()["num_batches_tracked"].item() == 1


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad"])
def test_any_optimizer_is_found_by_its_name(name: str) -> None:
    optimizer = make_optimizer(name, [nn.Parameter(torch.ones(2))], lr=0.25, weight_decay=0.5)
    assert type(optimizer) is getattr(torch.optim, name)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert optimizer.param_groups[0]["weight_decay"] == 0.5


def test_a_typed_zero_wins_over_the_optimizers_own_default() -> None:
    weights = [nn.Parameter(torch.ones(2))]
    assert make_optimizer("AdamW", weights, lr=0.1).param_groups[0]["weight_decay"] == 0.01
    without = make_optimizer("AdamW", weights, lr=0.1, weight_decay=0.0)
    assert without.param_groups[0]["weight_decay"] == 0.0


def test_clipping_works_although_the_norm_overflows() -> None:
    store = store_of(0.0, clip=1.0)
    store.apply([torch.tensor([3e30, 4e30])])
    assert store.state_dict()["0"].tolist() == pytest.approx([-0.6, -0.8], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Sgd", {}, "--optimizer Sgd is not in torch.optim; did you mean SGD?"),
        ("adamw", {}, "--optimizer adamw is not in torch.optim; did you mean AdamW?"),
        ("Optimizer", {}, "--optimizer Optimizer is not in torch.optim; "),
        ("Adam", {"momentum": 0.9}, "--optimizer Adam takes no --momentum"),
        ("Rprop", {"weight_decay": 0.1}, "--optimizer Rprop takes no --weight-decay"),
        ("LBFGS", {}, "--optimizer LBFGS evaluates the model itself and cannot be served"),
    ],
)
def test_an_unusable_optimizer_is_refused(
    name: str, options: dict[str, float], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_optimizer(name, [nn.Parameter(torch.ones(2))], lr=0.1, **options)
    assert str(caught.value).startswith(message)
