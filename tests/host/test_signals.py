"""What a request to end does in each phase, by real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from ps.host.processes import FROM_TORCHRUN, SHOW_STACKS
from ps.host.signals import Phase, Signals, restore_defaults
from ps.settings.errors import Interrupted
from tests.jobs import ROOT

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGQUIT: 131}
ORPHANED = 9


class Left(BaseException):
    """In place of the end of this process."""


class SignalInDestructor:
    def __del__(self) -> None:
        with suppress(Interrupted, Left):  # as Python itself does, with a message
            signal.raise_signal(signal.SIGINT)


@pytest.fixture
def signals() -> Iterator[Signals]:
    before = {number: signal.getsignal(number) for number in (*FROM_TORCHRUN, SHOW_STACKS)}

    def leave(code: int) -> None:
        raise Left(code)

    yield Signals(end_timeout_s=7.0, leave=leave)
    restore_defaults()
    for number, handler in before.items():
        signal.signal(number, handler)


def acts_by_default() -> bool:
    return all(signal.getsignal(number) is signal.SIG_DFL for number in FROM_TORCHRUN)


@pytest.mark.parametrize("number", FROM_TORCHRUN)
def test_the_first_signal_interrupts_and_later_ones_are_not_the_cause(
    signals: Signals, number: signal.Signals
) -> None:
    signals.enter(Phase.INTERRUPT)
    signals.check()
    with pytest.raises(Interrupted, match=number.name) as caught:
        signal.raise_signal(number)
    assert caught.value.exit_code == EXIT_CODES[number]
    for later in FROM_TORCHRUN:
        signal.raise_signal(later)
    assert signals.came is caught.value


def test_what_a_destructor_swallowed_is_raised_by_the_next_check(signals: Signals) -> None:
    signals.enter(Phase.INTERRUPT)
    SignalInDestructor()
    with pytest.raises(Interrupted, match="SIGINT"):
        signals.check()


def test_a_signal_that_came_before_a_phase_is_not_forgotten(signals: Signals) -> None:
    signals.enter(Phase.FINISHING)
    signal.raise_signal(signal.SIGQUIT)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(Interrupted, match="SIGQUIT"):
        signals.enter(Phase.INTERRUPT)
    signals.enter(Phase.NOTE)
    assert acts_by_default()
    with pytest.raises(Interrupted, match="SIGQUIT"):
        signals.check()
    for phase in (Phase.END_AT_ONCE, Phase.CLEAN_UP, Phase.HANDED_OVER):
        cleaned: list[str] = []
        with pytest.raises(Left, match="131"):
            signals.enter(phase, lambda: cleaned.append("once"))  # noqa: B023
        assert cleaned == ["once"]


@pytest.mark.parametrize("fails", [False, True])
def test_while_modules_are_loaded_one_function_is_called_and_the_process_ends(
    signals: Signals, warnings: pytest.LogCaptureFixture, fails: bool
) -> None:
    calls: list[str] = []

    def clean_up() -> None:
        calls.append("clean up")
        signal.raise_signal(signal.SIGTERM)
        if fails:
            raise OSError("no room")

    signals.enter(Phase.CLEAN_UP, clean_up)
    with pytest.raises(Left, match="129"):
        signal.raise_signal(signal.SIGHUP)
    assert calls == ["clean up"]
    assert "SIGHUP" in warnings.records[-1].getMessage()
    assert ("no room" in warnings.text) == fails


def test_the_first_signal_is_noted_and_the_second_ends_the_process(signals: Signals) -> None:
    signals.enter(Phase.NOTE)
    signals.check()
    signal.raise_signal(signal.SIGHUP)
    with pytest.raises(Interrupted, match="SIGHUP"):
        signals.check()
    assert acts_by_default()


def test_signals_that_are_handed_over_are_read_from_the_handle(signals: Signals) -> None:
    signals.enter(Phase.HANDED_OVER)
    assert signals.read() is None
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.raise_signal(signal.SIGALRM)  # is no request
    assert signals.read() is None
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.raise_signal(number)
    came = signals.read()
    assert came is not None and came.exit_code == 129
    assert signals.read() is came is signals.came


def test_no_signal_gets_lost_while_it_begins_to_be_handed_over(
    signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_handler = signal.signal

    def set_and_be_hit(number: int, handler: object) -> None:
        set_handler(number, handler)  # type: ignore[arg-type]
        signal.raise_signal(number)

    with monkeypatch.context() as patched:
        patched.setattr(signal, "signal", set_and_be_hit)
        signals.enter(Phase.HANDED_OVER)
    assert len(os.read(signals.handle, 64)) == len(FROM_TORCHRUN)


def test_one_deadline_starts_with_the_first_signal(signals: Signals) -> None:
    signals.enter(Phase.FINISHING)
    assert (signals.deadline, signals.left_s(600.0)) == (None, 600.0)
    signal.raise_signal(signal.SIGTERM)
    first = signals.deadline
    assert first is not None and 6 < first.left_s() <= 7
    time.sleep(0.01)
    signal.raise_signal(signal.SIGTERM)
    assert signals.deadline == first
    assert 6 < signals.left_s(600.0) < 7
    assert signals.left_s(2.0) == 2.0


def orphan(signals: Signals) -> None:
    """As the thread that watches does."""
    with suppress(Left):
        signals.orphaned()


def test_the_end_of_torchrun_interrupts_the_main_thread_as_a_signal_does(signals: Signals) -> None:
    signals.enter(Phase.INTERRUPT)
    with pytest.raises(Interrupted, match="torchrun") as caught:
        threading.Thread(target=orphan, args=(signals,)).start()
        time.sleep(5)
    signal.raise_signal(signal.SIGTERM)
    assert (caught.value.exit_code, signals.came) == (ORPHANED, caught.value)
    assert signals.deadline is not None


@pytest.mark.parametrize("phase", [Phase.NOTE, Phase.FINISHING])
def test_the_end_of_torchrun_is_kept_where_signals_are(signals: Signals, phase: Phase) -> None:
    signals.enter(phase)
    orphan(signals)
    assert signals.came is not None and signals.came.exit_code == ORPHANED
    assert acts_by_default() == (phase is Phase.NOTE)


@pytest.mark.parametrize("phase", [Phase.END_AT_ONCE, Phase.CLEAN_UP, Phase.HANDED_OVER])
def test_the_end_of_torchrun_ends_a_process_whose_main_thread_may_be_inside_c(
    signals: Signals, phase: Phase, warnings: pytest.LogCaptureFixture
) -> None:
    cleaned: list[str] = []
    signals.enter(phase, lambda: cleaned.append("once"))
    with pytest.raises(Left, match=str(ORPHANED)):
        signals.orphaned()
    assert cleaned == ["once"]
    assert "torchrun" in warnings.text


def test_a_signal_before_the_end_of_torchrun_stays_the_cause(signals: Signals) -> None:
    signals.enter(Phase.FINISHING)
    signal.raise_signal(signal.SIGINT)
    orphan(signals)
    assert signals.came is not None and signals.came.exit_code == 130


# --- the process


def run(code: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, to its end."""
    head = (
        "import os, signal, sys\nfrom ps.host.signals import Phase, Signals\nsignals = Signals()\n"
    )
    return subprocess.run(
        [sys.executable, "-c", head + code], cwd=ROOT, capture_output=True, text=True
    )


@pytest.mark.slow
def test_a_process_ends_also_where_an_exception_would_be_swallowed() -> None:
    ended = run(
        "from tests.host.test_signals import SignalInDestructor\n"
        "signals.enter(Phase.CLEAN_UP, lambda: print('clean', flush=True))\n"
        "SignalInDestructor()\n"
        "print('went on')\n"
    )
    assert (ended.returncode, ended.stdout) == (130, "clean\n")


@pytest.mark.slow
def test_a_signal_to_a_process_that_was_forked_is_not_one_to_this() -> None:
    """Such as a process that loads batches, which is ended by it."""
    ended = run(
        "signals.enter(Phase.HANDED_OVER)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    signal.signal(14, lambda *_: None)\n"
        "    signal.raise_signal(14)\n"
        "    signal.raise_signal(15)\n"
        "    os._exit(7)\n"
        "print(os.WTERMSIG(os.waitpid(pid, 0)[1]), signals.read(), flush=True)\n"
        "signals.enter(Phase.END_AT_ONCE)\n"
        "signal.raise_signal(1)\n"
    )
    assert (ended.stdout, ended.returncode) == ("15 None\n", -signal.SIGHUP)


@pytest.mark.slow
def test_who_is_asked_for_its_stacks_goes_on_whether_it_can_write_them_or_not() -> None:
    ended = run(
        "from ps.host import stacks\n"
        "signals.enter(Phase.HANDED_OVER)\n"
        "signal.raise_signal(signal.SIGUSR1)\n"
        "def here(): signal.raise_signal(signal.SIGUSR1)\n"
        "stacks.show_on_request(sys.stderr)\n"
        "here()\n"
        "print('went on')\n"
    )
    assert (ended.returncode, ended.stdout) == (0, "went on\n")
    assert "in here" in ended.stderr
