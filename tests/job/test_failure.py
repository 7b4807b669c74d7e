"""How a rank ends for an error: outcome, exit code, and one traceback."""

from __future__ import annotations

import faulthandler
import json
from dataclasses import replace
from pathlib import Path

import pytest

from ps.job.failure import in_one_line, outcome_of, show_traceback
from ps.server.roll import Outcome
from ps.settings.errors import Interrupted, LaunchError, Orphaned, TrainingFailed
from tests.helpers import topology_of

SERVER = topology_of(0, 3, port=1)
SIGINT = Interrupted.by_signal("SIGINT", 2)


@pytest.mark.parametrize(
    ("error", "came", "status", "exit_code", "part"),
    [
        (SIGINT, None, "interrupted", 130, "SIGINT"),
        (SIGINT, SIGINT, "interrupted", 130, "SIGINT"),
        (Interrupted.by_error(Orphaned()), None, "interrupted", 9, "torchrun"),
        (OSError("no room"), SIGINT, "interrupted", 130, "SIGINT"),
        (LaunchError("nobody came"), None, "failed", 3, "nobody came"),
        (TrainingFailed("nan", 2), None, "failed", 8, "nan"),
        (OSError("no room\nat all"), None, "failed", 1, "server rank 0: OSError: no room"),
        (SystemExit(5), None, "failed", 1, "server rank 0: SystemExit: 5"),
        (MemoryError(), None, "failed", 1, "server rank 0: MemoryError: "),
    ],
)
def test_every_error_of_the_servers_own_part_has_an_outcome(
    error: BaseException, came: Interrupted | None, status: str, exit_code: int, part: str
) -> None:
    """What fails after a request to end is not the cause."""
    outcome = outcome_of(error, SERVER, came)
    assert (outcome.status, outcome.exit_code, outcome.rank) == (status, exit_code, 0)
    assert outcome.cause is not None and part in outcome.cause
    assert "\n" not in outcome.cause
    assert isinstance(outcome, Outcome) and not outcome.rank_ends


@pytest.mark.parametrize("is_under_torchrun", [False, True])
def test_a_traceback_is_shown_once_and_under_torchrun_by_torchrun(
    is_under_torchrun: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    warnings: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setattr(faulthandler, "enable", lambda **_: None)  # which torch does
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    topology = replace(SERVER, error_file=str(path) if is_under_torchrun else None)
    try:
        raise ValueError("boom\nand more")
    except ValueError as error:
        show_traceback(error, topology)
        assert in_one_line(error) == "ValueError: boom"
    assert capsys.readouterr().err.count("Traceback") == (0 if is_under_torchrun else 1)
    assert path.exists() == is_under_torchrun
    if is_under_torchrun:
        assert "boom" in json.dumps(json.loads(path.read_text()))
        assert "ValueError: boom" in warnings.text
