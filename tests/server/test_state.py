"""What training goes on from: taken at one moment, and given back to another job."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ps.protocol import Trained
from ps.server.metrics import Metrics
from ps.server.state import Content, TrainingState, begin
from ps.settings.errors import CheckpointUnusable
from tests.helpers import until
from tests.server.work import orders_of, plan_of, result_of, state_of, training_of

PLAN = plan_of(train=16)


def trained(updates: int = 1) -> TrainingState:
    """One trainer has done so many orders."""
    state = state_of(PLAN)
    training, _ = training_of(state)
    for _ in range(updates):
        training.assign([1], 0.0)
        result = result_of(training.held_by(1), 1.0, torch.tensor(1.0))
        assert isinstance(result, Trained)
        training.take_trained(1, result, training.contribution(1, result), 2.0)
    return state


def test_a_state_goes_on_where_the_other_was_and_tells_from_where() -> None:
    before = trained()
    plan = replace(PLAN, epochs=5, batches_per_update=2)
    path = Path("updates-1.pt")

    def restore_newest(restore: object) -> Path:
        assert callable(restore)
        restore(before.snapshot().content)
        return path

    fresh = state_of(plan)
    state = begin(
        *(plan, fresh.store, orders_of(plan), Metrics(plan, (1,))),
        clock=lambda: 0.0,
        restore_newest=restore_newest,
    )
    assert (state.resumed_from, state.plan) == (path, plan)
    assert state.store.version == 1
    assert state.store.state_dict()["value"].item() == -1.0
    assert state.orders.updates_left == 2 + 4 * 2
    assert (state.metrics.updates, state.metrics.total_updates) == (1, 11)


def test_a_state_that_goes_on_from_nothing_is_as_its_parts_are() -> None:
    plain, searched = begin_plain(), state_of(PLAN)
    for state in (plain, searched):
        assert (state.resumed_from, state.store.version) == (None, 0)
        assert state.metrics.total_updates == PLAN.total_updates


def begin_plain() -> TrainingState:
    return begin(
        *(PLAN, state_of(PLAN).store, orders_of(PLAN), Metrics(PLAN, (1,))), clock=lambda: 0.0
    )


@pytest.mark.parametrize(
    "name", ["num_train_samples", "num_test_samples", "batch_size", "seed", "slice_size"]
)
def test_a_state_of_another_job_is_refused_and_nothing_is_changed(name: str) -> None:
    plan = replace(PLAN, **{name: 3})
    content: list[Content] = [trained().snapshot().content]
    state = state_of(plan)

    def restore_newest(restore: object) -> None:
        assert callable(restore)
        restore(content[0])

    with pytest.raises(CheckpointUnusable, match=rf"{name} is \d+ there and 3 here"):
        begin(
            *(plan, state.store, state.orders, state.metrics),
            clock=lambda: 0.0,
            restore_newest=restore_newest,
        )
    assert (state.store.version, state.metrics.updates) == (0, 0)


def test_a_snapshot_stays_as_it_is_unless_it_is_no_copy() -> None:
    state = trained()
    copied, live = state.snapshot(), state.snapshot(copy=False)
    state.store.apply([torch.tensor(1.0), None])
    weights = [snapshot.content["store"]["model"]["value"].item() for snapshot in (copied, live)]
    assert weights == [-1.0, -2.0]
    assert copied.version == live.version == 1


def test_two_snapshots_have_one_mark_if_nothing_was_done_between_them() -> None:
    state = trained()
    state.orders.take_batch(1)
    first = state.snapshot()
    assert state.snapshot().mark == first.mark
    state.orders.leave(1)
    assert state.snapshot().mark == first.mark
    assert trained(2).snapshot().mark != first.mark
    state.store.version += 1
    assert state.snapshot().mark != first.mark


def test_a_snapshot_is_taken_under_the_lock_with_the_time_so_far() -> None:
    state = begin(
        *(PLAN, state_of(PLAN).store, orders_of(PLAN), Metrics(PLAN, (1,))), clock=lambda: 9.0
    )
    state.metrics.dispatched(1, 4.0)
    contents: list[Content] = []
    thread = threading.Thread(target=lambda: contents.append(state.snapshot().content))
    with state.lock:
        thread.start()
        thread.join(0.05)
        assert contents == []
    until(lambda: bool(contents), 10.0)
    assert contents[0]["metrics"]["training_s"] == 5.0
    assert contents[0].keys() == {"store", "orders", "metrics", "job"}
