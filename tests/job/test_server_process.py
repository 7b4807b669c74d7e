"""How a rank ends when it cannot end by itself."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest

from ps.host.signals import Signals
from ps.host.watch import GIL_GRACE_S, Watch
from ps.job import run
from ps.job.ending import Ending
from ps.server.server import Outcome, ParameterServer
from ps.settings.config import Config
from ps.settings.errors import PsError, TrainingFailed
from tests.helpers import server_of, topology_of
from tests.plugins import perceptron


class Ended:
    """Stands for the end of the run: saving takes a while."""

    def __init__(self, server: ParameterServer) -> None:
        self.server = server
        self.calls: list[str] = []

    def stop(self, outcome: Outcome, **options: Any) -> None:
        self.calls.append(f"stop within {options['bound_s']} s")
        self.server.stop(outcome, options["abandoned"])

    def finish(self) -> None:
        time.sleep(0.3)
        self.calls.append(f"finish {self.server.ended.is_set()}")


def test_an_orphan_saves_however_long_that_takes_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "ORPHAN_BOUND_S", 0.1)
    ended = Ended(server_of(perceptron(), trainers=(1, 2)).server)
    monkeypatch.setattr(run, "leave", lambda code: ended.calls.append(f"leave {code}"))
    run._end_orphaned(cast(Ending, ended), topology_of(0, 3, port=1))
    assert ended.calls == ["stop within 0.1 s", "finish True", "leave 9"]
    assert ended.server.outcome is not None
    assert ended.server.outcome.cause == "torchrun, the parent of all ranks, is gone"


def test_without_a_file_for_them_stacks_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files: list[object] = []
    monkeypatch.setattr(run.stacks, "show_on_request", files.append)
    watch = Watch(Signals())
    run._watch_stacks(watch, tmp_path / "none", 1, Config(stall_timeout=7.0))
    assert files == [sys.stderr]
    assert watch._guard == (7.0 + GIL_GRACE_S, sys.stderr)


@pytest.mark.parametrize(
    ("error", "code"), [(ValueError("no"), 1), (TrainingFailed("no"), 8), (PsError("no"), 1)]
)
def test_a_trainer_ends_with_the_exit_code_of_its_error(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        raise error
    except Exception as caught:
        assert run._explain(caught, topology_of(1, 3, port=1)) == code
    assert capsys.readouterr().err.count("Traceback") == 1
