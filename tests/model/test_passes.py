"""How a forward pass is run: precision, memory format, micro-batches; and that results agree."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from ps.model.passes import Passes
from ps.model.randomness import SeededForward
from ps.settings.config import Config
from tests.plugins import perceptron


class Watched(nn.Module):
    """A small convolutional net that notes what reaches its layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 8, 3)
        self.second = nn.Conv2d(8, 4, 3)
        self.head = nn.Linear(4, 2)
        self.inputs = self.features = torch.empty(0)

    def forward(self, inputs: Tensor) -> Tensor:
        self.inputs = inputs
        self.features = self.second(self.first(inputs).relu()).relu()
        outputs: Tensor = self.head(self.features.mean((2, 3)))
        return outputs


IMAGES = torch.randn(5, 3, 9, 9, generator=torch.Generator().manual_seed(1))


def is_channels_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last)


def gradients(passes: Passes, model: nn.Module) -> tuple[Tensor, list[Tensor]]:
    """Outputs and the gradients of a loss over them."""
    outputs = passes.run(passes.prepare(model), IMAGES)
    outputs.square().mean().backward()
    return outputs.detach(), [p.grad for p in model.parameters() if p.grad is not None]


def test_a_plain_pass_is_the_models_own() -> None:
    model = Watched()
    expected = model(IMAGES)
    assert torch.equal(Passes().run(Passes().prepare(model), IMAGES), expected)
    assert not is_channels_last(model.inputs)
    assert not is_channels_last(model.first.weight)


@pytest.mark.parametrize("channels_last", [False, True])
def test_in_bfloat16_the_layers_compute_in_it_and_all_else_is_float32(channels_last: bool) -> None:
    """Close to the results of a plain pass, but not these."""
    model = Watched()
    plain, plain_gradients = gradients(Passes(), copy.deepcopy(model))
    rough, rough_gradients = gradients(Passes(bfloat16=True, channels_last=channels_last), model)
    assert model.features.dtype == torch.bfloat16
    assert is_channels_last(model.features) is channels_last
    tensors = [rough, model.inputs, *model.parameters(), *rough_gradients]
    assert {tensor.dtype for tensor in tensors} == {torch.float32}
    assert 0.0 < (plain - rough).abs().max() < 0.02
    for one, other in zip(plain_gradients, rough_gradients, strict=True):
        assert 0.0 < (one - other).norm() < 0.05 * one.norm() + 1e-3


def test_a_bfloat16_pass_sees_weights_that_changed_since_the_last_one() -> None:
    """Autocast keeps casted weights while it is on; it ends with the pass."""
    model, passes = Watched(), Passes(bfloat16=True)
    passes.run(model, IMAGES)
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert passes.run(model, IMAGES).tolist() == [[0.0, 0.0]] * 5


def test_bfloat16_draws_the_same_dropout_as_float32() -> None:
    model, inputs = nn.Dropout(0.5), torch.ones(100)
    kept = []
    for passes in (Passes(), Passes(bfloat16=True)):
        with SeededForward(7):
            kept.append(passes.run(model, inputs) != 0)
    assert torch.equal(*kept)


def test_channels_last_is_the_format_of_images_and_weights_and_changes_no_result() -> None:
    model, passes = Watched(), Passes(channels_last=True)
    before = copy.deepcopy(model.state_dict())
    plain, plain_gradients = gradients(Passes(), copy.deepcopy(model))
    assert passes.prepare(model) is model
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    outputs, got = gradients(passes, model)
    for tensor in (model.inputs, model.features, model.first.weight, got[0]):
        assert is_channels_last(tensor)
    torch.testing.assert_close(outputs, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got, plain_gradients, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 3, 5), (2, 3, 4, 5, 6)])
def test_inputs_that_are_no_images_are_left_as_they_are(shape: tuple[int, ...]) -> None:
    inputs = torch.randn(shape)
    assert Passes(channels_last=True).run(nn.Identity(), inputs) is inputs


@pytest.mark.parametrize(
    "make",
    [lambda: nn.Linear(3, 2), lambda: nn.Conv1d(3, 2, 2), lambda: nn.Conv3d(3, 2, 2)],
    ids=["Linear", "Conv1d", "Conv3d"],
)
def test_weights_that_are_not_of_images_are_left_as_they_are(
    make: Callable[[], nn.Module],
) -> None:
    model = make()
    weight = model.get_parameter("weight")
    before = weight.detach().clone()
    Passes(channels_last=True).prepare(model)
    assert torch.equal(weight, before) and weight.stride() == before.stride()


@pytest.mark.parametrize(
    ("samples", "batch_size", "sizes"),
    [(8, 4, [4, 4]), (9, 4, [4, 4, 1]), (3, 4, [3]), (4, 4, [4]), (3, 1, [1, 1, 1]), (0, 4, [])],
)
def test_an_order_is_computed_in_micro_batches(
    samples: int, batch_size: int, sizes: list[int]
) -> None:
    indices = tuple(range(100, 100 + samples))
    micro_batches = Passes(batch_size=batch_size).micro_batches(indices)
    assert [len(each) for each in micro_batches] == sizes
    assert [index for each in micro_batches for index in each] == list(indices)
    assert Passes().micro_batches(range(10**6)) == [range(10**6)]


@pytest.mark.parametrize(
    ("typed", "own", "used"),
    [
        (None, False, False),
        (None, True, True),
        (True, False, True),
        (True, True, True),
        (False, True, False),
        (False, False, False),
    ],
)
def test_the_flag_for_channels_last_wins_over_what_the_workload_says(
    typed: bool | None, own: bool, used: bool
) -> None:
    workload = replace(perceptron(), channels_last=own)
    assert Passes.of(Config(channels_last=typed), workload).channels_last is used


def test_seed_precision_and_batch_size_are_those_of_the_config() -> None:
    config = Config(seed=7, precision="bfloat16", batch_size=48, accumulate=3)
    assert Passes.of(config, perceptron()) == Passes(seed=7, bfloat16=True, batch_size=48)
    assert Passes.of(Config(), perceptron()) == Passes(seed=0, bfloat16=False, batch_size=32)
