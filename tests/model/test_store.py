"""The state of training: one update at a time, as a plain torch loop would make it."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ps.model.flat import FlatModel
from ps.model.optimizer import make_optimizer
from ps.model.store import Store
from ps.settings.errors import CheckpointUnusable, TrainingFailed


def model_of(*values: float) -> nn.Module:
    return nn.ParameterList([nn.Parameter(torch.tensor([value, value])) for value in values])


def store_of(*values: float, momentum: float = 0.0, **options: Any) -> Store:
    model = model_of(*values)
    return Store(model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=momentum), **options)


def grads(*values: float) -> list[Tensor | None]:
    return [torch.tensor([value, value]) for value in values]


def values_of(store: Store) -> list[Tensor]:
    return [value.clone() for value in store.state_dict().values()]


def test_apply_is_one_optimizer_step_and_raises_the_version_by_one() -> None:
    store = store_of(5.0, 7.0)
    assert store.version == 0
    assert store.apply(grads(1.0, 2.0)) == store.version == 1
    assert store.state_dict()["0"].tolist() == [4.0, 4.0]
    assert store.state_dict()["1"].tolist() == [5.0, 5.0]


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.3},
    "Adam": {"lr": 0.1, "weight_decay": 0.3},
    "AdamW": {"lr": 0.1, "weight_decay": 0.3},
    "RMSprop": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.3},
    "Adagrad": {"lr": 0.1, "weight_decay": 0.3},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("flat", [False, True], ids=["as-it-is", "flat"])
def test_a_parameter_without_gradient_fares_as_in_a_plain_loop(name: str, flat: bool) -> None:
    """Bit for bit: neither its momentum nor its weight decay goes on in such a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    plain = copy.deepcopy(model)
    optimizer = getattr(torch.optim, name)(model.parameters(), **OPTIMIZERS[name])
    plain_optimizer = getattr(torch.optim, name)(plain.parameters(), **OPTIMIZERS[name])
    store = Store(model, optimizer)
    if flat:
        store.flatten()
    for step in range(8):
        missing = {2: (0, 1), 3: (0,), 5: (1, 2, 3), 6: (3,)}.get(step, ())
        gradients = [
            None if place in missing else torch.randn_like(parameter)
            for place, parameter in enumerate(plain.parameters())
        ]
        for parameter, gradient in zip(plain.parameters(), gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        plain_optimizer.step()
        before = values_of(store)
        store.apply(gradients)
        after = values_of(store)
        assert all(torch.equal(before[place], after[place]) for place in missing)
        assert all(torch.equal(a, b) for a, b in zip(after, plain.parameters(), strict=True))
    assert store.version == 8
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_names_that_no_gradient_has_reached_are_known_also_after_restoring() -> None:
    store, restored = store_of(1.0, 2.0, 3.0), store_of(0.0, 0.0, 0.0)
    assert store.untrained == {"0", "1", "2"}
    store.apply([None, torch.ones(2), None])
    restored.restore(from_file(store.state()))
    assert store.untrained == restored.untrained == {"0", "2"}
    store.apply([torch.ones(2), None, None])
    assert store.untrained == {"2"}
    store.apply(grads(0.0, 0.0, 0.0))
    assert store.untrained == set()


def test_clip_norm_limits_the_gradients_that_are_there_together() -> None:
    """Gradients of a larger norm are clipped in place, others are not."""
    store = store_of(0.0, 0.0, 0.0, clip_norm=5.1)
    first, third = torch.tensor([30.0, 0.0]), torch.tensor([0.0, 40.0])
    store.apply([first, None, third])
    assert first.tolist() == pytest.approx([3.06, 0.0], rel=1e-5)
    store.apply([None, torch.tensor([3.0, -4.0]), None])
    assert [value.tolist() for value in values_of(store)] == [
        pytest.approx([-3.06, 0.0], rel=1e-5),
        [-3.0, 4.0],
        pytest.approx([0.0, -4.08], rel=1e-5),
    ]


def test_the_schedule_counts_updates_and_goes_on_from_the_one_that_was_reached() -> None:
    first, second = (store_of(0.0, lr_factor=lambda version: 0.5**version) for _ in range(2))
    for _ in range(2):
        first.apply(grads(1.0))
    assert first.state_dict()["0"].tolist() == [-1.5, -1.5]
    second.restore(from_file(first.state()))
    second.apply(grads(1.0))
    assert second.state_dict()["0"].tolist() == [-1.75, -1.75]


def test_a_frozen_parameter_needs_no_gradient_and_keeps_its_value() -> None:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    model[0].weight.requires_grad = False
    frozen = model[0].weight.item()
    store = Store(model, torch.optim.SGD([model[1].weight], lr=1.0))
    assert store.names == ["1.weight"]
    store.apply([torch.ones(1, 1)])
    assert store.state_dict()["0.weight"].item() == frozen


@pytest.mark.parametrize("flat", [False, True], ids=["as-it-is", "flat"])
def test_a_replica_is_a_copy_of_the_version_it_was_refreshed_to(flat: bool) -> None:
    store = store_of(5.0)
    if flat:
        store.flatten()
    replica = store.replica()
    store.apply(grads(1.0))
    assert (replica.version, replica.parameters[0].tolist()) == (0, [5.0, 5.0])
    store.refresh(replica)
    assert (replica.version, replica.parameters[0].tolist()) == (1, [4.0, 4.0])


def test_buffers_of_the_latest_step_become_the_stores() -> None:
    model = nn.BatchNorm1d(2)
    store = Store(model, torch.optim.SGD(model.parameters(), lr=0.1))
    replica = store.replica()
    replica.module(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
    store.take_buffers(replica.buffers)
    assert store.state_dict()["running_mean"].tolist() == pytest.approx([0.2, 0.4])
    assert store.state_dict()["num_batches_tracked"].item() == 1


def kinds_of_tensors() -> nn.Module:
    """BatchNorm's counter is int64; the frozen layer never changes."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last), nn.BatchNorm2d(4), nn.Flatten()
    )
    model.append(nn.Linear(4, 4).requires_grad_(False))
    return model


def flat_store() -> tuple[nn.Module, Store, FlatModel]:
    model = kinds_of_tensors()
    parameters = [p for p in model.parameters() if p.requires_grad]
    store = Store(model, torch.optim.SGD(parameters, lr=1.0, momentum=0.5))
    return model, store, store.flatten()


def test_copied_weights_are_the_model_in_the_layout_of_another_one() -> None:
    model, store, flat = flat_store()
    other = kinds_of_tensors()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    buffer = torch.zeros(flat.total_bytes, dtype=torch.uint8)
    FlatModel(other).move_to(buffer, keep_values=False)
    store.copy_weights(buffer)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


def test_the_moving_part_brings_an_update_and_buffers_and_leaves_the_rest_alone() -> None:
    model, store, flat = flat_store()
    buffer = torch.zeros(flat.total_bytes, dtype=torch.uint8)
    store.copy_weights(buffer)
    before = buffer.clone()
    store.apply([torch.ones_like(p) for p in model.parameters() if p.requires_grad])
    store.take_buffers([torch.full_like(b, 7) for b in model.buffers()])
    assert torch.equal(buffer, before)
    buffer[flat.moving_bytes :].fill_(255)
    store.copy_weights(buffer[: flat.moving_bytes])
    assert buffer[flat.moving_bytes :].unique().tolist() == [255]
    parameters = zip(flat.trained.views(buffer), flat.trained.views(before), strict=True)
    assert all(torch.equal(new, old - 1.0) for new, old in parameters)
    assert all(b.unique().tolist() == [7] for b in flat.buffers.views(buffer))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.decoder = nn.Linear(4, 4)
        self.decoder.weight = self.encoder.weight


class MixedDtypes(nn.Module):
    """Empty tensors and scalars too."""

    def __init__(self) -> None:
        super().__init__()
        for name, dtype, shape in (
            ("a", torch.float32, (3, 2)),
            ("b", torch.float64, (5,)),
            ("c", torch.bfloat16, (7,)),
            ("empty", torch.float32, (0, 3)),
            ("scalar", torch.float64, ()),
        ):
            self.register_parameter(name, nn.Parameter(torch.randn(shape).to(dtype)))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "tied": Tied,
    "batch norm, channels last, frozen": kinds_of_tensors,
    "mixed dtypes": MixedDtypes,
}
GOING_ON: dict[str, dict[str, Any]] = {
    "SGD": {},
    "SGD with momentum": {"momentum": 0.9, "weight_decay": 0.1},
    "RMSprop with momentum": {"momentum": 0.9},
    **{name: {} for name in ("Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam")},
    **{name: {} for name in ("RAdam", "RMSprop", "Rprop")},
}


def going_on(
    make: Callable[[], nn.Module], optimizer: str, *, values: int = 0, **options: Any
) -> Store:
    """A store whose model is moved by `values`, so that nothing is equal before restoring."""
    model = make()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(values)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    name = optimizer.split()[0]
    return Store(model, make_optimizer(name, trained, **{"lr": 0.1} | options))


def update(store: Store, seed: int) -> None:
    """One that depends on the seed alone; some parameters get no gradient in some."""
    generator = torch.Generator().manual_seed(seed)
    replica = store.replica()
    gradients: list[Tensor | None] = []
    for place, parameter in enumerate(replica.parameters):
        gradient = torch.zeros_like(parameter)
        gradient.copy_(torch.randn(parameter.shape, generator=generator))
        gradients.append(None if place == seed % 5 else gradient)
    store.apply(gradients)
    store.take_buffers([buffer + seed for buffer in replica.buffers])


def from_file(state: object) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def differs(a: Any, b: Any, where: str = "") -> str | None:
    """The first place at which two states are not the same bit for bit."""
    if isinstance(a, Mapping):
        if a.keys() != b.keys():
            return where or "names"
        found = (differs(a[key], b[key], f"{where} {key}") for key in a)
        return next((place for place in found if place), None)
    if isinstance(a, Tensor):
        same = (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        return None if same and torch.equal(a, b) else where
    return None if (type(a), a) == (type(b), b) else where


@pytest.mark.parametrize(
    ("model", "optimizer", "flat"),
    [
        *(("plain", optimizer, None) for optimizer in GOING_ON),
        *(
            (m, o, f)
            for m in MODELS
            for o in ("SGD with momentum", "Adam")
            for f in ("after", "before")
        ),
        *((model, "Adam", None) for model in MODELS if model != "plain"),
    ],
)
def test_a_restored_store_goes_on_bit_for_bit(model: str, optimizer: str, flat: str | None) -> None:
    """flat tells whether it is restored before it is laid out in one buffer, or after."""
    make, options = MODELS[model], GOING_ON[optimizer]
    first = going_on(make, optimizer, **options)
    second = going_on(make, optimizer, values=1, **options)
    if flat:
        first.flatten()
    for seed in range(4):
        update(first, seed)
    state = from_file(first.state())
    if flat == "before":
        second.flatten()
    second.restore(state)
    if flat == "after":
        second.flatten()
    assert second.version == 4
    assert differs(first.state_dict(), second.state_dict()) is None
    for seed in range(4, 8):
        update(first, seed)
        update(second, seed)
    assert differs(first.state_dict(), second.state_dict()) is None
    assert differs(first.state(), second.state()) is None


@pytest.mark.parametrize("flat", [False, True], ids=["as-it-is", "flat"])
@pytest.mark.parametrize("model", MODELS)
def test_a_state_is_a_copy_on_which_later_updates_have_no_effect(model: str, flat: bool) -> None:
    store = going_on(MODELS[model], "Adam")
    if flat:
        store.flatten()
    update(store, 1)
    state = store.state()
    before = copy.deepcopy(state)
    update(store, 2)
    assert differs(state, before) is None
    assert differs(store.state(), before) is not None


@pytest.mark.parametrize("flat", [False, True], ids=["as-it-is", "flat"])
@pytest.mark.parametrize("make", [kinds_of_tensors, Tied])
def test_a_file_is_a_plain_modules_and_holds_each_value_once_and_nothing_beside_it(
    make: Callable[[], nn.Module], flat: bool
) -> None:
    torch.manual_seed(0)
    model = make()
    store = Store(model, torch.optim.SGD(model.parameters(), lr=1.0))
    expected = copy.deepcopy(model.state_dict())
    if flat:
        store.flatten()
    for state in (store.state_dict(), store.state()["model"]):
        loaded = from_file(state)
        assert list(loaded) == list(expected)
        assert differs(loaded, expected) is None
        for name, value in loaded.items():
            assert value.untyped_storage().nbytes() == value.numel() * value.element_size(), name
        if make is Tied:
            assert loaded["encoder.weight"].data_ptr() == loaded["decoder.weight"].data_ptr()
    assert "param_groups" not in store.state()["optimizer"]


def wider() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))


def renamed() -> nn.Module:
    return nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(4, 2)})


def swapped() -> nn.Module:
    return nn.ModuleDict({"b": nn.Linear(4, 2), "a": nn.Linear(3, 4)})


def partly_frozen() -> nn.Module:
    model = plain()
    model.get_parameter("0.weight").requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("there", "here", "difference"),
    [
        (plain, wider, r"1.weight .*\[2, 4\] there .*\[3, 4\] here"),
        (plain, renamed, "a.weight is nothing there"),
        (renamed, swapped, "a.weight in the place of b.weight"),
        (plain, partly_frozen, "0.weight in the place of 0.bias"),
        (partly_frozen, plain, "0.bias in the place of 0.weight"),
    ],
)
def test_the_state_of_another_model_is_refused_and_nothing_is_changed(
    there: Callable[[], nn.Module], here: Callable[[], nn.Module], difference: str
) -> None:
    other, own = going_on(there, "SGD", momentum=0.9), going_on(here, "SGD", momentum=0.9)
    update(other, 1)
    update(own, 2)
    before = own.state()
    with pytest.raises(CheckpointUnusable, match=difference):
        own.restore(other.state())
    assert differs(own.state(), before) is None


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_what_is_typed_anew_is_used_after_restoring(name: str) -> None:
    model = plain()
    optimizer = make_optimizer(name, list(model.parameters()), lr=0.1, weight_decay=0.0)
    first, anew = Store(model, optimizer), going_on(plain, name, lr=0.5, weight_decay=0.25)
    update(first, 1)
    anew.restore(from_file(first.state()))
    for group in optimizer.param_groups:
        group.update(lr=0.5, weight_decay=0.25)
    for store in (anew, first):
        update(store, 2)
    assert differs(anew.state(), first.state()) is None
    [options] = anew.optimizer.options
    assert (options["lr"], options["weight_decay"]) == (0.5, 0.25)


class BreaksOff(torch.optim.SGD):
    """Its second step changes the first parameter and no more."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        if self.steps == 2:
            self.param_groups[0]["params"][0].add_(1.0)
            raise RuntimeError("out of memory")
        super().step(closure)


def test_a_state_in_the_middle_of_an_update_is_refused() -> None:
    model = model_of(1.0, 2.0)
    store = Store(model, BreaksOff(model.parameters(), lr=1.0))
    store.apply(grads(1.0, 1.0))
    assert store.state()["version"] == 1
    with pytest.raises(RuntimeError, match="out of memory"):
        store.apply(grads(1.0, 1.0))
    with pytest.raises(TrainingFailed):
        store.state()


def test_a_state_is_refused_once_buffers_were_taken_in_part() -> None:
    """Their order would be done again, although its gradient was applied."""
    store = going_on(kinds_of_tensors, "SGD")
    update(store, 1)
    buffers = [buffer.clone() for buffer in store.replica().buffers]
    with pytest.raises(RuntimeError):
        store.take_buffers([*buffers[:-1], torch.zeros(5, dtype=torch.int64)])
    with pytest.raises(TrainingFailed):
        store.state()


class Graph(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        edges = torch.tensor([[0, 1], [1, 0]])
        with torch.sparse.check_sparse_tensor_invariants(enable=False):
            matrix = torch.sparse_coo_tensor(edges, torch.tensor([2.0, 3.0]), (2, 2))
        self.register_buffer("adjacent", matrix.coalesce())


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
def test_a_sparse_buffer_is_part_of_the_state() -> None:
    models = Graph(), Graph()
    first, second = (Store(m, torch.optim.SGD(m.parameters(), lr=1.0)) for m in models)
    first.apply([torch.ones(2, 2), torch.ones(2)])
    state = first.state()
    models[0].get_buffer("adjacent").mul_(2)
    second.restore(from_file(state))
    assert second.state_dict()["adjacent"].to_dense().tolist() == [[0.0, 2.0], [3.0, 0.0]]
    assert torch.equal(second.state_dict()["weight"], state["model"]["weight"])
