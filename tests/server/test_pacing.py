"""Who may start when: the rule at invented speeds, and the staleness that it bounds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps.server.orders import Plan
from ps.server.pacing import Pacing, staleness_bound
from tests.server.work import Crew, Simulation, crews, plans

lags = st.integers(1, 4)


@settings(deadline=None, max_examples=80)
@given(plan=plans, crew=crews(), max_lag=lags)
def test_only_who_is_too_far_ahead_is_held_up_and_the_slowest_is_served_first(
    plan: Plan, crew: Crew, max_lag: int
) -> None:
    job = Simulation(plan, crew, max_lag).run()
    for waiting, finished, ready in job.ready:
        limit = min(finished.values()) + max_lag
        assert sorted(ready) == sorted(t for t in waiting if finished[t] <= limit)
        counts = [finished[trainer] for trainer in ready]
        assert counts == sorted(counts)
    for start in job.starts:
        assert start.finished[start.trainer] - min(start.finished.values()) <= max_lag


@settings(deadline=None, max_examples=50)
@given(plan=plans, crew=crews())
def test_without_a_limit_all_who_wait_may_start_in_the_order_they_came(
    plan: Plan, crew: Crew
) -> None:
    for waiting, _, ready in Simulation(plan, crew, None).run().ready:
        assert ready == waiting


@settings(deadline=None, max_examples=50)
@given(plan=plans, crew=crews())
def test_in_rounds_all_who_are_there_start_together(plan: Plan, crew: Crew) -> None:
    for start in Simulation(plan, crew, 0).run().starts:
        assert start.working == set()
        assert start.waiting == start.finished.keys()


@settings(deadline=None, max_examples=80)
@given(plan=plans, crew=crews(), max_lag=st.sampled_from([None, 0, 1, 2, 4]))
def test_all_is_done_and_no_gradient_is_staler_than_the_bound(
    plan: Plan, crew: Crew, max_lag: int | None
) -> None:
    job = Simulation(plan, crew, max_lag).run()
    assert len(job.batches()) == len(job.staleness) == plan.epochs * plan.batches_per_epoch
    bound = staleness_bound(max_lag, len(crew.speeds))
    assert bound is None or max(job.staleness) <= bound


@pytest.mark.parametrize("num_trainers", [2, 3, 4])
@pytest.mark.parametrize("max_lag", [1, 2, 3])
def test_the_bound_is_reached(num_trainers: int, max_lag: int) -> None:
    """Trainer 1 runs ahead as far as it may, and then holds one order while all overtake it."""
    others = list(range(2, num_trainers + 1))
    pacing = Pacing([1, *others], max_lag)
    for trainer in others:
        pacing.start(trainer)
    for _ in range(max_lag):
        assert pacing.ready([1]) == [1]
        work(pacing, [1])
    assert pacing.ready([1]) == [1]
    pacing.start(1)
    updates = len(others)
    for trainer in others:
        pacing.finish(trainer)
    while ready := pacing.ready(others):
        work(pacing, ready[:1])
        updates += 1
    assert updates == staleness_bound(max_lag, num_trainers)


@pytest.mark.parametrize(
    ("max_lag", "num_trainers", "bound"),
    [
        *((None, 1, None), (None, 8, None), (0, 1, 0), (0, 8, 0), (1, 1, 0), (7, 1, 0)),
        *((1, 2, 3), (2, 2, 5), (1, 3, 6), (2, 4, 15)),
    ],
)
def test_the_bound_of_the_staleness(
    max_lag: int | None, num_trainers: int, bound: int | None
) -> None:
    assert staleness_bound(max_lag, num_trainers) == bound


def work(pacing: Pacing, trainers: Sequence[int]) -> None:
    for trainer in trainers:
        pacing.start(trainer)
        pacing.finish(trainer)


@pytest.mark.parametrize(
    ("max_lag", "worked", "waiting", "ready"),
    [
        (2, [1, 1], [1], [1]),  # exactly as far ahead as is allowed
        (2, [1, 1, 1], [1], []),
        (2, [1, 1, 1, 2, 3], [1], [1]),
        (1, [1, 1], [1], []),  # trainers that have not come yet count too
        (5, [1, 1, 1, 3], [1, 2, 3], [2, 3, 1]),
        (5, [], [3, 1], [3, 1]),
        (None, [1] * 99, [3, 1], [3, 1]),
        (0, [], [3, 1], []),
        (0, [], [3, 1, 2], [1, 2, 3]),
        (0, [1], [3, 1, 2], [1, 2, 3]),  # there was an order for one of the round only
    ],
)
def test_who_may_start_of_three(
    max_lag: int | None, worked: list[int], waiting: list[int], ready: list[int]
) -> None:
    pacing = Pacing([1, 2, 3], max_lag)
    work(pacing, worked)
    assert pacing.ready(waiting) == ready


@pytest.mark.parametrize("max_lag", [None, 0, 1, 9])
def test_a_round_is_open_until_the_last_order_is_in_and_there_are_rounds_at_lag_0_only(
    max_lag: int | None,
) -> None:
    pacing = Pacing([1, 2], max_lag)
    is_open = [pacing.round_is_open]
    for step, trainer in ((pacing.start, 1), (pacing.start, 2), (pacing.finish, 2)):
        step(trainer)
        is_open.append(pacing.round_is_open)
    if max_lag == 0:
        assert pacing.ready([2]) == []
    pacing.finish(1)
    assert [*is_open, pacing.round_is_open] == [max_lag == 0 and n in (1, 2, 3) for n in range(5)]


def test_a_trainer_that_leaves_holds_nobody_up() -> None:
    pacing = Pacing([1, 2, 3], max_lag=1)
    pacing.start(3)
    work(pacing, [1, 1, 2])
    assert pacing.ready([1, 2]) == [2]
    for _ in range(2):  # the second time changes nothing
        pacing.leave(3)
        assert pacing.ready([1, 2]) == [2, 1]


def test_a_trainer_that_leaves_in_a_round_or_between_them_is_not_waited_for() -> None:
    pacing = Pacing([1, 2, 3], max_lag=0)
    for trainer in (1, 2, 3):
        pacing.start(trainer)
    pacing.finish(1)
    pacing.finish(2)
    assert pacing.ready([1, 2]) == []
    pacing.leave(3)
    assert pacing.round_is_open is False
    assert pacing.ready([2, 1]) == [1, 2]
    pacing.leave(1)
    assert pacing.ready([2]) == [2]


def test_when_all_have_left_nobody_may_start() -> None:
    pacing = Pacing([1], max_lag=1)
    pacing.leave(1)
    assert pacing.ready([]) == []


def test_returning_what_was_not_started_is_refused() -> None:
    with pytest.raises(KeyError):
        Pacing([1, 2], max_lag=1).finish(1)
