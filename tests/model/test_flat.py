"""Tensors in one buffer: nothing of a model changes but where its values lie."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from ps.model.flat import ALIGNMENT_BYTES, FlatModel, Layout
from ps.model.mailbox import private_mailbox
from ps.settings.errors import TrainingFailed


class Everything(nn.Module):
    """Parameters and buffers of all kinds: strides, dtypes, empty, shared and frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.first = nn.Linear(5, 5, bias=False)
        self.second = nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(2, 3).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(2.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.turned = nn.Parameter(torch.randn(3, 4).t())
        self.wide = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.randn(3).to(torch.bfloat16))
        self.register_buffer("halves", torch.randn(5).to(torch.bfloat16))
        self.register_buffer("doubles", torch.randn(2, dtype=torch.float64))
        self.register_buffer("counts", torch.tensor([1, -2, 2**60]))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("images", torch.randn(1, 2, 3, 3))
        self.register_buffer("hidden", torch.randn(2), persistent=False)
        self.register_buffer("none", None)


@pytest.fixture
def everything() -> Everything:
    torch.manual_seed(0)
    return Everything()


def tensors_of(module: nn.Module) -> list[Tensor]:
    return [*(p.detach() for p in module.parameters()), *module.buffers()]


def forms_of(tensors: Sequence[Tensor]) -> list[tuple[torch.Size, torch.dtype, tuple[int, ...]]]:
    return [(tensor.shape, tensor.dtype, tensor.stride()) for tensor in tensors]


def empty_buffer(num_bytes: int) -> Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


def moved(module: nn.Module) -> tuple[FlatModel, Tensor]:
    """The module in a new buffer, with its values."""
    flat = FlatModel(module)
    buffer = empty_buffer(flat.total_bytes)
    flat.move_to(buffer, keep_values=True)
    return flat, buffer


def lies_in(buffer: Tensor, tensor: Tensor) -> bool:
    if not tensor.numel():
        return True
    start = tensor.data_ptr() - buffer.data_ptr()
    return start >= 0 and start + tensor.numel() * tensor.element_size() <= buffer.numel()


KINDS: dict[str, Tensor] = {
    "contiguous": torch.zeros(2, 3),
    "channels_last": torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last),
    "channels_last_3d": torch.zeros(2, 3, 2, 2, 2).to(memory_format=torch.channels_last_3d),
    "transposed": torch.zeros(3, 4).t(),
    "permuted": torch.zeros(2, 3, 4).permute(2, 0, 1),
    "turned_with_one_row": torch.empty_strided((4, 1, 3), (1, 100, 4)).zero_(),
    "one_channel": torch.zeros(4, 1, 3, 3).to(memory_format=torch.channels_last),
    "scalar": torch.tensor(1.0),
    "empty": torch.zeros(0, 3),
    "float64": torch.zeros(3, dtype=torch.float64),
    "bfloat16": torch.zeros(3, dtype=torch.bfloat16),
    "int64": torch.zeros(3, dtype=torch.int64),
    "bool": torch.zeros(3, dtype=torch.bool),
    "complex64": torch.zeros(3, dtype=torch.complex64),
}
NOT_DENSE: dict[str, Tensor] = {
    "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
    "expanded_from_one": torch.tensor(4.0).expand(5),
    "every_second": torch.arange(8.0)[::2],
    "columns": torch.arange(12.0).view(3, 4)[:, :2],
    "columns_turned": torch.arange(12.0).view(3, 4)[:, :2].t(),
    "windows": torch.arange(6.0).unfold(0, 3, 1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_view_has_shape_dtype_and_strides_of_its_tensor(kind: str) -> None:
    layout = Layout([torch.zeros(3), KINDS[kind], torch.zeros(3)])
    _, view, _ = layout.views(empty_buffer(layout.stop))
    assert forms_of([view]) == forms_of([KINDS[kind]])


@pytest.mark.parametrize("kind", NOT_DENSE)
def test_a_tensor_with_gaps_or_shared_elements_becomes_dense(kind: str) -> None:
    tensor = NOT_DENSE[kind]
    layout = Layout([tensor, torch.zeros(3)])
    view, after = layout.views(empty_buffer(layout.stop))
    assert view.is_contiguous()
    assert (view.shape, view.dtype) == (tensor.shape, tensor.dtype)
    after.fill_(7.0)
    view.copy_(tensor)
    assert torch.equal(view, tensor)
    assert torch.equal(after, torch.full((3,), 7.0))


def test_every_tensor_starts_at_a_cache_line_and_no_element_overlaps_another() -> None:
    tensors = [*KINDS.values(), *NOT_DENSE.values()]
    layout = Layout(tensors)
    buffer = empty_buffer(layout.stop)
    views = layout.views(buffer)
    starts = [view.data_ptr() - buffer.data_ptr() for view in views if view.numel()]
    assert all(start % ALIGNMENT_BYTES == 0 for start in starts)
    assert ALIGNMENT_BYTES == 64
    values = [torch.arange(v.numel()).view(v.shape) + 7 * k for k, v in enumerate(views)]
    for view, value in zip(views, values, strict=True):
        view.copy_(value)
    for view, value in zip(views, values, strict=True):
        assert torch.equal(view, value.to(view.dtype))


def test_a_layout_begins_where_it_is_told_and_ends_at_a_cache_line() -> None:
    first = Layout([torch.zeros(17), torch.zeros(1)])
    second = Layout([torch.zeros(16)], first.stop)
    assert (first.start, first.stop) == (0, 128 + 64)
    assert (second.start, second.stop) == (192, 256)
    assert Layout([], 192).stop == 192


def test_views_with_a_base_are_those_of_a_buffer_that_begins_there() -> None:
    first = Layout([torch.zeros(5)])
    second = Layout([torch.zeros(3), torch.zeros(2, dtype=torch.int64)], first.stop)
    whole = empty_buffer(second.stop)
    floats, integers = second.views(whole)
    floats.copy_(torch.tensor([1.0, 2.0, 3.0]))
    integers.copy_(torch.tensor([4, 5]))
    part = whole[second.start : second.stop].clone()
    floats, integers = second.views(part, base=second.start)
    assert floats.tolist() == [1.0, 2.0, 3.0]
    assert integers.tolist() == [4, 5]


def test_tensors_of_one_dtype_are_one_block_with_the_gaps_between_them() -> None:
    layout = Layout([torch.zeros(3), torch.zeros(0, 2), torch.tensor(1.0), torch.zeros(2, 2)])
    buffer = empty_buffer(layout.stop)
    for number, view in enumerate(layout.views(buffer), start=1):
        view.fill_(number)
    [block] = layout.blocks(buffer)
    assert block.dtype == torch.float32
    assert block.tolist() == [1.0] * 3 + [0.0] * 13 + [3.0] + [0.0] * 15 + [4.0] * 4


def test_another_dtype_begins_another_block() -> None:
    dtypes = [torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float32]
    layout = Layout([torch.zeros(20, dtype=dtype) for dtype in dtypes])
    buffer = empty_buffer(layout.stop)
    blocks = layout.blocks(buffer)
    assert [(block.dtype, len(block)) for block in blocks] == [
        (torch.float32, 32 + 20),
        (torch.float64, 20),
        (torch.bfloat16, 20),
        (torch.float32, 20),
    ]
    assert Layout([]).blocks(buffer) == []


def test_every_element_is_in_a_block() -> None:
    layout = Layout([kind for kind in KINDS.values() if kind.is_floating_point()])
    buffer = empty_buffer(layout.stop)
    views = layout.views(buffer)
    for view in views:
        view.fill_(float("nan"))
    spoiled = sum(int(block.isnan().sum()) for block in layout.blocks(buffer))
    assert spoiled == sum(view.numel() for view in views)


def test_moving_changes_neither_values_nor_forms(everything: Everything) -> None:
    before = copy.deepcopy(tensors_of(everything))
    state = copy.deepcopy(everything.state_dict())
    _, buffer = moved(everything)
    after = tensors_of(everything)
    assert forms_of(after) == forms_of(before)
    assert all(torch.equal(one, other) for one, other in zip(after, before, strict=True))
    assert all(lies_in(buffer, tensor) for tensor in after)
    assert list(everything.state_dict()) == list(state)
    for name, value in everything.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_without_keeping_values_the_module_takes_what_is_there(everything: Everything) -> None:
    _, buffer = moved(everything)
    other, copied = Everything(), buffer.clone()
    FlatModel(other).move_to(copied, keep_values=False)
    assert torch.equal(copied, buffer)
    for one, another in zip(tensors_of(everything), tensors_of(other), strict=True):
        assert torch.equal(one, another)


def test_a_moved_model_can_load_a_state_and_be_copied(everything: Everything) -> None:
    flat, buffer = moved(everything)
    torch.manual_seed(1)
    other = Everything()
    everything.load_state_dict(other.state_dict())
    for module in (everything, copy.deepcopy(everything)):
        assert flat.describe() == FlatModel(module).describe()
        for name, value in module.state_dict().items():
            assert torch.equal(value, other.state_dict()[name]), name
    assert all(lies_in(buffer, tensor) for tensor in tensors_of(everything))


def test_one_copy_brings_all_that_moves_to_another_module(everything: Everything) -> None:
    flat, buffer = moved(everything)
    other = copy.deepcopy(everything)
    _, other_buffer = moved(other)
    with torch.no_grad():
        for tensor in tensors_of(everything):
            tensor.copy_(tensor.logical_not() if tensor.dtype == torch.bool else tensor + 1)
    other_buffer[: flat.moving_bytes].copy_(buffer[: flat.moving_bytes])
    frozen = {"frozen.weight", "frozen.bias"}
    mine = dict(everything.named_parameters()) | dict(everything.named_buffers())
    for name, value in (dict(other.named_parameters()) | dict(other.named_buffers())).items():
        same = torch.equal(value, mine[name])
        assert same is (name not in frozen), name


def test_trained_parameters_come_first_then_buffers_then_frozen_ones(
    everything: Everything,
) -> None:
    flat, buffer = moved(everything)

    def start(tensor: Tensor) -> int:
        return tensor.data_ptr() - buffer.data_ptr()

    parameters = [p for p in everything.parameters() if p.numel()]
    trained = [start(p) for p in parameters if p.requires_grad]
    frozen = [start(p) for p in parameters if not p.requires_grad]
    buffers = [start(b) for b in everything.buffers()]
    assert trained == sorted(trained)
    assert max(trained) < flat.trained.stop == flat.buffers.start <= min(buffers)
    assert max(buffers) < flat.buffers.stop == flat.moving_bytes <= min(frozen)
    assert max(frozen) < flat.total_bytes
    assert [id(p) for p in flat.parameters] == [
        id(p) for p in everything.parameters() if p.requires_grad
    ]


def test_a_parameter_or_buffer_of_two_modules_stays_one() -> None:
    shared = torch.tensor([1.0, 2.0])
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    first.register_buffer("seen", shared)
    second.register_buffer("also_seen", shared)
    model = nn.Sequential(first, second)
    flat, buffer = moved(model)
    assert first.weight is second.weight
    assert first.get_buffer("seen") is second.get_buffer("also_seen")
    assert flat.buffers.stop - flat.buffers.start == ALIGNMENT_BYTES
    first.get_buffer("seen").add_(1.0)
    flat.buffers.views(buffer)[0].mul_(2.0)
    assert second.get_buffer("also_seen").tolist() == [4.0, 6.0]


class Replacing(nn.Module):
    """Puts a new tensor in the place of its buffer instead of changing it."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("kept", torch.ones(2))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen = self.seen + len(inputs)
        outputs: Tensor = self.layer(inputs)
        return outputs


def test_a_buffer_that_forward_replaced_is_brought_back() -> None:
    model = Replacing()
    flat, buffer = moved(model)
    seen, kept = flat.buffers.views(buffer)
    for calls in (1, 2):
        model(torch.ones(3, 2))
        assert not lies_in(buffer, model.seen)
        flat.gather_buffers()
        assert lies_in(buffer, model.seen)
        assert (seen.item(), model.seen.item()) == (3.0 * calls, 3.0 * calls)
        assert kept.tolist() == [1.0, 1.0]
    seen.fill_(50.0)
    model(torch.ones(1, 2))
    assert model.seen.item() == 51.0


def test_a_buffer_that_changed_its_shape_is_refused_by_name() -> None:
    model = Replacing()
    flat, _ = moved(model)
    model.seen = torch.zeros(3)
    with pytest.raises(TrainingFailed, match="seen"):
        flat.gather_buffers()


def test_gathering_what_was_changed_in_place_or_removed_changes_nothing(
    everything: Everything,
) -> None:
    flat, buffer = moved(everything)
    everything.norm(torch.randn(3, 4, 2, 2))
    everything.get_buffer("counts").add_(1)
    everything.hidden = None
    before, objects = buffer.clone(), [id(b) for b in everything.buffers()]
    flat.gather_buffers()
    assert torch.equal(buffer, before)
    assert [id(b) for b in everything.buffers()] == objects
    assert everything.get_buffer("counts").tolist() == [2, -1, 2**60 + 1]


def small(**changed: Tensor) -> nn.Module:
    """A model whose description is that of any other one, unless something is changed."""
    model = nn.Module()
    parts: dict[str, Tensor] = {"first": parameter(2, 3, 2, 2), "second": parameter(6)}
    for name, value in (parts | changed).items():
        if isinstance(value, nn.Parameter):
            model.register_parameter(name, value)
        else:
            model.register_buffer(name, value)
    return model


def parameter(*shape: int, dtype: torch.dtype = torch.float32, frozen: bool = False) -> Tensor:
    return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=not frozen)


OTHERS: dict[str, dict[str, Tensor]] = {
    "shape": {"second": parameter(2, 3)},
    "size": {"second": parameter(7)},
    "dtype": {"second": parameter(6, dtype=torch.float64)},
    "dtype of the same size": {"second": parameter(6, dtype=torch.int32, frozen=True)},
    "strides": {"first": nn.Parameter(torch.zeros(2, 2, 2, 3).permute(0, 3, 1, 2))},
    "order": {"first": parameter(6), "second": parameter(2, 3, 2, 2)},
    "one more parameter": {"third": parameter(1)},
    "one more buffer": {"third": torch.zeros(1)},
    "frozen": {"second": parameter(6, frozen=True)},
    "a buffer for a parameter": {"second": torch.zeros(6)},
    "empty": {"third": parameter(0)},
}


def test_models_are_described_equally_only_if_their_buffers_mean_the_same(
    everything: Everything,
) -> None:
    assert FlatModel(small()).describe() == FlatModel(small()).describe()
    different = {FlatModel(small(**changed)).describe() for changed in ({}, *OTHERS.values())}
    assert len(different) == 1 + len(OTHERS)
    described = FlatModel(everything).describe()
    assert FlatModel(Everything()).describe() == described
    moved(everything)
    assert FlatModel(everything).describe() == described


def test_a_recurrent_net_finds_its_weights_in_the_buffer() -> None:
    torch.manual_seed(0)
    net, inputs = nn.LSTM(3, 4), torch.randn(5, 2, 3)
    expected, _ = net(inputs)
    _, buffer = moved(net)
    assert torch.equal(net(inputs)[0], expected)
    buffer.zero_()
    assert net(inputs)[0].abs().max().item() == 0.0


def test_a_private_mailbox_has_room_for_both_and_is_zero(everything: Everything) -> None:
    flat = FlatModel(everything)
    mailbox = private_mailbox(flat)
    assert mailbox.weights.tolist() == [0] * flat.total_bytes
    assert mailbox.gradients.tolist() == [0] * flat.trained.stop
