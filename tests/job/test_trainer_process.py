"""A trainer's work from joining to leaving, and where its stacks go."""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO, cast

import pytest

from ps.host.processes import SHOW_STACKS
from ps.host.stacks import stacks_path
from ps.host.watch import GIL_GRACE_S, Watch
from ps.job.build import TrainerParts
from ps.job.injection import Injection
from ps.job.trainer_process import open_stacks, work
from ps.links.choice import Link
from ps.settings.config import Config
from ps.settings.errors import PeerLost, PsError, TrainingFailed
from tests.helpers import COMPUTE, Parts, server_of, topology_of
from tests.plugins import perceptron

TOPOLOGY = topology_of(1, 2, port=1)


class Trainer:
    """Over a link of this process, on which one call fails if the test says so."""

    def __init__(self, compute: str = "server", call: str = "", error: object = None) -> None:
        self.parts: Parts = server_of(perceptron(num_train=16), compute=compute)
        self.link = self.parts.link()
        self.calls: list[str] = []
        for name in ("join", "next_order", "fail", "leave", "close"):
            setattr(self.link, name, self._noting(name, error if name == call else None))

    def work(self) -> int:
        config = Config(compute=self.parts_compute)
        parts = TrainerParts(config, self.parts.workload, Injection((), TOPOLOGY))
        return work(TOPOLOGY, cast(Link, self.link), parts, at_end=lambda: self.note("at end"))

    def note(self, call: str) -> None:
        if self.calls[-1:] != [call]:
            self.calls.append(call)

    @property
    def parts_compute(self) -> Any:
        return "server" if type(self.parts.compute).__name__ == "ServerCompute" else "trainer"

    def _noting(self, name: str, error: object) -> Callable[..., Any]:
        call = getattr(self.link, name)

        def noting(*args: Any) -> Any:
            self.note(name)
            if isinstance(error, BaseException):
                raise error
            return call(*args)

        return noting


@pytest.mark.parametrize("compute", COMPUTE)
def test_it_joins_trains_and_leaves_and_then_the_server_may_end(compute: str) -> None:
    trainer = Trainer(compute)
    assert trainer.work() == 0
    assert trainer.calls == ["join", "next_order", "at end", "leave", "close"]
    assert trainer.parts.outcome.status == "done"


@pytest.mark.parametrize(
    ("error", "code"),
    [(ValueError("no"), 1), (TrainingFailed("no"), 8), (PsError("no"), 1), (SystemExit(5), 1)],
)
def test_it_tells_the_server_what_it_fails_for_and_shows_the_traceback_once(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(call="next_order", error=error)
    assert trainer.work() == code
    assert trainer.calls == ["join", "next_order", "at end", "fail", "close"]
    outcome = trainer.parts.outcome
    assert (outcome.exit_code, outcome.rank, outcome.rank_ends) == (code, 1, True)
    assert type(error).__name__ in str(outcome.cause)
    assert capsys.readouterr().err.count("Traceback") == 1


def test_an_error_of_the_server_is_the_servers(capsys: pytest.CaptureFixture[str]) -> None:
    """The same at world size 1, where this is the same process."""
    trainer = Trainer()
    trainer.parts.state.store.apply = lambda *_: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    assert trainer.work() == 1
    assert trainer.calls == ["join", "next_order", "at end", "leave", "close"]
    outcome = trainer.parts.outcome
    assert (outcome.exit_code, outcome.rank) == (1, 0)
    assert "ZeroDivisionError" in str(outcome.cause)
    assert trainer.parts.server.roll.circumstances()["consequences"] == []


def test_a_server_that_is_lost_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(call="next_order", error=PeerLost("gone"))
    with pytest.raises(PeerLost):
        trainer.work()
    assert trainer.calls == ["join", "next_order"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("folder_is_there", [True, False])
@pytest.mark.parametrize("timeout_s", [7.0, 0.0])
def test_stacks_go_to_the_run_directory_or_are_printed(
    tmp_path: Path,
    folder_is_there: bool,
    timeout_s: float,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    guards: list[float] = []
    register, files = faulthandler.register, list[TextIO]()

    class Guarded:
        def guard(self, file: TextIO, timeout_s: float) -> None:
            guards.append(timeout_s)

    def keep(number: int, file: TextIO, **options: Any) -> None:
        files.append(file)
        register(number, file, **options)

    folder = tmp_path if folder_is_there else tmp_path / "none"
    monkeypatch.setattr(faulthandler, "register", keep)
    try:
        watch = cast(Watch, Guarded())
        open_stacks(watch, folder, 1, Config(stall_timeout=timeout_s))
        signal.raise_signal(SHOW_STACKS)
    finally:
        faulthandler.unregister(SHOW_STACKS)
        if folder_is_there:
            files[0].close()
    here = "in test_stacks_go_to"
    assert (here in capfd.readouterr().err) != folder_is_there
    assert not folder_is_there or here in stacks_path(folder, 1).read_text()
    assert guards == ([timeout_s + GIL_GRACE_S] if timeout_s else [])
