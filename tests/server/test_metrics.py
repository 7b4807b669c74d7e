"""The numbers of the progress lines and of the report, at invented times."""

from __future__ import annotations

import copy
import io
import math
from typing import Any, cast

import pytest
import torch

from ps.protocol import Evaluated, Train, Trained
from ps.server.metrics import MAX_NAMED, PROGRESS_INTERVAL_S, Metrics
from tests.server.work import plan_of


def metrics_of(
    *,
    train: int = 96,
    test: int = 10,
    batch: int = 32,
    epochs: int = 2,
    trainers: int = 1,
    per_update: int = 1,
) -> Metrics:
    plan = plan_of(
        train=train, test=test, batch=batch, epochs=epochs, slice=6, per_update=per_update
    )
    return Metrics(plan, range(1, trainers + 1))


def trained(batch: int = 0, *, epoch: int = 0, samples: int = 32, loss: float = 1.0) -> Trained:
    return Trained(epoch, batch, samples, loss, gradient=torch.zeros(0))


def apply(metrics: Metrics, result: Trained, staleness: int = 0, trainer: int = 1) -> None:
    """An update of this one gradient."""
    metrics.updated()
    metrics.trained(trainer, result, staleness)


def step(
    metrics: Metrics,
    start: float,
    stop: float,
    result: Trained,
    staleness: int = 0,
    trainer: int = 1,
) -> None:
    """One order that is out from start to stop."""
    metrics.dispatched(trainer, start)
    metrics.returned(trainer, stop)
    apply(metrics, result, staleness, trainer)


def trainer_report(metrics: Metrics, trainer: int) -> dict[str, Any]:
    report = cast(dict[str, Any], metrics.report(now=0.0))
    return cast(dict[str, Any], report["trainers"][str(trainer)])


def staleness_of(report: dict[str, Any]) -> tuple[float | None, int | None, int | None]:
    return report["staleness_mean"], report["staleness_p99"], report["staleness_max"]


def test_a_report_with_nothing_done_holds_none_for_what_does_not_exist() -> None:
    nothing = {
        "orders": 0,
        "samples": 0,
        "order_s": None,
        "staleness_mean": None,
        "staleness_p99": None,
        "staleness_max": None,
    }
    assert metrics_of(trainers=2).report(now=100.0) == {
        "orders_skipped": 0,
        "samples_skipped": 0,
        "skipped": [],
        "updates": 0,
        "samples_trained": 0,
        "samples_per_s": None,
        "train_loss": None,
        "test_loss": None,
        "test_accuracy": None,
        "staleness_mean": None,
        "staleness_p99": None,
        "staleness_max": None,
        "trainers": {"1": nothing, "2": nothing},
        "history": [],
    }


@pytest.mark.parametrize(
    ("events", "training_s"),
    [
        ("out 1 at 10, in 1 at 12, out 1 at 50, in 1 at 52", 4.0),  # only while an order is out
        ("out 1 at 10, out 2 at 11, in 1 at 13, in 2 at 16", 6.0),  # once where orders overlap
        ("out 1 at 10, in 1 at 12, out 2 at 97", 5.0),  # one that is still out
        ("out 1 at 10, out 2 at 12, in 1 at 13", 90.0),
        ("", 0.0),
    ],
)
def test_the_rate_is_over_the_time_in_which_an_order_was_out(
    events: str, training_s: float
) -> None:
    metrics = metrics_of(trainers=2)
    for what, trainer, _, moment in map(str.split, filter(None, events.split(", "))):
        if what == "out":
            metrics.dispatched(int(trainer), float(moment))
        else:
            metrics.returned(int(trainer), float(moment))
            apply(metrics, trained(), trainer=int(trainer))
    samples = 32 * events.count("in ")
    rate = metrics.report(now=100.0)["samples_per_s"]
    assert rate == (samples / training_s if samples else None)


def test_an_order_takes_from_dispatch_to_return_whoever_else_works() -> None:
    metrics = metrics_of(trainers=2)
    step(metrics, 0.0, 1.0, trained(0), trainer=1)
    metrics.dispatched(1, 10.0)
    metrics.dispatched(2, 10.5)
    metrics.returned(2, 11.0)
    apply(metrics, trained(1), trainer=2)
    metrics.returned(1, 15.0)
    apply(metrics, trained(2), trainer=1)
    assert trainer_report(metrics, 1)["order_s"] == (1.0 + 5.0) / 2
    assert trainer_report(metrics, 2)["order_s"] == 0.5
    assert metrics.training_s == 1.0 + 5.0


@pytest.mark.parametrize("fate", ["lost", "skipped"])
def test_an_order_that_became_part_of_no_update_costs_time_and_is_in_no_mean(fate: str) -> None:
    metrics = metrics_of(trainers=2)
    metrics.dispatched(2, 10.0)
    metrics.returned(2, 12.0)
    if fate == "skipped":
        metrics.skipped(2, Train(0, 0, range(32)), 0, "the loss is nan")
    assert trainer_report(metrics, 2)["order_s"] is None
    step(metrics, 12.0, 13.0, trained(0))
    report = metrics.report(now=20.0)
    assert (report["updates"], report["samples_trained"]) == (1, 32)
    assert report["samples_per_s"] == 32 / 3.0
    step(metrics, 30.0, 35.0, trained(1), trainer=2)
    second = trainer_report(metrics, 2)
    assert (second["orders"], second["samples"], second["order_s"]) == (1, 32, 5.0)


def test_each_trainer_is_reported_by_its_own_orders_and_samples() -> None:
    metrics = metrics_of(trainers=3)
    apply(metrics, trained(0, samples=32), trainer=1)
    apply(metrics, trained(1, samples=32), trainer=3)
    apply(metrics, trained(2, samples=5), trainer=3)
    counts = [
        (trainer_report(metrics, t)["orders"], trainer_report(metrics, t)["samples"])
        for t in (1, 2, 3)
    ]
    assert counts == [(1, 32), (0, 0), (2, 37)]


def test_what_is_not_out_returns_without_effect() -> None:
    """As when an update fails and its trainer then leaves."""
    metrics = metrics_of()
    metrics.dispatched(1, 1.0)
    for now in (2.0, 9.0):
        metrics.returned(1, now)
    assert metrics.training_s == 1.0


def test_an_update_of_several_gradients_counts_once_and_all_its_samples() -> None:
    metrics = metrics_of(train=96, batch=32, trainers=3, per_update=3)
    for trainer in (1, 2, 3):
        metrics.dispatched(trainer, 0.0)
    for trainer in (1, 2, 3):
        metrics.returned(trainer, float(trainer))
    metrics.updated()
    for trainer in (1, 2, 3):
        metrics.trained(trainer, trained(trainer - 1), 0)
    report = metrics.report(now=3.0)
    assert (report["updates"], report["samples_trained"]) == (1, 96)
    assert report["samples_per_s"] == 96 / 3.0
    metrics.evaluated(Evaluated(0, 0, samples=10, loss_sum=1.0, correct=10))
    assert metrics.history[0].updates == 1


@pytest.mark.parametrize(
    ("counts", "p99"),
    [
        ({0: 1}, 0),
        ({4: 99, 9: 1}, 4),
        ({4: 98, 9: 2}, 9),
        ({0: 197, 1: 1, 7: 2}, 1),
        ({0: 198, 7: 2}, 0),
        ({0: 98, 5: 1}, 5),
        ({0: 100, 5: 1}, 0),
        ({0: 99, 5: 2}, 5),
    ],
)
def test_the_99th_percentile_is_the_value_at_the_nearest_rank(
    counts: dict[int, int], p99: int
) -> None:
    """The smallest value that at least 99 of 100 do not exceed: one that did occur."""
    metrics = metrics_of()
    for staleness, count in counts.items():
        for _ in range(count):
            metrics.trained(1, trained(), staleness)
    total = sum(counts.values())
    mean = sum(value * count for value, count in counts.items()) / total
    report = metrics.report(now=0.0)
    assert report["staleness_mean"] == pytest.approx(mean)
    assert (report["staleness_p99"], report["staleness_max"]) == (p99, max(counts))
    values = sorted(value for value, count in counts.items() for _ in range(count))
    assert p99 == values[math.ceil(0.99 * total) - 1]


def test_staleness_is_reported_for_each_trainer_and_over_all() -> None:
    metrics = metrics_of(trainers=3)
    for staleness in (0, 0, 3):
        metrics.trained(1, trained(), staleness)
    metrics.trained(2, trained(), 9)
    assert staleness_of(trainer_report(metrics, 1)) == (1.0, 3, 3)
    assert staleness_of(trainer_report(metrics, 2)) == (9.0, 9, 9)
    assert staleness_of(trainer_report(metrics, 3)) == (None, None, None)
    assert staleness_of(metrics.report(now=0.0)) == (3.0, 9, 9)
    assert metrics.staleness == {0: 2, 3: 1, 9: 1}


def test_progress_is_said_at_most_once_per_interval() -> None:
    metrics = metrics_of()
    said = []
    for batch in range(21):
        now = 100.0 + batch * PROGRESS_INTERVAL_S / 4
        step(metrics, now, now, trained(batch))
        if (line := metrics.progress(now)) is not None:
            said.append(batch)
            assert "  0 samples/s  " in line
    assert said == [0, 4, 8, 12, 16, 20]
    assert PROGRESS_INTERVAL_S == 1.0


def test_progress_covers_what_came_since_the_last_line() -> None:
    metrics = metrics_of(train=320)
    step(metrics, 0.0, 2.0, trained(0, loss=9.0))
    assert metrics.progress(2.0) == (
        "epoch 1/2  updates 1/20  loss 9.0000  16 samples/s  staleness 0.00"
    )
    step(metrics, 2.0, 2.5, trained(1, loss=1.0), staleness=1)
    assert metrics.progress(2.5) is None
    step(metrics, 3.5, 4.0, trained(2, samples=96, loss=3.0, epoch=1), staleness=2)
    assert metrics.progress(4.0) == (
        "epoch 2/2  updates 3/20  loss 2.5000  128 samples/s  staleness 1.50"
    )


def test_progress_in_rounds_averages_over_orders_and_counts_updates() -> None:
    metrics = metrics_of(train=320, trainers=2, per_update=2)
    for trainer in (1, 2):
        metrics.dispatched(trainer, 0.0)
        metrics.returned(trainer, 2.0)
    metrics.updated()
    metrics.trained(1, trained(0, samples=32, loss=1.0), 1)
    metrics.trained(2, trained(1, samples=96, loss=3.0), 2)
    assert metrics.progress(2.0) == (
        "epoch 1/2  updates 1/10  loss 2.5000  32 samples/s  staleness 1.50"
    )


def test_progress_counts_the_time_of_an_order_that_stays_out_only_once() -> None:
    metrics = metrics_of(trainers=2)
    metrics.dispatched(2, 0.0)
    step(metrics, 0.0, 2.0, trained(0))
    line = metrics.progress(2.0)
    assert line is not None
    assert "  16 samples/s  " in line
    step(metrics, 2.0, 4.0, trained(1))
    line = metrics.progress(6.0)
    assert line is not None
    assert "  8 samples/s  " in line


def test_progress_says_nothing_when_nothing_was_trained_since() -> None:
    metrics = metrics_of()
    assert metrics.progress(100.0) is None
    step(metrics, 100.0, 101.0, trained())
    assert metrics.progress(101.0) is not None
    assert metrics.progress(200.0) is None


def test_loss_and_accuracy_of_an_evaluation_weigh_each_sample_alike() -> None:
    metrics = metrics_of(train=32, test=10, epochs=2)
    apply(metrics, trained(0, loss=0.75))
    assert metrics.evaluated(Evaluated(0, 0, samples=6, loss_sum=3.0, correct=6)) is None
    line = metrics.evaluated(Evaluated(0, 1, samples=4, loss_sum=7.0, correct=1))
    assert line == "epoch 1/2 evaluated: test loss 1.0000, test accuracy 0.7000 (7 of 10)"
    report = metrics.report(now=0.0)
    assert (report["test_loss"], report["test_accuracy"]) == (1.0, 0.7)
    assert report["history"] == [
        {
            "epoch": 1,
            "updates": 1,
            "train_loss": 0.75,
            "test_loss": 1.0,
            "test_accuracy": 0.7,
        }
    ]


def test_a_half_done_evaluation_is_not_reported() -> None:
    metrics = metrics_of(test=10)
    metrics.evaluated(Evaluated(0, 0, samples=6, loss_sum=3.0, correct=6))
    report = metrics.report(now=0.0)
    assert (report["test_loss"], report["test_accuracy"], report["history"]) == (None, None, [])


def test_each_epoch_is_evaluated_afresh_and_the_last_one_is_reported() -> None:
    metrics = metrics_of(train=96, test=10, batch=32, epochs=2)
    for epoch, (loss_sum, correct) in enumerate([(20.0, 2), (5.0, 9)]):
        for batch in range(3):
            apply(metrics, trained(batch, epoch=epoch, loss=2.0 - epoch))
        metrics.evaluated(Evaluated(epoch, 0, samples=10, loss_sum=loss_sum, correct=correct))
    report = metrics.report(now=0.0)
    assert (report["test_loss"], report["test_accuracy"]) == (0.5, 0.9)
    records = [(r.epoch, r.updates, r.train_loss, r.test_accuracy) for r in metrics.history]
    assert records == [(1, 3, 2.0, 0.2), (2, 6, 1.0, 0.9)]


def test_the_training_loss_reported_is_that_of_the_last_epoch() -> None:
    metrics = metrics_of()
    apply(metrics, trained(0, epoch=0, loss=8.0))
    apply(metrics, trained(0, epoch=1, loss=1.0))
    apply(metrics, trained(1, epoch=1, loss=3.0))
    assert (metrics.train_loss(0), metrics.train_loss(1)) == (8.0, 2.0)
    assert metrics.report(now=0.0)["train_loss"] == 2.0


def test_the_training_loss_of_an_epoch_not_begun_is_no_number() -> None:
    assert math.isnan(metrics_of().train_loss(0))


def test_the_first_orders_that_are_skipped_are_named_and_further_ones_counted() -> None:
    metrics = metrics_of()
    lines = [
        metrics.skipped(3, Train(1, batch, [batch, 7]), 40 + batch, "the loss is nan")
        for batch in range(MAX_NAMED + 2)
    ]
    assert MAX_NAMED == 10
    assert lines[8] == "skipped epoch 2, batch 8 of trainer rank 3: the loss is nan"
    assert lines[9] is not None and lines[9].startswith("skipped epoch 2, batch 9 of trainer rank")
    assert lines[9].endswith("only counted")
    assert lines[10:] == [None, None]
    report = cast(dict[str, Any], metrics.report(now=0.0))
    assert (report["orders_skipped"], report["samples_skipped"]) == (12, 24)
    assert [skipped["batch"] for skipped in report["skipped"]] == list(range(10))
    assert report["skipped"][1] == {
        "epoch": 2,
        "batch": 1,
        "trainer": 3,
        "version": 41,
        "samples": [1, 7],
        "cause": "the loss is nan",
    }


def busy_metrics() -> Metrics:
    """In the middle of the second epoch's evaluation: one trainer was stale, one has left."""
    metrics = metrics_of(train=96, test=10, batch=32, epochs=3, trainers=3)
    for epoch in (0, 1):
        for batch in range(3):
            now = 10.0 * epoch + batch
            loss = 3.0 - epoch - 0.1 * batch
            result = trained(batch, epoch=epoch, samples=32 - batch, loss=loss)
            step(metrics, now, now + 0.5, result, staleness=3 * batch, trainer=1 + batch % 2)
        metrics.evaluated(Evaluated(epoch, 0, samples=6, loss_sum=3.0 - epoch, correct=2 + epoch))
        if epoch == 0:
            metrics.evaluated(Evaluated(epoch, 1, samples=4, loss_sum=1.0, correct=3))
    metrics.skipped(1, Train(0, 2, range(64, 96)), 5, "the loss is nan")
    return metrics


def restored(metrics: Metrics, *, now: float = 100.0, trainers: int = 3) -> Metrics:
    file = io.BytesIO()
    torch.save(metrics.state(now), file)
    file.seek(0)
    other = metrics_of(train=96, test=10, batch=32, epochs=3, trainers=trainers)
    other.restore(torch.load(file, weights_only=True))
    return other


@pytest.mark.parametrize("trainers", [1, 2, 3])
def test_what_was_restored_is_reported_as_it_was_before(trainers: int) -> None:
    """Trainers that are not there any more are reported too."""
    metrics = busy_metrics()
    before = metrics.report(now=100.0)
    nothing = metrics_of().report(now=0.0)
    assert [key for key in before if before[key] == nothing[key]] == []
    after = restored(metrics, trainers=trainers).report(now=5.0)
    assert after == before


def test_trainers_that_are_new_are_reported_with_nothing_done() -> None:
    metrics = busy_metrics()
    report = cast(dict[str, Any], restored(metrics, trainers=5).report(now=5.0))
    assert list(report["trainers"]) == ["1", "2", "3", "4", "5"]
    assert [trainer["orders"] for trainer in report["trainers"].values()] == [4, 2, 0, 0, 0]
    assert report["trainers"]["1"] == trainer_report(metrics, 1)


def test_what_was_restored_goes_on_as_if_nothing_had_been() -> None:
    """But for the clock, which is another one."""
    first = busy_metrics()
    second = restored(first, now=100.0)
    for metrics, start in ((first, 200.0), (second, 7.0)):
        line = metrics.evaluated(Evaluated(1, 1, samples=4, loss_sum=2.0, correct=4))
        assert line == "epoch 2/3 evaluated: test loss 0.4000, test accuracy 0.7000 (7 of 10)"
        result = trained(0, epoch=2, loss=0.5)
        step(metrics, start, start + 2.0, result, staleness=1, trainer=2)
    assert second.report(now=9.0) == first.report(now=202.0)
    assert second.history == first.history
    assert second.training_s == first.training_s


def test_losses_of_an_epoch_that_was_interrupted_count_from_its_start() -> None:
    metrics = metrics_of()
    apply(metrics, trained(0, epoch=0, samples=30, loss=1.0))
    second = restored(metrics)
    apply(second, trained(1, epoch=0, samples=10, loss=5.0))
    assert second.train_loss(0) == pytest.approx(2.0)


def test_the_time_of_an_order_that_is_out_is_in_the_state_and_the_order_is_not() -> None:
    metrics = metrics_of(trainers=2)
    step(metrics, 10.0, 12.0, trained(0))
    metrics.dispatched(1, 20.0)
    second = restored(metrics, now=23.0)
    assert (second.training_s, second.samples_trained) == (5.0, 32)
    step(second, 1.0, 2.0, trained(1))
    assert second.training_s == 6.0


def test_a_state_of_numbers_does_not_change_with_what_comes_later() -> None:
    metrics = busy_metrics()
    state = metrics.state(100.0)
    before = copy.deepcopy(state)
    metrics.evaluated(Evaluated(1, 1, samples=4, loss_sum=2.0, correct=4))
    step(metrics, 200.0, 201.0, trained(0, epoch=2), staleness=3)
    assert state == before


def test_progress_after_restoring_covers_what_came_since() -> None:
    second = restored(busy_metrics())
    assert second.progress(0.0) is None
    step(second, 1000.0, 1002.0, trained(0, epoch=2, loss=0.5), staleness=1)
    line = second.progress(1002.0)
    assert line == "epoch 3/3  updates 7/9  loss 0.5000  16 samples/s  staleness 1.00"
