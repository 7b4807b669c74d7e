"""How a forward pass is run: precision, memory format, portions; and that the results agree."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from ps.model.passes import Passes
from ps.model.randomness import SeededForward
from ps.settings.config import Config
from ps.workload import Workload


class Watched(nn.Module):
    """A small convolutional net that notes what reaches its layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 8, 3)
        self.second = nn.Conv2d(8, 4, 3)
        self.head = nn.Linear(4, 2)
        self.inputs: Tensor | None = None
        self.features: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        self.inputs = inputs
        self.features = self.second(self.first(inputs).relu()).relu()
        outputs: Tensor = self.head(self.features.mean((2, 3)))
        return outputs


def is_channels_last(tensor: Tensor | None) -> bool:
    assert tensor is not None
    return tensor.is_contiguous(memory_format=torch.channels_last)


def images(count: int = 5) -> Tensor:
    return torch.randn(count, 3, 9, 9, generator=torch.Generator().manual_seed(1))


def gradients(passes: Passes, model: nn.Module, inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Outputs and the gradients of a loss over them."""
    outputs = passes.run(passes.prepare(model), inputs)
    outputs.square().mean().backward()
    return outputs.detach(), [p.grad for p in model.parameters() if p.grad is not None]


def workload_of(*, channels_last: bool) -> Workload:
    samples: Sequence[tuple[Tensor, int]] = [(torch.zeros(3), 0)]
    return Workload(
        name="tiny",
        model=lambda: nn.Linear(3, 1),
        train=samples,
        test=samples,
        loss=lambda outputs, targets: outputs.mean(),
        correct=lambda outputs, targets: 0,
        channels_last=channels_last,
    )


def test_a_plain_pass_is_the_models_own() -> None:
    model = Watched()
    expected = model(images())
    assert torch.equal(Passes().run(Passes().prepare(model), images()), expected)
    assert not is_channels_last(model.inputs)
    assert not is_channels_last(model.first.weight)


def test_in_bfloat16_the_layers_compute_in_it_and_the_outputs_are_float32() -> None:
    model = Watched()
    outputs = Passes(bfloat16=True).run(model, images())
    assert model.features is not None
    assert model.features.dtype == torch.bfloat16
    assert outputs.dtype == torch.float32
    assert model.inputs is not None
    assert model.inputs.dtype == torch.float32


def test_in_bfloat16_weights_and_gradients_stay_float32() -> None:
    model = Watched()
    _, grads = gradients(Passes(bfloat16=True), model, images())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert [g.dtype for g in grads] == [torch.float32] * 6


def test_bfloat16_is_close_to_float32_and_not_the_same() -> None:
    model = Watched()
    plain, plain_grads = gradients(Passes(), copy.deepcopy(model), images())
    rough, rough_grads = gradients(Passes(bfloat16=True), model, images())
    assert 0.0 < (plain - rough).abs().max() < 0.02
    for one, other in zip(plain_grads, rough_grads, strict=True):
        assert 0.0 < (one - other).norm() < 0.05 * one.norm() + 1e-3


def test_a_bfloat16_pass_sees_weights_that_changed_since_the_last_one() -> None:
    """Autocast keeps casted weights while it is on."""
    model, passes = Watched(), Passes(bfloat16=True)
    passes.run(model, images())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert passes.run(model, images()).tolist() == [[0.0, 0.0]] * 5


def test_autocast_ends_with_the_pass() -> None:
    Passes(bfloat16=True).run(Watched(), images())
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_bfloat16_draws_the_same_dropout_as_float32() -> None:
    model, inputs = nn.Dropout(0.5), torch.ones(100)
    kept = []
    for passes in (Passes(), Passes(bfloat16=True)):
        with SeededForward(7):
            kept.append(passes.run(model, inputs) != 0)
    assert torch.equal(*kept)


def test_images_and_weights_are_brought_into_channels_last() -> None:
    model, passes = Watched(), Passes(channels_last=True)
    before = copy.deepcopy(model.state_dict())
    assert passes.prepare(model) is model
    passes.run(model, images())
    assert is_channels_last(model.inputs)
    assert is_channels_last(model.features)
    assert is_channels_last(model.first.weight)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_channels_last_gives_the_results_of_a_plain_pass() -> None:
    model = Watched()
    plain, plain_grads = gradients(Passes(), copy.deepcopy(model), images())
    other, other_grads = gradients(Passes(channels_last=True), model, images())
    torch.testing.assert_close(other, plain, rtol=1e-5, atol=1e-5)
    for one, two in zip(other_grads, plain_grads, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)
    assert is_channels_last(other_grads[0])


@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 3, 5), (2, 3, 4, 5, 6)])
def test_inputs_that_are_no_images_are_left_as_they_are(shape: tuple[int, ...]) -> None:
    seen: list[Tensor] = []

    class Noting(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            seen.append(inputs)
            return inputs

    inputs = torch.randn(shape)
    Passes(channels_last=True).run(Noting(), inputs)
    assert seen[0] is inputs


@pytest.mark.parametrize(
    "make",
    [lambda: nn.Linear(3, 2), lambda: nn.Conv1d(3, 2, 2), lambda: nn.Conv3d(3, 2, 2)],
    ids=["Linear", "Conv1d", "Conv3d"],
)
def test_a_model_without_image_weights_may_be_prepared_for_channels_last(make: object) -> None:
    assert callable(make)
    model = make()
    before = copy.deepcopy(model.state_dict())
    Passes(channels_last=True).prepare(model)
    assert torch.equal(model.weight, before["weight"])


def test_both_at_once_work_together() -> None:
    model = Watched()
    plain = Passes().run(copy.deepcopy(model), images())
    passes = Passes(bfloat16=True, channels_last=True)
    outputs = passes.run(passes.prepare(model), images())
    assert model.features is not None
    assert (model.features.dtype, outputs.dtype) == (torch.bfloat16, torch.float32)
    assert is_channels_last(model.features)
    assert (outputs - plain).abs().max() < 0.02


@pytest.mark.parametrize(
    ("samples", "batch_size", "sizes"),
    [(8, 4, [4, 4]), (9, 4, [4, 4, 1]), (3, 4, [3]), (4, 4, [4]), (3, 1, [1, 1, 1]), (0, 4, [])],
)
def test_an_order_is_computed_in_portions(samples: int, batch_size: int, sizes: list[int]) -> None:
    indices = tuple(range(100, 100 + samples))
    parts = Passes(batch_size=batch_size).micro_batches(indices)
    assert [len(part) for part in parts] == sizes
    assert [index for part in parts for index in part] == list(indices)


def test_an_order_is_one_portion_by_default() -> None:
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
    passes = Passes.of(Config(channels_last=typed), workload_of(channels_last=own))
    assert passes.channels_last is used


def test_seed_precision_and_batch_size_are_those_of_the_config() -> None:
    workload = workload_of(channels_last=False)
    config = Config(seed=7, precision="bfloat16", batch_size=48, accumulate=3)
    assert Passes.of(config, workload) == Passes(seed=7, bfloat16=True, batch_size=48)
    assert Passes.of(Config(), workload) == Passes(seed=0, bfloat16=False, batch_size=32)
