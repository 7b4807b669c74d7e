"""The state of training: one update at a time, as a plain torch loop would make it."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ps.model.flat import FlatModel
from ps.model.gradients import check_gradients, mean_gradients
from ps.model.optimizer import make_optimizer
from ps.model.store import Store
from ps.settings.errors import CheckpointUnusable, ConfigError, TrainingFailed


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
def test_a_gradient_that_is_not_finite_is_named(bad: float) -> None:
    store = store_of(5.0, 7.0)
    with pytest.raises(TrainingFailed, match=r"^the gradient of 1 is not finite$"):
        check_gradients([torch.ones(2), torch.tensor([1.0, bad])], store.names)
    with pytest.raises(TrainingFailed, match=r"^the gradient of 0 is not finite$"):
        check_gradients([torch.tensor([bad, bad]), None], store.names)


def test_infinities_that_cancel_each_other_are_seen() -> None:
    gradient = torch.tensor([float("inf"), float("-inf")])
    with pytest.raises(TrainingFailed, match=r"^the gradient of 0 is not finite$"):
        check_gradients([gradient], ["0"])


def test_a_check_changes_nothing_and_gives_nothing_to_the_optimizer() -> None:
    store = store_of(5.0, momentum=0.9)
    gradient = torch.tensor([1.0, 3.0])
    check_gradients([gradient], store.names)
    assert gradient.tolist() == [1.0, 3.0]
    assert (store.version, store.untrained) == (0, {"0"})
    assert store.state_dict()["0"].tolist() == [5.0, 5.0]


def test_a_missing_gradient_is_good_unless_all_are() -> None:
    store = store_of(5.0, 7.0)
    check_gradients([torch.ones(2), None], store.names)
    check_gradients([None, torch.ones(2)], store.names)
    with pytest.raises(TrainingFailed, match=r"^no gradient reached any parameter$"):
        check_gradients([None, None], store.names)


@pytest.mark.parametrize(
    "gradient",
    [
        torch.tensor([3e38, 3e38]),
        torch.tensor([-3e38, -3e38]),
        torch.tensor([3e38, 3e38], dtype=torch.bfloat16),
        torch.tensor([1e308, 1.7e308], dtype=torch.float64),
        torch.tensor([60000.0, 60000.0], dtype=torch.float16),
    ],
)
def test_finite_gradients_whose_sum_overflows_are_good(gradient: Tensor) -> None:
    assert not math.isfinite(gradient.sum().item())
    check_gradients([gradient], ["0"])


def test_complex_gradients_are_checked_in_both_parts() -> None:
    store = store_of(0.0)
    check_gradients([torch.tensor([1 + 2j, 3j])], store.names)
    with pytest.raises(TrainingFailed, match=r"^the gradient of 0 is not finite$"):
        check_gradients([torch.tensor([1 + 2j, complex(1.0, float("nan"))])], store.names)


def sparse(*row: float) -> Tensor:
    """All rows but one are zero."""
    places, values = torch.tensor([[1]]), torch.tensor([row])
    return torch.sparse_coo_tensor(places, values, (4, len(row)), check_invariants=False)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_sparse_gradients_are_checked_too(bad: float) -> None:
    good = sparse(3e38, 3e38)
    spoiled = sparse(1.0, bad)
    store = store_of(0.0)
    check_gradients([good], store.names)
    with pytest.raises(TrainingFailed, match=r"^the gradient of 0 is not finite$"):
        check_gradients([spoiled], store.names)


def test_blocks_are_looked_at_first_and_gradients_alone_are_refused() -> None:
    """They hold all gradients, and may hold what is none."""
    store, bad = store_of(0.0, 0.0), torch.tensor([1.0, float("nan")])
    check_gradients([torch.ones(2), bad], store.names, blocks=[torch.ones(2), torch.ones(2)])
    check_gradients([torch.ones(2), None], store.names, blocks=[torch.ones(2), bad])
    with pytest.raises(TrainingFailed, match=r"^the gradient of 1 is not finite$"):
        check_gradients([torch.ones(2), bad], store.names, blocks=[torch.cat([torch.ones(2), bad])])


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
        before = store_values(store)
        store.apply(gradients)
        after = store_values(store)
        assert all(torch.equal(before[place], after[place]) for place in missing)
        assert all(torch.equal(a, b) for a, b in zip(after, plain.parameters(), strict=True))
    assert store.version == 8


def store_values(store: Store) -> list[Tensor]:
    return [value.clone() for value in store.state_dict().values()]


def test_the_names_that_no_gradient_has_reached_are_known() -> None:
    store = store_of(1.0, 2.0, 3.0)
    assert store.untrained == {"0", "1", "2"}
    store.apply([None, torch.ones(2), None])
    assert store.untrained == {"0", "2"}
    store.apply([torch.ones(2), None, None])
    assert store.untrained == {"2"}
    store.apply(grads(0.0, 0.0, 0.0))
    assert store.untrained == set()


def test_gradients_are_not_kept() -> None:
    model = model_of(1.0, 2.0)
    store = Store(model, torch.optim.SGD(model.parameters(), lr=1.0))
    store.apply([torch.ones(2), None])
    assert [parameter.grad for parameter in model.parameters()] == [None, None]


def test_huge_finite_gradients_whose_norm_overflows_are_applied() -> None:
    store = store_of(0.0)
    check_gradients(grads(1e30), store.names)
    store.apply(grads(1e30))
    assert store.state_dict()["0"].tolist() == pytest.approx([-1e30, -1e30])


def test_clip_norm_limits_all_gradients_together() -> None:
    store = store_of(0.0, 0.0, clip=1.0)
    store.apply([torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])])
    assert store.state_dict()["0"].tolist() == pytest.approx([-0.6, 0.0], abs=1e-5)
    assert store.state_dict()["1"].tolist() == pytest.approx([0.0, -0.8], abs=1e-5)


def test_clip_norm_counts_what_is_there_and_clips_in_place() -> None:
    store = store_of(0.0, 0.0, 0.0, clip=1.0)
    first, third = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    store.apply([first, None, third])
    assert first.tolist() == pytest.approx([0.6, 0.0], abs=1e-5)
    assert store.state_dict()["1"].tolist() == [0.0, 0.0]
    assert store.state_dict()["2"].tolist() == pytest.approx([0.0, -0.8], abs=1e-5)


def test_gradients_within_the_norm_are_not_clipped() -> None:
    store = store_of(0.0, clip=5.1)
    store.apply([torch.tensor([3.0, -4.0])])
    assert store.state_dict()["0"].tolist() == [-3.0, 4.0]


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
    store.take_buffers(replica.module.buffers())
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
    store = store_of(0.0, 0.0, 0.0, clip=1.0)
    store.apply([torch.tensor([3e30, 0.0]), None, torch.tensor([0.0, 4e30])])
    assert store.state_dict()["0"].tolist() == pytest.approx([-0.6, 0.0], rel=1e-5)
    assert store.state_dict()["1"].tolist() == [0.0, 0.0]
    assert store.state_dict()["2"].tolist() == pytest.approx([0.0, -0.8], rel=1e-5)


def test_the_mean_weighs_each_gradient_by_its_samples() -> None:
    mean = mean_gradients([(grads(1.0, 10.0), 3), (grads(5.0, 20.0), 1)])
    assert [list(g) for g in mean if g is not None] == [[2.0, 2.0], [12.5, 12.5]]


def test_a_missing_gradient_counts_as_zero_unless_all_are_missing() -> None:
    mean = mean_gradients(
        [([torch.ones(2), None, None], 1), ([None, torch.full((2,), 4.0), None], 3)]
    )
    assert mean[0] is not None
    assert mean[1] is not None
    assert (mean[0].tolist(), mean[1].tolist(), mean[2]) == ([0.25, 0.25], [3.0, 3.0], None)


def test_the_mean_of_one_is_that_one_untouched() -> None:
    [gradient] = alone = grads(3.0)
    assert mean_gradients([(alone, 7)])[0] is gradient
    assert gradient is not None
    assert gradient.tolist() == [3.0, 3.0]


def test_the_mean_changes_tensors_of_the_first_list_alone() -> None:
    second = [torch.tensor([1.0]), torch.tensor([2.0])]
    third = [torch.tensor([5.0]), torch.tensor([6.0])]
    mean_gradients([([None, torch.tensor([9.0])], 1), (second, 1), (third, 2)])
    assert [g.item() for g in (*second, *third)] == [1.0, 2.0, 5.0, 6.0]


def test_the_mean_is_close_to_one_in_double_precision() -> None:
    torch.manual_seed(0)
    samples = [32, 32, 17, 5]
    lists = [[torch.randn(1000), torch.randn(30, 4)] for _ in samples]
    wanted = [
        sum(lists[k][place].double() * samples[k] for k in range(4)) / sum(samples)
        for place in range(2)
    ]
    mean = mean_gradients([(copy.deepcopy(lists[k]), samples[k]) for k in range(4)])
    for got, reference in zip(mean, wanted, strict=True):
        assert got is not None
        assert isinstance(reference, Tensor)
        torch.testing.assert_close(got.double(), reference, rtol=0.0, atol=5e-7)


def test_the_mean_is_summed_in_the_order_given() -> None:
    """Numbers for which it matters: the small one is lost beside a large one."""

    def mean_of(*values: float) -> float:
        [mean] = mean_gradients([([torch.tensor([value])], 1) for value in values])
        assert mean is not None
        return mean.item()

    assert mean_of(2.0**30, -(2.0**30), 1.0, 0.0) == 0.25
    assert mean_of(2.0**30, 1.0, -(2.0**30), 0.0) == 0.0
    assert mean_of(1.0, 2.0**30, -(2.0**30), 0.0) == 0.0


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


def test_flattening_changes_nothing_of_the_state() -> None:
    plain, (_, store, _) = kinds_of_tensors().state_dict(), flat_store()
    state = store.state_dict()
    assert list(state) == list(plain)
    for name, value in state.items():
        assert torch.equal(value, plain[name]), name
        assert (value.dtype, value.stride()) == (plain[name].dtype, plain[name].stride()), name


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
    updated = [torch.full_like(b, 7) for b in model.buffers()]
    store.take_buffers(updated)
    buffer[flat.moving_bytes :].fill_(255)
    store.copy_weights(buffer[: flat.moving_bytes])
    assert buffer[flat.moving_bytes :].unique().tolist() == [255]
    parameters = zip(flat.trained.views(buffer), flat.trained.views(before), strict=True)
    assert all(torch.equal(new, old - 1.0) for new, old in parameters)
    assert all(b.unique().tolist() == [7] for b in flat.buffers.views(buffer))


def test_what_was_copied_does_not_change_with_the_next_update() -> None:
    model, store, flat = flat_store()
    buffer = torch.zeros(flat.total_bytes, dtype=torch.uint8)
    store.copy_weights(buffer)
    before = buffer.clone()
    store.apply([torch.ones_like(p) for p in model.parameters() if p.requires_grad])
    assert torch.equal(buffer, before)


def test_momentum_goes_on_after_flattening() -> None:
    store = store_of(0.0, momentum=0.5)
    flat = store.flatten()
    store.apply(grads(1.0))
    store.apply(grads(1.0))
    assert store.state_dict()["0"].tolist() == [-2.5, -2.5]
    buffer = torch.zeros(flat.total_bytes, dtype=torch.uint8)
    store.copy_weights(buffer)
    assert flat.trained.views(buffer)[0].tolist() == [-2.5, -2.5]


def test_a_replica_is_refreshed_from_a_flat_store_too() -> None:
    store = store_of(5.0)
    store.flatten()
    replica = store.replica()
    store.apply(grads(1.0))
    store.refresh(replica)
    assert replica.parameters[0].tolist() == [4.0, 4.0]


@pytest.mark.parametrize("flat", [False, True], ids=["as-it-is", "flat"])
def test_the_state_can_be_saved_and_loaded_as_a_plain_modules(flat: bool) -> None:
    """Also one whose tensors are of several dtypes; nothing that lies beside them is saved."""
    model = kinds_of_tensors()
    store = Store(model, torch.optim.SGD(model.parameters(), lr=1.0))
    if flat:
        store.flatten()
    file = io.BytesIO()
    torch.save(store.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for name, value in kinds_of_tensors().state_dict().items():
        assert torch.equal(loaded[name], value), name
        num_bytes = value.numel() * value.element_size()
        assert loaded[name].untyped_storage().nbytes() == num_bytes, name


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


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)),
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
    model = store._model
    gradients: list[Tensor | None] = []
    for place, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
        gradient = torch.zeros_like(parameter)
        gradient.copy_(torch.randn(parameter.shape, generator=generator))
        gradients.append(None if place == seed % 5 else gradient)
    store.apply(gradients)
    store.take_buffers([buffer + seed for buffer in model.buffers()])


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


@pytest.mark.parametrize("flat", [None, "after", "before"], ids=["as-it-is", "flat", "flat first"])
@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        *(("plain", optimizer) for optimizer in GOING_ON),
        *((model, "SGD with momentum") for model in MODELS),
        *((model, "Adam") for model in MODELS),
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
    assert differs(state, before) is None
    update(store, 2)
    assert differs(state, before) is None
    assert differs(store.state(), before) is not None


@pytest.mark.parametrize("flat", [False, True], ids=["as-it-is", "flat"])
def test_a_state_holds_each_value_once_and_nothing_that_lies_beside_it(flat: bool) -> None:
    store = going_on(Tied, "SGD", momentum=0.9)
    if flat:
        store.flatten()
    update(store, 1)
    state = store.state()
    model = state["model"]
    assert model["encoder.weight"].data_ptr() == model["decoder.weight"].data_ptr()
    for value in model.values():
        assert value.untyped_storage().nbytes() == value.numel() * value.element_size()
    assert "param_groups" not in state["optimizer"]
    file = io.BytesIO()
    torch.save(nn.Linear(400, 400).state_dict(), file)
    alone = file.tell()

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(400, 400)
            self.second = self.first

    file = io.BytesIO()
    torch.save(going_on(Wide, "SGD").state(), file)
    assert file.tell() < 1.1 * alone


def renamed() -> nn.Module:
    return nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(4, 2)})


def swapped() -> nn.Module:
    return nn.ModuleDict({"b": nn.Linear(4, 2), "a": nn.Linear(3, 4)})


def partly_frozen() -> nn.Module:
    model = MODELS["plain"]()
    model[0].weight.requires_grad_(False)  # type: ignore[index, union-attr]
    return model


OTHER_MODELS: list[tuple[str, Callable[[], nn.Module], Callable[[], nn.Module], str]] = [
    (
        "shape",
        MODELS["plain"],
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)),
        "1.weight is float32 [2, 4] there and float32 [3, 4] here",
    ),
    (
        "dtype",
        MODELS["plain"],
        lambda: MODELS["plain"]().double(),
        "0.weight is float32 [4, 3] there and float64 [4, 3] here",
    ),
    (
        "more layers",
        MODELS["plain"],
        lambda: nn.Sequential(*MODELS["plain"]().children(), nn.Linear(2, 2)),
        "2.weight is nothing there and float32 [2, 2] here",
    ),
    (
        "fewer layers",
        MODELS["plain"],
        lambda: nn.Sequential(nn.Linear(3, 4)),
        "1.weight is float32 [2, 4] there and nothing here",
    ),
    ("names", MODELS["plain"], renamed, "a.weight is nothing there and float32 [4, 3] here"),
    ("order", renamed, swapped, "it trains a.weight in the place of b.weight"),
    ("frozen", MODELS["plain"], partly_frozen, "it trains 0.weight in the place of 0.bias"),
    ("not frozen", partly_frozen, MODELS["plain"], "it trains 0.bias in the place of 0.weight"),
]


@pytest.mark.parametrize(
    ("there", "here", "difference"),
    [pytest.param(*case, id=name) for name, *case in OTHER_MODELS],
)
def test_the_state_of_another_model_is_refused_and_nothing_is_changed(
    there: Callable[[], nn.Module], here: Callable[[], nn.Module], difference: str
) -> None:
    other, own = going_on(there, "SGD", momentum=0.9), going_on(here, "SGD", momentum=0.9)
    update(other, 1)
    update(own, 2)
    before = own.state()
    with pytest.raises(CheckpointUnusable) as caught:
        own.restore(other.state())
    assert str(caught.value) == f"it is of another model: {difference}"
    assert differs(own.state(), before) is None


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_what_is_typed_anew_is_used_after_restoring(name: str) -> None:
    first = going_on(MODELS["plain"], name, weight_decay=0.0)
    update(first, 1)
    anew = going_on(MODELS["plain"], name, lr=0.5, weight_decay=0.25)
    anew.restore(from_file(first.state()))
    plain = going_on(MODELS["plain"], name, weight_decay=0.0)
    plain.restore(from_file(first.state()))
    for group in plain.optimizer._optimizer.param_groups:
        group.update(lr=0.5, weight_decay=0.25)
    for store in (anew, plain):
        update(store, 2)
    assert differs(anew.state(), plain.state()) is None
    [group] = anew.optimizer._optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.25)


def test_the_schedule_goes_on_from_the_update_that_was_reached() -> None:
    def store_with_schedule() -> Store:
        model = model_of(0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return Store(model, optimizer, lr_factor=lambda version: 0.5**version)

    first, second = store_with_schedule(), store_with_schedule()
    for _ in range(2):
        first.apply(grads(1.0))
    second.restore(from_file(first.state()))
    second.apply(grads(1.0))
    assert second.state_dict()["0"].tolist() == [-1.75, -1.75]


def test_which_parameters_no_gradient_has_reached_is_kept() -> None:
    first, second = store_of(1.0, 2.0, 3.0), store_of(0.0, 0.0, 0.0)
    first.apply([None, torch.ones(2), None])
    second.restore(from_file(first.state()))
    assert second.untrained == {"0", "2"}


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
    with pytest.raises(RuntimeError, match=r"^out of memory$"):
        store.apply(grads(1.0, 1.0))
    with pytest.raises(TrainingFailed, match=r"^the last update was broken off$"):
        store.state()


def test_a_state_is_refused_once_buffers_were_taken_in_part() -> None:
    """Their order would be done again, although its gradient was applied."""
    store = going_on(kinds_of_tensors, "SGD")
    update(store, 1)
    buffers = [buffer.clone() for buffer in store._model.buffers()]
    with pytest.raises(RuntimeError):
        store.take_buffers([*buffers[:-1], torch.zeros(5, dtype=torch.int64)])
    with pytest.raises(TrainingFailed, match=r"^the last update was broken off$"):
        store.state()


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
def test_a_sparse_buffer_is_part_of_the_state() -> None:
    class Graph(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            edges = torch.tensor([[0, 1], [1, 0]])
            with torch.sparse.check_sparse_tensor_invariants(enable=False):
                matrix = torch.sparse_coo_tensor(edges, torch.tensor([2.0, 3.0]), (2, 2))
            self.register_buffer("adjacent", matrix.coalesce())

    first, second = (Store(m, torch.optim.SGD(m.parameters(), lr=1.0)) for m in (Graph(), Graph()))
    first.apply([torch.ones(2, 2), torch.ones(2)])
    state = first.state()
    first._model.adjacent.mul_(2)  # type: ignore[operator, union-attr]
    assert state["model"]["adjacent"].to_dense().tolist() == [[0.0, 2.0], [3.0, 0.0]]
    second.restore(from_file(state))
    assert second.state_dict()["adjacent"].to_dense().tolist() == [[0.0, 2.0], [3.0, 0.0]]
    assert torch.equal(second.state_dict()["weight"], state["model"]["weight"])
