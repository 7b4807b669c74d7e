"""Which device holds which layers: 0, 1 and 2 GPUs, with counts made up."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ps.model.devices import choose_devices, place, split_point
from ps.settings.errors import ConfigError
from ps.workloads.images import conv_net


def devices_of(model: nn.Module) -> dict[str, str]:
    return {name: parameter.device.type for name, parameter in model.named_parameters()}


class Recorder(nn.Module):
    """A layer that computes nothing and remembers the device of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))
        self.seen: list[str] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen.append(inputs.device.type)
        return inputs


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
    with pytest.raises(ConfigError) as caught:
        choose_devices(num_gpus, available)
    assert str(caught.value) == (
        f"--num-gpus {num_gpus}, but this process sees {available}; type --num-gpus {available}, "
        "or look at nvidia-smi and CUDA_VISIBLE_DEVICES"
    )
    assert caught.value.exit_code == 2


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
def test_each_side_has_a_layer_with_parameters_if_there_are_two(sizes: list[int]) -> None:
    count = split_point(sizes)
    if sum(size > 0 for size in sizes) < 2:
        assert count == len(sizes)
    else:
        assert any(sizes[:count])
        assert any(sizes[count:])


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=12))
def test_no_other_point_divides_more_evenly(sizes: list[int]) -> None:
    def difference(count: int) -> int:
        return abs(sum(sizes[:count]) - sum(sizes[count:]))

    assert difference(split_point(sizes)) == min(map(difference, range(1, len(sizes))))


def test_the_tutorials_net_has_its_convolutions_on_the_first_device() -> None:
    model = conv_net()
    assert place(model, ("cpu", "meta")) == torch.device("cpu")
    assert devices_of(model) == {
        "conv1.weight": "cpu",
        "conv1.bias": "cpu",
        "conv2.weight": "cpu",
        "conv2.bias": "cpu",
        "fc1.weight": "meta",
        "fc1.bias": "meta",
        "fc2.weight": "meta",
        "fc2.bias": "meta",
    }


def test_one_device_takes_any_model_whole() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.BatchNorm1d(2)})
    assert place(model, ("meta",)) == torch.device("meta")
    assert set(devices_of(model).values()) == {"meta"}
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}


@pytest.mark.parametrize("devices", [("cpu",), ("cpu", "cpu"), ("cpu", "meta")])
def test_placing_changes_no_name_and_no_shape(devices: tuple[str, ...]) -> None:
    before = {name: value.shape for name, value in conv_net().state_dict().items()}
    model = conv_net()
    place(model, devices)
    assert {name: value.shape for name, value in model.state_dict().items()} == before


def test_a_divided_model_gives_the_same_outputs() -> None:
    torch.manual_seed(0)
    model = conv_net().eval()
    inputs = torch.randn(3, 1, 28, 28)
    with torch.no_grad():
        wanted = model(inputs)
        place(model, ("cpu", "cpu"))
        assert torch.equal(model(inputs), wanted)


def test_a_divided_model_has_gradients_on_both_sides() -> None:
    torch.manual_seed(0)
    model = conv_net()
    place(model, ("cpu", "cpu"))
    model(torch.randn(2, 1, 28, 28)).sum().backward()
    assert [p.grad is not None for p in model.parameters()] == [True] * 8


def test_the_second_part_takes_its_inputs_over() -> None:
    model = nn.Sequential(
        OrderedDict(a=nn.Linear(4, 4), b=nn.ReLU(), c=nn.Linear(4, 4), d=nn.ReLU())
    )
    place(model, ("cpu", "meta"))
    assert devices_of(model)["c.weight"] == "meta"
    outputs = model(torch.randn(3, 4))
    assert (outputs.device.type, tuple(outputs.shape)) == ("meta", (3, 4))


def test_a_copy_of_a_divided_model_is_divided_alike_and_shares_nothing() -> None:
    model = conv_net()
    place(model, ("cpu", "meta"))
    replica = copy.deepcopy(model)
    assert devices_of(replica) == devices_of(model)
    assert replica(torch.randn(2, 1, 28, 28)).device.type == "meta"
    pairs = zip(replica.parameters(), model.parameters(), strict=True)
    assert not any(mine is theirs for mine, theirs in pairs)


def test_a_copy_of_a_divided_model_computes_with_its_own_weights() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    place(model, ("cpu", "cpu"))
    replica = copy.deepcopy(model)
    inputs = torch.randn(3, 4)
    wanted = model(inputs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(replica(inputs), wanted)
    assert torch.equal(model(inputs), torch.zeros(3, 2))


def test_a_layer_used_on_both_sides_leaves_the_first_side_where_it_is() -> None:
    relu, first, second = nn.ReLU(), Recorder(), Recorder()
    model = nn.Sequential(relu, first, relu, second)
    place(model, ("cpu", "meta"))
    assert devices_of(model) == {"1.weight": "cpu", "3.weight": "meta"}
    model(torch.randn(3, 4))
    assert (first.seen, second.seen) == (["cpu"], ["meta"])


def test_two_devices_for_a_model_that_is_no_sequential_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        place(nn.Bilinear(2, 2, 2), ("cuda:0", "cuda:1"))
    assert str(caught.value) == (
        "--num-gpus 2 divides an nn.Sequential by its layers, but the model of this workload "
        "is a Bilinear; type --num-gpus 1"
    )


@pytest.mark.parametrize(
    "model", [nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(nn.Linear(2, 2))]
)
def test_two_devices_for_one_layer_with_parameters_are_refused(model: nn.Sequential) -> None:
    with pytest.raises(ConfigError) as caught:
        place(model, ("cpu", "meta"))
    assert str(caught.value) == "--num-gpus 2 needs two layers with parameters; type --num-gpus 1"
    assert set(devices_of(model).values()) == {"cpu"}
