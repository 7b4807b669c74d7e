"""Real processes, as another one sees them."""

from __future__ import annotations

import ctypes
import json
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
from typing import Any, cast

import psutil
import pytest

from ps.host import processes
from ps.host.processes import (
    GONE,
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

BOUND_S = 5.0
PTRACE_ATTACH = 16
PLATFORM = cast(Any, psutil)._psplatform
MIB = 1 << 20
TELLS_LATER = sys.platform == "linux" and tuple(
    int(part) for part in platform.release().split(".")[:2]
) >= (6, 15)
"""Whether the kernel still knows how a process ended when its parent has waited for it."""
BLOCKED = "import ctypes, time; ctypes.CDLL(None).vfork(); time.sleep(60)"
"""The first one waits in the kernel for the second, which is a copy of it."""
WRITES_STACKS = """
import faulthandler, signal, sys, time
faulthandler.register(signal.SIGUSR1, open(sys.argv[1], "a"), all_threads=True)
print("ready", flush=True)
time.sleep(60)
"""
HOLDS_MEMORY = """
import mmap, sys, time
held = {held}
print("ready", flush=True)
time.sleep(60)
"""


def ended(status: int | None) -> Reading:
    return Reading(1, GONE, status=status)


def by_signal(number: signal.Signals) -> Reading:
    return ended(int(number))


def by_exit(code: int) -> Reading:
    return ended(code << 8)


@contextmanager
def program(code: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    """A Python program that has printed its first line."""
    command = [sys.executable, "-c", code, *args]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ends_with(process: subprocess.Popen[bytes]) -> Peer:
    """Held while it ran; it has ended, and nobody has waited for it."""
    peer = peer_of(process)
    until(lambda: has_ended(process), BOUND_S)
    return peer


def raising(error: type[psutil.Error]) -> Any:
    def read(process: psutil.Process, *args: object) -> None:
        raise error(process.pid)

    return read


def test_a_process_that_sleeps_is_alive_and_its_memory_is_read() -> None:
    with sleeper() as process:
        peer = peer_of(process)
        until(lambda: peer.read().state == "sleeping", BOUND_S)
        reading = peer.read()
    assert (reading.pid, reading.is_alive, reading.status) == (process.pid, True, None)
    assert reading.cpu_s is not None and 0 <= reading.cpu_s < 1
    assert reading.private_bytes is not None and 0 < reading.private_bytes < 10 * MIB


def test_cpu_time_is_that_of_user_and_system() -> None:
    me = Peer(Identity.of(os.getpid()))
    while time.process_time() < 0.1:
        pass
    used = me.read().cpu_s
    assert used == pytest.approx(time.process_time(), abs=0.1)


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
    assert reading.private_bytes is not None
    assert (reading.private_bytes > 32 * MIB) == counts
    assert (reading.private_bytes < 24 * MIB) != counts


def test_a_stopped_process_is_alive_and_goes_on_when_it_is_told_to() -> None:
    with sleeper() as process:
        peer = peer_of(process)
        process.send_signal(signal.SIGSTOP)
        until(lambda: peer.read().state in STOPPED, BOUND_S)
        reading = peer.read()
        assert (STOPPED[reading.state], reading.is_alive) == ("stopped", True)
        peer.go_on()
        until(lambda: peer.read().state == "sleeping", BOUND_S)
        peer.go_on()  # does nothing to one that runs
        assert process.poll() is None


def test_a_process_that_a_debugger_holds_is_told_apart() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with sleeper() as process:
        if libc.ptrace(PTRACE_ATTACH, process.pid, 0, 0) != 0:
            pytest.skip(f"no debugging here: {os.strerror(ctypes.get_errno())}")
        os.waitpid(process.pid, 0)
        reading = peer_of(process).read()
    assert (STOPPED[reading.state], reading.is_alive) == ("stopped by a debugger", True)


def test_a_process_that_waits_inside_the_kernel_is_told_apart() -> None:
    with spawned(sys.executable, "-c", BLOCKED) as process:
        peer = peer_of(process)
        until(lambda: peer.read().state == UNINTERRUPTIBLE, BOUND_S)
        assert peer.read().is_alive
        [copy] = psutil.Process(process.pid).children()
        held = Peer(Identity.of(copy.pid))
        process.kill()
        copy.kill()
        until(lambda: not held.read().is_alive, BOUND_S)


def test_one_that_ended_and_was_not_waited_for_is_a_zombie_and_not_alive() -> None:
    with spawned("sh", "-c", "exit 3") as process:
        reading = ends_with(process).read()
    assert (reading.state, reading.is_alive, reading.exit_code) == (ZOMBIE, False, 3)
    assert reading.ended == "ended with exit code 3"
    assert (reading.cpu_s, reading.private_bytes) == (None, None)


@pytest.mark.parametrize(
    ("command", "words", "code"),
    [
        ("exit 3", "ended with exit code 3", 3),
        ("exit 0", "ended with exit code 0", 0),
        ("kill -9 $$", "killed by SIGKILL", None),
        ("kill -15 $$", "killed by SIGTERM", None),
    ],
)
def test_how_a_process_ended_is_known_also_when_its_parent_has_waited_for_it(
    command: str, words: str, code: int | None
) -> None:
    with spawned("sh", "-c", command) as process:
        peer = ends_with(process)
        assert (peer.read().ended, peer.read().exit_code) == (words, code)
        process.wait()
        reading = peer.read()
    assert (reading.state, reading.is_alive) == (GONE, False)
    if TELLS_LATER:
        assert (reading.ended, reading.exit_code) == (words, code)
    else:
        assert (reading.ended, reading.exit_code) == ("its process is gone", None)


def test_where_the_kernel_does_not_tell_the_process_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with sleeper() as process:
        peer = peer_of(process)
    monkeypatch.setattr(processes.sys, "platform", "darwin")
    reading = peer.read()
    assert (reading.state, reading.status, reading.ended) == (GONE, None, "its process is gone")


def test_a_process_that_had_ended_before_it_could_be_held_is_gone() -> None:
    with sleeper() as process:
        identity = Identity.of(process.pid)
    peer = Peer(identity)
    assert (peer.read(), peer.handle) == (Reading(process.pid, GONE), None)
    peer.show_stacks()
    peer.go_on()


def test_a_process_with_the_same_pid_that_started_at_another_time_is_not_it() -> None:
    with sleeper() as process:
        identity = Identity.of(process.pid)
        other = Peer(replace(identity, created=identity.created - 1))
        assert (other.read(), other.handle) == (Reading(process.pid, GONE), None)
        other.show_stacks()  # would end it
        time.sleep(0.05)
        assert process.poll() is None


def test_a_process_whose_pid_another_has_got_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    with sleeper() as process:
        peer = peer_of(process)
        assert peer.read().is_alive
        monkeypatch.setattr(PLATFORM.Process, "create_time", lambda *args, **options: 1.0)
        assert peer.read() == Reading(process.pid, GONE)
        peer.show_stacks()  # would end it
        time.sleep(0.05)
        assert process.poll() is None


def test_how_a_process_ended_is_not_told_by_another_that_got_its_pid() -> None:
    with spawned("sh", "-c", "exit 3") as process:
        until(lambda: has_ended(process), BOUND_S)
        identity = Identity.of(process.pid)
        other = Peer(replace(identity, created=identity.created - 1))
        assert other.read() == Reading(process.pid, GONE)


@pytest.mark.parametrize("method", ["status", "cpu_times", "memory_info"])
@pytest.mark.parametrize(
    ("error", "state"),
    [
        (psutil.AccessDenied, UNKNOWN),
        (psutil.NoSuchProcess, GONE),
        (psutil.ZombieProcess, ZOMBIE),
    ],
)
def test_what_cannot_be_read_is_unknown_and_what_is_not_there_is_gone(
    monkeypatch: pytest.MonkeyPatch, method: str, error: type[psutil.Error], state: str
) -> None:
    me = Peer(Identity.of(os.getpid()))
    monkeypatch.setattr(PLATFORM.Process, method, raising(error))
    reading = me.read()
    assert reading == Reading(os.getpid(), state)
    assert reading.is_alive == (state == UNKNOWN)


def test_the_handle_becomes_readable_when_the_process_ends_and_stays_so() -> None:
    with sleeper() as process:
        peer = peer_of(process)
        if peer.handle is None:
            pytest.skip("this system has no handles of processes")
        poll = select.poll()
        poll.register(peer.handle, select.POLLIN)
        assert poll.poll(0) == []
        process.kill()
        assert poll.poll(BOUND_S * 1000) == [(peer.handle, select.POLLIN)]
        process.wait()
        assert poll.poll(0)[0][0] == peer.handle


def test_a_system_without_handles_is_read_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with sleeper() as process:
        peer = peer_of(process)
        assert (peer.handle, peer.read().is_alive) == (None, True)
        process.kill()
        until(lambda: not peer.read().is_alive, BOUND_S)
        assert peer.read().ended == "killed by SIGKILL"


def test_a_process_that_shows_its_stacks_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "stacks"
    with program(WRITES_STACKS, str(path)) as process:
        peer_of(process).show_stacks()
        until(lambda: path.stat().st_size > 0, BOUND_S)
        assert process.poll() is None
    assert "<module>" in path.read_text()


def test_signals_to_a_process_that_has_ended_or_is_not_ours_are_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with sleeper() as process:
        peer = peer_of(process)
    peer.show_stacks()
    peer.go_on()
    me = Peer(Identity.of(os.getpid()))
    monkeypatch.setattr(psutil.Process, "send_signal", raising(psutil.AccessDenied))
    me.show_stacks()
    me.go_on()


@pytest.mark.parametrize(
    ("reading", "words"),
    [
        (ended(None), "its process is gone"),
        (by_exit(0), "ended with exit code 0"),
        (by_exit(255), "ended with exit code 255"),
        (by_signal(signal.SIGSEGV), "killed by SIGSEGV"),
        (ended(signal.SIGSEGV | 0x80), "killed by SIGSEGV"),  # with a core dump
        (ended(63), "killed by signal 63"),
    ],
)
def test_how_a_process_ended_is_told_in_words(reading: Reading, words: str) -> None:
    assert reading.ended == words


@pytest.mark.parametrize(
    ("reading", "told"),
    [
        (by_signal(signal.SIGTERM), True),
        (by_signal(signal.SIGINT), True),
        (by_signal(signal.SIGHUP), True),
        (by_signal(signal.SIGQUIT), True),
        (ended(signal.SIGQUIT | 0x80), True),
        (by_exit(143), True),
        (by_exit(130), True),
        (by_exit(129), True),
        (by_exit(131), True),
        (by_exit(9), True),  # torchrun is gone
        (by_signal(signal.SIGKILL), False),
        (by_signal(signal.SIGSEGV), False),
        (by_exit(0), False),
        (by_exit(1), False),
        (by_exit(15), False),
        (by_exit(137), False),
        (ended(None), False),
        (Reading(1, "sleeping"), False),
    ],
)
def test_who_ended_for_what_reaches_all_ranks_was_told_to(reading: Reading, told: bool) -> None:
    assert reading.was_told_to_end == told


def test_an_identity_is_the_same_in_every_process_and_at_every_time() -> None:
    code = (
        "import os, sys; from dataclasses import asdict; from ps.host.processes import Identity; "
        "import json; print(json.dumps([asdict(Identity.of(p)) for p in map(int, sys.argv[1:])]))"
    )
    pids = [os.getpid(), os.getppid()]
    command = [sys.executable, "-c", code, *map(str, pids)]
    seen = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    assert [Identity(**card) for card in json.loads(seen)] == [Identity.of(pid) for pid in pids]
    assert Peer(Identity(**json.loads(seen)[0])).read().is_alive


def test_an_identity_does_not_move_with_the_clock_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = Identity.of(os.getpid())
    told = psutil.boot_time()
    for module in (psutil, PLATFORM):
        monkeypatch.setattr(module, "boot_time", lambda: told + 3600)
    assert Identity.of(os.getpid()) == before
    assert Peer(before).read().is_alive


def test_where_there_is_no_proc_psutil_tells_when_a_process_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "_stat", lambda pid: [])
    me = Identity.of(os.getpid())
    assert me.created == psutil.Process().create_time()
    assert Peer(me).read().is_alive


def test_nobody_has_the_identity_of_a_process_that_is_not_there() -> None:
    with sleeper() as process:
        pass
    with pytest.raises(psutil.NoSuchProcess):
        Identity.of(process.pid)


def test_a_fingerprint_tells_processes_and_starts_of_the_host_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with sleeper() as process:
        identities = [Identity.of(pid) for pid in (os.getpid(), os.getppid(), process.pid)]
    identities.append(replace(identities[0], created=identities[0].created + 1))
    identities.append(replace(identities[0], pid=identities[0].pid + 1))
    prints = [fingerprint(identity) for identity in identities]
    assert len(set(prints)) == len(prints)
    assert [fingerprint(identity) for identity in identities] == prints
    assert all(len(text) == 6 and int(text, 16) >= 0 for text in prints)
    monkeypatch.setattr(processes, "_boot", lambda: "another")
    assert fingerprint(identities[0]) != prints[0]


def test_what_was_seen_is_plain_for_the_report() -> None:
    with sleeper() as process:
        peer = peer_of(process)
        alive = peer.read().facts()
        process.kill()
        until(lambda: has_ended(process), BOUND_S)
        zombie = peer.read().facts()
    gone = Reading(7, GONE).facts()
    assert [json.loads(json.dumps(facts)) for facts in (alive, zombie, gone)] == [
        alive,
        zombie,
        gone,
    ]
    assert alive.keys() == zombie.keys() == gone.keys()
    assert (alive["pid"], alive["ended"]) == (process.pid, None)
    assert (zombie["state"], zombie["ended"]) == ("zombie", "killed by SIGKILL")
    assert gone == {
        "pid": 7,
        "state": "gone",
        "cpu_s": None,
        "private_bytes": None,
        "ended": "its process is gone",
    }


def test_all_processes_of_the_host_are_listed_with_parent_command_and_age() -> None:
    with sleeper() as process:
        time.sleep(0.05)
        [found] = [seen for seen in list_processes() if seen.pid == process.pid]
    assert (found.parent, found.command, found.is_own) == (os.getpid(), ("sleep", "60"), True)
    assert 0 < found.age_s < 60


def test_what_is_none_of_our_business_is_listed_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hidden:
        info = dict.fromkeys(["pid", "ppid", "cmdline", "create_time", "uids"]) | {"pid": 7}

    monkeypatch.setattr(psutil, "process_iter", lambda names: [Hidden])
    [found] = list_processes()
    assert (found.pid, found.parent, found.command, found.age_s, found.is_own) == (
        *(7, 0, (), 0.0, False),
    )
