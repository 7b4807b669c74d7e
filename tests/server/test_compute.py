"""Where forward and backward run: what reaches an update is the same, whoever computed it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from ps.model.flat import FlatModel
from ps.model.gradients import check_gradients
from ps.model.mailbox import Mailbox, private_mailbox
from ps.model.passes import Passes
from ps.model.randomness import SeededForward, step_seed
from ps.model.store import Store
from ps.protocol import Assignment, Push, Train, Trained, Weights
from ps.server.compute import Contribution, ServerCompute, TrainerCompute
from ps.settings.errors import ConfigError
from ps.workload import Workload, fetch
from ps.workloads.checks import make_model
from tests.helpers import COMPUTE, momentum_sgd, server_of

SEED = 3
BOTH = pytest.mark.parametrize("compute", COMPUTE)


class Net(nn.Module):
    """Has a frozen layer, buffers, dropout, and a layer that only some batches use."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(dropout)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.sometimes = nn.Linear(6, 6)
        self.last = nn.Linear(6, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.frozen(self.dropout(self.norm(self.first(inputs)).relu()))
        if inputs.sum() > 0:
            features = features + self.sometimes(features)
        outputs: Tensor = self.last(features)
        return outputs


def net_with_dropout() -> nn.Module:
    return Net(0.5)


def plain_net() -> nn.Module:
    """Without batch norm, so that micro-batches add up to the whole."""
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


class Counting(nn.Module):
    """Puts a new tensor in the place of its buffer instead of changing it."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.seen = self.seen + len(inputs)
        outputs: Tensor = self.layer(inputs)
        return outputs


POSITIVE, NEGATIVE = range(40), range(40, 80)


def workload_of(model: Callable[[], nn.Module]) -> Workload:
    """The sum of the inputs is positive in the first 40 samples, and not in the other 40."""
    generator = torch.Generator().manual_seed(9)
    inputs = torch.rand(80, 4, generator=generator)
    inputs[40:] *= -1
    samples = TensorDataset(inputs, torch.randn(80, 2, generator=generator))
    return Workload(
        name="small",
        model=model,
        train=samples,
        test=samples,
        loss=mse_loss,
        correct=lambda outputs, targets: 0,
    )


class Side:
    """A server and two trainers, whose orders the test invents."""

    def __init__(
        self, model: Callable[[], nn.Module], compute: str = "server", passes: Passes | None = None
    ) -> None:
        self.workload = workload_of(model)
        self.parts = server_of(
            self.workload,
            compute=compute,
            trainers=(1, 2),
            passes=passes or Passes(seed=SEED),
            optimizer=momentum_sgd,
        )
        self.store = self.parts.store
        self.workers = {trainer: self.parts.worker(trainer) for trainer in (1, 2)}

    @property
    def compute(self) -> ServerCompute:
        assert isinstance(self.parts.compute, ServerCompute)
        return self.parts.compute

    def do(self, batch: int, indices: Sequence[int], trainer: int = 1) -> Contribution:
        weights = self.parts.compute.dispatch(trainer)
        order = Train(0, batch, tuple(indices))
        result = self.workers[trainer].do(Assignment(order, weights))
        assert isinstance(result, Trained)
        return self.parts.compute.contribution(trainer, result)

    def update(self, batch: int, indices: Sequence[int], trainer: int = 1) -> Contribution:
        contribution = self.do(batch, indices, trainer)
        self.store.apply(contribution.gradients)
        self.store.take_buffers(contribution.buffers)
        return contribution

    def inputs(self, indices: Sequence[int] = range(8)) -> Tensor:
        return fetch(self.workload.train, indices)[0]

    def with_ones(self, trainer: int, outputs: Tensor) -> Contribution:
        """Returns a gradient of one by each output."""
        result = Trained(0, 0, len(outputs), 0.0, torch.ones_like(outputs))
        return self.compute.contribution(trainer, result)


def copies(contribution: Contribution) -> list[Tensor | None]:
    """Gradients and buffers as they are now."""
    tensors = [*contribution.gradients, *contribution.buffers]
    return [None if tensor is None else tensor.clone() for tensor in tensors]


def assert_close(
    got: Sequence[Tensor | None], expected: Sequence[Tensor | None], within: float = 0.0
) -> None:
    assert [tensor is None for tensor in got] == [tensor is None for tensor in expected]
    for one, other in zip(got, expected, strict=True):
        if one is not None:
            torch.testing.assert_close(one, other, rtol=0.0, atol=within)


# --- what both have in common


@BOTH
def test_gradients_and_buffers_are_those_of_plain_autograd(compute: str) -> None:
    side = Side(Net, compute)
    model = make_model(side.workload, SEED)
    for indices in (POSITIVE, NEGATIVE, POSITIVE):
        inputs, targets = fetch(side.workload.train, indices)
        model.load_state_dict(side.store.state_dict())
        model.zero_grad()
        mse_loss(model(inputs), targets).backward()
        contribution = side.update(0, indices)
        gradients = [p.grad for p in model.parameters() if p.requires_grad]
        assert_close(contribution.gradients, gradients, within=1e-6)
        assert_close(contribution.buffers, list(model.buffers()), within=1e-6)
        pairs = zip(side.store.names, contribution.gradients, strict=True)
        missing = [name for name, gradient in pairs if gradient is None]
        unused = [] if indices == POSITIVE else ["sometimes.weight", "sometimes.bias"]
        assert missing == unused


@pytest.mark.parametrize("model", [Net, net_with_dropout])
def test_where_it_is_computed_makes_no_difference(model: Callable[[], nn.Module]) -> None:
    """With a micro-batch that uses all parameters and one that does not, too."""
    passes = Passes(seed=SEED, batch_size=16)
    sides = [Side(model, compute, passes) for compute in COMPUTE]
    mixed = [*NEGATIVE[:16], *POSITIVE[:16]]
    for batch, indices in enumerate((POSITIVE, NEGATIVE, mixed)):
        one, other = (side.update(batch, indices) for side in sides)
        assert one.version == other.version == batch
        assert_close(copies(one), copies(other), within=1e-5)
    states = [list(side.store.state_dict().values()) for side in sides]
    assert_close(*states, within=1e-5)


@BOTH
def test_an_order_begins_with_the_newest_weights(compute: str) -> None:
    side = Side(plain_net, compute)
    trainers = (1, 1, 1, 2, 1)
    versions = [side.update(batch, range(8), t).version for batch, t in enumerate(trainers)]
    assert versions == [0, 1, 2, 3, 4]


@BOTH
@pytest.mark.parametrize("batch_size", [1, 3])
def test_micro_batches_add_up_to_the_whole_and_leave_nothing_behind(
    compute: str, batch_size: int
) -> None:
    whole = Side(plain_net, compute).do(0, range(8))
    side = Side(plain_net, compute, Passes(seed=SEED, batch_size=batch_size))
    first = copies(side.do(0, range(8)))
    assert_close(first, copies(whole), within=1e-6)
    assert_close(copies(side.do(0, range(8))), first)


@BOTH
def test_gradients_stay_what_they_are_during_the_orders_of_others(compute: str) -> None:
    side = Side(plain_net, compute)
    mine = side.do(0, range(8), trainer=1)
    before = copies(mine)
    side.do(1, range(20), trainer=2)
    assert_close(copies(mine), before)


@BOTH
def test_an_order_that_was_not_applied_leaves_no_trace_in_the_next(compute: str) -> None:
    """The step has changed the buffers of the trainer's model."""
    side = Side(Net, compute)
    first = copies(side.do(0, POSITIVE))
    assert_close(copies(side.do(0, POSITIVE)), first)


@BOTH
def test_a_buffer_that_forward_replaces_is_shared_by_all_trainers(compute: str) -> None:
    side = Side(Counting, compute)
    for batch, trainer in enumerate((1, 2, 1, 2)):
        side.update(batch, range(10), trainer)
    assert side.store.state_dict()["seen"].item() == 40.0


# --- on the server


def test_outputs_carry_no_graph_and_all_micro_batches_see_the_same_weights() -> None:
    side = Side(plain_net)
    inputs = side.inputs()
    first = side.compute.forward(1, 0, 0, inputs)
    assert (first.requires_grad, first.dtype) == (False, torch.float32)
    assert torch.equal(first, make_model(side.workload, SEED)(inputs))
    side.update(1, range(8, 16), trainer=2)
    side.compute.backward(1, torch.ones_like(first))
    second = side.compute.forward(1, 0, 0, inputs)
    assert torch.equal(first, second)
    assert side.with_ones(1, second).version == 0
    third = side.compute.forward(1, 0, 2, inputs)
    assert (third - first).abs().max() > 1e-4
    assert side.with_ones(1, third).version == 1


def test_orders_of_two_trainers_may_overlap() -> None:
    side = Side(plain_net)
    batches = [side.inputs(range(8)), side.inputs(range(8, 16))]
    alone = [copies(side.with_ones(1, side.compute.forward(1, 0, k, batches[k]))) for k in (0, 1)]
    outputs = [side.compute.forward(k + 1, 0, k, batches[k]) for k in (0, 1)]
    for k in (1, 0):
        assert_close(copies(side.with_ones(k + 1, outputs[k])), alone[k])


def test_each_micro_batch_draws_from_its_own_seed() -> None:
    side = Side(net_with_dropout)
    inputs, model = side.inputs(range(5)), make_model(side.workload, SEED)
    for micro_batch in range(2):
        outputs = side.compute.forward(1, 4, 7, inputs)
        with SeededForward(step_seed(SEED, 4, 7, micro_batch)):
            assert torch.equal(outputs, model(inputs))
        side.compute.backward(1, torch.ones_like(outputs))


def test_a_gradient_without_a_forward_is_refused() -> None:
    side = Side(plain_net)
    side.do(0, range(8), trainer=2)
    with pytest.raises(AssertionError, match=r"trainer 2 .* without forward"):
        side.with_ones(2, torch.ones(8, 2))


def test_evaluation_sees_the_weights_it_was_opened_with_and_no_dropout() -> None:
    side = Side(net_with_dropout)
    inputs = side.inputs(range(10))
    side.update(0, range(20))
    side.compute.open_evaluation()
    model = make_model(side.workload, SEED).eval()
    model.load_state_dict(side.store.state_dict())
    expected = model(inputs)
    outputs = side.compute.evaluate(1, inputs)
    assert torch.equal(outputs, expected) and not outputs.requires_grad
    side.update(1, range(20))
    assert torch.equal(side.compute.evaluate(2, inputs), expected)
    side.compute.open_evaluation()
    assert not torch.equal(side.compute.evaluate(1, inputs), expected)


def test_evaluation_changes_nothing_in_training() -> None:
    side, fresh = Side(net_with_dropout), Side(net_with_dropout)
    fresh.compute.evaluate(1, fresh.inputs())
    assert_close(copies(side.do(0, range(20))), copies(fresh.do(0, range(20))))


def test_the_weights_stay_on_the_server_and_any_trainer_may_join() -> None:
    side = Side(plain_net)
    side.store.version = 7
    assert side.compute.dispatch(1) == Weights(7)
    side.compute.check_layout(1, None)


def test_outputs_are_float32_in_bfloat16_too() -> None:
    rough, plain = Side(plain_net, passes=Passes(seed=SEED, bfloat16=True)), Side(plain_net)
    outputs, wanted = (side.compute.forward(1, 0, 0, side.inputs()) for side in (rough, plain))
    assert outputs.dtype == torch.float32
    assert 0.0 < (outputs - wanted).abs().max() < 0.05
    gradients, exact = (side.with_ones(1, outputs).gradients for side in (rough, plain))
    for gradient, wanted_gradient in zip(gradients, exact, strict=True):
        assert gradient is not None and wanted_gradient is not None
        assert gradient.dtype == torch.float32
        assert (gradient - wanted_gradient).norm() < 0.05 * wanted_gradient.norm()


# --- on the trainers


class Trainers:
    """A server that computes nothing, and the mailbox of trainer 1."""

    def __init__(self) -> None:
        parts = server_of(workload_of(Net), compute="trainer", optimizer=momentum_sgd)
        assert isinstance(parts.compute, TrainerCompute)
        self.store, self.compute, self.flat = parts.store, parts.compute, parts.compute.flat
        self.mailbox = self.attach(1)

    def attach(self, trainer: int) -> Mailbox:
        mailbox = private_mailbox(self.flat)
        self.compute.attach(trainer, mailbox)
        return mailbox

    def update(self) -> None:
        self.store.apply([torch.ones_like(parameter) for parameter in self.flat.parameters])

    def push(self, unused: tuple[int, ...] = ()) -> Contribution:
        return self.compute.contribution(1, Trained(0, 0, 8, 0.0, Push(5, unused)))


def weights_in(store: Store, num_bytes: int) -> Tensor:
    into = torch.empty(num_bytes, dtype=torch.uint8)
    store.copy_weights(into)
    return into


def test_the_first_order_brings_all_weights_and_later_ones_what_moves() -> None:
    side = Trainers()
    flat, weights = side.flat, side.mailbox.weights
    assert 0 < flat.trained.stop < flat.moving_bytes < flat.total_bytes
    assert side.compute.dispatch(1) == Weights(0, flat.total_bytes)
    assert torch.equal(weights, weights_in(side.store, flat.total_bytes))
    assert torch.equal(side.compute.fresh_weights(1, 9), weights[:9])
    side.update()
    weights.fill_(255)
    assert side.compute.dispatch(1) == Weights(1, flat.moving_bytes)
    moving = flat.moving_bytes
    assert torch.equal(weights[:moving], weights_in(side.store, moving))
    assert weights[moving:].unique().tolist() == [255]
    assert side.mailbox.gradients.unique().tolist() == [0]
    before = weights.clone()
    side.update()
    assert torch.equal(weights, before)


def test_weights_that_a_trainer_has_are_not_written_again_until_it_did_a_step() -> None:
    side = Trainers()
    side.compute.dispatch(1)
    side.mailbox.weights.fill_(255)
    assert side.compute.dispatch(1) == Weights(0)
    assert side.mailbox.weights.unique().tolist() == [255]
    side.push()
    assert side.compute.dispatch(1) == Weights(0, side.flat.moving_bytes)


def test_each_trainer_has_a_mailbox_of_its_own() -> None:
    side = Trainers()
    other = side.attach(2)
    side.compute.dispatch(1)
    assert side.mailbox.weights.unique().numel() > 1
    assert other.weights.unique().tolist() == [0]
    assert side.compute.dispatch(2) == Weights(0, side.flat.total_bytes)


def test_what_came_by_message_lies_in_the_mailbox() -> None:
    side = Trainers()
    side.compute.dispatch(1)
    weights = side.mailbox.weights.clone()
    gradients = torch.zeros(side.flat.trained.stop, dtype=torch.uint8)
    gradients.view(torch.float32).fill_(2.5)
    start, stop = side.flat.buffers.start, side.flat.buffers.stop
    side.compute.receive(1, gradients, torch.full((stop - start,), 7, dtype=torch.uint8))
    weights[start:stop] = 7
    assert torch.equal(side.mailbox.weights, weights)
    contribution = side.push()
    assert contribution.version == 5
    assert {value for g in contribution.gradients for value in g.unique().tolist()} == {2.5}  # type: ignore[union-attr]
    assert contribution.gradients[0].data_ptr() == gradients.data_ptr()  # type: ignore[union-attr]
    assert [buffer.view(torch.uint8).unique().tolist() for buffer in contribution.buffers[:2]] == [
        [7],
        [7],
    ]


def test_blocks_hold_all_gradients_and_an_unused_parameter_has_none() -> None:
    """One spoiled element in any gradient is seen in them."""
    contribution = Trainers().push(unused=(1, 3))
    assert contribution.blocks is not None and len(contribution.blocks) == 1
    is_missing = [gradient is None for gradient in contribution.gradients]
    assert [place for place, missing in enumerate(is_missing) if missing] == [1, 3]
    for gradient in contribution.gradients:
        if gradient is not None:
            gradient.view(-1)[-1] = float("nan")
            assert contribution.blocks[0].isnan().sum() == 1
            gradient.view(-1)[-1] = 0.0


def test_what_an_unused_parameter_left_in_the_mailbox_fails_no_check() -> None:
    side = Trainers()
    for view in side.flat.trained.views(side.mailbox.gradients)[1:]:
        view.fill_(float("nan"))
    contribution = side.push(unused=tuple(range(1, len(side.store.names))))
    check_gradients(contribution.gradients, side.store.names, contribution.blocks)


class Another(Net):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)


@pytest.mark.parametrize("layout", [None, "", FlatModel(Another()).describe()])
def test_a_trainer_with_another_layout_is_refused_by_its_rank(layout: str | None) -> None:
    compute = Trainers().compute
    with pytest.raises(ConfigError, match="rank 7") as caught:
        compute.check_layout(7, layout)
    assert caught.value.exit_code == 2
    compute.check_layout(7, FlatModel(Net()).describe())
