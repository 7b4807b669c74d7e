"""One order, worked on by a trainer; without a server where that says more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from ps.model.flat import FlatModel
from ps.model.mailbox import Mailbox, private_mailbox
from ps.model.passes import Passes
from ps.protocol import (
    Assignment,
    Evaluate,
    Evaluated,
    Order,
    Push,
    Server,
    Train,
    Trained,
    Weights,
)
from ps.settings.errors import TrainingFailed
from ps.trainer.loading import Loader
from ps.trainer.worker import ServerComputeWorker, TrainerComputeWorker
from ps.workload import Workload, fetch
from ps.workloads.checks import make_model
from tests.plugins import embedding, perceptron

ORDER = Train(0, 3, tuple(range(10)))


def assigned(order: Order, version: int = 5) -> Assignment:
    return Assignment(order, Weights(version))


class Calls:
    """A server that computes with one layer, and writes down what it is asked."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.gradients: list[Tensor] = []
        self.layer = nn.Linear(6, 3)

    def forward(self, trainer: int, epoch: int, batch: int, inputs: Tensor) -> Tensor:
        self.names.append(f"forward {trainer} {epoch} {batch} {len(inputs)}")
        return self.layer(inputs).detach()  # type: ignore[no-any-return]

    def backward(self, trainer: int, output_gradient: Tensor) -> None:
        self.names.append(f"backward {trainer} {len(output_gradient)}")
        self.gradients.append(output_gradient)

    def evaluate(self, trainer: int, inputs: Tensor) -> Tensor:
        self.names.append(f"evaluate {trainer} {len(inputs)}")
        return self.layer(inputs).detach()  # type: ignore[no-any-return]


def server_side(
    workload: Workload, passes: Passes | None = None, calls: Calls | None = None
) -> tuple[ServerComputeWorker, Calls]:
    passes, calls = passes or Passes(), calls or Calls()
    loader = Loader(workload.train, passes)
    return ServerComputeWorker(4, calls, workload, passes, loader), calls  # type: ignore[arg-type]


def test_where_the_server_computes_a_step_is_one_call_besides_handing_in() -> None:
    workload = perceptron()
    work, calls = server_side(workload)
    result = work.do(assigned(ORDER))
    assert calls.names == ["forward 4 0 3 10"]
    assert isinstance(result, Trained) and isinstance(result.gradient, Tensor)
    inputs, targets = fetch(workload.train, ORDER.indices)
    outputs = calls.layer(inputs)
    loss = workload.loss(outputs, targets)
    [expected] = torch.autograd.grad(loss, outputs)
    assert torch.equal(result.gradient, expected)
    assert (result.epoch, result.batch, result.samples) == (0, 3, 10)
    assert result.loss == pytest.approx(loss.item())


def test_each_micro_batch_but_the_last_is_a_call_of_its_own_and_has_its_share() -> None:
    workload = perceptron()
    work, calls = server_side(workload, Passes(batch_size=4))
    result = work.do(assigned(ORDER))
    assert isinstance(result, Trained) and isinstance(result.gradient, Tensor)
    assert calls.names == [
        *("forward 4 0 3 4", "backward 4 4", "forward 4 0 3 4", "backward 4 4"),
        "forward 4 0 3 2",
    ]
    whole, _ = server_side(workload, calls=calls)
    expected = whole.do(assigned(ORDER))
    assert isinstance(expected, Trained) and isinstance(expected.gradient, Tensor)
    torch.testing.assert_close(torch.cat([*calls.gradients, result.gradient]), expected.gradient)
    assert result.loss == pytest.approx(expected.loss)


def test_a_loss_that_does_not_depend_on_the_outputs_is_an_error() -> None:
    weight = nn.Parameter(torch.ones(()))
    work, _ = server_side(replace(perceptron(), loss=lambda *_: weight * 1.0))
    with pytest.raises(TrainingFailed, match="loss"):
        work.do(assigned(ORDER))


def test_an_evaluated_slice_has_the_sums_over_its_samples() -> None:
    workload = perceptron()
    work, calls = server_side(workload)
    result = work.do(assigned(Evaluate(1, 2, 90, 97)))
    inputs, targets = fetch(workload.test, range(90, 97))
    outputs = calls.layer(inputs)
    assert calls.names == ["evaluate 4 7"]
    assert isinstance(result, Evaluated)
    assert (result.epoch, result.slice, result.samples) == (1, 2, 7)
    assert result.loss_sum == pytest.approx(7 * workload.loss(outputs, targets).item())
    assert result.correct == workload.correct(outputs, targets)


class Side:
    """A trainer that computes itself, and what it and the server see."""

    def __init__(self, workload: Workload, passes: Passes | None = None) -> None:
        passes = passes or Passes()
        self.model = make_model(workload, 0)
        self.flat = FlatModel(self.model)
        self.mailbox: Mailbox = private_mailbox(self.flat)
        self.flat.move_to(self.mailbox.weights, keep_values=True)
        loader = Loader(workload.train, passes)
        self.worker = TrainerComputeWorker(
            workload, self.model, self.flat, self.mailbox, passes, loader
        )

    def train(self, order: Train = ORDER) -> tuple[Trained, Push]:
        result = self.worker.do(assigned(order))
        assert isinstance(result, Trained) and isinstance(result.gradient, Push)
        return result, result.gradient

    @property
    def gradients(self) -> list[Tensor]:
        return self.flat.trained.views(self.mailbox.gradients)


def reference(workload: Workload, model: nn.Module) -> list[Tensor]:
    inputs, targets = fetch(workload.train, ORDER.indices)
    loss = workload.loss(model(inputs), targets)
    return list(torch.autograd.grad(loss, list(model.parameters())))


def test_gradients_go_into_the_mailbox_and_stay_nowhere_else() -> None:
    workload = perceptron()
    side = Side(workload)
    _, push = side.train()
    expected = reference(workload, make_model(workload, 0))
    assert all(torch.equal(*pair) for pair in zip(side.gradients, expected, strict=True))
    assert all(parameter.grad is None for parameter in side.model.parameters())
    assert push == Push(5)


def test_a_second_step_replaces_the_gradients_of_the_first() -> None:
    workload = perceptron()
    side = Side(workload)
    side.train(Train(0, 0, (11, 12)))
    side.train()
    expected = reference(workload, make_model(workload, 0))
    assert all(torch.equal(*pair) for pair in zip(side.gradients, expected, strict=True))


def test_the_gradients_of_the_micro_batches_add_up_to_those_of_the_whole() -> None:
    workload = perceptron()
    side = Side(workload, Passes(batch_size=4))
    result, _ = side.train()
    expected = reference(workload, make_model(workload, 0))
    for got, wanted in zip(side.gradients, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-7)
    assert result.loss == pytest.approx(Side(workload).train()[0].loss)


class Sometimes(nn.Module):
    """Uses its second layer in every other forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(6, 3)
        self.sometimes = nn.Linear(6, 3)
        self._passes = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self._passes += 1
        outputs: Tensor = self.always(inputs)
        return outputs + self.sometimes(inputs) if self._passes % 2 else outputs


SOMETIMES = replace(perceptron(), model=Sometimes, loss=nn.functional.cross_entropy)


def test_parameters_that_a_step_does_not_use_are_named_by_their_places() -> None:
    side = Side(SOMETIMES)
    assert [side.train()[1].unused for _ in range(3)] == [(), (2, 3), ()]


def test_a_parameter_that_one_micro_batch_uses_is_used() -> None:
    side = Side(SOMETIMES, Passes(batch_size=5))
    _, push = side.train()
    inputs, targets = fetch(SOMETIMES.train, ORDER.indices[:5])
    model = make_model(SOMETIMES, 0)
    (0.5 * SOMETIMES.loss(model(inputs), targets)).backward()
    assert push.unused == ()
    torch.testing.assert_close(side.gradients[2], model.sometimes.weight.grad)  # type: ignore[union-attr]


class Renewing(nn.Module):
    """Replaces its buffer in each pass instead of changing it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("passes", torch.zeros(2))

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes = self.passes + 1
        return self.layer(inputs)  # type: ignore[no-any-return]


def test_the_server_sees_the_buffers_that_a_step_leaves_even_where_the_model_replaced_them() -> (
    None
):
    workload = replace(perceptron(), model=Renewing, loss=nn.functional.cross_entropy)
    side = Side(workload, Passes(batch_size=5))
    side.train()
    [passes] = side.flat.buffers.views(side.mailbox.weights)
    assert passes.tolist() == [2.0, 2.0]


def test_weights_that_the_server_writes_into_the_mailbox_are_what_is_computed_with() -> None:
    side = Side(perceptron())
    side.mailbox.weights.zero_()
    result, _ = side.train()
    assert all(bool((parameter == 0).all()) for parameter in side.model.parameters())
    assert result.loss == pytest.approx(torch.log(torch.tensor(3.0)).item())


def test_a_sparse_gradient_is_refused_and_the_option_named() -> None:
    with pytest.raises(TrainingFailed, match="--compute server"):
        Side(embedding(sparse=True)).train()


def test_what_is_assigned_and_what_follows_is_told_to_the_loader_but_for_slices() -> None:
    class Telling(Loader):
        def expect(self, order: Train, prefetch: Sequence[Train] = ()) -> None:
            told.append((order, tuple(prefetch)))

    told: list[tuple[Train, tuple[Train, ...]]] = []
    workload, passes, following = perceptron(), Passes(), Train(0, 4, (11, 12))
    loader, model = Telling(workload.train, passes), make_model(workload, 0)
    flat = FlatModel(model)
    server, mailbox = cast(Server, Calls()), private_mailbox(flat)
    flat.move_to(mailbox.weights, keep_values=True)
    for work in (
        ServerComputeWorker(4, server, workload, passes, loader),
        TrainerComputeWorker(workload, model, flat, mailbox, passes, loader),
    ):
        work.do(Assignment(ORDER, Weights(0), (following,)))
        work.do(assigned(Evaluate(0, 0, 0, 4)))
    assert told == [(ORDER, (following,))] * 2


def test_evaluating_draws_no_random_numbers_and_leaves_the_model_in_training_mode() -> None:
    side = Side(perceptron(dropout=0.5))
    order = assigned(Evaluate(0, 0, 0, 40))
    assert side.worker.do(order) == side.worker.do(order)
    assert all(module.training for module in side.model.modules())


def test_dropout_draws_by_the_micro_batch_alone() -> None:
    """Whatever was drawn before, and whichever trainer computes."""
    workload = perceptron(dropout=0.5)
    first = Side(workload, Passes(seed=7, batch_size=5))
    first.train()
    kept = [gradient.clone() for gradient in first.gradients]
    torch.rand(3)
    first.train(Train(0, 4, ORDER.indices))
    assert not torch.equal(first.gradients[0], kept[0])
    first.train()
    assert all(torch.equal(*pair) for pair in zip(first.gradients, kept, strict=True))
