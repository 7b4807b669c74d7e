"""The list of work under trainers of any number, speed and loyalty: each sample exactly once."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps.model.randomness import permutation
from ps.protocol import Evaluate, Evaluated, Order, Result, Train, Trained
from ps.server.orders import Orders, Plan
from ps.settings.errors import ConfigError
from tests.server.work import (
    NO_GRADIENT,
    Crew,
    Simulation,
    crews,
    finish,
    name_of,
    orders_of,
    plan_of,
    plans,
    result_of,
    take,
)

ALONE = Crew(speeds=[[1.0]])


def every_name(plan: Plan) -> list[tuple[int, int]]:
    """Of the orders of a whole job, in its order."""
    return [
        (2 * epoch + evaluation, place)
        for epoch in range(plan.epochs)
        for evaluation, places in ((0, plan.batches_per_epoch), (1, plan.slices))
        for place in range(places)
    ]


def batch_of(order: Order | None) -> int:
    assert isinstance(order, Train)
    return order.batch


def numbers(reserved: Sequence[Train]) -> list[int]:
    return [order.batch for order in reserved]


# --- whole jobs


@settings(deadline=None, max_examples=80)
@given(plan=plans, crew=crews(), prefetch=st.integers(0, 3))
def test_every_sample_is_trained_on_and_evaluated_exactly_once_per_epoch(
    plan: Plan, crew: Crew, prefetch: int
) -> None:
    job = Simulation(plan, crew, prefetch=prefetch).run()
    for epoch in range(plan.epochs):
        trained = [i for order in job.batches() if order.epoch == epoch for i in order.indices]
        assert sorted(trained) == list(range(plan.num_train_samples))
        slices = [o for o in job.done if isinstance(o, Evaluate) and o.epoch == epoch]
        evaluated = [i for order in slices for i in range(order.start, order.stop)]
        assert sorted(evaluated) == list(range(plan.num_test_samples))
    assert sorted(map(name_of, job.done)) == every_name(plan)


@settings(deadline=None, max_examples=50)
@given(plan=plans, crew=crews(), prefetch=st.integers(0, 3))
def test_a_batch_holds_the_same_samples_whoever_trains(
    plan: Plan, crew: Crew, prefetch: int
) -> None:
    wanted = {name_of(order): order for order in Simulation(plan, ALONE).run().taken}
    for order in Simulation(plan, crew, prefetch=prefetch).run().taken:
        assert order == wanted[name_of(order)]


@settings(deadline=None, max_examples=80)
@given(plan=plans, crew=crews(), prefetch=st.integers(0, 3))
def test_training_and_evaluation_take_turns_and_never_overlap(
    plan: Plan, crew: Crew, prefetch: int
) -> None:
    """So the weights stand still from the first slice dispatched to the last one returned."""
    job = Simulation(plan, crew, prefetch=prefetch).run()
    phases = [name_of(order)[0] for order in job.events]
    assert phases == sorted(phases)
    assert set(phases) == set(range(2 * plan.epochs))
    assert job.out_when_opened == [0] * plan.epochs


@settings(deadline=None, max_examples=50)
@given(plan=plans, crew=crews(), prefetch=st.integers(0, 3))
def test_an_order_is_dispatched_again_only_when_its_trainer_left(
    plan: Plan, crew: Crew, prefetch: int
) -> None:
    job = Simulation(plan, crew, prefetch=prefetch).run()
    again = len(job.taken) - len(set(map(name_of, job.taken)))
    assert again == len(job.taken) - len(job.done) <= len(crew.leaves_after)


@pytest.mark.parametrize("per_update", [1, 3])
def test_one_trainer_gets_all_in_order_and_the_last_of_each_holds_what_is_left(
    per_update: int,
) -> None:
    plan = plan_of(train=10, batch=4, test=6, slice=4, epochs=2, seed=7, per_update=per_update)
    job = Simulation(plan, ALONE).run()
    assert [name_of(order) for order in job.taken] == every_name(plan)
    for order in job.batches():
        wanted = permutation(7, order.epoch, 10)[4 * order.batch : 4 * order.batch + 4]
        assert list(order.indices) == list(wanted)
    assert [len(order.indices) for order in job.batches()] == [4, 4, 2] * 2
    slices = [(o.epoch, o.start, o.stop) for o in job.done if isinstance(o, Evaluate)]
    assert slices == [(0, 0, 4), (0, 4, 6), (1, 0, 4), (1, 4, 6)]


# --- one epoch after the other


def test_there_is_nothing_to_take_while_the_last_batch_of_an_epoch_is_out() -> None:
    orders = orders_of(plan_of(train=4, batch=2, epochs=2))
    assert orders.take_slice(1) is None
    assert [batch_of(take(orders, trainer)) for trainer in (1, 2)] == [0, 1]
    assert take(orders, 3) is None
    finish(orders, 1)
    assert (take(orders, 1), orders.evaluating) == (None, None)
    finish(orders, 2)
    assert orders.evaluating == 0
    assert take(orders, 1) == Evaluate(epoch=0, slice=0, start=0, stop=4)


def test_there_is_no_batch_while_a_slice_is_to_be_taken_or_out() -> None:
    orders = orders_of(plan_of(train=2, batch=2, test=4, slice=2, epochs=2))
    take(orders, 1)
    finish(orders, 1)
    assert orders.take_batch(1) is None
    take(orders, 1)
    finish(orders, 1)
    assert orders.take_batch(1) is None
    take(orders, 2)
    assert (orders.take_slice(1), orders.take_batch(1)) == (None, None)
    finish(orders, 2)
    following = orders.take_batch(1)
    assert following is not None
    assert (following.epoch, following.batch, orders.evaluating) == (1, 0, 0)


def test_it_is_finished_when_the_last_slice_is() -> None:
    orders = orders_of(plan_of(train=2, batch=2, test=2, slice=2, epochs=1))
    for _ in range(2):
        assert orders.finished is False
        take(orders, 1)
        assert orders.finished is False
        finish(orders, 1)
    assert orders.finished is True
    assert take(orders, 1) is None


# --- the samples of an epoch are still being shuffled


def test_there_is_no_batch_until_the_order_of_the_samples_is_there() -> None:
    made: dict[int, Sequence[int]] = {}
    asked: list[int] = []

    def permutation_of(epoch: int) -> Sequence[int] | None:
        asked.append(epoch)
        return made.get(epoch)

    orders = Orders(plan_of(train=4, batch=2, test=2, epochs=2), permutation_of)
    assert (orders.take_batch(1), orders.take_batch(2)) == (None, None)
    assert orders.reserve([1, 2], 1) == {1: [], 2: []}
    assert asked == [0, 0, 0, 0]
    made[0] = [3, 1, 0, 2]
    assert orders.take_batch(1) == Train(0, 0, [3, 1])
    assert orders.reserve([1], 1) == {1: [Train(0, 1, [0, 2])]}
    assert asked == [0] * 5
    for _ in range(2):
        finish(orders, 1)
        take(orders, 1)
    assert isinstance(orders.held_by(1), Evaluate)
    finish(orders, 1)
    assert take(orders, 1) is None and orders.updates_left == 2
    made[1] = [0, 1, 2, 3]
    assert take(orders, 1) == Train(1, 0, [0, 1])
    assert asked == [0] * 5 + [1] * 3


# --- a trainer leaves


def test_what_a_trainer_held_when_it_left_is_dispatched_next() -> None:
    orders = orders_of(plan_of(train=10, batch=2))
    held = take(orders, 1)
    take(orders, 2)
    orders.leave(1)
    assert orders.held_by(1) is None
    orders.leave(2)
    assert [batch_of(take(orders, trainer)) for trainer in (3, 4, 5)] == [1, 0, 2]
    assert orders.held_by(4) == held


def test_a_slice_of_a_trainer_that_left_is_dispatched_first_and_before_the_next_epoch() -> None:
    orders = orders_of(plan_of(train=2, batch=2, test=4, slice=2, epochs=2))
    take(orders, 1)
    finish(orders, 1)
    held = take(orders, 1)
    orders.leave(1)
    assert orders.take_batch(2) is None
    assert take(orders, 2) == held == Evaluate(epoch=0, slice=0, start=0, stop=2)


def test_leaving_without_an_order_changes_nothing() -> None:
    orders = orders_of(plan_of(train=4, batch=2))
    orders.leave(9)
    assert orders.state() == orders_of(plan_of(train=4, batch=2)).state()
    assert batch_of(take(orders, 1)) == 0


# --- reserved batches


def test_a_trainer_takes_what_was_reserved_for_it_and_others_what_comes_after() -> None:
    orders = orders_of(plan_of(train=20, batch=2, seed=3))
    assert batch_of(take(orders, 1)) == 0
    reserved = orders.reserve([1], 3)[1]
    assert numbers(reserved) == [1, 2, 3]
    assert batch_of(take(orders, 2)) == 4
    finish(orders, 1)
    assert take(orders, 1) == reserved[0]
    assert numbers(orders.reserve([1], 3)[1]) == [2, 3, 5]
    assert numbers(orders.reserve([1], 0)[1]) == [2, 3, 5]


def test_what_is_reserved_goes_last_one_first_to_others_when_nothing_else_is_left() -> None:
    orders = orders_of(plan_of(train=10, batch=2))
    take(orders, 1)
    assert numbers(orders.reserve([1], 9)[1]) == [1, 2, 3, 4]
    assert [batch_of(take(orders, trainer)) for trainer in (2, 3)] == [4, 3]
    assert [numbers(orders.reserve([t], 9)[t]) for t in (1, 2)] == [[1, 2], []]


def test_others_take_from_whom_the_most_is_reserved_for() -> None:
    orders = orders_of(plan_of(train=12, batch=2))
    take(orders, 1)
    orders.reserve([1], 1)
    take(orders, 2)
    assert numbers(orders.reserve([2], 9)[2]) == [3, 4, 5]
    assert [batch_of(take(orders, trainer)) for trainer in (3, 4)] == [5, 4]


def test_what_was_reserved_for_a_trainer_that_left_is_dispatched_in_order() -> None:
    orders = orders_of(plan_of(train=20, batch=2))
    take(orders, 1)
    orders.reserve([1], 2)
    orders.leave(1)
    assert [batch_of(take(orders, trainer)) for trainer in (2, 3, 4, 5)] == [0, 1, 2, 3]


def test_no_evaluation_opens_while_a_batch_is_reserved() -> None:
    orders = orders_of(plan_of(train=4, batch=2))
    take(orders, 1)
    orders.reserve([1], 1)
    finish(orders, 1)
    assert (orders.evaluating, orders.take_slice(2)) == (None, None)
    assert batch_of(take(orders, 1)) == 1


def test_reserving_does_not_change_which_batches_meet_in_an_update() -> None:
    """In rounds: an update is of as many batches in a row as there are trainers."""
    orders = orders_of(plan_of(train=16, batch=2, per_update=2))
    rounds = []
    for _ in range(4):
        rounds.append([batch_of(take(orders, trainer)) for trainer in (1, 2)])
        reserved = [numbers(batches) for batches in orders.reserve((1, 2), 2).values()]
        if len(rounds) == 1:
            assert reserved == [[2, 4], [3, 5]]
        for trainer in (1, 2):
            finish(orders, trainer)
    assert rounds == [[0, 1], [2, 3], [4, 5], [6, 7]]


# --- what breaks the contract


def test_a_check_of_a_result_ticks_nothing_off() -> None:
    orders = orders_of(plan_of())
    held = take(orders, 1)
    orders.check(1, result_of(held))
    assert orders.held_by(1) == held


def test_a_trainer_that_holds_an_order_is_given_no_other() -> None:
    orders = orders_of(plan_of())
    held = take(orders, 1)
    with pytest.raises(AssertionError, match="trainer 1"):
        take(orders, 1)
    assert orders.held_by(1) == held


@pytest.mark.parametrize(
    "result",
    [
        Trained(0, 1, 4, 0.0, NO_GRADIENT),
        Trained(1, 0, 4, 0.0, NO_GRADIENT),
        Evaluated(0, 0, 4, 0.0, 0),
    ],
)
def test_a_result_of_another_order_than_the_one_held_is_refused(result: Result) -> None:
    orders = orders_of(plan_of())
    held = take(orders, 1)
    with pytest.raises(AssertionError, match=r"trainer 1 holds \('batch', 0, 0\)"):
        orders.finish(1, result)
    assert orders.held_by(1) == held


def test_a_result_of_an_order_that_is_not_held_or_not_any_more_is_refused() -> None:
    orders = orders_of(plan_of())
    result = result_of(take(orders, 1))
    with pytest.raises(AssertionError, match="trainer 2 holds None"):
        orders.finish(2, result)
    orders.finish(1, result)
    with pytest.raises(AssertionError, match="trainer 1 holds None"):
        orders.finish(1, result)


# --- stopped and gone on with


def restored(state: object, plan: Plan) -> Orders:
    """From what a file would hold: JSON keeps only plain values as they are."""
    plain = json.loads(json.dumps(state))
    assert plain == state
    orders = orders_of(plan)
    orders.restore(plain)
    return orders


def do_something(orders: Orders, trainer: int, draw: random.Random) -> Order | None:
    """Take, reserve, leave, or finish; gives what was finished."""
    held = orders.held_by(trainer)
    if draw.random() < 0.1:
        orders.leave(trainer)
    elif held is None:
        if isinstance(take(orders, trainer), Train):
            orders.reserve([trainer], draw.randrange(4))
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
    orders, done, draw = orders_of(plan), list[Order](), random.Random(seed)
    for trainers, events in [*stretches, (2, 100_000)]:
        for _ in range(events):
            if orders.finished:
                break
            if order := do_something(orders, draw.randint(1, trainers), draw):
                done.append(order)
            batches = sum(isinstance(order, Train) for order in done)
            assert orders.updates_left == plan.total_updates - batches
        before = orders
        orders = restored(before.state(), plan)
        assert (orders.finished, orders.updates_left) == (before.finished, before.updates_left)
        assert (orders.evaluating, orders.state()) == (before.evaluating, before.state())
    names = [name_of(order) for order in done]
    assert sorted(names) == every_name(plan)
    assert [phase for phase, _ in names] == sorted(phase for phase, _ in names)
    for epoch in range(plan.epochs):
        batches_done = [o for o in done if isinstance(o, Train) and o.epoch == epoch]
        trained = sorted(i for order in batches_done for i in order.indices)
        assert trained == list(range(plan.num_train_samples))


def test_what_is_held_and_reserved_is_in_the_state_as_not_done() -> None:
    orders = orders_of(plan_of(train=40, batch=2))
    for trainer in (1, 2, 3):
        take(orders, trainer)
    orders.reserve((1, 2), 2)
    orders.leave(3)
    finish(orders, 2)
    assert orders.state() == {
        "epoch": 0,
        "evaluating": None,
        "next_batch": 7,
        "returned_batches": [0, 2, 3, 4, 5, 6],
        "slices": [],
    }


def test_a_state_does_not_change_with_what_is_done_later() -> None:
    orders = orders_of(plan_of(train=20, batch=2))
    take(orders, 1)
    state = orders.state()
    before = json.dumps(state)
    finish(orders, 1)
    for trainer in (1, 2):
        take(orders, trainer)
    orders.leave(2)
    assert json.dumps(state) == before


@pytest.mark.parametrize("phase", ["training", "evaluation"])
def test_the_state_is_the_same_whoever_holds_what(phase: str) -> None:
    """So that nothing seems to have changed when trainers only leave."""
    orders = orders_of(plan_of(train=20, batch=2, test=12, slice=2))
    while phase == "evaluation" and orders.evaluating is None:
        take(orders, 1)
        finish(orders, 1)
    for trainer in (1, 2, 3):
        take(orders, trainer)
    orders.reserve((2, 1, 3), 2)
    finish(orders, 2)
    state = orders.state()
    for trainer in (3, 1, 2):
        orders.leave(trainer)
        assert orders.state() == state


def test_batches_in_a_row_meet_in_an_update_as_they_would_have() -> None:
    plan = plan_of(train=16, batch=2, per_update=2)
    orders = orders_of(plan)
    for trainer in (1, 2):
        take(orders, trainer)
    orders.reserve((1, 2), 2)
    resumed = restored(orders.state(), plan)
    assert [batch_of(take(resumed, trainer)) for trainer in (1, 2)] == [0, 1]
    assert [numbers(batches) for batches in resumed.reserve((1, 2), 2).values()] == [[2, 4], [3, 5]]


def test_an_evaluation_goes_on_with_the_slices_that_are_left() -> None:
    plan = plan_of(train=2, batch=2, test=12, slice=4, epochs=1)
    orders = orders_of(plan)
    take(orders, 1)
    finish(orders, 1)
    for trainer in (1, 2):
        take(orders, trainer)
    finish(orders, 1)
    resumed = restored(orders.state(), plan)
    assert (resumed.evaluating, resumed.take_batch(1)) == (0, None)
    for index in (1, 2):
        assert take(resumed, 7) == Evaluate(0, index, 4 * index, 4 * index + 4)
        finish(resumed, 7)
    assert resumed.finished


def test_a_finished_list_stays_finished_or_goes_on_with_further_epochs_alone() -> None:
    state = Simulation(plan_of(epochs=2), ALONE).run().orders.state()
    resumed = restored(state, plan_of(epochs=2))
    assert (resumed.finished, take(resumed, 1), resumed.updates_left) == (True, None, 0)
    resumed = restored(state, plan_of(epochs=3))
    assert (resumed.finished, resumed.updates_left) == (False, 3)
    assert take(resumed, 1) == Train(2, 0, permutation(0, 2, 10)[:4])


def stopped_in_epoch(epoch: int, batches: int, epochs: int = 9) -> dict[str, object]:
    """The state after so many batches of it, epoch from 1."""
    done = Simulation(plan_of(epochs=epoch - 1), ALONE).run().orders
    orders = restored(done.state(), plan_of(epochs=epochs))
    for _ in range(batches):
        take(orders, 1)
        finish(orders, 1)
    return orders.state()


@pytest.mark.parametrize(("epoch", "batches", "least"), [(3, 1, 3), (3, 3, 3), (3, 0, 2)])
def test_fewer_epochs_than_were_begun_are_refused(epoch: int, batches: int, least: int) -> None:
    state = stopped_in_epoch(epoch, batches)
    for epochs in range(1, least):
        orders = orders_of(plan_of(epochs=epochs))
        before = orders.state()
        with pytest.raises(ConfigError, match=rf"--epochs {epochs}.*begun epoch {least}\b"):
            orders.restore(state)
        assert orders.state() == before
    assert restored(state, plan_of(epochs=least)).finished is (batches == 0)


@pytest.mark.parametrize(
    ("per_update", "epochs", "left"), [(1, 9, 3 * 7 - 2), (2, 9, 1 + 2 * 6), (3, 3, 1), (5, 4, 2)]
)
def test_the_updates_left_are_those_of_the_trainers_that_there_are_now(
    per_update: int, epochs: int, left: int
) -> None:
    """Of epoch 3, two of its three batches are done."""
    state = stopped_in_epoch(3, 2)
    assert restored(state, plan_of(epochs=epochs, per_update=per_update)).updates_left == left


def test_batches_that_are_held_and_reserved_are_updates_that_are_left() -> None:
    orders = orders_of(plan_of(train=14, batch=2, epochs=2, per_update=2))
    assert orders.updates_left == 8
    for trainer in (1, 2):
        take(orders, trainer)
    orders.reserve((1, 2), 1)
    assert orders.updates_left == 8
    finish(orders, 1)
    finish(orders, 2)
    assert orders.updates_left == 7


# --- the plan in numbers


@pytest.mark.parametrize(
    ("train", "batch", "per_update", "updates"),
    [
        *((1, 32, 1, 1), (32, 32, 1, 1), (33, 32, 1, 2), (60000, 32, 1, 1875), (60000, 64, 1, 938)),
        *((24, 4, 2, 3), (20, 4, 2, 3), (20, 4, 3, 2), (20, 4, 5, 1), (20, 4, 9, 1)),
    ],
)
def test_an_update_of_several_batches_does_not_reach_into_the_next_epoch(
    train: int, batch: int, per_update: int, updates: int
) -> None:
    plan = plan_of(train=train, batch=batch, epochs=3, per_update=per_update)
    assert plan.batches_per_epoch == math.ceil(train / batch)
    assert (plan.updates_per_epoch, plan.total_updates) == (updates, 3 * updates)


@pytest.mark.parametrize(("test", "slices"), [(1, 1), (500, 1), (501, 2), (10000, 20)])
def test_where_nothing_is_said_slices_are_of_500_samples_and_updates_of_a_batch(
    test: int, slices: int
) -> None:
    plan = Plan(num_train_samples=7, num_test_samples=test, batch_size=1, epochs=1, seed=0)
    assert (plan.slices, plan.updates_per_epoch) == (slices, 7)
