"""Gradients on their way to the update: checked, averaged, clipped."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from ps.model.gradients import check_gradients, clip_gradients, mean_gradients
from ps.settings.errors import TrainingFailed

NAN, INF = math.nan, math.inf


def grads(*values: float) -> list[Tensor | None]:
    return [torch.tensor([value, value]) for value in values]


def sparse(*row: float) -> Tensor:
    """All rows but one are zero."""
    places, values = torch.tensor([[1]]), torch.tensor([row])
    return torch.sparse_coo_tensor(places, values, (4, len(row)), check_invariants=False)


@pytest.mark.parametrize(
    ("gradients", "named"),
    [
        *(([torch.ones(2), torch.tensor([1.0, bad])], "b") for bad in (NAN, INF, -INF)),
        *(([torch.tensor([bad, bad]), None], "a") for bad in (NAN, INF, -INF)),
        *(([None, sparse(1.0, bad)], "b") for bad in (NAN, INF)),
        ([torch.tensor([INF, -INF]), torch.ones(2)], "a"),
        ([torch.ones(2), torch.tensor([1 + 2j, complex(1.0, NAN)])], "b"),
    ],
)
def test_a_gradient_that_is_not_finite_is_named(
    gradients: Sequence[Tensor | None], named: str
) -> None:
    with pytest.raises(TrainingFailed, match=rf"gradient of {named} "):
        check_gradients(gradients, ["a", "b"])


@pytest.mark.parametrize(
    "gradient",
    [
        torch.tensor([3e38, 3e38]),
        torch.tensor([-3e38, -3e38]),
        torch.tensor([3e38, 3e38], dtype=torch.bfloat16),
        torch.tensor([1e308, 1.7e308], dtype=torch.float64),
        torch.tensor([60000.0, 60000.0], dtype=torch.float16),
        sparse(3e38, 3e38),
        torch.tensor([1 + 2j, 3j]),
    ],
)
def test_finite_gradients_are_good_although_their_sum_may_overflow(gradient: Tensor) -> None:
    before = copy.deepcopy(gradient)
    check_gradients([gradient], ["a"])
    assert torch.equal(gradient.to_dense(), before.to_dense())


def test_a_missing_gradient_is_good_unless_all_are() -> None:
    check_gradients([torch.ones(2), None], ["a", "b"])
    check_gradients([None, torch.ones(2)], ["a", "b"])
    with pytest.raises(TrainingFailed, match="no gradient"):
        check_gradients([None, None], ["a", "b"])


def test_blocks_are_looked_at_first_and_gradients_alone_are_refused() -> None:
    """They hold all gradients, and may hold what is none."""
    names, good, bad = ["a", "b"], torch.ones(2), torch.tensor([1.0, NAN])
    check_gradients([good, bad], names, blocks=[good, good])
    check_gradients([good, None], names, blocks=[good, bad])
    with pytest.raises(TrainingFailed, match="gradient of b "):
        check_gradients([good, bad], names, blocks=[torch.cat([good, bad])])


def test_the_mean_weighs_each_gradient_by_its_samples() -> None:
    mean = mean_gradients([(grads(1.0, 10.0), 3), (grads(5.0, 20.0), 1)])
    assert [list(g) for g in mean if g is not None] == [[2.0, 2.0], [12.5, 12.5]]


def test_a_missing_gradient_counts_as_zero_unless_all_are_missing() -> None:
    lists = [([torch.ones(2), None, None], 1), ([None, torch.full((2,), 4.0), None], 3)]
    first, second, third = mean_gradients(lists)
    assert first is not None and second is not None
    assert (first.tolist(), second.tolist(), third) == ([0.25, 0.25], [3.0, 3.0], None)


def test_the_mean_of_one_is_that_one_untouched() -> None:
    gradient = torch.tensor([3.0, 3.0])
    assert mean_gradients([([gradient], 7)])[0] is gradient
    assert gradient.tolist() == [3.0, 3.0]


def test_the_mean_changes_tensors_of_the_first_list_alone() -> None:
    second = [torch.tensor([1.0]), torch.tensor([2.0])]
    third = [torch.tensor([5.0]), torch.tensor([6.0])]
    mean_gradients([([None, torch.tensor([9.0])], 1), (second, 1), (third, 2)])
    assert [g.item() for g in (*second, *third)] == [1.0, 2.0, 5.0, 6.0]


def test_the_mean_is_summed_in_the_order_given() -> None:
    """Numbers for which it matters: the small one is lost beside a large one."""

    def mean_of(*values: float) -> float:
        [mean] = mean_gradients([([torch.tensor([value])], 1) for value in values])
        assert mean is not None
        return mean.item()

    assert mean_of(2.0**30, -(2.0**30), 1.0, 0.0) == 0.25
    assert mean_of(2.0**30, 1.0, -(2.0**30), 0.0) == 0.0
    assert mean_of(1.0, 2.0**30, -(2.0**30), 0.0) == 0.0


@pytest.mark.parametrize(
    ("scale", "max_norm"), [(1.0, 1.0), (1.0, 5.1), (1e30, 1.0)], ids=["large", "small", "huge"]
)
def test_the_norm_of_all_gradients_together_is_limited_in_place(
    scale: float, max_norm: float
) -> None:
    """Also where their squares overflow; gradients of a smaller norm stay as they are."""
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    first, last = scale * torch.tensor([3.0, 0.0]), scale * torch.tensor([0.0, 4.0])
    parameters[0].grad, parameters[2].grad = first, last
    clip_gradients(parameters, max_norm)
    factor = min(1.0, max_norm / (5 * scale))
    assert first.tolist() == pytest.approx([factor * 3 * scale, 0.0], rel=1e-5)
    assert last.tolist() == pytest.approx([0.0, factor * 4 * scale], rel=1e-5)
    assert parameters[0].grad is first and parameters[1].grad is None


def test_gradients_are_clipped_as_torch_does_bit_for_bit() -> None:
    torch.manual_seed(0)
    models = [nn.Linear(30, 20), nn.Linear(30, 20)]
    for gradient in (torch.randn(20, 30), torch.randn(20)):
        for model in models:
            next(p for p in model.parameters() if p.shape == gradient.shape).grad = gradient.clone()
    clip_gradients(list(models[0].parameters()), 0.7)
    torch.nn.utils.clip_grad_norm_(models[1].parameters(), 0.7)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)
