"""The thread that watches: real processes, real threads, real signals."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from ps.host import looks
from ps.host import watch as watch_module
from ps.host.health import Doing, Finding, Progress
from ps.host.looks import HEALTH_FILE, ServerSide, TrainerSide
from ps.host.processes import Identity, Peer
from ps.host.stacks import stacks_path
from ps.host.watch import Watch
from tests.helpers import has_ended, peer_of, sleeper, spawned, until
from tests.jobs import ROOT

BOUND_S = 5.0
LONG_S = 30.0
"""An interval in which no test ends."""
MIB = 1 << 20
PR_SET_CHILD_SUBREAPER = 36
WATCHED = """
import ctypes, os, signal, sys, time
from pathlib import Path
from ps.host import libc, signals
from ps.settings import log
from ps.watch import Watch
log.configure("trainer", 1)
watch = Watch()
{prepare}
watch.start()
print("ready", flush=True)
{then}
"""
INSIDE_C = "lock = bytes(64); pin = ctypes.create_string_buffer(64); c = ctypes.CDLL(None)\n" + (
    "c.pthread_mutex_lock(pin); c.pthread_mutex_lock(pin)"
)
"""Waits for itself, with no regard to signals, and lets other threads run."""
SHOWS_STACKS = """
import faulthandler, signal, sys, time
def the_slow_one():
    print("ready", flush=True)
    time.sleep(60)
faulthandler.register(signal.SIGUSR1, open(sys.argv[1], "a"), all_threads=True)
the_slow_one()
"""


class Server:
    """Whom the findings are told."""

    def __init__(self, **progress: Progress) -> None:
        self.made = {int(rank.removeprefix("t")): made for rank, made in progress.items()}
        self.findings: list[Finding] = []
        self.stuck: list[tuple[Finding, Mapping[str, Any]]] = []
        self.on_found: Callable[[], None] = lambda: None

    def progress(self) -> Mapping[int, Progress]:
        return self.made

    def found(self, finding: Finding) -> None:
        self.on_found()
        self.findings.append(finding)


@contextmanager
def program(code: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    """A Python program that has printed its first line."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *args],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def watched(prepare: str = "", then: str = "time.sleep(60)") -> Any:
    return program(WATCHED.format(prepare=prepare, then=then))


def kill(process: subprocess.Popen[Any], number: signal.Signals = signal.SIGKILL) -> None:
    """It has ended then, and nobody has waited for it."""
    process.send_signal(number)
    until(lambda: has_ended(process), BOUND_S)


def stop(process: subprocess.Popen[Any]) -> Peer:
    process.send_signal(signal.SIGSTOP)
    peer = peer_of(process)
    until(lambda: peer.read().state == "stopped", BOUND_S)
    return peer


def myself() -> Peer:
    return Peer(Identity.of(os.getpid()))


def working(for_s: float = 0.0) -> Progress:
    return Progress(Doing.WORKING, time.monotonic() - for_s)


def side_of(
    server: Server,
    run_dir: Path,
    *trainers: subprocess.Popen[Any],
    stall_timeout_s: float | None = 60.0,
    memory_limit_bytes: int | None = None,
) -> ServerSide:
    """This process is the server, and these are its trainers from rank 1 on."""
    peers = {0: myself()} | {rank: peer_of(t) for rank, t in enumerate(trainers, start=1)}
    return ServerSide(
        server,
        peers,
        0,
        run_dir,
        stall_timeout_s=stall_timeout_s,
        memory_limit_bytes=memory_limit_bytes,
        on_stuck=lambda finding, facts: server.stuck.append((finding, facts)),
    )


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exit codes with which this process would have ended."""
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        threading.Event().wait()

    monkeypatch.setattr(watch_module, "leave", leave)
    return codes


@pytest.fixture
def seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens within a test, no interval is over."""
    monkeypatch.setattr(watch_module, "INTERVAL_S", LONG_S)


# --- the thread


def test_it_looks_once_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "INTERVAL_S", 0.05)
    looks: list[float] = []
    watch = Watch()
    watch.look_with(lambda: looks.append(time.monotonic()), [])
    watch.start()
    until(lambda: len(looks) == 6, BOUND_S)
    watch.close()
    assert looks[5] - looks[0] >= 4 * 0.05


@pytest.mark.usefixtures("seldom")
def test_it_looks_at_once_when_it_has_something_to_look_at_and_when_a_peer_ends() -> None:
    looks: list[float] = []
    watch = Watch()
    watch.start()
    with sleeper() as process, sleeper() as other:
        time.sleep(0.05)
        watch.look_with(lambda: looks.append(time.monotonic()), [peer_of(process), peer_of(other)])
        until(lambda: len(looks) == 1, BOUND_S)
        process.kill()
        until(lambda: len(looks) == 2, BOUND_S)
        time.sleep(0.1)
        assert len(looks) == 2  # not again and again for one that has ended
        other.kill()
        until(lambda: len(looks) == 3, BOUND_S)
    watch.close()


@pytest.mark.usefixtures("seldom")
def test_a_peer_without_a_handle_is_looked_at_with_the_others() -> None:
    looks: list[float] = []
    with sleeper() as process:
        identity = Identity.of(process.pid)
    watch = Watch()
    watch.look_with(lambda: looks.append(0.0), [Peer(identity)])
    watch.start()
    until(lambda: len(looks) == 1, BOUND_S)
    watch.close()


def test_a_look_that_raises_is_told_once_and_looking_goes_on(
    monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch_module, "INTERVAL_S", 0.01)
    looks: list[int] = []

    def look() -> None:
        looks.append(1)
        raise ValueError("first" if len(looks) < 5 else "second")

    watch = Watch()
    watch.look_with(look, [])
    watch.start()
    until(lambda: len(looks) > 8, BOUND_S)
    watch.close()
    assert [record.getMessage() for record in warnings.records] == [
        "health could not be looked at: ValueError: first",
        "health could not be looked at: ValueError: second",
    ]


def test_after_close_nobody_looks_and_a_look_under_way_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch_module, "INTERVAL_S", 0.01)
    begun, ended = threading.Event(), threading.Event()
    looks: list[int] = []

    def look() -> None:
        looks.append(1)
        begun.set()
        time.sleep(0.2)
        ended.set()

    watch = Watch()
    watch.look_with(look, [])
    watch.start()
    assert begun.wait(BOUND_S)
    watch.close()
    assert ended.is_set()
    time.sleep(0.1)
    watch.look_now()
    assert len(looks) == 1


@pytest.mark.usefixtures("seldom")
def test_a_look_can_be_made_now_and_never_two_at_once() -> None:
    at_once: list[bool] = []
    busy = threading.Lock()

    def look() -> None:
        at_once.append(not busy.acquire(blocking=False))
        time.sleep(0.05)
        busy.release()

    watch = Watch()
    watch.look_with(look, [])
    watch.start()
    until(lambda: len(at_once) == 1, BOUND_S)
    watch.look_now()
    assert at_once == [False, False]
    watch.close()


@pytest.mark.usefixtures("seldom")
def test_a_watch_that_breaks_ends_the_process_and_says_why(
    left: list[int], warnings: pytest.LogCaptureFixture
) -> None:
    """Or nobody would see that a rank is gone."""

    class Broken:
        def poll(self, bound_ms: float) -> Sequence[tuple[int, int]]:
            raise OSError(12, "Cannot allocate memory")

    watch = Watch()
    watch._poll = Broken()  # type: ignore[assignment]
    watch.start()
    until(lambda: left == [1], BOUND_S)
    [record] = warnings.records
    assert record.getMessage() == "the watch broke: OSError: [Errno 12] Cannot allocate memory"


def test_a_process_that_is_to_end_later_does_so_and_looks_no_more(
    monkeypatch: pytest.MonkeyPatch, left: list[int]
) -> None:
    monkeypatch.setattr(watch_module, "INTERVAL_S", 0.01)
    looks: list[int] = []
    watch = Watch()

    def look() -> None:
        looks.append(1)
        watch.end_later(5, 0.2)

    watch.look_with(look, [])
    start = time.monotonic()
    watch.start()
    until(lambda: left == [5], BOUND_S)
    assert 0.2 <= time.monotonic() - start < 1.0
    assert len(looks) == 1


@pytest.mark.usefixtures("seldom")
def test_a_signal_ends_a_process_that_is_to_end_later(left: list[int]) -> None:
    reader, writer = os.pipe()
    watch = Watch()
    watch.end_later(5, LONG_S)
    watch.start()
    watch.take_signals(reader)
    os.write(writer, bytes([signal.SIGTERM]))
    until(lambda: left == [143], BOUND_S)
    os.close(writer)


@pytest.mark.usefixtures("seldom")
def test_each_signal_is_handed_on_and_those_that_do_not_ask_to_end_are_not() -> None:
    numbers: list[int] = []
    reader, writer = os.pipe()
    watch = Watch()
    watch.on_signal = numbers.append
    watch.start()
    watch.take_signals(reader)
    sent = [signal.SIGCHLD, signal.SIGINT, signal.SIGALRM, signal.SIGHUP, signal.SIGTERM]
    os.write(writer, bytes(sent))
    until(lambda: len(numbers) == 3, BOUND_S)
    assert numbers == [signal.SIGINT, signal.SIGHUP, signal.SIGTERM]


# --- the process it is in


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


def exit_code_of(child: int, bound_s: float) -> int:
    """Of a child that ends within the bound; it is killed if it does not."""
    until_s = time.monotonic() + bound_s
    while time.monotonic() < until_s:
        with suppress(ChildProcessError):  # its parent is about to end
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError(f"it ran on for {bound_s} s")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prepare", "then"),
    [
        ("", "time.sleep(60)"),
        ("signals.by_handle()", INSIDE_C),
        ("import ps.watch; ps.host.watch.INTERVAL_S = 30", "time.sleep(60)"),
    ],
    ids=["in Python", "inside C", "between two looks"],
)
def test_a_process_whose_parent_is_killed_ends_within_a_second_with_9(
    prepare: str, then: str
) -> None:
    with orphan_of(WATCHED.format(prepare=prepare, then=then)) as (parent, child):
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
def test_a_server_that_is_orphaned_while_it_fetches_puts_things_in_order_and_ends(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "made"
    folder.mkdir()
    with orphan_of(FETCHES.format(folder=str(folder))) as (parent, child):
        parent.kill()
        assert exit_code_of(child, 1.5) == 128 + signal.SIGTERM
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "code"), [("folder.rmdir()", 9), ("folder.rmdir(); raise ValueError", 1)]
)
def test_an_orphan_puts_things_in_order_and_ends_even_if_it_cannot(
    tmp_path: Path, act: str, code: int
) -> None:
    folder = tmp_path / "made"
    folder.mkdir()
    prepare = (
        f"folder = Path({str(folder)!r})\ndef put_in_order():\n    {act}\n"
        "watch.end_orphaned_after(put_in_order)"
    )
    with orphan_of(WATCHED.format(prepare=prepare, then="time.sleep(60)")) as (parent, child):
        parent.kill()
        assert exit_code_of(child, 1.0) == code
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_ends_a_process_whose_main_thread_is_inside_c(number: signal.Signals) -> None:
    with watched("watch.take_signals(signals.by_handle())", INSIDE_C) as process:
        time.sleep(0.02)
        process.send_signal(number)
        assert process.wait(1.0) == 128 + number


@pytest.mark.slow
def test_a_signal_that_somebody_else_handles_ends_nothing() -> None:
    prepare = (
        "watch.take_signals(signals.by_handle())\n"
        "signal.signal(signal.SIGALRM, lambda *_: print('rang', flush=True))"
    )
    with watched(prepare, "while True: time.sleep(0.01)") as process:
        process.send_signal(signal.SIGALRM)
        assert process.stdout is not None and process.stdout.readline() == "rang\n"
        time.sleep(0.1)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(1.0) == 143


GUARDED = """
def hold_it():
    libc.hold_gil()
until = time.monotonic() + {busy_s}
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
    prepare = f"watch.guard(open({str(path)!r}, 'a'), 0.8)"
    with watched(prepare, GUARDED.format(busy_s=1.2)) as process:
        assert process.stdout is not None and process.stdout.readline() == "worked\n"
        start = time.monotonic()
        assert process.wait(BOUND_S) == 1
        assert time.monotonic() - start < 2.0
    assert "in hold_it" in path.read_text()


# --- what the server sees


def test_a_killed_trainer_is_found_and_nothing_else(tmp_path: Path) -> None:
    server = Server(t1=working(), t2=working())
    with sleeper() as first, sleeper() as second:
        side = side_of(server, tmp_path, first, second)
        side.look()
        assert server.findings == []
        kill(second)
        side.look()
    assert server.findings == [Finding(2, "killed by SIGKILL", 4, is_gone=True)]


def test_a_trainer_that_has_not_joined_or_has_left_is_not_looked_at(tmp_path: Path) -> None:
    server = Server(t1=working())
    with sleeper() as first, sleeper() as second:
        side = side_of(server, tmp_path, first, second)
        kill(second)
        side.look()
        server.made = {}
        kill(first)
        side.look()
    assert server.findings == []


def test_a_trainer_that_was_told_to_end_is_found_only_if_this_rank_is_not_told_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which would be seen meanwhile, as a look takes no time."""
    monkeypatch.setattr(looks, "END_BOUND_S", 0.2)
    server = Server(t1=working(), t2=working(), t3=working())
    with sleeper() as first, sleeper() as second, sleeper() as third:
        side = side_of(server, tmp_path, first, second, third)
        kill(first, signal.SIGTERM)
        kill(second, signal.SIGTERM)
        start = time.monotonic()
        side.look()
        assert time.monotonic() - start < 0.15
        assert server.findings == []
        kill(third)
        side.look()
        assert [(f.rank, f.text) for f in server.findings] == [(3, "killed by SIGKILL")]
        time.sleep(0.2)
        side.look()
    assert [f.rank for f in server.findings[1:]] == [1, 2]  # and no finding twice
    assert server.findings[-1].text == "killed by SIGTERM"


def test_a_trainer_without_progress_has_shown_its_stacks_when_it_is_found(tmp_path: Path) -> None:
    path = stacks_path(tmp_path, 1)
    server = Server(t1=working(for_s=70))
    server.on_found = lambda: seen.append(path.read_text())
    seen: list[str] = []
    with program(SHOWS_STACKS, str(path)) as process:
        side_of(server, tmp_path, process).look()
        until(lambda: "in the_slow_one" in path.read_text(), BOUND_S)
        assert process.poll() is None
    [finding] = server.findings
    assert (finding.rank, finding.exit_code) == (1, 5)
    assert finding.text.startswith("it has made no progress for 70 s (--stall-timeout); ")
    assert seen[0] != ""


def test_where_stacks_cannot_be_looked_for_a_trainer_is_found_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looks, "STACKS_BOUND_S", 0.1)
    server = Server(t1=working(for_s=70))
    with program(SHOWS_STACKS, str(tmp_path / "stacks")) as process:
        side_of(server, tmp_path / ("x" * 300), process).look()
    assert len(server.findings) == 1


def test_a_trainer_that_shows_no_stacks_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looks, "STACKS_BOUND_S", 0.1)
    server = Server(t1=working(for_s=70))
    deaf = "import signal, time; signal.signal(signal.SIGUSR1, signal.SIG_IGN); "
    with program(f"{deaf}print('ready', flush=True); time.sleep(60)") as process:
        side = side_of(server, tmp_path, process)
        start = time.monotonic()
        side.look()
        assert 0.1 <= time.monotonic() - start < 0.5
    assert len(server.findings) == 1


def test_a_call_that_is_not_answered_shows_the_stacks_of_the_server(tmp_path: Path) -> None:
    server = Server(t1=Progress(Doing.SERVED, time.monotonic() - 70))
    with sleeper() as process:
        side_of(server, tmp_path, process).look()
    [finding] = server.findings
    assert finding.rank == 0
    stacks = stacks_path(tmp_path, 0).read_text()
    assert "test_a_call_that_is_not_answered_shows_the_stacks_of_the_server" in stacks
    assert not stacks_path(tmp_path, 1).exists()


def test_a_server_that_cannot_be_told_stops_nobody_from_looking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock is held. Each look tries again, and never two at once; in the end this one ends."""
    monkeypatch.setattr(looks, "TELL_BOUND_S", 0.05)
    monkeypatch.setattr(looks, "LOCK_BOUND_S", 0.3)
    server, lock = Server(t1=working(), t2=working()), threading.Lock()
    tried: list[float] = []

    def wait() -> None:
        tried.append(time.monotonic())
        with lock:
            pass

    server.on_found = wait
    with sleeper() as first, sleeper() as second:
        side = side_of(server, tmp_path, first, second)
        kill(first)
        with lock:
            side.look()
            kill(second)
            side.look()
            assert (len(tried), server.findings, server.stuck) == (1, [], [])
            time.sleep(0.3)
            server.made.clear()
            side.look()
            server.made[2] = Progress(Doing.SERVED, time.monotonic() - 70)
            side.look()
            (held, facts), (call, _) = server.stuck
            assert (held.rank, held.exit_code, facts["pid"]) == (0, 5, os.getpid())
            assert held.text == "its lock has not been given back for 0 s"
            assert (call.rank, call.exit_code) == (0, 5)
            assert call.text.startswith("a call of trainer rank 2 has made no progress for 70 s")
        until(lambda: len(server.findings) == 1, BOUND_S)
        side.look()
        assert [found.rank for found in server.findings] == [1, 2, 0]
        side.look()
        assert (len(server.findings), len(server.stuck)) == (3, 2)


def test_a_stopped_trainer_is_found_after_the_timeout_and_then_goes_on(tmp_path: Path) -> None:
    """So that it takes the signal of torchrun, and shows where it was."""
    path = stacks_path(tmp_path, 1)
    server = Server(t1=working())
    with program(SHOWS_STACKS, str(path)) as process:
        side = side_of(server, tmp_path, process, stall_timeout_s=0.3)
        peer = stop(process)
        side.look()
        time.sleep(0.15)
        side.look()
        assert (server.findings, peer.read().state) == ([], "stopped")
        time.sleep(0.15)
        side.look()
        [finding] = server.findings
        assert (finding.rank, finding.text) == (1, "it has been stopped for 0 s")
        until(lambda: peer.read().state == "sleeping", BOUND_S)
        until(lambda: path.stat().st_size > 0, BOUND_S)
        assert process.poll() is None


def test_a_server_that_could_not_run_itself_is_the_cause(tmp_path: Path) -> None:
    """The others have left for that, as the first one tells."""
    server = Server(t1=Progress(Doing.WAITING, 0.0))
    with sleeper() as process:
        side = side_of(server, tmp_path, process, stall_timeout_s=0.2)
        assert side.lost_before() is None
        side.look()
        assert side.lost_before() is None
        kill(process)
        time.sleep(0.2)
        own = Finding(0, "it stood still for 0 s", 5)
        assert (side.explain(1), side.lost_before()) == (own, own)
        side.look()
    assert [finding.rank for finding in server.findings] == [0, 1]
    assert server.findings[0] == own


def test_without_a_timeout_a_server_never_stands_still(tmp_path: Path) -> None:
    server = Server()
    side = side_of(server, tmp_path, stall_timeout_s=None)
    side.look()
    side.look()
    assert server.findings == []


def test_memory_over_the_limit_is_found_with_who_holds_it(tmp_path: Path) -> None:
    server = Server(t1=working())
    with sleeper() as process:
        side_of(server, tmp_path, process, memory_limit_bytes=MIB).look()
    [finding] = server.findings
    assert (finding.rank, finding.exit_code) == (0, 6)
    assert finding.text.startswith("the job uses ")


def test_the_limit_counts_where_the_host_would_allow_more(tmp_path: Path) -> None:
    record = look_recorded(tmp_path, memory_limit_bytes=1 << 50)
    assert record["memory"]["free_bytes"] < 1 << 50
    used = record["memory"]["used_bytes"]
    record = look_recorded(tmp_path, memory_limit_bytes=2 * used)
    assert record["memory"]["free_bytes"] == pytest.approx(used, rel=0.2)


def test_the_host_counts_where_the_limit_would_allow_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looks.resources, "available_memory_bytes", lambda: 7 * MIB)
    record = look_recorded(tmp_path, memory_limit_bytes=1 << 50)
    assert record["memory"]["free_bytes"] == 7 * MIB


def test_what_all_share_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = look_recorded(tmp_path)["memory"]["used_bytes"]
    monkeypatch.setattr(looks.resources, "shared_memory_bytes", lambda: 1 << 40)
    after = look_recorded(tmp_path)
    assert after["memory"]["used_bytes"] - before == pytest.approx(1 << 40, rel=0.001)
    private = sum(seen["private_bytes"] for seen in after["ranks"].values())
    assert after["memory"]["used_bytes"] == private + (1 << 40)


def test_a_host_that_does_not_tell_its_memory_is_looked_at_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> int:
        raise FileNotFoundError("/proc/meminfo")

    monkeypatch.setattr(looks.resources, "available_memory_bytes", refuse)
    assert look_recorded(tmp_path, memory_limit_bytes=MIB)["memory"] is None


def look_recorded(run_dir: Path, memory_limit_bytes: int | None = None) -> Any:
    """The last line of health.jsonl after one look at this process and another."""
    with sleeper() as process:
        side = side_of(
            Server(t1=working()), run_dir, process, memory_limit_bytes=memory_limit_bytes
        )
        side.look()
    return json.loads((run_dir / HEALTH_FILE).read_text().splitlines()[-1])


def test_what_was_seen_is_written_down_now_and_then_and_with_every_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looks, "RECORD_INTERVAL_S", 0.2)
    server = Server(t1=working())

    def records() -> list[Any]:
        return [json.loads(line) for line in (tmp_path / HEALTH_FILE).read_text().splitlines()]

    with sleeper() as process:
        side = side_of(server, tmp_path, process)
        side.look()
        side.look()
        [first] = records()
        time.sleep(0.2)
        side.look()
        assert len(records()) == 2
        kill(process)
        side.look()
        last = records()[-1]
    assert first.keys() == {"time", "ranks", "memory", "findings"}
    assert first["ranks"]["1"]["state"] == "sleeping"
    assert first["ranks"]["0"]["private_bytes"] > MIB
    assert first["memory"]["used_bytes"] > first["ranks"]["0"]["private_bytes"]
    assert first["findings"] == []
    assert len(records()) == 3
    assert last["findings"] == ["rank 1: killed by SIGKILL"]
    assert last["ranks"]["1"]["ended"] == "killed by SIGKILL"


def test_where_nothing_can_be_written_it_is_looked_all_the_same(tmp_path: Path) -> None:
    server = Server(t1=working(), t2=Progress(Doing.SERVED, time.monotonic() - 70))
    with sleeper() as first, sleeper() as second:
        side = side_of(server, tmp_path / "removed", first, second)
        kill(first)
        side.look()
    assert [finding.rank for finding in server.findings] == [1, 0]


def test_why_a_connection_closed_is_how_its_trainer_ended(tmp_path: Path) -> None:
    with sleeper() as process:
        side = side_of(Server(), tmp_path, process)
        kill(process)
        start = time.monotonic()
        assert side.explain(1) == Finding(1, "killed by SIGKILL", 4, is_gone=True)
        assert time.monotonic() - start < 0.2


def test_a_trainer_may_end_a_moment_after_its_connection(tmp_path: Path) -> None:
    with spawned("sh", "-c", "sleep 0.2; exit 3") as process:
        explained = side_of(Server(), tmp_path, process).explain(1)
    assert explained == Finding(1, "ended with exit code 3", 4, is_gone=True)


@pytest.mark.parametrize("told", [False, True])
def test_one_that_lives_on_and_one_that_was_told_to_end_are_waited_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    monkeypatch.setattr(looks, "END_BOUND_S", 0.2)
    with sleeper() as process:
        side = side_of(Server(), tmp_path, process)
        if told:
            kill(process, signal.SIGTERM)
        start = time.monotonic()
        explained = side.explain(1)
        assert 0.2 <= time.monotonic() - start < 0.5
    loss = Finding(1, "killed by SIGTERM", 4, is_gone=True)
    assert explained == (loss if told else None)


def test_a_rank_that_was_lost_before_this_one_was_told_to_end_is_the_cause(
    tmp_path: Path,
) -> None:
    server = Server(t1=working(), t2=working(), t3=working())
    with sleeper() as first, sleeper() as second, sleeper() as third:
        side = side_of(server, tmp_path, first, second, third)
        kill(first, signal.SIGTERM)
        assert side.lost_before() is None
        kill(third)
        assert side.lost_before() == Finding(3, "killed by SIGKILL", 4, is_gone=True)
        server.made.pop(3)
        assert side.lost_before() is None


def test_what_was_seen_last_of_a_rank_is_both_alive_and_now(tmp_path: Path) -> None:
    server = Server(t1=working())
    with sleeper() as process:
        side = side_of(server, tmp_path, process)
        assert side.facts(1)["last_seen_alive"] is None
        side.look()
        kill(process)
        side.look()
        facts = side.facts(1)
    assert facts["ended"] == "killed by SIGKILL"
    alive = facts["last_seen_alive"]
    assert isinstance(alive, dict) and alive["state"] == "sleeping"
    assert side.facts(9) == {"last_seen_alive": None}


# --- what a trainer sees


class Told:
    """What a trainer was told, by the look at its server."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.facts: list[Mapping[str, Any]] = []

    def __call__(self, finding: Finding, facts: Mapping[str, Any]) -> None:
        self.findings.append(finding)
        self.facts.append(facts)


def trainer_side(
    told: Told,
    server: subprocess.Popen[Any],
    stall_timeout_s: float | None = 60.0,
    memory_limit_bytes: int | None = None,
) -> TrainerSide:
    """This process is trainer rank 2."""
    return TrainerSide(
        peer_of(server),
        myself(),
        2,
        told,
        stall_timeout_s=stall_timeout_s,
        memory_limit_bytes=memory_limit_bytes,
    )


def test_a_trainer_finds_its_server_gone_and_tells_what_it_saw_of_it() -> None:
    told = Told()
    with sleeper() as server:
        side = trainer_side(told, server)
        side.look()
        assert told.findings == []
        kill(server)
        side.look()
    assert told.findings == [Finding(0, "killed by SIGKILL", 4, is_gone=True)]
    assert told.facts[0]["ended"] == "killed by SIGKILL"
    assert told.facts[0]["last_seen_alive"]["state"] == "sleeping"


def test_a_server_that_was_never_seen_alive_is_gone_too() -> None:
    told = Told()
    with sleeper() as server:
        side = trainer_side(told, server)
        kill(server)
        side.look()
    assert told.facts[0]["last_seen_alive"] is None


def test_a_trainer_finds_its_server_stopped_and_lets_it_go_on() -> None:
    """The report is written then, and the server can take the signal of torchrun."""
    told = Told()
    with sleeper() as server:
        side = trainer_side(told, server, stall_timeout_s=0.2)
        peer = stop(server)
        side.look()
        assert (told.findings, peer.read().state) == ([], "stopped")
        time.sleep(0.2)
        side.look()
        until(lambda: peer.read().state == "sleeping", BOUND_S)
        assert server.poll() is None
    assert told.findings == [Finding(0, "it has been stopped for 0 s", 5, is_halted=True)]
    assert told.facts[0]["state"] == "stopped"


def test_a_server_may_end_when_it_is_expected_to_and_not_stand_still() -> None:
    told = Told()
    with sleeper() as server, sleeper() as other:
        side = trainer_side(told, server)
        side.expect_end()
        kill(server)
        side.look()
        assert told.findings == []
        side = trainer_side(told, other, stall_timeout_s=0.1)
        side.expect_end()
        stop(other)
        side.look()
        time.sleep(0.1)
        side.look()
    assert [finding.exit_code for finding in told.findings] == [5]


def test_a_trainer_over_the_limit_by_itself_is_told_so_and_the_worst_is_told_alone() -> None:
    told = Told()
    with sleeper() as server:
        side = trainer_side(told, server, memory_limit_bytes=MIB)
        side.look()
        [finding] = told.findings
        assert (finding.rank, finding.exit_code) == (2, 6)
        kill(server)
        side.look()
    assert [f.rank for f in told.findings] == [2, 0]


def test_a_warning_is_left_to_the_server_and_so_is_the_memory_of_others() -> None:
    told = Told()
    held = "held = b'x' * (100 << 20); print('ready', flush=True); time.sleep(60)"
    with program(f"import time; {held}") as server:
        used = myself().read().private_bytes or 0
        used += looks.resources.shared_memory_bytes()
        trainer_side(told, server, memory_limit_bytes=int(used / 0.94)).look()
    assert told.findings == []
