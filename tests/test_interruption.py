"""What signals do, by real signals."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.jobs import ROOT
from ps import interruption
from ps.errors import Interrupted


@pytest.fixture(autouse=True)
def _handlers_of_the_tests() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class SignalInDestructor:
    def __del__(self) -> None:
        with suppress(Interrupted):  # as Python itself does, with a message
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["int", "term"]
)
def test_the_first_signal_raises_and_later_ones_do_nothing(
    number: signal.Signals, code: int
) -> None:
    interruption.raise_once()
    with pytest.raises(Interrupted, match=f"^stopped by {number.name}") as caught:
        signal.raise_signal(number)
    assert caught.value.exit_code == code
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGTERM)


def test_what_a_destructor_swallowed_is_raised_by_the_next_check() -> None:
    interruption.raise_once()
    interruption.check()
    SignalInDestructor()
    with pytest.raises(Interrupted, match="SIGINT"):
        interruption.check()
    interruption.raise_once()
    interruption.check()


def test_end_after_ends_also_where_an_exception_would_be_swallowed(tmp_path: Path) -> None:
    code = (
        "from ps import interruption, log\n"
        "log.configure('server', 0)\n"
        "from tests.test_interruption import SignalInDestructor\n"
        "from pathlib import Path\n"
        f"folder = Path({str(tmp_path)!r}) / 'made'\n"
        "folder.mkdir()\n"
        "interruption.end_after(folder.rmdir)\n"
        "SignalInDestructor()\n"
        "print('went on')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (130, "")
    assert ended.stderr.splitlines() == ["server rank 0 | error: stopped by SIGINT"]
    assert list(tmp_path.iterdir()) == []
