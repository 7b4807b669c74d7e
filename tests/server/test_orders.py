"""The list of work under trainers of any number, speed and loyalty: each sample exactly once."""

from __future__ import annotations

import heapq
import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ps.protocol import Evaluate, Evaluated, Result, Train, Trained
from ps.server.orders import Orders, Plan, permutation
from ps.settings.errors import ConfigError

NO_GRADIENT = torch.zeros(0)


def plan_of(
    *,
    train: int = 10,
    test: int = 6,
    batch: int = 4,
    epochs: int = 2,
    seed: int = 0,
    slice: int = 4,
    per_update: int = 1,
) -> Plan:
    return Plan(
        num_train_samples=train,
        num_test_samples=test,
        batch_size=batch,
        epochs=epochs,
        seed=seed,
        slice_size=slice,
        batches_per_update=per_update,
    )


def take(orders: Orders, trainer: int) -> Train | Evaluate | None:
    """What the server gives a trainer that may do anything: a slice first, else a batch."""
    return orders.take_slice(trainer) or orders.take_batch(trainer)


def phase_of(order: Train | Evaluate) -> int:
    """Training of epoch 0 is 0, its evaluation 1, training of epoch 1 is 2, and so on."""
    return 2 * order.epoch + isinstance(order, Evaluate)


def place_of(order: Train | Evaluate) -> int:
    """Among the orders of its phase."""
    return order.batch if isinstance(order, Train) else order.slice


def result_of(order: Train | Evaluate) -> Result:
    if isinstance(order, Train):
        return Trained(order.epoch, order.batch, len(order.indices), 0.0, NO_GRADIENT)
    return Evaluated(order.epoch, order.slice, order.stop - order.start, 0.0, 0)


@dataclass(kw_only=True)
class Crew:
    """Trainers 1..N: how long an order takes each, and after how many orders it leaves."""

    speeds: list[float]
    leaves_after: dict[int, int] = field(default_factory=dict)
    """A trainer that is in here leaves while it holds its next order."""
    lookahead: int = 0
    """How many batches each is promised when it takes one."""


@dataclass
class Log:
    """What a simulated job did, in the order in which it happened."""

    taken: list[Train | Evaluate] = field(default_factory=list)
    finished: list[Train | Evaluate] = field(default_factory=list)
    events: list[Train | Evaluate] = field(default_factory=list)
    """Both of the above, as they came."""
    out_when_opened: list[int] = field(default_factory=list)
    """How many batches were out when the evaluation of epoch 0, 1, ... was opened."""

    def batches(self) -> list[Train]:
        return [order for order in self.finished if isinstance(order, Train)]

    def slices(self) -> list[Evaluate]:
        return [order for order in self.finished if isinstance(order, Evaluate)]


class Job:
    """Runs a crew on the orders of a plan, event by event, without threads or clocks."""

    def __init__(self, plan: Plan, crew: Crew) -> None:
        self.plan = plan
        self.crew = crew
        self.orders = Orders(plan)
        self.log = Log()
        self.idle = list(range(1, len(crew.speeds) + 1))
        self.busy: list[tuple[float, int]] = []
        self.done: Counter[int] = Counter()

    def run(self) -> Log:
        now = 0.0
        while not self.orders.finished:
            self._hand_out(now)
            assert self.busy, "nobody works and the job is not finished"
            now, trainer = heapq.heappop(self.busy)
            if self.crew.leaves_after.get(trainer) == self.done[trainer]:
                self.orders.leave(trainer)
            else:
                self._finish(trainer)
                self.idle.append(trainer)
        assert not self.busy, "finished although an order is out"
        return self.log

    def _hand_out(self, now: float) -> None:
        for trainer in list(self.idle):
            order = take(self.orders, trainer)
            if order is None:
                continue
            assert self.orders.held_by(trainer) == order
            self.idle.remove(trainer)
            heapq.heappush(self.busy, (now + self.crew.speeds[trainer - 1], trainer))
            self.log.taken.append(order)
            self.log.events.append(order)
            if isinstance(order, Train):
                promised = self.orders.promise([trainer], self.crew.lookahead)[trainer]
                assert len(promised) <= self.crew.lookahead
                assert all(o.epoch == order.epoch for o in promised)

    def _finish(self, trainer: int) -> None:
        order = self.orders.held_by(trainer)
        assert order is not None
        evaluating = self.orders.evaluating
        self.orders.finish(trainer, result_of(order))
        self.done[trainer] += 1
        self.log.finished.append(order)
        self.log.events.append(order)
        if self.orders.evaluating != evaluating:
            held = [self.orders.held_by(t) for _, t in self.busy]
            self.log.out_when_opened.append(sum(isinstance(o, Train) for o in held))


plans = st.builds(
    plan_of,
    train=st.integers(1, 40),
    test=st.integers(1, 12),
    batch=st.integers(1, 12),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 2**63 - 1),
    slice=st.integers(1, 6),
)


@st.composite
def crews(draw: st.DrawFn) -> Crew:
    """1, 2, 3 or 5 trainers, up to 50 times as fast as each other; not all of them leave."""
    num = draw(st.sampled_from([1, 2, 3, 5]))
    speeds = draw(st.lists(st.floats(0.1, 5.0), min_size=num, max_size=num))
    stays = draw(st.integers(1, num))
    others = [trainer for trainer in range(1, num + 1) if trainer != stays]
    leaving = draw(st.lists(st.sampled_from(others), unique=True)) if others else []
    leaves_after = {trainer: draw(st.integers(0, 6)) for trainer in leaving}
    return Crew(speeds=speeds, leaves_after=leaves_after, lookahead=draw(st.integers(0, 3)))


@settings(deadline=None, max_examples=50)
@given(plan=plans, crew=crews())
def test_every_sample_is_trained_on_exactly_once_per_epoch(plan: Plan, crew: Crew) -> None:
    log = Job(plan, crew).run()
    for epoch in range(plan.epochs):
        trained = [i for order in log.batches() if order.epoch == epoch for i in order.indices]
        assert sorted(trained) == list(range(plan.num_train_samples))
    assert len(log.batches()) == plan.epochs * plan.batches_per_epoch


@settings(deadline=None, max_examples=50)
@given(plan=plans, crew=crews())
def test_every_test_sample_is_evaluated_exactly_once_per_epoch(plan: Plan, crew: Crew) -> None:
    log = Job(plan, crew).run()
    for epoch in range(plan.epochs):
        slices = [order for order in log.slices() if order.epoch == epoch]
        evaluated = [i for order in slices for i in range(order.start, order.stop)]
        assert sorted(evaluated) == list(range(plan.num_test_samples))
        assert sorted(order.slice for order in slices) == list(range(plan.slices))


@settings(deadline=None, max_examples=60)
@given(plan=plans, crew=crews())
def test_a_batch_holds_the_same_samples_whoever_trains(plan: Plan, crew: Crew) -> None:
    alone = Job(plan, Crew(speeds=[1.0])).run()
    wanted = {(order.epoch, order.batch): order.indices for order in alone.batches()}
    for order in Job(plan, crew).run().taken:
        if isinstance(order, Train):
            assert order.indices == wanted[order.epoch, order.batch]


@settings(deadline=None, max_examples=50)
@given(plan=plans, crew=crews())
def test_training_and_evaluation_take_turns_and_never_overlap(plan: Plan, crew: Crew) -> None:
    """So the weights stand still from the first slice handed out to the last one handed in."""
    phases = [phase_of(order) for order in Job(plan, crew).run().events]
    assert phases == sorted(phases)
    assert set(phases) == set(range(2 * plan.epochs))


@settings(deadline=None, max_examples=50)
@given(plan=plans, crew=crews())
def test_the_evaluation_of_every_epoch_opens_when_no_batch_is_out(plan: Plan, crew: Crew) -> None:
    assert Job(plan, crew).run().out_when_opened == [0] * plan.epochs


@settings(deadline=None, max_examples=50)
@given(plan=plans, crew=crews())
def test_an_order_is_handed_out_again_only_when_its_trainer_left(plan: Plan, crew: Crew) -> None:
    log = Job(plan, crew).run()
    again = len(log.taken) - len({(phase_of(order), place_of(order)) for order in log.taken})
    assert again == len(log.taken) - len(log.finished)
    assert again <= len(crew.leaves_after)


def test_one_trainer_gets_the_batches_of_an_epoch_in_order_and_then_the_slices() -> None:
    log = Job(plan_of(), Crew(speeds=[1.0])).run()
    names = [(phase_of(order), place_of(order)) for order in log.taken]
    assert names == [
        *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)),
        *((2, 0), (2, 1), (2, 2), (3, 0), (3, 1)),
    ]


def test_the_last_batch_and_the_last_slice_hold_what_is_left() -> None:
    log = Job(plan_of(train=10, batch=4, test=6, slice=4, epochs=1), Crew(speeds=[1.0])).run()
    assert [len(order.indices) for order in log.batches()] == [4, 4, 2]
    assert [(order.start, order.stop) for order in log.slices()] == [(0, 4), (4, 6)]


def test_a_batch_is_its_stretch_of_the_permutation() -> None:
    plan = plan_of(train=10, batch=4, epochs=2, seed=7)
    for order in Job(plan, Crew(speeds=[1.0])).run().batches():
        wanted = permutation(7, order.epoch, 10)[4 * order.batch : 4 * order.batch + 4]
        assert list(order.indices) == list(wanted)


def test_there_is_nothing_to_take_while_the_last_batch_of_an_epoch_is_out() -> None:
    orders = Orders(plan_of(train=4, batch=2, epochs=2))
    first, second = take(orders, 1), take(orders, 2)
    assert isinstance(first, Train)
    assert isinstance(second, Train)
    assert take(orders, 3) is None
    orders.finish(1, result_of(first))
    assert (take(orders, 1), orders.evaluating) == (None, None)
    orders.finish(2, result_of(second))
    assert orders.evaluating == 0
    assert take(orders, 1) == Evaluate(epoch=0, slice=0, start=0, stop=4)


def test_there_is_no_batch_while_a_slice_is_to_be_taken_or_out() -> None:
    orders = Orders(plan_of(train=2, batch=2, test=4, slice=2, epochs=2))
    batch = take(orders, 1)
    assert batch is not None
    orders.finish(1, result_of(batch))
    assert orders.take_batch(1) is None
    first = orders.take_slice(1)
    assert first is not None
    orders.finish(1, result_of(first))
    assert orders.take_batch(1) is None
    second = orders.take_slice(2)
    assert second is not None
    assert (orders.take_slice(1), orders.take_batch(1)) == (None, None)
    orders.finish(2, result_of(second))
    following = orders.take_batch(1)
    assert following is not None
    assert (following.epoch, following.batch, orders.evaluating) == (1, 0, 0)


def test_there_is_no_slice_before_the_batches_are_done() -> None:
    orders = Orders(plan_of(train=2, batch=2))
    assert orders.take_slice(1) is None
    batch = orders.take_batch(1)
    assert batch is not None
    assert orders.take_slice(2) is None
    orders.finish(1, result_of(batch))
    assert orders.take_slice(2) == Evaluate(epoch=0, slice=0, start=0, stop=4)


def test_it_is_finished_when_the_last_slice_is() -> None:
    orders = Orders(plan_of(train=2, batch=2, test=2, slice=2, epochs=1))
    for _ in range(2):
        assert orders.finished is False
        order = take(orders, 1)
        assert order is not None
        orders.finish(1, result_of(order))
    assert orders.finished is True
    assert take(orders, 1) is None


def test_what_a_trainer_held_when_it_left_is_handed_out_next() -> None:
    orders = Orders(plan_of(train=10, batch=2))
    held = take(orders, 1)
    assert take(orders, 2) != held
    orders.leave(1)
    assert orders.held_by(1) is None
    assert take(orders, 3) == held


def test_a_slice_of_a_trainer_that_left_is_handed_out_before_the_next_epoch() -> None:
    orders = Orders(plan_of(train=2, batch=2, test=2, slice=2, epochs=2))
    batch = take(orders, 1)
    assert batch is not None
    orders.finish(1, result_of(batch))
    held = take(orders, 1)
    assert held == Evaluate(epoch=0, slice=0, start=0, stop=2)
    orders.leave(1)
    assert orders.take_batch(2) is None
    assert take(orders, 2) == held


def batch_of(order: Train | Evaluate | None) -> int:
    assert isinstance(order, Train)
    return order.batch


def numbers(promised: Sequence[Train]) -> list[int]:
    return [order.batch for order in promised]


def test_a_trainer_takes_what_it_was_promised_and_others_what_comes_after() -> None:
    orders = Orders(plan_of(train=20, batch=2))
    assert batch_of(take(orders, 1)) == 0
    assert numbers(orders.promise([1], 3)[1]) == [1, 2, 3]
    assert batch_of(take(orders, 2)) == 4
    orders.finish(1, Trained(0, 0, 2, 0.0, NO_GRADIENT))
    assert batch_of(take(orders, 1)) == 1
    assert numbers(orders.promise([1], 3)[1]) == [2, 3, 5]


def test_a_promise_is_of_the_orders_that_are_taken_later() -> None:
    orders = Orders(plan_of(train=20, batch=2, seed=3))
    take(orders, 1)
    [promised] = orders.promise([1], 1)[1]
    orders.finish(1, Trained(0, 0, 2, 0.0, NO_GRADIENT))
    assert take(orders, 1) == promised


def test_what_was_promised_goes_last_one_first_to_others_when_nothing_else_is_left() -> None:
    orders = Orders(plan_of(train=10, batch=2))
    take(orders, 1)
    assert numbers(orders.promise([1], 9)[1]) == [1, 2, 3, 4]
    assert batch_of(take(orders, 2)) == 4
    assert batch_of(take(orders, 3)) == 3
    assert numbers(orders.promise([1], 9)[1]) == [1, 2]
    assert numbers(orders.promise([2], 9)[2]) == []


def test_the_longest_promise_is_broken_first() -> None:
    orders = Orders(plan_of(train=12, batch=2))
    take(orders, 1)
    orders.promise([1], 1)[1]
    take(orders, 2)
    assert numbers(orders.promise([2], 9)[2]) == [3, 4, 5]
    assert [batch_of(take(orders, trainer)) for trainer in (3, 4)] == [5, 4]


def test_what_a_trainer_that_left_was_promised_is_handed_out_in_order() -> None:
    orders = Orders(plan_of(train=20, batch=2))
    take(orders, 1)
    orders.promise([1], 2)[1]
    orders.leave(1)
    assert [batch_of(take(orders, trainer)) for trainer in (2, 3, 4, 5)] == [0, 1, 2, 3]


def test_no_evaluation_opens_while_a_batch_is_promised() -> None:
    orders = Orders(plan_of(train=4, batch=2))
    take(orders, 1)
    orders.promise([1], 1)[1]
    orders.finish(1, Trained(0, 0, 2, 0.0, NO_GRADIENT))
    assert (orders.evaluating, orders.take_slice(2)) == (None, None)
    assert batch_of(take(orders, 1)) == 1


def test_promises_do_not_change_which_batches_meet_in_an_update() -> None:
    """In rounds: an update is of as many batches in a row as there are trainers."""
    orders = Orders(plan_of(train=16, batch=2, per_update=2))
    rounds = []
    for _ in range(4):
        met = []
        for trainer in (1, 2):
            met.append(batch_of(take(orders, trainer)))
        orders.promise((1, 2), 2)
        for trainer, batch in zip((1, 2), met, strict=True):
            orders.finish(trainer, Trained(0, batch, 2, 0.0, NO_GRADIENT))
        rounds.append(met)
    assert rounds == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_leaving_without_an_order_changes_nothing() -> None:
    orders = Orders(plan_of(train=4, batch=2))
    orders.leave(9)
    first = take(orders, 1)
    assert isinstance(first, Train)
    assert (first.epoch, first.batch) == (0, 0)


def test_a_check_of_a_result_ticks_nothing_off() -> None:
    orders = Orders(plan_of())
    held = take(orders, 1)
    assert held is not None
    orders.check(1, result_of(held))
    assert orders.held_by(1) == held


def test_taking_while_holding_is_a_broken_promise() -> None:
    orders = Orders(plan_of())
    held = take(orders, 1)
    with pytest.raises(AssertionError, match=r"^trainer 1 already holds an order$"):
        take(orders, 1)
    assert orders.held_by(1) == held


@pytest.mark.parametrize(
    ("result", "named"),
    [
        (Trained(0, 1, 4, 0.0, NO_GRADIENT), r"\('batch', 0, 1\)"),
        (Trained(1, 0, 4, 0.0, NO_GRADIENT), r"\('batch', 1, 0\)"),
        (Evaluated(0, 0, 4, 0.0, 0), r"\('slice', 0, 0\)"),
    ],
)
def test_finishing_another_order_than_the_one_held_is_a_broken_promise(
    result: Result, named: str
) -> None:
    orders = Orders(plan_of())
    held = take(orders, 1)
    with pytest.raises(AssertionError, match=rf"^trainer 1 holds \('batch', 0, 0\), not {named}$"):
        orders.finish(1, result)
    assert orders.held_by(1) == held


def test_finishing_without_holding_is_a_broken_promise() -> None:
    orders = Orders(plan_of())
    with pytest.raises(AssertionError, match=r"^trainer 2 holds None, not \('batch', 0, 0\)$"):
        orders.finish(2, Trained(0, 0, 4, 0.0, NO_GRADIENT))


def test_finishing_the_same_order_twice_is_a_broken_promise() -> None:
    orders = Orders(plan_of())
    order = take(orders, 1)
    assert order is not None
    orders.finish(1, result_of(order))
    with pytest.raises(AssertionError, match=r"^trainer 1 holds None, not \('batch', 0, 0\)$"):
        orders.finish(1, result_of(order))


def restored(state: object, plan: Plan) -> Orders:
    """From what a file would hold: JSON keeps only plain values as they are."""
    plain = json.loads(json.dumps(state))
    assert plain == state
    orders = Orders(plan)
    orders.restore(plain)
    return orders


def do_something(orders: Orders, trainer: int, draw: random.Random) -> Train | Evaluate | None:
    """Take, be promised, leave, or finish; gives what was finished."""
    held = orders.held_by(trainer)
    if draw.random() < 0.1:
        orders.leave(trainer)
    elif held is None:
        if isinstance(take(orders, trainer), Train):
            orders.promise([trainer], draw.randrange(4))
    elif draw.random() < 0.6:
        orders.finish(trainer, result_of(held))
        return held
    return None


@settings(deadline=None, max_examples=80)
@given(
    plan=plans,
    stretches=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 30)), max_size=6),
    seed=st.integers(0, 2**32),
)
def test_stopped_at_any_moment_and_gone_on_with_any_number_each_order_is_done_once(
    plan: Plan, stretches: list[tuple[int, int]], seed: int
) -> None:
    """Each stretch is a number of trainers, and after how many events the job is stopped."""
    orders, finished, draw = Orders(plan), list[Train | Evaluate](), random.Random(seed)
    for trainers, events in [*stretches, (2, 100_000)]:
        for _ in range(events):
            if orders.finished:
                break
            if done := do_something(orders, draw.randint(1, trainers), draw):
                finished.append(done)
            batches = sum(isinstance(order, Train) for order in finished)
            assert orders.updates_left == plan.total_updates - batches
        before = orders
        orders = restored(before.state(), plan)
        assert (orders.finished, orders.updates_left) == (before.finished, before.updates_left)
        assert (orders.evaluating, orders.state()) == (before.evaluating, before.state())
    assert orders.finished
    names = [(phase_of(order), place_of(order)) for order in finished]
    assert sorted(names) == [
        (2 * epoch + evaluation, place)
        for epoch in range(plan.epochs)
        for evaluation, places in ((0, plan.batches_per_epoch), (1, plan.slices))
        for place in range(places)
    ]
    assert [phase for phase, _ in names] == sorted(phase for phase, _ in names)
    for epoch in range(plan.epochs):
        trained = [
            i for o in finished if o.epoch == epoch and isinstance(o, Train) for i in o.indices
        ]
        assert sorted(trained) == list(range(plan.num_train_samples))


def test_what_is_held_and_promised_is_in_the_state_as_not_done() -> None:
    orders = Orders(plan_of(train=40, batch=2))
    for trainer in (1, 2, 3):
        take(orders, trainer)
    orders.promise((1, 2), 2)
    orders.leave(3)
    finish_first(orders, 2)
    assert orders.state() == {
        "epoch": 0,
        "evaluating": None,
        "next_batch": 7,
        "returned_batches": [0, 2, 3, 4, 5, 6],
        "slices": [],
    }


def finish_first(orders: Orders, trainer: int) -> None:
    held = orders.held_by(trainer)
    assert held is not None
    orders.finish(trainer, result_of(held))


def test_a_state_does_not_change_with_what_is_done_later() -> None:
    orders = Orders(plan_of(train=20, batch=2))
    take(orders, 1)
    state = orders.state()
    before = json.dumps(state)
    finish_first(orders, 1)
    for trainer in (1, 2):
        take(orders, trainer)
    orders.leave(2)
    assert json.dumps(state) == before


def test_the_state_is_the_same_whoever_holds_what() -> None:
    """So that nothing seems to have changed when trainers only leave."""
    orders = Orders(plan_of(train=20, batch=2))
    for trainer in (1, 2, 3):
        take(orders, trainer)
    orders.promise((2, 1, 3), 2)
    finish_first(orders, 2)
    assert_the_same_when_all_leave(orders, (3, 1, 2))
    orders = Orders(plan_of(train=2, batch=2, test=12, slice=2))
    take(orders, 1)
    finish_first(orders, 1)
    for trainer in (1, 2, 3):
        take(orders, trainer)
    finish_first(orders, 2)
    assert_the_same_when_all_leave(orders, (1, 3))


def assert_the_same_when_all_leave(orders: Orders, trainers: Sequence[int]) -> None:
    state = orders.state()
    for trainer in trainers:
        orders.leave(trainer)
        assert orders.state() == state


def test_batches_in_a_row_meet_in_an_update_as_they_would_have() -> None:
    orders = Orders(plan_of(train=16, batch=2, per_update=2))
    for trainer in (1, 2):
        take(orders, trainer)
    orders.promise((1, 2), 2)
    resumed = restored(orders.state(), plan_of(train=16, batch=2, per_update=2))
    met = [batch_of(take(resumed, trainer)) for trainer in (1, 2)]
    assert met == [0, 1]
    assert [numbers(batches) for batches in resumed.promise((1, 2), 2).values()] == [[2, 4], [3, 5]]


def test_an_evaluation_goes_on_with_the_slices_that_are_left() -> None:
    plan = plan_of(train=2, batch=2, test=12, slice=4, epochs=1)
    orders = Orders(plan)
    take(orders, 1)
    finish_first(orders, 1)
    for trainer in (1, 2):
        take(orders, trainer)
    finish_first(orders, 1)
    resumed = restored(orders.state(), plan)
    assert (resumed.evaluating, resumed.take_batch(1)) == (0, None)
    for index in (1, 2):
        assert take(resumed, 7) == Evaluate(0, index, 4 * index, 4 * index + 4)
        finish_first(resumed, 7)
    assert resumed.finished


def done_with(plan: Plan) -> Orders:
    orders = Orders(plan)
    while not orders.finished:
        take(orders, 1)
        finish_first(orders, 1)
    return orders


def test_a_finished_list_stays_finished() -> None:
    plan = plan_of(epochs=2)
    resumed = restored(done_with(plan).state(), plan)
    assert (resumed.finished, take(resumed, 1), resumed.updates_left) == (True, None, 0)


def test_a_finished_list_goes_on_with_further_epochs_alone() -> None:
    resumed = restored(done_with(plan_of(epochs=2)).state(), plan_of(epochs=3))
    assert (resumed.finished, resumed.updates_left) == (False, 3)
    following = resumed.take_batch(1)
    assert following is not None
    assert (following.epoch, following.batch) == (2, 0)
    assert list(following.indices) == list(permutation(0, 2, 10)[:4])


def stopped_in_epoch(epoch: int, batches: int, epochs: int = 9) -> object:
    """The state after so many batches of it, epoch from 1; a batch is out."""
    orders = done_with(plan_of(epochs=epoch - 1)) if epoch > 1 else Orders(plan_of())
    orders = restored(orders.state(), plan_of(epochs=epochs))
    for _ in range(batches):
        take(orders, 1)
        finish_first(orders, 1)
    return orders.state()


@pytest.mark.parametrize(("epoch", "batches", "least"), [(3, 1, 3), (3, 3, 3), (3, 0, 2)])
def test_fewer_epochs_than_were_begun_are_refused(epoch: int, batches: int, least: int) -> None:
    state = stopped_in_epoch(epoch, batches)
    for epochs in range(1, least):
        orders = Orders(plan_of(epochs=epochs))
        before = orders.state()
        with pytest.raises(ConfigError) as caught:
            orders.restore(state)  # type: ignore[arg-type]
        assert str(caught.value) == (
            f"--epochs {epochs} cannot be: the run to go on from has begun epoch {least}; "
            f"type {least} or more, or omit it"
        )
        assert orders.state() == before
    assert restored(state, plan_of(epochs=least)).finished is (batches == 0)


@pytest.mark.parametrize(
    ("per_update", "epochs", "left"), [(1, 9, 3 * 7 - 2), (2, 9, 1 + 2 * 6), (3, 3, 1), (5, 4, 2)]
)
def test_the_updates_left_are_those_of_the_trainers_that_there_are_now(
    per_update: int, epochs: int, left: int
) -> None:
    """Of epoch 3, two of its three batches are done."""
    resumed = restored(stopped_in_epoch(3, 2), plan_of(epochs=epochs, per_update=per_update))
    assert resumed.updates_left == left


def test_the_updates_left_count_what_is_out_and_what_is_promised() -> None:
    orders = Orders(plan_of(train=14, batch=2, epochs=2, per_update=2))
    assert orders.updates_left == 8
    for trainer in (1, 2):
        take(orders, trainer)
    orders.promise((1, 2), 1)
    assert orders.updates_left == 8
    finish_first(orders, 1)
    finish_first(orders, 2)
    assert orders.updates_left == 7


@pytest.mark.parametrize(
    ("train", "batch", "updates"),
    [(1, 32, 1), (32, 32, 1), (33, 32, 2), (60000, 32, 1875), (60000, 64, 938), (5, 1, 5)],
)
def test_the_updates_of_an_epoch_are_the_batches_rounded_up(
    train: int, batch: int, updates: int
) -> None:
    plan = plan_of(train=train, batch=batch, epochs=3)
    assert (plan.updates_per_epoch, plan.total_updates) == (updates, 3 * updates)


@pytest.mark.parametrize(
    ("batches", "per_update", "updates"), [(6, 2, 3), (5, 2, 3), (5, 3, 2), (5, 5, 1), (5, 9, 1)]
)
def test_an_update_of_several_batches_does_not_reach_into_the_next_epoch(
    batches: int, per_update: int, updates: int
) -> None:
    plan = plan_of(train=4 * batches, batch=4, epochs=3, per_update=per_update)
    assert plan.batches_per_epoch == batches
    assert (plan.updates_per_epoch, plan.total_updates) == (updates, 3 * updates)


def test_how_many_batches_make_an_update_changes_no_order() -> None:
    alone, together = (
        Job(plan_of(per_update=per_update), Crew(speeds=[1.0])).run() for per_update in (1, 3)
    )
    assert alone.taken == together.taken


@pytest.mark.parametrize(("test", "slices"), [(1, 1), (500, 1), (501, 2), (10000, 20)])
def test_the_slices_are_of_500_samples_rounded_up(test: int, slices: int) -> None:
    plan = Plan(num_train_samples=1, num_test_samples=test, batch_size=1, epochs=1, seed=0)
    assert plan.slices == slices == math.ceil(test / 500)


@given(seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 1000), length=st.integers(0, 300))
def test_the_order_of_samples_is_a_permutation(seed: int, epoch: int, length: int) -> None:
    assert sorted(permutation(seed, epoch, length)) == list(range(length))


def test_the_order_of_samples_differs_by_epoch_and_by_seed() -> None:
    orders = {
        tuple(permutation(seed, epoch, 100)) for seed in (0, 1, 11) for epoch in (0, 1, 10, 11)
    }
    assert len(orders) == 12
    assert permutation(3, 4, 100) == permutation(3, 4, 100)


def test_the_order_of_samples_stays_what_it_was_in_earlier_releases() -> None:
    assert list(permutation(0, 0, 10)) == [5, 4, 2, 0, 8, 3, 1, 9, 6, 7]
    assert list(permutation(0, 1, 10)) == [9, 0, 2, 8, 5, 3, 7, 1, 4, 6]
