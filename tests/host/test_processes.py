"""Processes as another one sees them: how they end in words, and real ones."""

from __future__ import annotations

import ctypes
import os
import platform
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from ps.host.processes import (
    GONE,
    SHOW_STACKS,
    STOPPED,
    UNINTERRUPTIBLE,
    UNKNOWN,
    ZOMBIE,
    Identity,
    Peer,
    Reading,
    fingerprint,
    list_processes,
)
from tests.helpers import has_ended, peer_of, sleeper, spawned, until
from tests.jobs import ROOT

TIMEOUT_S = 5.0
PTRACE_ATTACH = 16
MIB = 1 << 20
TELLS_LATER = sys.platform == "linux" and tuple(
    int(part) for part in platform.release().split(".")[:2]
) >= (6, 15)
"""Whether the kernel still knows how a process ended when its parent has waited for it."""
BLOCKED = "import ctypes, time; ctypes.CDLL(None).vfork(); time.sleep(60)"
"""The first one waits in the kernel for the second, which is a copy of it."""
HOLDS_MEMORY = """
import mmap, time
held = {held}
print("ready", flush=True)
time.sleep(60)
"""


def ended(status: int | None) -> Reading:
    return Reading(1, GONE, status=status)


def by_exit(code: int) -> Reading:
    return ended(code << 8)


def me() -> Peer:
    return Peer(Identity.of(os.getpid()))


@contextmanager
def program(code: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    """A Python program that has printed its first line."""
    command = [sys.executable, "-c", code, *args]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


# --- how one ended


@pytest.mark.parametrize(
    ("reading", "words", "code"),
    [
        (ended(None), "its process is gone", None),
        (by_exit(0), "ended with exit code 0", 0),
        (by_exit(255), "ended with exit code 255", 255),
        (ended(signal.SIGSEGV), "killed by SIGSEGV", None),
        (ended(signal.SIGSEGV | 0x80), "killed by SIGSEGV", None),  # with a core dump
        (ended(63), "killed by signal 63", None),
    ],
)
def test_how_a_process_ended_is_told_in_words(
    reading: Reading, words: str, code: int | None
) -> None:
    assert (reading.ended, reading.exit_code) == (words, code)


@pytest.mark.parametrize(
    ("reading", "was_asked"),
    [
        *[(ended(number), True) for number in (1, 2, 3, 3 | 0x80, 15)],
        *[(by_exit(code), True) for code in (129, 130, 131, 143)],
        (by_exit(9), True),  # torchrun is gone
        *[(ended(number), False) for number in (signal.SIGKILL, signal.SIGSEGV, None)],
        *[(by_exit(code), False) for code in (0, 1, 15, 137)],
        (Reading(1, "sleeping"), False),
    ],
)
def test_who_ended_for_what_reaches_all_ranks_was_asked_to(
    reading: Reading, was_asked: bool
) -> None:
    assert reading.was_asked_to_end == was_asked


def test_what_was_seen_is_plain_for_the_report() -> None:
    alive, gone = Reading(7, "running", 1.5, MIB).facts(), Reading(7, GONE).facts()
    assert alive == {
        "pid": 7,
        "state": "running",
        "cpu_s": 1.5,
        "private_bytes": MIB,
        "ended": None,
    }
    assert gone == {
        "pid": 7,
        "state": "gone",
        "cpu_s": None,
        "private_bytes": None,
        "ended": "its process is gone",
    }


# --- who is who


def test_an_identity_does_not_move_with_the_clock_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, boot = Identity.of(os.getpid()), psutil.boot_time()
    monkeypatch.setattr(psutil, "boot_time", lambda: boot + 3600)
    assert Identity.of(os.getpid()) == before
    assert Peer(before).read().is_alive


def test_where_there_is_no_proc_psutil_tells_when_a_process_started(tmp_path: Path) -> None:
    assert Identity.of(os.getpid(), tmp_path).created == psutil.Process().create_time()


def test_a_fingerprint_tells_processes_and_starts_of_the_host_apart(tmp_path: Path) -> None:
    mine = Identity.of(os.getpid())
    others = [replace(mine, created=mine.created + 1), replace(mine, pid=mine.pid + 1)]
    prints = [fingerprint(identity) for identity in (mine, Identity.of(os.getppid()), *others)]
    boot_id = tmp_path / "sys/kernel/random/boot_id"
    boot_id.parent.mkdir(parents=True)
    boot_id.write_text("another")
    prints += [fingerprint(mine, tmp_path), fingerprint(mine, tmp_path / "absent")]
    assert len(set(prints)) == len(prints)
    assert fingerprint(mine) == prints[0]
    assert all(len(text) == 6 and int(text, 16) >= 0 for text in prints)


@pytest.mark.slow
def test_a_process_that_had_ended_or_has_the_pid_of_another_is_gone() -> None:
    with spawned("sh", "-c", "exit 3") as zombie, sleeper() as process:
        until(lambda: has_ended(zombie), TIMEOUT_S)
        for other in (zombie, process):
            identity = Identity.of(other.pid)
            peer = Peer(replace(identity, created=identity.created - 1))
            assert (peer.read(), peer.handle) == (Reading(other.pid, GONE), None)
        peer.show_stacks()  # would end it
        time.sleep(0.05)
        assert process.poll() is None
    peer = Peer(identity)
    assert (peer.read(), peer.handle) == (Reading(process.pid, GONE), None)
    peer.show_stacks()
    peer.resume()
    with pytest.raises(psutil.NoSuchProcess):
        Identity.of(process.pid)


# --- what can be read


def test_cpu_time_is_that_of_user_and_system() -> None:
    while time.process_time() < 0.1:
        pass
    assert me().read().cpu_s == pytest.approx(time.process_time(), abs=0.1)


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (psutil.AccessDenied, UNKNOWN),
        (psutil.NoSuchProcess, GONE),
        (psutil.ZombieProcess, ZOMBIE),
    ],
)
def test_what_cannot_be_read_is_unknown_and_what_is_not_there_is_gone(
    monkeypatch: pytest.MonkeyPatch, error: type[psutil.Error], state: str
) -> None:
    monkeypatch.setattr(psutil.Process, "status", raising(error))
    reading = me().read()
    assert reading == Reading(os.getpid(), state)
    assert reading.is_alive == (state == UNKNOWN)


def raising(error: type[psutil.Error]) -> Any:
    def read(process: psutil.Process, *args: object) -> None:
        raise error(process.pid)

    return read


def test_a_process_whose_pid_another_has_got_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = me()
    assert peer.read().is_alive
    monkeypatch.setattr(psutil.Process, "is_running", lambda self: False)
    assert peer.read() == Reading(os.getpid(), GONE)


def test_a_process_is_asked_for_its_stacks_by_a_signal_and_it_is_no_error_if_it_is_not_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers: list[int] = []
    before = signal.signal(SHOW_STACKS, lambda number, frame: numbers.append(number))
    me().show_stacks()
    me().resume()  # does nothing to one that runs
    signal.signal(SHOW_STACKS, before)
    assert numbers == [SHOW_STACKS]
    monkeypatch.setattr(psutil.Process, "send_signal", raising(psutil.AccessDenied))
    me().show_stacks()
    me().resume()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("held", "counts"),
    [
        ("b'x' * (32 << 20)", True),
        ("mmap.mmap(-1, 32 << 20); held.write(b'x' * (32 << 20))", False),
    ],
    ids=["private", "shared"],
)
def test_memory_that_is_shared_is_nobodys(held: str, counts: bool) -> None:
    with program(HOLDS_MEMORY.format(held=held)) as process:
        reading = peer_of(process).read()
    assert (reading.is_alive, reading.status) == (True, None)
    assert reading.private_bytes is not None
    assert (reading.private_bytes > 32 * MIB) == counts
    assert (reading.private_bytes < 24 * MIB) != counts


@pytest.mark.slow
def test_a_stopped_process_is_alive_and_goes_on_when_it_is_resumed() -> None:
    with sleeper() as process:
        peer = peer_of(process)
        assert peer.read().state == "sleeping"
        process.send_signal(signal.SIGSTOP)
        until(lambda: peer.read().state in STOPPED, TIMEOUT_S)
        reading = peer.read()
        assert (STOPPED[reading.state], reading.is_alive) == ("stopped", True)
        peer.resume()
        until(lambda: peer.read().state == "sleeping", TIMEOUT_S)


@pytest.mark.slow
def test_a_process_that_a_debugger_holds_is_told_apart() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with sleeper() as process:
        if libc.ptrace(PTRACE_ATTACH, process.pid, 0, 0) != 0:
            pytest.skip(f"no debugging here: {os.strerror(ctypes.get_errno())}")
        os.waitpid(process.pid, 0)
        reading = peer_of(process).read()
    assert (STOPPED[reading.state], reading.is_alive) == ("stopped by a debugger", True)


@pytest.mark.slow
def test_a_process_that_waits_inside_the_kernel_is_told_apart() -> None:
    with spawned(sys.executable, "-c", BLOCKED) as process:
        peer = peer_of(process)
        until(lambda: peer.read().state == UNINTERRUPTIBLE, TIMEOUT_S)
        assert peer.read().is_alive
        [copy] = psutil.Process(process.pid).children()
        held = Peer(Identity.of(copy.pid))
        process.kill()
        copy.kill()
        until(lambda: not held.read().is_alive, TIMEOUT_S)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "words"),
    [("exit 3", "ended with exit code 3"), ("kill -15 $$", "killed by SIGTERM")],
)
def test_how_a_process_ended_is_known_also_when_its_parent_has_waited_for_it(
    monkeypatch: pytest.MonkeyPatch, command: str, words: str
) -> None:
    with spawned("sh", "-c", command) as process:
        peer = peer_of(process)
        until(lambda: has_ended(process), TIMEOUT_S)
        zombie = peer.read()
        assert (zombie.state, zombie.is_alive, zombie.ended) == (ZOMBIE, False, words)
        assert (zombie.cpu_s, zombie.private_bytes) == (None, None)
        process.wait()
    reading = peer.read()
    assert (reading.state, reading.is_alive) == (GONE, False)
    assert reading.status == (zombie.status if TELLS_LATER else None)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert peer.read() == Reading(process.pid, GONE)


@pytest.mark.slow
def test_the_handle_becomes_readable_when_the_process_ends_and_stays_so() -> None:
    with sleeper() as process:
        peer = peer_of(process)
        if peer.handle is None:
            pytest.skip("this system has no handles of processes")
        poll = select.poll()
        poll.register(peer.handle, select.POLLIN)
        assert poll.poll(0) == []
        process.kill()
        assert poll.poll(TIMEOUT_S * 1000) == [(peer.handle, select.POLLIN)]
        process.wait()
        assert poll.poll(0)[0][0] == peer.handle
    peer.show_stacks()
    peer.resume()


@pytest.mark.slow
def test_a_system_without_handles_is_read_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with sleeper() as process:
        peer = peer_of(process)
        assert (peer.handle, peer.read().is_alive) == (None, True)
        process.kill()
        until(lambda: not peer.read().is_alive, TIMEOUT_S)
        assert peer.read().ended == "killed by SIGKILL"


# --- all of them


@pytest.mark.slow
def test_all_processes_of_the_host_are_listed_with_parent_command_and_age() -> None:
    with sleeper() as process:
        time.sleep(0.05)
        [found] = [seen for seen in list_processes() if seen.pid == process.pid]
    assert (found.parent, found.command, found.is_own) == (os.getpid(), ("sleep", "60"), True)
    assert 0 < found.age_s < 60


def test_a_process_that_may_not_be_read_is_listed_without_what_it_hides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Hidden:
        info = dict.fromkeys(["pid", "ppid", "cmdline", "create_time", "uids"]) | {"pid": 7}

    monkeypatch.setattr(psutil, "process_iter", lambda names: [Hidden])
    [found] = list_processes()
    assert (found.pid, found.parent, found.command) == (7, 0, ())
    assert (found.age_s, found.is_own) == (0.0, False)
