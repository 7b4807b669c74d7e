"""What a run leaves in its folder: at the start, while it trains, and when it has ended."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from ps.checkpoint import Checkpointer, Checkpoints, read
from ps.config import Config
from ps.ending import Ending
from ps.parts import ServerParts, server_parts
from ps.preparation import prepare
from ps.run import _after_update
from ps.rundir import checkpoints_in, options_of
from ps.server import Outcome
from tests.helpers import topology_of, until

ALONE = topology_of(port=1)
BOUND_S = 10.0


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Run:
    """One at world size 1 that has begun."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder / "run"
        config = Config(workload="tests.plugins:plain", run_dir=self.folder, threads=1, **options)
        prepared = prepare(ALONE, config)
        assert prepared.run_dir._lock is not None
        os.close(prepared.run_dir._lock)  # another of this process may go on there
        earlier = Checkpoints(prepared.resume_from) if prepared.resume_from else None
        self.job: ServerParts = server_parts(ALONE, prepared.config, earlier)
        self.ending = Ending(self.job, ALONE, prepared)
        self.ending.begin()

    def update(self) -> None:
        parameters = self.job.store._parameters
        self.job.store.apply([torch.ones_like(parameter) for parameter in parameters])

    def end(self, outcome: Outcome | None = None) -> None:
        self.job.server.stop(outcome or Outcome("interrupted", 143, "stopped by SIGTERM"))
        self.ending.finish()

    @property
    def report(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.folder / "report.json").read_text())
        return loaded

    @property
    def versions(self) -> list[int]:
        return [read(path)["store"]["version"] for path in checkpoints_in(self.folder)]


def test_a_run_that_has_begun_says_so_and_leaves_its_options(tmp_path: Path) -> None:
    run = Run(tmp_path, epochs=3, log_level="debug")
    options = options_of(run.folder)
    assert (options["workload"], options["epochs"]) == ("tests.plugins:plain", 3)
    assert options.keys().isdisjoint({"run_dir", "resume", "log_level", "inject"})
    assert (run.report["status"], run.report["resumed_from"]) == ("running", None)
    run.end()


def test_a_run_that_goes_on_is_running_whatever_the_earlier_one_reported(tmp_path: Path) -> None:
    """So that --resume auto finds it if it is killed."""
    run = Run(tmp_path)
    run.update()
    run.end(Outcome("done"))
    assert run.report["status"] == "done"
    [checkpoint] = checkpoints_in(run.folder)
    again = Run(tmp_path, resume=str(run.folder))
    assert (again.report["status"], again.report["resumed_from"]) == ("running", str(checkpoint))
    again.end()


@pytest.mark.parametrize(("keep", "left"), [(1, [2]), (2, [1, 2]), (9, [0, 1, 2])])
def test_the_last_state_is_saved_and_as_many_are_kept_as_was_said(
    tmp_path: Path, keep: int, left: list[int]
) -> None:
    run = Run(tmp_path, keep=keep, checkpoint_every="0")
    for version in (0, 1):
        run.ending.checkpointer.due()
        until(lambda: run.versions[-1:] == [version], BOUND_S)  # noqa: B023
        run.update()
    run.end()
    assert run.versions == left
    assert run.report["checkpoint"] == str(checkpoints_in(run.folder)[-1])


@pytest.mark.slow
def test_it_is_saved_by_the_clock_where_seconds_were_said(tmp_path: Path) -> None:
    run = Run(tmp_path, checkpoint_every="1s")
    run.update()
    assert until(lambda: run.versions == [1], BOUND_S) > 0.5
    run.end()


@pytest.mark.parametrize(
    ("every", "at"), [("3", [3, 6, 9]), ("1", [*range(1, 11)]), ("0", []), ("1s", [])]
)
def test_it_is_saved_after_so_many_updates_where_a_number_was_said(
    every: str, at: list[int]
) -> None:
    told: list[int] = []

    class Listening:
        def due(self) -> None:
            told.append(version)

    config = Config(checkpoint_every=every)
    act = _after_update(ALONE, config, cast(Checkpointer, Listening()))
    for version in range(1, 11):
        act(version)
    assert told == at
