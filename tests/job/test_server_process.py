"""The life of rank 0, in this process; and of trainers beside it, each in a thread."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO, cast

import pytest
import torch
from torch import Tensor, nn

from ps.host.processes import FROM_TORCHRUN, SHOW_STACKS, Peer
from ps.host.signals import Signals, restore_defaults
from ps.host.watch import Watch
from ps.job.checkpoint import Checkpointer, read
from ps.job.preparation import prepare
from ps.job.rundir import checkpoints_in
from ps.job.server_process import AfterUpdate, Intervals, ServerProcess, run_server
from ps.job.trainer_process import run_trainer
from ps.settings.config import Config, parse_args
from ps.settings.errors import ConfigError
from ps.workload import Workload
from tests.helpers import COMPUTE, topology_of, until
from tests.plugins import perceptron

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
TIMEOUT_S = 10.0
SHORT = Intervals(tick_s=0.02, goodbye_s=0.2, orphan_lock_s=0.1)
ACT: dict[str, Callable[[], object]] = {}
"""What the plug-ins below do at their 20th batch."""


def acting(config: Config) -> Workload:
    workload, calls = perceptron(), 0

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        value = workload.loss(outputs, targets)
        calls += outputs.requires_grad
        return value * (ACT["act"]() or 1.0) if calls == 20 and value.requires_grad else value

    return replace(workload, loss=loss)


class Failing(nn.Linear):
    """Raises in its 20th forward that is trained on, which is the server's where that computes."""

    num_calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls == 20:
            raise ValueError("boom")
        return super().forward(inputs)


def failing_on_the_server(config: Config) -> Workload:
    return replace(perceptron(), model=lambda: nn.Sequential(Failing(6, 3), nn.LogSoftmax(1)))


class FakeWatch:
    """In place of threads that watch for as long as this process lives."""

    def __init__(self) -> None:
        self.orphan: Callable[[], None] = lambda: None

    def when_orphaned(self, act: Callable[[], None]) -> None:
        self.orphan = act

    def look_with(self, look: Callable[[], None], peers: Iterable[Peer]) -> None:
        pass

    def guard(self, stacks: TextIO, timeout_s: float) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def process_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Signals, stacks, and threads of torch."""
    threads = torch.get_num_threads()
    before = {number: signal.getsignal(number) for number in FROM_TORCHRUN}
    register, files = faulthandler.register, list[TextIO]()

    def keep(number: int, file: TextIO, **options: Any) -> None:
        files.append(file)
        register(number, file, **options)

    monkeypatch.setattr(faulthandler, "register", keep)
    yield
    faulthandler.unregister(SHOW_STACKS)
    for file in files:
        file.close()
    restore_defaults()
    for number, handler in before.items():
        signal.signal(number, handler)
    torch.set_num_threads(threads)
    gc.collect()  # sockets that a process has open to its end


class Job:
    """Rank 0 in the main thread of this process, and further ranks as threads of it."""

    def __init__(self, folder: Path, *args: str, workload: str = "", world_size: int = 1) -> None:
        self.path = folder / "run"
        named = workload if "." in workload or not workload else f"{__name__}:{workload}"
        self.argv = ["--workload", named or "tests.plugins:plain", "--batch-size", "8"]
        self.argv += ["--threads", "1", "--run-dir", str(self.path), *args]
        self.config = parse_args(self.argv)
        self.topology = topology_of(0, world_size)
        self.watch = FakeWatch()
        self.codes: list[int] = []
        """With which this process would have left."""
        self.trainer_codes: dict[int, int] = {}

    def run(self, trainers: Iterable[int] = ()) -> int:
        signals = Signals(end_timeout_s=5.0, leave=self.codes.append)
        prepared = prepare(self.topology, self.config, self.argv)
        process = ServerProcess(
            *(self.topology, prepared, signals, cast(Watch, self.watch)),
            intervals=SHORT,
            leave=self.codes.append,
        )
        threads = [threading.Thread(target=self._train, args=(t,), daemon=True) for t in trainers]
        for thread in threads:
            thread.start()
        code = process.run()
        for thread in threads:
            thread.join(0.5)
        prepared.run_dir.close()
        return code

    def _train(self, trainer: int) -> None:
        topology = replace(self.topology, rank=trainer)
        code = run_trainer(topology, self.config, cast(Watch, FakeWatch()))
        self.trainer_codes[trainer] = code

    @property
    def report(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.path / "report.json").read_text())
        return loaded

    @property
    def saved_version(self) -> int:
        version: int = read(checkpoints_in(self.path)[-1])["store"]["version"]
        return version


def ask_to_end() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def fail() -> float:
    raise ValueError("boom")


def leave() -> float:
    raise SystemExit(5)


@pytest.mark.parametrize("compute", COMPUTE)
def test_one_process_trains_alone(tmp_path: Path, compute: str) -> None:
    job = Job(tmp_path, "--epochs", "1", "--compute", compute)
    assert job.run() == 0
    assert (job.report["status"], job.report["samples_trained"]) == ("done", 400)
    assert job.saved_version == 50


@pytest.mark.parametrize("compute", COMPUTE)
def test_ranks_meet_train_and_part(tmp_path: Path, compute: str) -> None:
    job = Job(tmp_path, "--epochs", "1", "--compute", compute, world_size=3)
    assert job.run(trainers=(1, 2)) == 0
    assert job.trainer_codes == {1: 0, 2: 0}
    assert (job.report["status"], job.report["samples_trained"]) == ("done", 400)
    assert job.report["link"] == "local"


@pytest.mark.parametrize(
    ("act", "exit_code", "name"),
    [(fail, 1, "ValueError"), (leave, 1, "SystemExit"), (lambda: float("nan"), 8, "nan")],
)
def test_one_process_whose_step_fails_is_the_cause_and_no_consequence_of_itself(
    tmp_path: Path, act: Callable[[], object], exit_code: int, name: str
) -> None:
    ACT["act"] = act
    job = Job(tmp_path, workload="acting")
    assert job.run() == exit_code
    assert (job.report["exit_code"], job.report["failure"]["rank"]) == (exit_code, 0)
    assert name in job.report["cause"]
    assert job.report["failure"]["consequences"] == []
    assert job.saved_version == job.report["updates"] == 19


def test_nor_is_one_whose_server_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = Job(tmp_path, workload="failing_on_the_server")
    assert job.run() == 1
    assert "ValueError: boom" in job.report["cause"]
    assert job.report["failure"]["consequences"] == []
    assert job.saved_version == job.report["updates"]
    assert capfd.readouterr().err.count("calls.ServerError: ") == 1


def test_a_run_goes_on_in_place_with_all_that_was_typed_before(
    tmp_path: Path, said: list[str]
) -> None:
    assert Job(tmp_path, "--epochs", "1").run() == 0
    job = Job(tmp_path, "--epochs", "2", "--resume", str(tmp_path / "run"))
    prepared = prepare(job.topology, job.config, job.argv)
    assert run_server(job.topology, prepared, Signals(), cast(Watch, job.watch)) == 0
    prepared.run_dir.close()
    assert (job.report["updates"], job.report["samples_trained"]) == (100, 800)
    assert job.report["resumed_from"] in "\n".join(said)


def test_a_server_that_fails_by_itself_shows_its_traceback_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    job = Job(tmp_path)
    monkeypatch.setattr(job.watch, "look_with", lambda *_: fail())
    assert job.run() == 1
    assert "ValueError: boom" in job.report["cause"]
    assert capfd.readouterr().err.count("Traceback") == 1


def test_a_request_in_a_step_that_does_not_end_is_obeyed_and_all_is_saved(tmp_path: Path) -> None:
    go = threading.Event()

    def hang() -> None:
        ask_to_end()
        go.wait(TIMEOUT_S)

    ACT["act"] = hang
    job = Job(tmp_path, workload="acting")
    assert job.run() == 143
    assert (job.report["status"], job.report["exit_code"]) == ("interrupted", 143)
    assert job.saved_version == job.report["updates"] == 19
    go.set()


def test_a_request_while_ranks_are_waited_for_is_obeyed(tmp_path: Path) -> None:
    job = Job(tmp_path, world_size=2)
    threading.Timer(1.0, ask_to_end).start()
    assert job.run() == 143
    assert job.report["status"] == "interrupted"


def test_an_orphan_saves_and_leaves_whatever_the_main_thread_does(tmp_path: Path) -> None:
    go = threading.Event()

    def be_orphaned() -> None:
        threading.Thread(target=job.watch.orphan).start()
        go.wait(TIMEOUT_S)

    ACT["act"] = be_orphaned
    job = Job(tmp_path, workload="acting")
    assert job.run() == 9
    until(lambda: job.codes == [9], TIMEOUT_S)
    assert "torchrun" in job.report["cause"]
    assert job.saved_version == 19
    go.set()


def test_after_a_failure_the_others_are_not_waited_for_for_ever(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One hangs in its 20th batch, and the other raises in its own."""
    go, calls = threading.Event(), list[str]()

    def hang_or_fail() -> None:
        calls.append("called")
        if len(calls) == 2:
            fail()
        go.wait(TIMEOUT_S)

    ACT["act"] = hang_or_fail
    job = Job(tmp_path, "--staleness", "100", workload="acting", world_size=3)
    start = time.monotonic()
    assert job.run(trainers=(1, 2)) == 1
    assert time.monotonic() - start < TIMEOUT_S
    assert list(job.trainer_codes.values()) == [1]
    assert "ValueError: boom" in job.report["cause"]
    go.set()


def test_what_cannot_be_built_leaves_nothing_behind(tmp_path: Path) -> None:
    job = Job(tmp_path, workload="tests.plugins:loss_of_each_sample")
    prepared = prepare(job.topology, job.config, job.argv)
    with pytest.raises(ConfigError):
        run_server(job.topology, prepared, Signals(), cast(Watch, job.watch))
    assert not job.path.exists()


@pytest.mark.parametrize(
    ("every", "at"), [("3", [3, 6, 9]), ("1", [*range(1, 11)]), ("0", []), ("1s", [])]
)
def test_it_is_saved_after_so_many_updates_where_a_number_was_said(
    every: str, at: list[int]
) -> None:
    asked: list[int] = []

    class Listening:
        def due(self) -> None:
            asked.append(version)

    config = Config(checkpoint_every=every)
    act = AfterUpdate(topology_of(port=1), config, cast(Checkpointer, Listening()))
    for version in range(1, 11):
        act(version)
    assert asked == at


@pytest.mark.slow
def test_it_is_saved_by_the_clock_where_seconds_were_said(tmp_path: Path) -> None:
    def wait_for_a_checkpoint() -> None:
        until(lambda: bool(checkpoints_in(job.path)), TIMEOUT_S)

    ACT["act"] = wait_for_a_checkpoint
    job = Job(tmp_path, "--epochs", "1", "--checkpoint-every", "1s", workload="acting")
    assert job.run() == 0
