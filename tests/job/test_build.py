"""A job that was stopped at some moment goes on from its checkpoint, with new parts."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ps.job.build import build_basis, build_server
from ps.job.checkpoint import Checkpoints
from ps.model.passes import Passes
from ps.protocol import Evaluate, Finished, Order, Train
from ps.server.roll import Outcome
from ps.settings.config import Config
from ps.settings.errors import CheckpointUnusable, ConfigError
from ps.workload import Workload
from tests.helpers import (
    COMPUTE,
    Parts,
    assert_equal,
    server_of,
    topology_of,
    train_all,
)
from tests.plugins import Points, one_weight_for_each_sample, perceptron

STOPPED = Outcome("interrupted", 143, "stopped by SIGTERM")


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def small(config: Config) -> Workload:
    """7 batches of 8, the last of them smaller, and 2 slices; buffers and dropout matter."""

    def model() -> nn.Module:
        layers = (nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
        return nn.Sequential(*layers, nn.LogSoftmax(1))

    return replace(perceptron(), model=model, train=Points(52, 6, 3), test=Points(520, 6, 3))


def larger(config: Config) -> Workload:
    return replace(small(config), train=Points(53, 6, 3))


def with_more_tests(config: Config) -> Workload:
    return replace(small(config), test=Points(521, 6, 3))


def wider(config: Config) -> Workload:
    return replace(small(config), model=lambda: nn.Linear(6, 3))


def counting(config: Config) -> Workload:
    """6 batches of 8; training on sample i with --lr 8 takes exactly 1 off weight i."""
    workload = one_weight_for_each_sample(48)
    return replace(workload, test=torch.utils.data.Subset(workload.train, range(20)))


def config_of(workload: str = "small", **options: Any) -> Config:
    defaults: dict[str, Any] = {"batch_size": 8, "epochs": 2, "threads": 1}
    return Config(**{"workload": f"{__name__}:{workload}"} | defaults | options)


def in_step(**options: Any) -> Config:
    return config_of(max_lag="0", momentum=0.9, lr_schedule="linear", **options)


class Job:
    """The server and all trainers in one thread. An event is one order worked on."""

    def __init__(
        self, config: Config, num_trainers: int = 2, resume: Path | None = None, seed: int = 0
    ) -> None:
        """seed decides who is next."""
        topology = topology_of(world_size=num_trainers + 1, port=1)
        self.basis = build_basis(topology, config, Checkpoints(resume) if resume else None)
        self.state = self.basis.state
        self.server = build_server(topology, config, self.basis, lambda version: None)
        self.handed_in: list[Order] = []
        self._draw = random.Random(seed)
        workload, compute = self.basis.workload, self.basis.compute
        passes = Passes.of(config, workload)
        crew = Parts(self.server, self.state, compute, workload, passes, topology.trainers)
        self._workers = {trainer: crew.worker(trainer) for trainer in crew.trainers}
        self._replies = {t: self.server.next_order(t, None) for t in crew.trainers}

    def run(self, events: int = 10_000) -> Job:
        for _ in range(events):
            able = [trainer for trainer, reply in self._replies.items() if has_work(reply)]
            if not able:
                break
            trainer = self._draw.choice(able)
            assignment = self._replies[trainer].wait()
            self.handed_in.append(assignment.order)
            result = self._workers[trainer].do(assignment)
            self._replies[trainer] = self.server.next_order(trainer, result)
        return self

    def finish(self) -> Job:
        self.run()
        assert self.state.orders.finished
        return self

    @property
    def content(self) -> dict[str, Any]:
        return dict(self.state.snapshot().content)

    def save(self, folder: Path) -> Path:
        """As at the end of an interrupted job."""
        self.server.stop(STOPPED)
        for trainer in self._replies:
            self.server.leave(trainer)
        snapshot = self.state.snapshot(copy=False)
        Checkpoints(folder).write(snapshot.content, snapshot.version)
        return folder

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.state.store.state_dict().items()}

    @property
    def numbers(self) -> dict[str, Any]:
        """What is reported, but for times and who did what."""
        self.server.stop(STOPPED)
        _, report = self.server.result()
        return {key: report[key] for key in report.keys() - {"samples_per_s", "trainers"}}


def has_work(reply: Any) -> bool:
    return reply.done() and not isinstance(reply.wait(), Finished)


@cache
def uninterrupted(compute: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    job = Job(in_step(compute=compute)).finish()
    assert len(job.handed_in) == 18
    return job.weights, job.numbers


@pytest.mark.parametrize(
    "events",
    [
        pytest.param(0, id="at the start"),
        pytest.param(1, id="in the first round"),
        pytest.param(4, id="between rounds"),
        pytest.param(5, id="in a round"),
        pytest.param(7, id="before the evaluation"),
        pytest.param(8, id="in the evaluation"),
        pytest.param(9, id="after the evaluation"),
        pytest.param(16, id="before the last evaluation"),
        pytest.param(18, id="at the end"),
    ],
)
@pytest.mark.parametrize("compute", COMPUTE)
def test_a_job_in_step_ends_bit_for_bit_as_if_it_had_not_been_stopped(
    tmp_path: Path, compute: str, events: int
) -> None:
    config = in_step(compute=compute)
    stopped = Job(config).run(events).save(tmp_path)
    job = Job(config, resume=stopped, seed=1).finish()
    weights, numbers = uninterrupted(compute)
    assert_equal(job.weights, weights, within=0)
    assert job.numbers == numbers


@pytest.mark.parametrize("compute", COMPUTE)
def test_stopped_again_and_again_it_ends_bit_for_bit_as_if_it_had_not_been(
    tmp_path: Path, compute: str
) -> None:
    config, resume = in_step(compute=compute), None
    for stop in range(9):
        folder = tmp_path / str(stop)
        resume = Job(config, resume=resume, seed=stop).run(2 + stop % 2).save(folder)
    assert_equal(Job(config, resume=resume).finish().weights, uninterrupted(compute)[0], within=0)


def test_where_it_is_computed_may_change_when_it_goes_on(tmp_path: Path) -> None:
    stopped = Job(in_step(compute="server")).run(5).save(tmp_path)
    job = Job(in_step(compute="trainer"), resume=stopped).finish()
    assert_equal(job.weights, uninterrupted("trainer")[0])
    assert job.numbers["samples_trained"] == 104


@pytest.mark.parametrize("seed", range(8))
def test_every_sample_is_trained_once_per_epoch_however_often_the_job_is_stopped(
    tmp_path: Path, seed: int
) -> None:
    """With another number of trainers each time, and computed here or there."""
    draw, resume, handed_in = random.Random(seed), None, 0
    config = config_of("counting", lr=8.0, epochs=3)
    for stop in range(5):
        config = replace(config, compute=draw.choice(COMPUTE))
        job = Job(config, draw.randint(1, 4), resume, seed=draw.randrange(2**32))
        job.run(draw.randrange(8))
        handed_in += len(job.handed_in)
        resume = job.save(tmp_path / str(stop))
    job = Job(config, draw.randint(1, 4), resume).finish()
    assert job.weights["weight"].tolist() == [[-3.0] * 48]
    assert handed_in + len(job.handed_in) == 3 * (6 + 1)
    assert (job.numbers["updates"], job.numbers["samples_trained"]) == (18, 144)
    assert [record["updates"] for record in job.numbers["history"]] == [6, 12, 18]


def test_what_was_handed_in_and_not_applied_is_done_again(tmp_path: Path) -> None:
    """One of two gradients of a synchronous update: it is not in the weights."""
    job = Job(in_step()).run(3)
    [twice] = [order for order in job.handed_in[2:] if isinstance(order, Train)]
    assert job.state.store.version == 1
    resumed = Job(in_step(), resume=job.save(tmp_path))
    assert resumed.state.store.version == 1
    assert sorted(o.batch for o in resumed.run(2).handed_in if isinstance(o, Train)) == [2, 3]
    assert twice in resumed.handed_in


def test_nothing_that_comes_after_the_stop_is_in_the_state() -> None:
    job = Job(config_of()).run(3)
    job.server.stop(STOPPED)
    before = job.content
    job.run()
    after = job.content
    assert len(job.handed_in) > 3
    assert after["store"]["version"] == 3
    assert (after["orders"], after["job"]) == (before["orders"], before["job"])
    assert_equal(after["store"]["model"], before["store"]["model"], within=0)


def test_the_state_does_not_change_when_the_trainers_leave(tmp_path: Path) -> None:
    job = Job(in_step()).run(5)
    before = job.content
    job.save(tmp_path)
    assert job.content["orders"] == before["orders"]


@pytest.mark.parametrize("compute", COMPUTE)
def test_every_state_that_is_taken_during_training_is_of_one_moment(compute: str) -> None:
    parts = server_of(perceptron(), compute=compute, trainers=(1, 2, 3), epochs=2)
    training = threading.Thread(target=train_all, args=(parts,))
    training.start()
    states = []
    while training.is_alive():
        states.append(parts.state.snapshot().content)
    training.join()
    for state in [*states, parts.state.snapshot().content]:
        orders, metrics = state["orders"], state["metrics"]
        batches = 50 * orders["epoch"] + orders["next_batch"] - len(orders["returned_batches"])
        assert state["store"]["version"] == metrics["updates"] == batches
        assert metrics["samples_trained"] == 8 * batches
        assert sum(trainer["samples"] for trainer in metrics["trainers"].values()) == 8 * batches
    assert len({state["store"]["version"] for state in states}) > 3


def test_a_job_that_goes_on_knows_from_which_file(tmp_path: Path) -> None:
    config = config_of()
    stopped = Job(config).run(3).save(tmp_path)
    [path] = Checkpoints(stopped).paths()
    assert Job(config, resume=stopped).state.resumed_from == path
    assert Job(config, resume=tmp_path / "none").state.resumed_from is None
    assert Job(config).state.resumed_from is None


def test_the_schedule_ends_with_the_job_when_the_number_of_trainers_changes(
    tmp_path: Path,
) -> None:
    """4 updates in an epoch of two trainers, 3 of three, 7 of one; 2 batches are left."""
    stopped = Job(in_step()).run(6).save(tmp_path)
    for num_trainers, total in ((1, 3 + 1 + 7), (2, 3 + 1 + 4), (3, 3 + 1 + 3)):
        job = Job(in_step(), num_trainers, stopped)
        assert (job.state.store.version, job.state.metrics.total_updates) == (3, total)
        assert job.state.orders.updates_left == total - 3
        job.finish()
        assert job.state.store.version == total
        [group] = job.state.store.optimizer.options
        assert group["lr"] == pytest.approx(job.basis.lr / total)


def test_further_epochs_of_a_job_that_is_done_are_trained_alone(tmp_path: Path) -> None:
    done = Job(in_step(epochs=1)).finish().save(tmp_path)
    job = Job(in_step(epochs=3), resume=done).finish()
    assert {order.epoch for order in job.handed_in if isinstance(order, Train | Evaluate)} == {1, 2}
    assert [record["epoch"] for record in job.numbers["history"]] == [1, 2, 3]
    assert job.numbers["samples_trained"] == 3 * 52


def test_a_job_that_is_done_has_nothing_to_do(tmp_path: Path) -> None:
    first = Job(in_step()).finish()
    again = Job(in_step(), resume=first.save(tmp_path)).finish()
    assert again.handed_in == []
    assert_equal(again.weights, first.weights, within=0)
    assert again.numbers == first.numbers


def test_fewer_epochs_than_were_begun_are_a_wrong_option_and_no_unusable_file(
    tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    stopped = Job(config_of(epochs=2)).run(12).save(tmp_path)
    with pytest.raises(ConfigError, match="--epochs 1 "):
        Job(config_of(epochs=1), resume=stopped)
    assert warnings.messages == []


@pytest.mark.parametrize(
    ("config", "difference"),
    [
        (config_of(seed=1), "job: seed is 0 there and 1 here"),
        (config_of(batch_size=16), "job: batch_size is 8 there and 16 here"),
        (config_of(accumulate=2), "job: batch_size is 8 there and 16 here"),
        (config_of("larger"), "job: num_train_samples is 52 there and 53 here"),
        (config_of("with_more_tests"), "job: num_test_samples is 520 there and 521 here"),
        (config_of("wider"), "model: weight is nothing there and float32 [3, 6] here"),
    ],
    ids=["seed", "batch size", "accumulate", "training samples", "test samples", "model"],
)
def test_the_checkpoint_of_another_job_is_refused_and_it_is_said_why(
    tmp_path: Path, warnings: pytest.LogCaptureFixture, config: Config, difference: str
) -> None:
    stopped = Job(config_of()).run(3).save(tmp_path)
    [path] = Checkpoints(stopped).paths()
    with pytest.raises(CheckpointUnusable, match=r"^none of the 1 checkpoints in ") as caught:
        Job(config, resume=stopped)
    assert caught.value.exit_code == 7
    assert warnings.messages == [f"checkpoint {path} is not used: it is of another {difference}"]


def test_after_one_of_another_job_the_one_before_is_restored_whole(
    tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    config = in_step()
    job = Job(config).run(5)
    checkpoints = Checkpoints(tmp_path, keep=3)
    checkpoints.write(job.content, 2)
    other = Job(in_step(seed=1)).run(9).content
    checkpoints.write(other, 4)
    checkpoints.write(other | {"job": job.content["job"], "store": wide_state(other)}, 4)
    job = Job(config, resume=tmp_path).finish()
    assert len(warnings.messages) == 2
    assert_equal(job.weights, uninterrupted("server")[0], within=0)


def wide_state(state: dict[str, Any]) -> dict[str, Any]:
    store = state["store"]
    return store | {"model": store["model"] | {"0.bias": torch.zeros(9)}}
