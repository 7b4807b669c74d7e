"""Every way to fail has an exit code of its own."""

from __future__ import annotations

import pytest

from ps.settings import errors
from ps.settings.errors import Interrupted, Orphaned, PsError, first_line


def test_every_error_has_an_exit_code_of_its_own() -> None:
    codes = {kind.__name__: kind.exit_code for kind in PsError.__subclasses__()}
    assert codes == {
        "ConfigError": 2,
        "LaunchError": 3,
        "PeerLost": 4,
        "Stalled": 5,
        "OutOfMemory": 6,
        "CheckpointUnusable": 7,
        "TrainingFailed": 8,
        "Orphaned": 9,
    }
    assert "torchrun" in str(Orphaned())


@pytest.mark.parametrize(
    ("name", "number", "is_from_torchrun"), [("SIGTERM", 15, True), ("SIGINT", 2, False)]
)
def test_a_signal_is_no_exception_for_a_handler_of_all(
    name: str, number: int, is_from_torchrun: bool
) -> None:
    error = Interrupted.by_signal(name, number)
    assert not isinstance(error, Exception)
    assert error.exit_code == 128 + number
    assert name in str(error)
    assert ("torchrun" in str(error)) is is_from_torchrun


@pytest.mark.parametrize(("text", "line"), [("", ""), ("one", "one"), ("one\n#0 frame", "one")])
def test_the_first_line_of_an_error(text: str, line: str) -> None:
    assert first_line(errors.LaunchError(text)) == line
