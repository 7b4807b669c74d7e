"""Who may start when: the rule at invented speeds, and the staleness that it bounds."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ps.protocol import Evaluate, Evaluated, Train, Trained
from ps.server.orders import Orders, Plan
from ps.server.pacing import Pacing, staleness_bound


@dataclass(kw_only=True)
class Crew:
    """Trainers 1..N: how long their orders take, in turns, and after how many one leaves."""

    speeds: list[list[float]]
    leaves_after: dict[int, int] = field(default_factory=dict)
    """A trainer that is in here leaves while it holds its next order."""


@dataclass
class Start:
    """A training order was handed out: what the test itself knows of that moment."""

    trainer: int
    finished: dict[int, int]
    """Training orders that each trainer still there has finished."""
    waiting: set[int]
    working: set[int]


@dataclass
class Log:
    starts: list[Start] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    """Of each gradient: updates between the version it was computed on and its own."""
    ready: list[tuple[list[int], dict[int, int], list[int]]] = field(default_factory=list)
    """What ready() was asked: who waits, what each has finished, and the answer."""
    batches: int = 0


class Race:
    """Orders under a pacing, event by event, put together as the server does it."""

    def __init__(self, plan: Plan, crew: Crew, max_lag: int | None) -> None:
        self.plan = plan
        self.crew = crew
        self.orders = Orders(plan)
        self.finished = dict.fromkeys(range(1, len(crew.speeds) + 1), 0)
        self.pacing = Pacing(self.finished, max_lag)
        self.durations: dict[int, Iterator[float]] = {
            trainer: itertools.cycle(crew.speeds[trainer - 1]) for trainer in self.finished
        }
        self.waiting = list(self.finished)
        self.busy: list[tuple[float, int]] = []
        self.done = dict.fromkeys(self.finished, 0)
        self.version = 0
        self.computed_on: dict[int, int] = {}
        self.round: list[int] = []
        self.log = Log()

    def run(self) -> Log:
        now = 0.0
        while not self.orders.finished:
            self._hand_out(now)
            assert self.busy, f"{self.waiting} wait for ever, finished are {self.finished}"
            now, trainer = heapq.heappop(self.busy)
            if self.crew.leaves_after.get(trainer) == self.done[trainer]:
                self._leave(trainer)
            else:
                self._hand_in(trainer)
        return self.log

    def _hand_out(self, now: float) -> None:
        slices = [t for t in self.waiting if self.orders.take_slice(t)]
        for trainer in slices:
            self._begin(trainer, now)
        if slices:
            return
        ready = self.pacing.ready(self.waiting)
        self.log.ready.append((list(self.waiting), dict(self.finished), ready))
        waiting, working = set(self.waiting), {t for _, t in self.busy}
        for trainer in ready:
            if self.orders.take_batch(trainer) is None:
                break
            self.log.starts.append(Start(trainer, dict(self.finished), waiting, working))
            self.pacing.start(trainer)
            self.computed_on[trainer] = self.version
            self._begin(trainer, now)

    def _begin(self, trainer: int, now: float) -> None:
        self.waiting.remove(trainer)
        heapq.heappush(self.busy, (now + next(self.durations[trainer]), trainer))

    def _hand_in(self, trainer: int) -> None:
        order = self.orders.held_by(trainer)
        self.done[trainer] += 1
        self.waiting.append(trainer)
        if isinstance(order, Evaluate):
            samples = order.stop - order.start
            self.orders.finish(trainer, Evaluated(order.epoch, order.slice, samples, 0.0, 0))
            return
        self.pacing.finish(trainer)
        self.finished[trainer] += 1
        self.round.append(trainer)
        self._apply()

    def _apply(self) -> None:
        if not self.round or self.pacing.round_is_open:
            return
        for trainer in self.round:
            order = self.orders.held_by(trainer)
            assert isinstance(order, Train)
            result = Trained(order.epoch, order.batch, len(order.indices), 0.0, torch.zeros(0))
            self.orders.finish(trainer, result)
            self.log.staleness.append(self.version - self.computed_on[trainer])
            self.log.batches += 1
        self.version += 1
        self.round = []

    def _leave(self, trainer: int) -> None:
        self.orders.leave(trainer)
        self.pacing.leave(trainer)
        del self.finished[trainer]
        self._apply()


def plan_of(*, batches: int, epochs: int = 1, slices: int = 1) -> Plan:
    return Plan(
        num_train_samples=batches,
        num_test_samples=slices,
        batch_size=1,
        epochs=epochs,
        seed=0,
        slice_size=1,
    )


plans = st.builds(
    plan_of, batches=st.integers(1, 25), epochs=st.integers(1, 3), slices=st.integers(1, 4)
)
lags = st.integers(1, 4)


@st.composite
def crews(draw: st.DrawFn) -> Crew:
    """1 to 5 trainers whose speeds change, up to a hundredfold; not all of them leave."""
    num = draw(st.integers(1, 5))
    duration = st.one_of(st.sampled_from([0.1, 1.0, 10.0]), st.floats(0.1, 10.0))
    speeds = [draw(st.lists(duration, min_size=1, max_size=4)) for _ in range(num)]
    stays = draw(st.integers(1, num))
    others = [trainer for trainer in range(1, num + 1) if trainer != stays]
    leaving = draw(st.lists(st.sampled_from(others), unique=True)) if others else []
    return Crew(speeds=speeds, leaves_after={t: draw(st.integers(0, 8)) for t in leaving})


@settings(deadline=None, max_examples=60)
@given(plan=plans, crew=crews(), max_lag=lags)
def test_no_trainer_starts_when_it_is_too_far_ahead_of_the_slowest(
    plan: Plan, crew: Crew, max_lag: int
) -> None:
    for start in Race(plan, crew, max_lag).run().starts:
        assert start.finished[start.trainer] - min(start.finished.values()) <= max_lag


@settings(deadline=None, max_examples=60)
@given(plan=plans, crew=crews(), max_lag=lags)
def test_nobody_else_is_held_up_and_the_slowest_is_served_first(
    plan: Plan, crew: Crew, max_lag: int
) -> None:
    for waiting, finished, ready in Race(plan, crew, max_lag).run().ready:
        limit = min(finished.values()) + max_lag
        assert set(ready) == {trainer for trainer in waiting if finished[trainer] <= limit}
        assert len(set(ready)) == len(ready)
        counts = [finished[trainer] for trainer in ready]
        assert counts == sorted(counts)


@settings(deadline=None, max_examples=60)
@given(plan=plans, crew=crews())
def test_without_a_limit_all_who_wait_may_start_in_the_order_they_came(
    plan: Plan, crew: Crew
) -> None:
    for waiting, _, ready in Race(plan, crew, None).run().ready:
        assert ready == waiting


@settings(deadline=None, max_examples=60)
@given(plan=plans, crew=crews())
def test_in_rounds_all_who_are_there_start_together(plan: Plan, crew: Crew) -> None:
    for start in Race(plan, crew, 0).run().starts:
        assert start.working == set()
        assert start.waiting == start.finished.keys()


@settings(deadline=None, max_examples=60)
@given(plan=plans, crew=crews(), max_lag=st.sampled_from([None, 0, 1, 2, 4]))
def test_all_is_done_and_nobody_waits_for_ever(plan: Plan, crew: Crew, max_lag: int | None) -> None:
    log = Race(plan, crew, max_lag).run()
    assert log.batches == plan.epochs * plan.batches_per_epoch


@settings(deadline=None, max_examples=80)
@given(plan=plans, crew=crews(), max_lag=st.integers(0, 4))
def test_no_gradient_is_staler_than_the_bound(plan: Plan, crew: Crew, max_lag: int) -> None:
    bound = staleness_bound(max_lag, len(crew.speeds))
    assert bound is not None
    assert max(Race(plan, crew, max_lag).run().staleness) <= bound


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
        pacing.start(1)
        pacing.finish(1)
    assert pacing.ready([1]) == [1]
    pacing.start(1)
    updates = 0
    for trainer in others:
        pacing.finish(trainer)
        updates += 1
    while ready := pacing.ready(others):
        pacing.start(ready[0])
        pacing.finish(ready[0])
        updates += 1
    assert updates == staleness_bound(max_lag, num_trainers)


@pytest.mark.parametrize(
    ("max_lag", "num_trainers", "bound"),
    [
        (None, 1, None),
        (None, 8, None),
        (0, 1, 0),
        (0, 8, 0),
        (1, 1, 0),
        (7, 1, 0),
        (1, 2, 3),
        (2, 2, 5),
        (1, 3, 6),
        (2, 4, 15),
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


def test_a_trainer_may_start_while_it_is_exactly_as_far_ahead_as_allowed() -> None:
    pacing = Pacing([1, 2], max_lag=2)
    work(pacing, [1, 1])
    assert pacing.ready([1]) == [1]
    work(pacing, [1])
    assert pacing.ready([1]) == []
    work(pacing, [2])
    assert pacing.ready([1]) == [1]


def test_a_trainer_counts_from_the_start_though_it_has_not_come_yet() -> None:
    pacing = Pacing([1, 2], max_lag=1)
    work(pacing, [1, 1])
    assert pacing.ready([1]) == []


def test_a_trainer_that_leaves_holds_nobody_up() -> None:
    pacing = Pacing([1, 2, 3], max_lag=1)
    pacing.start(3)
    work(pacing, [1, 1, 2])
    assert pacing.ready([1, 2]) == [2]
    pacing.leave(3)
    assert pacing.ready([1, 2]) == [2, 1]


def test_a_trainer_that_waited_without_orders_is_served_before_those_ahead_of_it() -> None:
    pacing = Pacing([1, 2, 3], max_lag=5)
    work(pacing, [1, 1, 1, 3])
    assert pacing.ready([1, 2, 3]) == [2, 3, 1]


def test_a_round_starts_when_all_wait_and_in_the_order_of_the_trainers() -> None:
    pacing = Pacing([1, 2, 3], max_lag=0)
    assert pacing.ready([3, 1]) == []
    assert pacing.ready([3, 1, 2]) == [1, 2, 3]


def test_a_round_is_open_until_the_last_order_is_in() -> None:
    pacing = Pacing([1, 2], max_lag=0)
    assert pacing.round_is_open is False
    pacing.start(1)
    pacing.start(2)
    assert pacing.round_is_open is True
    pacing.finish(2)
    assert pacing.round_is_open is True
    assert pacing.ready([2]) == []
    pacing.finish(1)
    assert pacing.round_is_open is False


def test_a_trainer_that_leaves_in_a_round_lets_it_end_and_the_next_one_start() -> None:
    pacing = Pacing([1, 2, 3], max_lag=0)
    for trainer in (1, 2, 3):
        pacing.start(trainer)
    pacing.finish(1)
    pacing.finish(2)
    assert pacing.ready([1, 2]) == []
    pacing.leave(3)
    assert pacing.round_is_open is False
    assert pacing.ready([1, 2]) == [1, 2]


def test_a_trainer_that_leaves_between_rounds_is_not_waited_for() -> None:
    pacing = Pacing([1, 2, 3], max_lag=0)
    pacing.leave(2)
    assert pacing.ready([3, 1]) == [1, 3]


def test_a_round_for_which_not_enough_orders_are_left_ends_with_those_that_got_one() -> None:
    pacing = Pacing([1, 2], max_lag=0)
    work(pacing, [1])
    assert pacing.round_is_open is False
    assert pacing.ready([2, 1]) == [1, 2]


@pytest.mark.parametrize("max_lag", [None, 1, 9])
def test_there_are_no_rounds_unless_the_lag_is_0(max_lag: int | None) -> None:
    pacing = Pacing([1, 2], max_lag)
    pacing.start(1)
    assert pacing.round_is_open is False


def test_leaving_twice_changes_nothing() -> None:
    pacing = Pacing([1, 2], max_lag=1)
    pacing.leave(2)
    pacing.leave(2)
    work(pacing, [1, 1, 1])
    assert pacing.ready([1]) == [1]


def test_handing_in_what_was_not_started_is_a_broken_promise() -> None:
    with pytest.raises(KeyError):
        Pacing([1, 2], max_lag=1).finish(1)
