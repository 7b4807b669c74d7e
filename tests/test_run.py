"""How a rank ends when it cannot end by itself."""

from __future__ import annotations

import threading
import time

import pytest

from ps import run
from ps.errors import PsError, TrainingFailed
from tests.helpers import server_of, topology_of, until
from tests.plugins import perceptron

BOUND_S = 5.0


@pytest.mark.parametrize("is_stuck", [False, True])
def test_an_orphan_ends_whether_its_server_can_be_stopped_or_not(
    monkeypatch: pytest.MonkeyPatch, is_stuck: bool
) -> None:
    """An update that never ends holds the lock."""
    codes: list[int] = []
    monkeypatch.setattr(run, "leave", codes.append)
    monkeypatch.setattr(run, "ORPHAN_BOUND_S", 0.2)
    parts = server_of(perceptron(), trainers=(1, 2))
    if is_stuck:
        parts.store.lock.acquire()
    start = time.monotonic()
    threading.Thread(target=run._end_orphaned, args=(parts.server,), daemon=True).start()
    until(lambda: codes == [9], BOUND_S)
    assert time.monotonic() - start >= 0.2
    if is_stuck:
        assert parts.server.outcome is None
        parts.store.lock.release()
    until(parts.server.ended.is_set, BOUND_S)
    assert parts.outcome.cause == "torchrun, the parent of all ranks, is gone"
    assert parts.outcome.exit_code == 9


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
