"""Copies of states, messages as bytes: what goes in comes out, and shares memory or does not."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from ps.model.packing import decode, encode
from ps.model.snapshots import difference, in_own_storage, to_cpu


@pytest.mark.parametrize("copy", [True, False])
def test_a_state_keeps_its_form_and_its_ties_and_is_a_copy_if_asked(copy: bool) -> None:
    weight = nn.Parameter(torch.ones(2, 3).t())
    state = {"a": [weight, weight], "b": (weight[:2], 7), "c": {"d": "text", "e": None}}
    got = to_cpu(state, copy=copy)
    assert (got["c"], got["b"][1], type(got["b"])) == (state["c"], 7, tuple)
    assert got["a"][0] is got["a"][1]
    assert not got["a"][0].requires_grad
    with torch.no_grad():
        weight.fill_(5.0)
    assert got["a"][0].unique().tolist() == [1.0 if copy else 5.0]
    assert got["a"][0].stride() == (1, 3)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"weight": torch.ones(3, 2), "extra": 1}, None),
        ({"weight": torch.ones(2, 3), "extra": 1}, r"weight .*\[2, 3\] there .*\[3, 2\] here"),
        ({"weight": torch.ones(3, 2).double(), "extra": 1}, "weight .*float64 .*float32"),
        ({"weight": torch.ones(3, 2), "extra": "1"}, "extra .*str there .*int here"),
        ({"weight": torch.ones(3, 2)}, "extra .*nothing there .*int here"),
        ({"weight": torch.ones(3, 2), "extra": 1, "new": 2}, "new .*int there .*nothing here"),
    ],
)
def test_two_states_differ_in_names_types_shapes_and_dtypes(
    other: dict[str, object], named: str | None
) -> None:
    got = difference({"weight": torch.zeros(3, 2), "extra": 0}, other)
    assert got is None if named is None else re.match(named, got or "")


def test_views_get_storages_of_their_own_over_the_same_memory() -> None:
    buffer = torch.zeros(256, dtype=torch.uint8)
    views = {
        "turned": buffer[64:88].view(torch.float32).as_strided((2, 3), (1, 2)),
        "empty": buffer[128:128].view(torch.float32).view(0, 3),
        "double": buffer[192:208].view(torch.float64),
    }
    own = in_own_storage(views | {"tied": views["double"]}, buffer)
    views["turned"].copy_(torch.arange(6.0).view(2, 3))
    assert own["tied"] is own["double"]
    for name, view in views.items():
        assert torch.equal(own[name], view)
        assert (own[name].dtype, own[name].stride()) == (view.dtype, view.stride())
        assert own[name].untyped_storage().nbytes() == view.numel() * view.element_size()


TENSORS = {
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "one row of a column": torch.arange(6.0).view(3, 2)[:1, 1],
    "bfloat16": torch.ones(3, dtype=torch.bfloat16),
    "int64": torch.tensor([2**60]),
    "bool": torch.tensor([True, False]),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "negative": torch.tensor([1 + 2j]).conj().imag,
    "with a gradient": nn.Linear(2, 2).weight * 2,
}


@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_of_any_kind_travels_in_a_message(kind: str) -> None:
    tensor = TENSORS[kind]
    text, [got] = decode(encode(("text", [tensor])))
    assert text == "text" and isinstance(got, Tensor)
    assert torch.equal(got, tensor) and got.dtype == tensor.dtype
    assert got.is_contiguous() and not got.requires_grad
    got.zero_()  # it may be written to
