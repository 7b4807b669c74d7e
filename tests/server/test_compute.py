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
from ps.protocol import Evaluate, Push, Train, Trained, Weights
from ps.server.compute import Contribution, OnServer, OnTrainers
from ps.settings.errors import ConfigError
from ps.trainer.loading import Loader
from ps.trainer.worker import TrainerSideWorker
from ps.workload import Workload, fetch
from ps.workloads.checks import make_model

SEED = 3
SLICE = Evaluate(0, 0, 0, 10)


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


def plain_net() -> nn.Module:
    """Without batch norm, so that parts add up to the whole."""
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


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


def store_of(workload: Workload, lr: float = 0.1) -> Store:
    model = make_model(workload, SEED)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Store(model, torch.optim.SGD(parameters, lr=lr, momentum=0.9))


def copies(contribution: Contribution) -> tuple[list[Tensor | None], list[Tensor]]:
    """Gradients and buffers as they are now."""
    gradients = [None if g is None else g.clone() for g in contribution.gradients]
    return gradients, [buffer.clone() for buffer in contribution.buffers]


def same(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> bool:
    return len(one) == len(other) and all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(one, other, strict=True)
    )


def apply(store: Store, contribution: Contribution) -> None:
    check_gradients(contribution.gradients, store.names, contribution.blocks)
    store.apply(contribution.gradients)
    store.take_buffers(contribution.buffers)


def order_of(batch: int, indices: Sequence[int]) -> Train:
    return Train(0, batch, tuple(indices))


# --- on the server


class ServerSide:
    """Does orders with an OnServer, as a trainer would ask for it."""

    def __init__(
        self, workload: Workload, *, passes: Passes, trainers: Sequence[int] = (1, 2)
    ) -> None:
        self.workload = workload
        self.passes = passes
        self.store = store_of(workload)
        self.compute = OnServer(self.store, trainers, passes)

    def do(self, order: Train, trainer: int = 1) -> Contribution:
        samples, gradient = len(order.indices), torch.empty(0)
        for part, indices in enumerate(self.passes.micro_batches(order.indices)):
            if part:
                self.compute.backward(trainer, gradient)
            inputs, targets = fetch(self.workload.train, indices)
            outputs = self.compute.forward(trainer, order.epoch, order.batch, inputs)
            loss = self.workload.loss(outputs.requires_grad_(), targets)
            (loss * len(indices) / samples).backward()
            assert outputs.grad is not None
            gradient = outputs.grad
        result = Trained(order.epoch, order.batch, samples, 0.0, gradient)
        return self.compute.contribution(trainer, result)


def ones_in(side: ServerSide, trainer: int, outputs: Tensor, batch: int = 0) -> Contribution:
    """Hands in a gradient of one by each output."""
    return side.compute.contribution(trainer, Trained(0, batch, 1, 0.0, torch.ones_like(outputs)))


def test_the_server_gives_outputs_without_a_graph_and_the_gradients_of_plain_autograd() -> None:
    workload = workload_of(plain_net)
    side = ServerSide(workload, passes=Passes(seed=SEED))
    inputs, _ = fetch(workload.train, range(5))
    outputs = side.compute.forward(1, 0, 0, inputs)
    assert (outputs.requires_grad, outputs.dtype) == (False, torch.float32)
    model = make_model(workload, SEED)
    expected = model(inputs)
    assert torch.equal(outputs, expected)
    contribution = ones_in(side, 1, outputs)
    expected.sum().backward()
    assert same(contribution.gradients, [p.grad for p in model.parameters()])


def test_on_the_server_all_parts_of_an_order_see_the_same_weights() -> None:
    side = ServerSide(workload_of(plain_net), passes=Passes(seed=SEED, batch_size=8))
    inputs, _ = fetch(side.workload.train, range(8))
    first = side.compute.forward(1, 0, 0, inputs)
    apply(side.store, side.do(order_of(1, range(8, 16)), trainer=2))
    assert side.store.version == 1
    side.compute.backward(1, torch.ones_like(first))
    second = side.compute.forward(1, 0, 0, inputs)
    assert torch.equal(first, second)
    assert ones_in(side, 1, second).version == 0
    third = side.compute.forward(1, 0, 2, inputs)
    assert (third - first).abs().max() > 1e-4
    assert ones_in(side, 1, third).version == 1


def test_on_the_server_an_order_begins_with_the_newest_weights() -> None:
    side = ServerSide(workload_of(plain_net), passes=Passes(seed=SEED))
    versions = []
    for batch in range(3):
        contribution = side.do(order_of(batch, range(8)))
        versions.append(contribution.version)
        apply(side.store, contribution)
    apply(side.store, side.do(order_of(3, range(8)), trainer=2))
    versions.append(side.do(order_of(4, range(8)), trainer=1).version)
    assert versions == [0, 1, 2, 4]


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_on_the_server_parts_add_up_to_the_joint_batch(batch_size: int) -> None:
    workload, order = workload_of(plain_net), order_of(0, range(8))
    joint = ServerSide(workload, passes=Passes(seed=SEED, batch_size=8)).do(order)
    parts = ServerSide(workload, passes=Passes(seed=SEED, batch_size=batch_size)).do(order)
    for one, other in zip(joint.gradients, parts.gradients, strict=True):
        torch.testing.assert_close(other, one, rtol=0.0, atol=1e-6)


def test_on_the_server_nothing_of_an_order_is_left_for_the_next_one() -> None:
    side = ServerSide(workload_of(plain_net), passes=Passes(seed=SEED, batch_size=4))
    first, _ = copies(side.do(order_of(0, range(8))))
    again, _ = copies(side.do(order_of(0, range(8))))
    assert same(first, again)


def test_on_the_server_gradients_stay_what_they_are_during_the_orders_of_others() -> None:
    side = ServerSide(workload_of(plain_net), passes=Passes(seed=SEED))
    mine = side.do(order_of(0, range(8)), trainer=1)
    before, _ = copies(mine)
    side.do(order_of(1, range(20)), trainer=2)
    assert same(mine.gradients, before)


def test_on_the_server_orders_of_two_trainers_may_overlap() -> None:
    side = ServerSide(workload_of(plain_net), passes=Passes(seed=SEED))
    alone = [copies(side.do(order_of(k, range(8 * k, 8 * k + 8))))[0] for k in range(2)]
    batches = [fetch(side.workload.train, range(8 * k, 8 * k + 8)) for k in range(2)]
    outputs = [side.compute.forward(k + 1, 0, k, batches[k][0]) for k in range(2)]
    for k in (1, 0):
        side.workload.loss(outputs[k].requires_grad_(), batches[k][1]).backward()
        gradient = outputs[k].grad
        assert gradient is not None
        together = side.compute.contribution(k + 1, Trained(0, k, 8, 0.0, gradient))
        assert same(together.gradients, alone[k])


def test_on_the_server_a_parameter_that_was_not_used_has_no_gradient() -> None:
    side = ServerSide(workload_of(Net), passes=Passes(seed=SEED))
    missing = []
    for batch, indices in enumerate((POSITIVE, NEGATIVE, POSITIVE)):
        gradients = side.do(order_of(batch, indices)).gradients
        pairs = zip(side.store.names, gradients, strict=True)
        missing.append([name for name, gradient in pairs if gradient is None])
    assert missing == [[], ["sometimes.weight", "sometimes.bias"], []]


def test_on_the_server_buffers_come_with_the_gradients() -> None:
    side = ServerSide(workload_of(Net), passes=Passes(seed=SEED))
    contribution = side.do(order_of(0, POSITIVE))
    model = make_model(side.workload, SEED)
    model(fetch(side.workload.train, POSITIVE)[0])
    assert same(list(contribution.buffers), list(model.buffers()))
    mean, _, count = contribution.buffers
    assert mean.abs().max() > 1e-3
    assert count.item() == 1


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


def test_on_the_server_a_buffer_that_forward_replaces_is_shared_by_all_trainers() -> None:
    side = ServerSide(workload_of(Counting), passes=Passes(seed=SEED))
    for batch, trainer in enumerate((1, 2, 1, 2)):
        apply(side.store, side.do(order_of(batch, range(10)), trainer=trainer))
    assert side.store.state_dict()["seen"].item() == 40.0


def test_on_the_server_each_part_draws_from_its_own_seed() -> None:
    side = ServerSide(workload_of(lambda: Net(0.5)), passes=Passes(seed=SEED, batch_size=5))
    inputs, _ = fetch(side.workload.train, range(5))
    model = make_model(side.workload, SEED)
    for part in range(2):
        outputs = side.compute.forward(1, 4, 7, inputs)
        with SeededForward(step_seed(SEED, 4, 7, part)):
            assert torch.equal(outputs, model(inputs))
        side.compute.backward(1, torch.ones_like(outputs))


def test_on_the_server_handing_in_without_forward_is_a_broken_promise() -> None:
    side = ServerSide(workload_of(plain_net), passes=Passes(seed=SEED))
    side.do(order_of(0, range(8)), trainer=2)
    message = r"^trainer 2 hands in a batch without forward$"
    with pytest.raises(AssertionError, match=message):
        side.compute.contribution(2, Trained(0, 0, 8, 0.0, torch.ones(8, 2)))


def test_on_the_server_evaluation_sees_the_weights_it_was_opened_with() -> None:
    side = ServerSide(workload_of(lambda: Net(0.5)), passes=Passes(seed=SEED))
    inputs, _ = fetch(side.workload.test, range(10))
    apply(side.store, side.do(order_of(0, range(20))))
    side.compute.open_evaluation()
    model = make_model(side.workload, SEED).eval()
    model.load_state_dict(side.store.state_dict())
    expected = model(inputs)
    assert torch.equal(side.compute.evaluate(1, inputs), expected)
    apply(side.store, side.do(order_of(1, range(20))))
    assert torch.equal(side.compute.evaluate(2, inputs), expected)
    side.compute.open_evaluation()
    assert not torch.equal(side.compute.evaluate(1, inputs), expected)


def test_on_the_server_evaluation_is_without_a_graph_and_leaves_training_mode_alone() -> None:
    side = ServerSide(workload_of(lambda: Net(0.5)), passes=Passes(seed=SEED))
    inputs, _ = fetch(side.workload.test, range(10))
    before, buffers = copies(side.do(order_of(0, range(20))))
    assert not side.compute.evaluate(1, inputs).requires_grad
    fresh = ServerSide(workload_of(lambda: Net(0.5)), passes=Passes(seed=SEED))
    fresh.compute.evaluate(1, inputs)
    after, other_buffers = copies(fresh.do(order_of(0, range(20))))
    assert same(before, after)
    assert same(buffers, other_buffers)


def test_on_the_server_orders_go_out_with_a_version_alone_and_any_trainer_may_join() -> None:
    side = ServerSide(workload_of(plain_net), passes=Passes(seed=SEED))
    side.store.version = 7
    for order in (order_of(0, range(8)), SLICE):
        handed_out = side.compute.hand_out(1, order)
        assert handed_out == order
        assert handed_out.weights is not None
        assert (handed_out.weights.version, handed_out.weights.values) == (7, None)
    side.compute.check_layout(1, None)


def test_on_the_server_outputs_are_float32_in_bfloat16_too() -> None:
    passes = Passes(seed=SEED, bfloat16=True)
    rough, plain = (
        ServerSide(workload_of(plain_net), passes=p) for p in (passes, Passes(seed=SEED))
    )
    inputs, _ = fetch(rough.workload.train, range(8))
    outputs, wanted = (side.compute.forward(1, 0, 0, inputs) for side in (rough, plain))
    assert outputs.dtype == torch.float32
    assert 0.0 < (outputs - wanted).abs().max() < 0.05
    gradients, exact = (ones_in(side, 1, outputs).gradients for side in (rough, plain))
    for gradient, wanted_gradient in zip(gradients, exact, strict=True):
        assert gradient is not None
        assert wanted_gradient is not None
        assert gradient.dtype == torch.float32
        assert (gradient - wanted_gradient).norm() < 0.05 * wanted_gradient.norm()


# --- on the trainers


class TrainerSide:
    """A server that computes nothing, and one trainer."""

    def __init__(
        self,
        workload: Workload,
        *,
        by_message: bool,
        passes: Passes | None = None,
        trainer: int = 1,
    ) -> None:
        passes = passes or Passes(seed=SEED)
        self.trainer = trainer
        self.store = store_of(workload)
        self.compute = OnTrainers(self.store)
        self.model = make_model(workload, seed=99)  # what counts are the server's weights
        flat = FlatModel(self.model)
        self.mailbox = private_mailbox(flat)
        if not by_message:
            self.compute.attach(trainer, self.mailbox)
        flat.move_to(self.mailbox.weights, keep_values=False)
        self.worker = TrainerSideWorker(
            workload,
            self.model,
            flat,
            self.mailbox,
            passes,
            Loader(workload.train, passes),
            by_message=by_message,
        )

    def do(self, order: Train) -> Contribution:
        result = self.worker.do(self.compute.hand_out(self.trainer, order))
        assert isinstance(result, Trained)
        return self.compute.contribution(self.trainer, result)


WAYS = pytest.mark.parametrize("by_message", [False, True], ids=["mailbox", "message"])


def flat_weights(store: Store, num_bytes: int) -> Tensor:
    into = torch.empty(num_bytes, dtype=torch.uint8)
    store.copy_weights(into)
    return into


def weights_of(order: Train | Evaluate) -> Weights:
    assert order.weights is not None
    return order.weights


def push_of(compute: OnTrainers, version: int = 0) -> Trained:
    """Gradients and buffers that are all zero, by message."""
    flat = compute.flat
    gradients = torch.zeros(flat.trained.stop, dtype=torch.uint8)
    buffers = torch.zeros(flat.buffers.stop - flat.buffers.start, dtype=torch.uint8)
    return Trained(0, 0, 8, 0.0, Push(version, (), gradients, buffers))


def test_by_message_the_first_order_brings_all_weights_and_later_ones_what_moves() -> None:
    compute = OnTrainers(store := store_of(workload_of(Net)))
    flat = compute.flat
    assert 0 < flat.trained.stop < flat.moving_bytes < flat.total_bytes
    first = weights_of(compute.hand_out(1, order_of(0, range(8))))
    assert first.values is not None
    assert torch.equal(first.values, flat_weights(store, flat.total_bytes))
    apply(store, compute.contribution(1, push_of(compute)))
    second = weights_of(compute.hand_out(1, order_of(1, range(8))))
    assert second.values is not None
    assert torch.equal(second.values, flat_weights(store, flat.moving_bytes))
    assert (first.version, second.version) == (0, 1)
    other = weights_of(compute.hand_out(2, order_of(2, range(8))))
    assert other.values is not None
    assert len(other.values) == flat.total_bytes


def test_a_message_does_not_change_with_the_next_update() -> None:
    compute = OnTrainers(store := store_of(workload_of(plain_net)))
    values = weights_of(compute.hand_out(1, order_of(0, range(8)))).values
    assert values is not None
    before = values.clone()
    store.apply([torch.ones_like(p) for p in compute.flat.parameters])
    assert torch.equal(values, before)


def mailbox_for(compute: OnTrainers, trainer: int = 1) -> Mailbox:
    mailbox = private_mailbox(compute.flat)
    compute.attach(trainer, mailbox)
    return mailbox


def test_a_mailbox_is_written_in_place_first_all_of_it_and_then_what_moves() -> None:
    compute = OnTrainers(store := store_of(workload_of(Net)))
    mailbox, moving = mailbox_for(compute), compute.flat.moving_bytes
    first = weights_of(compute.hand_out(1, order_of(0, range(8))))
    assert first.values is None
    assert torch.equal(mailbox.weights, flat_weights(store, compute.flat.total_bytes))
    apply(store, compute.contribution(1, Trained(0, 0, 8, 0.0, Push(0))))
    mailbox.weights.fill_(255)
    second = weights_of(compute.hand_out(1, order_of(1, range(8))))
    assert (second.values, second.version) == (None, 1)
    assert torch.equal(mailbox.weights[:moving], flat_weights(store, moving))
    assert mailbox.weights[moving:].unique().tolist() == [255]
    assert mailbox.gradients.unique().tolist() == [0]


def test_nobody_writes_into_the_mailbox_of_another_trainer() -> None:
    compute = OnTrainers(store_of(workload_of(Net)))
    mine, other = mailbox_for(compute, 1), mailbox_for(compute, 2)
    compute.hand_out(1, order_of(0, range(8)))
    assert mine.weights.unique().numel() > 1
    assert other.weights.unique().tolist() == [0]


def test_weights_that_a_trainer_holds_already_are_not_sent_again() -> None:
    compute = OnTrainers(store := store_of(workload_of(Net)))
    assert weights_of(compute.hand_out(1, SLICE)).values is not None
    again = weights_of(compute.hand_out(1, SLICE))
    assert (again.values, again.version) == (None, 0)
    training = weights_of(compute.hand_out(1, order_of(0, range(8))))
    assert (training.values, training.version) == (None, 0)
    apply(store, compute.contribution(1, push_of(compute)))
    assert weights_of(compute.hand_out(1, SLICE)).values is not None
    store.apply([torch.ones_like(p) for p in compute.flat.parameters])
    newer = weights_of(compute.hand_out(1, SLICE))
    assert newer.values is not None
    assert newer.version == 2


def test_weights_that_a_mailbox_holds_already_are_not_written_again() -> None:
    compute = OnTrainers(store := store_of(workload_of(Net)))
    mailbox = mailbox_for(compute)
    compute.hand_out(1, SLICE)
    mailbox.weights.fill_(255)
    compute.hand_out(1, SLICE)
    assert mailbox.weights.unique().tolist() == [255]
    store.apply([torch.ones_like(p) for p in compute.flat.parameters])
    compute.hand_out(1, SLICE)
    moving = compute.flat.moving_bytes
    assert torch.equal(mailbox.weights[:moving], flat_weights(store, moving))


@WAYS
def test_after_a_step_weights_are_sent_though_the_version_is_the_same(by_message: bool) -> None:
    """The step has changed the buffers of the trainer's model, and was not applied."""
    side = TrainerSide(workload_of(Net), by_message=by_message)
    first, buffers = copies(side.do(order_of(0, POSITIVE)))
    assert side.store.version == 0
    second, other_buffers = copies(side.do(order_of(0, POSITIVE)))
    assert same(first, second)
    assert same(buffers, other_buffers)


@WAYS
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_on_a_trainer_each_step_gives_what_it_gives_on_the_server(
    by_message: bool, dropout: float
) -> None:
    passes = Passes(seed=SEED, batch_size=16)
    workload = workload_of(lambda: Net(dropout))
    trainer = TrainerSide(workload, by_message=by_message, passes=passes)
    server = ServerSide(workload, passes=passes)
    for batch, indices in enumerate((POSITIVE, NEGATIVE, POSITIVE)):
        order = order_of(batch, indices)
        mine, others = trainer.do(order), server.do(order)
        assert (mine.version, others.version) == (batch, batch)
        for one, other in zip(mine.gradients, others.gradients, strict=True):
            assert (one is None) is (other is None)
            if one is not None:
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        for one, other in zip(mine.buffers, others.buffers, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        apply(trainer.store, mine)
        apply(server.store, others)
    for name, value in trainer.store.state_dict().items():
        torch.testing.assert_close(value, server.store.state_dict()[name], rtol=1e-5, atol=1e-6)


def test_a_push_by_message_equals_one_by_mailbox_bit_for_bit() -> None:
    passes = Passes(seed=SEED, batch_size=16)
    workload = workload_of(lambda: Net(0.5))
    sides = [TrainerSide(workload, by_message=way, passes=passes) for way in (False, True)]
    for batch, indices in enumerate((POSITIVE, NEGATIVE, POSITIVE)):
        one, other = (side.do(order_of(batch, indices)) for side in sides)
        assert one.version == other.version == batch
        assert same(one.gradients, other.gradients)
        assert same(list(one.buffers), list(other.buffers))
        for side, contribution in zip(sides, (one, other), strict=True):
            apply(side.store, contribution)
    states = [side.store.state_dict() for side in sides]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@WAYS
def test_on_a_trainer_a_parameter_that_was_not_used_has_no_gradient(by_message: bool) -> None:
    side = TrainerSide(workload_of(Net), by_message=by_message)
    missing = []
    for batch, indices in enumerate((POSITIVE, NEGATIVE, POSITIVE)):
        gradients = side.do(order_of(batch, indices)).gradients
        pairs = zip(side.store.names, gradients, strict=True)
        missing.append([name for name, gradient in pairs if gradient is None])
    assert missing == [[], ["sometimes.weight", "sometimes.bias"], []]


@WAYS
def test_on_a_trainer_a_parameter_used_in_one_part_alone_has_that_parts_gradient(
    by_message: bool,
) -> None:
    workload = workload_of(Net)
    order = order_of(0, [*NEGATIVE[:10], *POSITIVE[:10]])
    passes = Passes(seed=SEED, batch_size=10)
    mine = TrainerSide(workload, by_message=by_message, passes=passes).do(order)
    others = ServerSide(workload, passes=passes).do(order)
    for one, other in zip(mine.gradients, others.gradients, strict=True):
        assert one is not None
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@WAYS
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_on_a_trainer_parts_add_up_to_the_joint_batch(by_message: bool, batch_size: int) -> None:
    workload, order = workload_of(plain_net), order_of(0, range(8))

    def gradients(size: int) -> Sequence[Tensor | None]:
        passes = Passes(seed=SEED, batch_size=size)
        return TrainerSide(workload, by_message=by_message, passes=passes).do(order).gradients

    for one, other in zip(gradients(8), gradients(batch_size), strict=True):
        torch.testing.assert_close(other, one, rtol=0.0, atol=1e-6)


@WAYS
def test_on_a_trainer_nothing_of_an_order_is_left_for_the_next_one(by_message: bool) -> None:
    passes = Passes(seed=SEED, batch_size=4)
    side = TrainerSide(workload_of(plain_net), by_message=by_message, passes=passes)
    first, _ = copies(side.do(order_of(0, range(8))))
    again, _ = copies(side.do(order_of(0, range(8))))
    assert same(first, again)
    assert all(parameter.grad is None for parameter in side.model.parameters())


@WAYS
def test_on_a_trainer_a_buffer_that_forward_replaces_reaches_the_server(by_message: bool) -> None:
    side = TrainerSide(workload_of(Counting), by_message=by_message)
    for batch in range(3):
        apply(side.store, side.do(order_of(batch, range(10))))
    assert side.store.state_dict()["seen"].item() == 30.0


@WAYS
def test_blocks_hold_all_gradients(by_message: bool) -> None:
    """One spoiled element in any gradient is seen in them."""
    side = TrainerSide(workload_of(Net), by_message=by_message)
    contribution = side.do(order_of(0, POSITIVE))
    assert contribution.blocks is not None
    assert len(contribution.blocks) == 1
    for gradient in contribution.gradients:
        assert gradient is not None
        kept = gradient.view(-1)[-1].clone()
        gradient.view(-1)[-1] = float("nan")
        assert torch.stack([block.isnan().sum() for block in contribution.blocks]).sum() == 1
        gradient.view(-1)[-1] = kept


@WAYS
def test_what_an_unused_parameter_left_in_the_mailbox_fails_no_check(by_message: bool) -> None:
    side = TrainerSide(workload_of(Net), by_message=by_message)
    side.do(order_of(0, POSITIVE))
    side.mailbox.gradients.view(torch.float32).fill_(float("nan"))
    contribution = side.do(order_of(1, NEGATIVE))
    check_gradients(contribution.gradients, side.store.names, contribution.blocks)


class Another(Net):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)


@pytest.mark.parametrize("layout", [None, "", FlatModel(Another()).describe()])
def test_a_trainer_with_another_layout_is_refused_by_its_rank(layout: str | None) -> None:
    compute = OnTrainers(store_of(workload_of(Net)))
    with pytest.raises(ConfigError) as caught:
        compute.check_layout(7, layout)
    assert str(caught.value) == (
        "the model that trainer rank 7 made differs from the server's in shapes, dtypes or order "
        "of its tensors; model() must give the same on every rank"
    )
    assert caught.value.exit_code == 2


def test_a_trainer_with_the_same_layout_is_welcome() -> None:
    compute = OnTrainers(store_of(workload_of(Net)))
    compute.check_layout(7, FlatModel(Net()).describe())


def test_an_order_goes_out_with_its_weights_and_is_otherwise_the_same() -> None:
    compute = OnTrainers(store_of(workload_of(Net)))
    order = order_of(2, range(8))
    assert compute.hand_out(1, order) == order
    assert compute.hand_out(1, SLICE) == SLICE
    compute.open_evaluation()
    assert order.weights is None
