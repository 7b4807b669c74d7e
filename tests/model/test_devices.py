"""Which device holds which layers: 0, 1 and 2 GPUs, with counts made up."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ps.model.devices import choose_devices, place, split_point
from ps.settings.errors import ConfigError
from ps.workloads.images import conv_net


def devices_of(model: nn.Module) -> dict[str, str]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.device.type for name, tensor in tensors}


@pytest.mark.parametrize(
    ("num_gpus", "available", "devices"),
    [
        (0, 0, ("cpu",)),
        (0, 2, ("cpu",)),
        (1, 1, ("cuda:0",)),
        (1, 2, ("cuda:0",)),
        (2, 2, ("cuda:0", "cuda:1")),
        (2, 8, ("cuda:0", "cuda:1")),
    ],
)
def test_the_devices_are_those_asked_for(
    num_gpus: int, available: int, devices: tuple[str, ...]
) -> None:
    assert choose_devices(num_gpus, available) == devices


@pytest.mark.parametrize(("num_gpus", "available"), [(1, 0), (2, 0), (2, 1)])
def test_more_gpus_than_there_are_is_refused_with_both_numbers(
    num_gpus: int, available: int
) -> None:
    with pytest.raises(ConfigError, match=rf"--num-gpus {num_gpus}.*--num-gpus {available}"):
        choose_devices(num_gpus, available)


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        ([10, 10], 1),
        ([10, 10, 10, 10], 2),
        ([10, 10, 20], 2),
        ([100, 1, 1], 1),
        ([1, 1, 100], 2),
        ([0, 5, 0, 5, 0], 3),
        ([3, 0, 0, 4, 5], 4),
        ([0, 0, 7], 3),
        ([0, 0], 2),
        ([], 0),
    ],
)
def test_the_layers_are_divided_where_both_sides_hold_about_as_much(
    sizes: list[int], count: int
) -> None:
    assert split_point(sizes) == count


@given(st.lists(st.integers(0, 1000), max_size=12))
def test_each_side_has_a_layer_with_parameters_and_no_other_point_divides_more_evenly(
    sizes: list[int],
) -> None:
    def difference(count: int) -> int:
        return abs(sum(sizes[:count]) - sum(sizes[count:]))

    count = split_point(sizes)
    if sum(size > 0 for size in sizes) < 2:
        assert count == len(sizes)
        return
    assert any(sizes[:count]) and any(sizes[count:])
    others = [n for n in range(1, len(sizes)) if any(sizes[:n]) and any(sizes[n:])]
    assert difference(count) == min(map(difference, others))


def test_one_device_takes_all_of_any_model() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.BatchNorm1d(2)})
    assert place(model, ("meta",)) == torch.device("meta")
    assert set(devices_of(model).values()) == {"meta"}


def test_the_tutorials_net_has_its_convolutions_on_the_first_device_and_keeps_its_names() -> None:
    model, shapes = conv_net(), {name: p.shape for name, p in conv_net().named_parameters()}
    assert place(model, ("cpu", "meta")) == torch.device("cpu")
    for name, device in devices_of(model).items():
        assert device == ("cpu" if name.startswith("conv") else "meta"), name
    assert {name: p.shape for name, p in model.named_parameters()} == shapes


def test_a_divided_model_gives_the_same_outputs_and_gradients_on_both_sides() -> None:
    torch.manual_seed(0)
    model = conv_net().eval()
    inputs = torch.randn(3, 1, 28, 28)
    with torch.no_grad():
        expected = model(inputs)
    place(model, ("cpu", "cpu"))
    outputs = model(inputs)
    assert torch.equal(outputs, expected)
    outputs.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_second_part_moves_its_inputs_to_its_device() -> None:
    model = nn.Sequential(
        OrderedDict(a=nn.Linear(4, 4), b=nn.ReLU(), c=nn.Linear(4, 4), d=nn.ReLU())
    )
    place(model, ("cpu", "meta"))
    assert (devices_of(model)["a.weight"], devices_of(model)["c.weight"]) == ("cpu", "meta")
    outputs = model(torch.randn(3, 4))
    assert (outputs.device.type, tuple(outputs.shape)) == ("meta", (3, 4))


def test_a_copy_of_a_divided_model_is_divided_alike_and_computes_with_its_own_weights() -> None:
    divided = conv_net()
    place(divided, ("cpu", "meta"))
    replica = copy.deepcopy(divided)
    assert devices_of(replica) == devices_of(divided)
    assert replica(torch.randn(2, 1, 28, 28)).device.type == "meta"

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    place(model, ("cpu", "cpu"))
    replica, inputs = copy.deepcopy(model), torch.randn(3, 4)
    expected = model(inputs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(replica(inputs), expected)
    assert torch.equal(model(inputs), torch.zeros(3, 2))


def test_a_layer_without_parameters_that_is_used_on_both_sides_is_copied() -> None:
    norm = nn.BatchNorm1d(4, affine=False)
    model = nn.Sequential(norm, nn.Linear(4, 4), nn.Linear(4, 4), norm)
    place(model, ("cpu", "meta"))
    devices = devices_of(model)
    assert (devices["0.running_mean"], devices["3.running_mean"]) == ("cpu", "meta")
    assert model(torch.randn(3, 4)).device.type == "meta"


TWICE = nn.Linear(2, 2)


@pytest.mark.parametrize(
    "model",
    [
        nn.Bilinear(2, 2, 2),
        nn.Sequential(nn.Linear(2, 2), nn.ReLU()),
        nn.Sequential(nn.Linear(2, 2)),
        nn.Sequential(TWICE, nn.Linear(2, 2), TWICE),
    ],
    ids=["no Sequential", "one layer with parameters", "one layer", "a layer used twice"],
)
def test_a_model_that_cannot_be_divided_is_refused_and_stays_where_it_is(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"--num-gpus 2.*--num-gpus 1"):
        place(model, ("cpu", "meta"))
    assert set(devices_of(model).values()) == {"cpu"}
