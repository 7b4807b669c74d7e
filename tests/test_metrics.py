"""The numbers of the progress lines and of the report, at invented times."""

from __future__ import annotations

import math

import pytest
import torch

from ps.metrics import PROGRESS_INTERVAL_S, Metrics
from ps.orders import Plan
from ps.protocol import Evaluated, Trained


def metrics_of(*, train: int = 96, test: int = 10, batch: int = 32, epochs: int = 2) -> Metrics:
    return Metrics(
        Plan(
            num_train_samples=train,
            num_test_samples=test,
            batch_size=batch,
            epochs=epochs,
            seed=0,
            slice_size=6,
        )
    )


def trained(batch: int = 0, *, epoch: int = 0, samples: int = 32, loss: float = 1.0) -> Trained:
    return Trained(epoch, batch, samples, loss, output_gradient=torch.zeros(0))


def step(metrics: Metrics, start: float, stop: float, result: Trained, staleness: int = 0) -> None:
    """One order that is out from start to stop."""
    metrics.handed_out(start)
    metrics.trained(result, staleness)
    metrics.taken_back(stop)


def test_a_report_with_nothing_done_holds_none_for_what_does_not_exist() -> None:
    assert metrics_of().report(now=100.0) == {
        "updates": 0,
        "samples_trained": 0,
        "samples_per_s": None,
        "train_loss": None,
        "test_loss": None,
        "test_accuracy": None,
        "staleness_mean": None,
        "staleness_max": None,
        "history": [],
    }


def test_the_rate_counts_only_time_in_which_an_order_was_out() -> None:
    metrics = metrics_of()
    step(metrics, 10.0, 12.0, trained(0))
    step(metrics, 50.0, 52.0, trained(1))
    assert metrics.training_s == 4.0
    assert metrics.report(now=100.0)["samples_per_s"] == 64 / 4.0


def test_the_rate_counts_overlapping_orders_once() -> None:
    metrics = metrics_of()
    metrics.handed_out(10.0)
    metrics.handed_out(11.0)
    metrics.trained(trained(0), 0)
    metrics.taken_back(13.0)
    metrics.trained(trained(1), 1)
    metrics.taken_back(16.0)
    assert metrics.training_s == 6.0
    assert metrics.report(now=16.0)["samples_per_s"] == 64 / 6.0


def test_the_rate_counts_the_time_of_an_order_that_is_still_out() -> None:
    metrics = metrics_of()
    step(metrics, 10.0, 12.0, trained(0))
    metrics.handed_out(20.0)
    assert metrics.report(now=22.0)["samples_per_s"] == 32 / 4.0


def test_an_order_whose_trainer_left_costs_time_and_counts_no_sample() -> None:
    metrics = metrics_of()
    metrics.handed_out(10.0)
    metrics.taken_back(12.0)
    step(metrics, 12.0, 14.0, trained(0))
    report = metrics.report(now=20.0)
    assert (report["updates"], report["samples_trained"]) == (1, 32)
    assert report["samples_per_s"] == 32 / 4.0


def test_staleness_is_reported_by_its_mean_and_its_maximum() -> None:
    metrics = metrics_of()
    for batch, staleness in enumerate([0, 3, 1, 2]):
        metrics.trained(trained(batch), staleness)
    report = metrics.report(now=0.0)
    assert (report["staleness_mean"], report["staleness_max"]) == (1.5, 3)


def test_no_staleness_at_all_is_zero_and_not_none() -> None:
    metrics = metrics_of()
    metrics.trained(trained(), 0)
    report = metrics.report(now=0.0)
    assert (report["staleness_mean"], report["staleness_max"]) == (0.0, 0)


def test_progress_is_said_at_most_once_per_interval() -> None:
    metrics = metrics_of()
    said = []
    for batch in range(21):
        now = 100.0 + batch * PROGRESS_INTERVAL_S / 4
        step(metrics, now, now, trained(batch))
        if metrics.progress(now) is not None:
            said.append(batch)
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


def test_progress_counts_the_time_of_an_order_that_stays_out_only_once() -> None:
    metrics = metrics_of()
    metrics.handed_out(0.0)
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
    metrics.trained(trained(0, loss=0.75), 0)
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
        metrics.trained(trained(0, epoch=epoch, loss=2.0 - epoch), 0)
        metrics.evaluated(Evaluated(epoch, 0, samples=10, loss_sum=loss_sum, correct=correct))
    report = metrics.report(now=0.0)
    assert (report["test_loss"], report["test_accuracy"]) == (0.5, 0.9)
    records = [(r.epoch, r.updates, r.train_loss, r.test_accuracy) for r in metrics.history]
    assert records == [(1, 3, 2.0, 0.2), (2, 6, 1.0, 0.9)]


def test_a_record_counts_the_updates_of_its_epoch_though_the_next_has_begun() -> None:
    metrics = metrics_of(train=64, test=10, batch=32, epochs=2)
    metrics.trained(trained(0, epoch=0, loss=4.0), 0)
    metrics.trained(trained(1, epoch=0, loss=2.0), 0)
    metrics.trained(trained(0, epoch=1, loss=100.0), 0)
    metrics.evaluated(Evaluated(0, 0, samples=10, loss_sum=1.0, correct=10))
    assert (metrics.history[0].updates, metrics.history[0].train_loss) == (2, 3.0)


def test_the_training_loss_weighs_each_sample_alike() -> None:
    metrics = metrics_of()
    metrics.trained(trained(0, samples=30, loss=1.0), 0)
    metrics.trained(trained(1, samples=10, loss=5.0), 0)
    assert metrics.train_loss(0) == pytest.approx(2.0)


def test_the_training_loss_reported_is_that_of_the_last_epoch() -> None:
    metrics = metrics_of()
    metrics.trained(trained(0, epoch=0, loss=8.0), 0)
    metrics.trained(trained(0, epoch=1, loss=1.0), 0)
    metrics.trained(trained(1, epoch=1, loss=3.0), 0)
    assert (metrics.train_loss(0), metrics.train_loss(1)) == (8.0, 2.0)
    assert metrics.report(now=0.0)["train_loss"] == 2.0


def test_the_training_loss_of_an_epoch_not_begun_is_no_number() -> None:
    assert math.isnan(metrics_of().train_loss(0))
