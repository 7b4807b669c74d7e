"""What signals do, by real signals."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ps.host import signals
from ps.host.processes import FROM_TORCHRUN
from ps.settings.errors import Interrupted
from tests.jobs import ROOT


@pytest.fixture(autouse=True)
def _handlers_of_the_tests() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in FROM_TORCHRUN}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class SignalInDestructor:
    def __del__(self) -> None:
        with suppress(Interrupted):  # as Python itself does, with a message
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGQUIT, 131)],
)
def test_the_first_signal_raises_and_later_ones_do_nothing(
    number: signal.Signals, code: int
) -> None:
    signals.raise_once()
    with pytest.raises(Interrupted, match=f"^stopped by {number.name}") as caught:
        signal.raise_signal(number)
    assert caught.value.exit_code == code
    for later in FROM_TORCHRUN:
        signal.raise_signal(later)
    assert signals.came()


def test_what_a_destructor_swallowed_is_raised_by_the_next_check() -> None:
    signals.raise_once()
    signals.check()
    SignalInDestructor()
    with pytest.raises(Interrupted, match="SIGINT"):
        signals.check()
    signals.raise_once()
    signals.check()


def test_end_after_ends_also_where_an_exception_would_be_swallowed(tmp_path: Path) -> None:
    code = (
        "from ps.host import signals\nfrom ps.settings import log\n"
        "log.configure('server', 0)\n"
        "from tests.host.test_signals import SignalInDestructor\n"
        "from pathlib import Path\n"
        f"folder = Path({str(tmp_path)!r}) / 'made'\n"
        "folder.mkdir()\n"
        "signals.end_after(folder.rmdir)\n"
        "SignalInDestructor()\n"
        "print('went on')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (130, "")
    assert ended.stderr.splitlines() == ["server rank 0 | error: stopped by SIGINT"]
    assert list(tmp_path.iterdir()) == []


def run(code: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, to its end."""
    head = "import os, signal, sys\nfrom ps.host import signals\n"
    return subprocess.run(
        [sys.executable, "-c", head + code], cwd=ROOT, capture_output=True, text=True
    )


def test_a_signal_that_is_noted_breaks_nothing_off_and_the_second_ends_at_once() -> None:
    ended = run(
        "signals.note_once()\n"
        "print(signals.came())\n"
        "signal.raise_signal(signal.SIGHUP)\n"
        "print(signals.came(), flush=True)\n"
        "try:\n    signals.check()\n"
        "except BaseException as error:\n    print(error, flush=True)\n"
        "signal.raise_signal(signal.SIGTERM)\n"
        "print('went on')\n"
    )
    assert ended.stdout.splitlines() == ["False", "True", "stopped by SIGHUP"]
    assert ended.returncode == -signal.SIGTERM


def test_a_signal_that_comes_while_something_is_written_is_kept_and_breaks_nothing_off() -> None:
    signals.raise_once()
    signals.ignore()
    assert not signals.came()
    signal.raise_signal(signal.SIGQUIT)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(Interrupted, match="SIGQUIT"):
        signals.check()


def test_signals_are_read_from_a_handle_in_the_order_in_which_they_came() -> None:
    ended = run(
        "handle = signals.by_handle()\n"
        "for number in (15, 2, 1, 3): signal.raise_signal(number)\n"
        "print(list(os.read(handle, 64)))\n"
        "signals.end_at_once()\n"
        "signal.raise_signal(15)\n"
    )
    assert (ended.stdout, ended.returncode) == ("[15, 2, 1, 3]\n", -signal.SIGTERM)


def test_no_signal_gets_lost_while_the_handle_is_made() -> None:
    ended = run(
        "set_handlers = signals._set\n"
        "def set_and_be_hit(handler):\n    set_handlers(handler)\n    signal.raise_signal(15)\n"
        "signals._set = set_and_be_hit\n"
        "print(list(os.read(signals.by_handle(), 64)))\n"
    )
    assert ended.stdout == "[15]\n"


def test_a_signal_to_a_process_that_was_forked_is_not_one_to_this() -> None:
    """Such as the workers of a data set, which are ended by it."""
    ended = run(
        "handle = signals.by_handle()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    signal.signal(14, lambda *_: None)\n"
        "    signal.raise_signal(14)\n"
        "    signal.raise_signal(15)\n"
        "    os._exit(7)\n"
        "print(os.WTERMSIG(os.waitpid(pid, 0)[1]))\n"
        "try:\n    os.read(handle, 64)\n"
        "except BlockingIOError:\n    print('nothing')\n"
    )
    assert ended.stdout.splitlines() == ["15", "nothing"]


def test_who_is_asked_for_its_stacks_goes_on_whether_it_can_write_them_or_not(
    tmp_path: Path,
) -> None:
    path = tmp_path / "stacks"
    ended = run(
        "signals.by_handle()\n"
        "signal.raise_signal(signal.SIGUSR1)\n"
        f"file = open({str(path)!r}, 'a')\n"
        "def here(): signal.raise_signal(signal.SIGUSR1)\n"
        "signals.show_stacks_to(file)\n"
        "here()\n"
        "print('went on')\n"
    )
    assert (ended.returncode, ended.stdout) == (0, "went on\n")
    assert "in here" in path.read_text()
