"""The thread that watches: real threads, and where it is in a process of its own, real signals."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest

from ps.host.processes import Peer
from ps.host.signals import Signals
from ps.host.timeouts import Deadline
from ps.host.watch import Watch
from ps.settings.errors import Interrupted
from tests.helpers import until
from tests.jobs import ROOT

TIMEOUT_S = 5.0
LONG_S = 30.0
"""An interval in which no test ends."""
PR_SET_CHILD_SUBREAPER = 36
WATCHED = """
import ctypes, os, signal, sys, time
from ps.host import libc
from ps.host.signals import Phase, Signals
from ps.host.watch import Watch
signals = Signals()
watch = Watch(signals, interval_s={interval_s})
{prepare}
watch.start()
print("ready", flush=True)
{then}
"""
INSIDE_C = "lock = bytes(64); pin = ctypes.create_string_buffer(64); c = ctypes.CDLL(None)\n" + (
    "c.pthread_mutex_lock(pin); c.pthread_mutex_lock(pin)"
)
"""Waits for itself, with no regard to signals, and lets other threads run."""


class FakeSignals:
    """In place of what a process has once."""

    def __init__(self) -> None:
        self.handle, self._writer = os.pipe()
        self.came: Interrupted | None = None
        self.deadline: Deadline | None = None
        self.read: Callable[[], Interrupted | None] = self._read

    def hand_over(self, request: Interrupted | None) -> None:
        self.came = request
        os.write(self._writer, b".")

    def orphaned(self) -> None:
        raise AssertionError

    def _read(self) -> Interrupted | None:
        os.read(self.handle, 64)
        return self.came


class Watched:
    """A watch in this process, which does not end."""

    def __init__(
        self,
        interval_s: float = LONG_S,
        last_look_timeout_s: float = LONG_S,
        overdue_s: float = LONG_S,
    ) -> None:
        self.exit_codes: list[int] = []
        self.signals = FakeSignals()
        self.watch = Watch(
            cast(Signals, self.signals),
            interval_s=interval_s,
            last_look_timeout_s=last_look_timeout_s,
            overdue_s=overdue_s,
            leave=self.leave,
        )

    def leave(self, code: int) -> None:
        self.exit_codes.append(code)
        threading.Event().wait()


class EndingPeer:
    """One whose process ends when the test says so."""

    def __init__(self, handle: bool = True) -> None:
        self.handle, self._writer = os.pipe() if handle else (None, None)

    def end(self) -> None:
        assert self._writer is not None
        os.write(self._writer, b".")


def peer(handle: bool = True) -> Any:
    return cast(Peer, EndingPeer(handle))


def test_it_looks_once_an_interval_and_for_a_peer_without_a_handle_too() -> None:
    looks: list[float] = []
    watched = Watched(interval_s=0.05)
    watched.watch.look_with(lambda: looks.append(time.monotonic()), [peer(handle=False)])
    watched.watch.start()
    until(lambda: len(looks) == 6, TIMEOUT_S)
    watched.watch.close()
    assert looks[5] - looks[0] >= 4 * 0.05


def test_it_looks_at_once_when_it_has_something_to_look_at_and_when_a_peer_ends() -> None:
    looks: list[float] = []
    watch, peers = Watched().watch, [peer(), peer()]
    watch.start()
    time.sleep(0.05)
    watch.look_with(lambda: looks.append(time.monotonic()), peers)
    until(lambda: len(looks) == 1, TIMEOUT_S)
    peers[0].end()
    until(lambda: len(looks) == 2, TIMEOUT_S)
    time.sleep(0.05)
    assert len(looks) == 2  # not again and again for one that has ended
    peers[1].end()
    until(lambda: len(looks) == 3, TIMEOUT_S)
    watch.close()


def test_a_look_that_raises_is_told_once_and_looking_goes_on(
    warnings: pytest.LogCaptureFixture,
) -> None:
    looks: list[int] = []
    watched = Watched(interval_s=0.01)

    def look() -> None:
        looks.append(1)
        raise ValueError("first" if len(looks) < 5 else "second")

    watched.watch.look_with(look, [])
    watched.watch.start()
    until(lambda: len(looks) > 8, TIMEOUT_S)
    watched.watch.close()
    first, second = (record.getMessage() for record in warnings.records)
    assert first.endswith("ValueError: first") and second.endswith("ValueError: second")


@pytest.mark.parametrize("hangs", [False, True])
def test_after_close_nobody_looks_and_a_look_under_way_has_ended_or_is_left_alone(
    hangs: bool,
) -> None:
    begun, ended, looks = threading.Event(), threading.Event(), list[int]()
    watched = Watched(interval_s=0.01, last_look_timeout_s=0.05 if hangs else LONG_S)

    def look() -> None:
        looks.append(1)
        begun.set()
        time.sleep(0.2)
        ended.set()

    watched.watch.look_with(look, [])
    watched.watch.start()
    assert begun.wait(TIMEOUT_S)
    watched.watch.close()
    assert ended.is_set() != hangs
    assert ended.wait(TIMEOUT_S)
    time.sleep(0.05)
    watched.watch.look_now()
    assert len(looks) == 1


def test_a_look_can_be_made_now_and_never_two_at_once() -> None:
    busy, at_once = threading.Lock(), list[bool]()

    def look() -> None:
        at_once.append(not busy.acquire(blocking=False))
        time.sleep(0.05)
        busy.release()

    watch = Watched().watch
    watch.look_with(look, [])
    watch.start()
    until(lambda: len(at_once) == 1, TIMEOUT_S)
    watch.look_now()
    assert at_once == [False, False]
    watch.close()


def test_a_watch_that_fails_ends_the_process_and_says_why(
    warnings: pytest.LogCaptureFixture,
) -> None:
    """Or nobody would see that a rank is gone."""

    def read() -> None:
        raise OSError(12, "Cannot allocate memory")

    watched = Watched()
    watched.signals.read = read
    watched.signals.hand_over(None)
    watched.watch.start()
    until(lambda: watched.exit_codes == [1], TIMEOUT_S)
    assert "Cannot allocate memory" in warnings.text


def test_a_process_that_is_to_end_later_does_so_and_looks_no_more() -> None:
    looks: list[int] = []
    watched = Watched(interval_s=0.01)

    def look() -> None:
        looks.append(1)
        watched.watch.end_later(5, 0.2)

    watched.watch.look_with(look, [])
    start = time.monotonic()
    watched.watch.start()
    until(lambda: watched.exit_codes == [5], TIMEOUT_S)
    assert 0.2 <= time.monotonic() - start < 1.0
    assert len(looks) == 1


SIGTERM = Interrupted.by_signal("SIGTERM", 15)


def test_a_signal_that_asks_to_end_ends_a_process_that_is_to_end_later() -> None:
    watched = Watched()
    watched.watch.end_later(5, LONG_S)
    watched.watch.start()
    watched.signals.hand_over(None)  # one that asks for nothing
    time.sleep(0.05)
    assert watched.exit_codes == []
    watched.signals.hand_over(SIGTERM)
    until(lambda: watched.exit_codes == [143], TIMEOUT_S)


def test_a_process_that_has_not_ended_some_time_after_its_deadline_is_ended(
    warnings: pytest.LogCaptureFixture,
) -> None:
    """Also where the thread that looks cannot: its look hangs."""
    begun, go_on = threading.Event(), threading.Event()
    watched = Watched(interval_s=0.05, overdue_s=0.2)

    def look() -> None:
        begun.set()
        go_on.wait(TIMEOUT_S)

    watched.watch.look_with(look, [])
    watched.watch.start()
    assert begun.wait(TIMEOUT_S)
    start = time.monotonic()
    watched.signals.deadline, watched.signals.came = Deadline.after(0.1), SIGTERM
    until(lambda: watched.exit_codes == [143], TIMEOUT_S)
    assert 0.3 <= time.monotonic() - start < 1.0
    assert "SIGTERM" in warnings.text
    go_on.set()


@pytest.mark.parametrize("hangs", [False, True])
def test_a_signal_is_followed_by_a_last_look_that_holds_nobody_up(hangs: bool) -> None:
    """torchrun sends one when the server has ended: then that is to be told."""
    looks, go_on = list[int](), threading.Event()
    watched = Watched(last_look_timeout_s=0.1 if hangs else LONG_S)

    def look() -> None:
        looks.append(1)
        if hangs and len(looks) == 2:
            go_on.wait(TIMEOUT_S)

    watched.watch.look_with(look, [])
    watched.watch.start()
    until(lambda: looks == [1], TIMEOUT_S)
    watched.signals.hand_over(SIGTERM)
    until(lambda: watched.exit_codes == [143], TIMEOUT_S)
    assert looks == [1, 1]
    go_on.set()


# --- the process it is in


def code_of(prepare: str = "", then: str = "time.sleep(60)", interval_s: float = 0.5) -> str:
    return WATCHED.format(prepare=prepare, then=then, interval_s=interval_s)


@contextmanager
def program(code: str) -> Iterator[subprocess.Popen[str]]:
    """A Python program that has printed its first line."""
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def orphan_of(code: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A shell, and the Python program that it has started, which becomes a child of this process
    when the shell is gone."""
    libc = ctypes.CDLL(None)
    assert libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    command = ["sh", "-c", '"$@" & echo $!; wait', "sh", sys.executable, "-c", code]
    parent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        assert parent.stdout.readline() == b"ready\n"
        yield parent, child
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def exit_code_of(child: int, timeout_s: float) -> int:
    """Of a child that ends within that time; it is killed if it does not."""
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        with suppress(ChildProcessError):  # its parent is about to end
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError(f"it ran on for {timeout_s} s")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prepare", "then", "interval_s"),
    [
        ("", "time.sleep(60)", 0.5),
        ("signals.enter(Phase.HANDED_OVER)", INSIDE_C, 0.5),
        ("signals.enter(Phase.CLEAN_UP, lambda: os.rmdir(sys.argv[0]))", INSIDE_C, LONG_S),
        ("watch.when_orphaned(lambda: os._exit(9))", INSIDE_C, LONG_S),
    ],
    ids=["in Python", "inside C", "between two looks", "with an action of its own"],
)
def test_a_process_whose_parent_is_killed_ends_within_a_second_with_9(
    prepare: str, then: str, interval_s: float
) -> None:
    with orphan_of(code_of(prepare, then, interval_s)) as (parent, child):
        parent.kill()
        assert exit_code_of(child, 1.0) == 9


FETCHES = """
import os, sys, time
import launch

def fetch(*args):
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        os.rmdir({folder!r})

launch.prepare = fetch
environ = dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
sys.exit(launch.main([], environ))
"""


@pytest.mark.slow
def test_a_server_that_is_orphaned_while_it_fetches_puts_things_in_order_and_ends_with_9(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "made"
    folder.mkdir()
    with orphan_of(FETCHES.format(folder=str(folder))) as (parent, child):
        parent.kill()
        assert exit_code_of(child, 1.5) == 9
    assert not folder.exists()


@pytest.mark.slow
def test_a_signal_ends_a_process_whose_main_thread_is_inside_c() -> None:
    with program(code_of("signals.enter(Phase.HANDED_OVER)", INSIDE_C)) as process:
        time.sleep(0.02)
        process.send_signal(signal.SIGHUP)
        assert process.wait(1.0) == 129


@pytest.mark.slow
def test_the_deadline_of_a_signal_starts_also_while_the_main_thread_is_inside_c() -> None:
    """As when it loads a model: the handler can only run after that."""
    prepare = (
        "signals = Signals(end_timeout_s=0.2)\n"
        "signals.enter(Phase.INTERRUPT)\n"
        "watch = Watch(signals, interval_s=0.1, overdue_s=0.2)"
    )
    with program(code_of(prepare, INSIDE_C)) as process:
        time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(2.0) == 143


GUARDED = """
def hold_it():
    libc.hold_gil()
until = time.monotonic() + 1.2
while time.monotonic() < until:
    pass
print("worked", flush=True)
hold_it()
"""


@pytest.mark.slow
def test_a_process_in_which_no_python_runs_any_more_ends_and_leaves_its_stacks(
    tmp_path: Path,
) -> None:
    path = tmp_path / "stacks"
    with program(code_of(f"watch.guard(open({str(path)!r}, 'a'), 0.8)", GUARDED)) as process:
        assert process.stdout is not None and process.stdout.readline() == "worked\n"
        start = time.monotonic()
        assert process.wait(TIMEOUT_S) == 1
        assert time.monotonic() - start < 2.0
    assert "in hold_it" in path.read_text()
