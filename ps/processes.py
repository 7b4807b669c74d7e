"""The processes of this host: one that is held and read, and the list of all. psutil's only door.

Nothing here judges, and nothing ends a process.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import signal
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

import psutil

GONE, UNKNOWN = "gone", "unknown"
ZOMBIE = str(psutil.STATUS_ZOMBIE)
UNINTERRUPTIBLE = str(psutil.STATUS_DISK_SLEEP)
STOPPED = {
    str(psutil.STATUS_STOPPED): "stopped",
    str(psutil.STATUS_TRACING_STOP): "stopped by a debugger",
}


@dataclass(frozen=True, slots=True)
class Identity:
    """What tells a process from all others of the host, those with the same pid later included."""

    pid: int
    created: float

    @classmethod
    def of(cls, pid: int) -> Identity:
        """Raises:
        psutil.NoSuchProcess: there is none.
        """
        return cls(pid, psutil.Process(pid).create_time())


def fingerprint(identity: Identity) -> str:
    """Six hexadecimal digits."""
    return hashlib.sha256(f"{identity.pid}-{identity.created}".encode()).hexdigest()[:6]


@dataclass(frozen=True, slots=True)
class Reading:
    """What was seen of a process. What could not be read is None."""

    pid: int
    state: str
    """psutil's word, or gone, or unknown."""
    cpu_s: float | None = None
    """User and system time since its start."""
    private_bytes: int | None = None
    """Resident memory that it shares with nobody."""
    status: int | None = None
    """As of wait(2), if it has ended and that is known."""

    @property
    def is_alive(self) -> bool:
        """Whether it still runs, as far as is known."""
        return self.state not in (GONE, ZOMBIE)

    @property
    def exit_code(self) -> int | None:
        """If it has ended by itself, and that is known."""
        ended = self.status is not None and os.WIFEXITED(self.status)
        return os.WEXITSTATUS(self.status or 0) if ended else None

    @property
    def was_told_to_end(self) -> bool:
        """Whether it ended by SIGTERM or SIGINT, as torchrun sends them to all."""
        told = (signal.SIGTERM, signal.SIGINT)
        killed = self.status is not None and os.WIFSIGNALED(self.status)
        by_signal = killed and os.WTERMSIG(self.status or 0) in told
        return by_signal or self.exit_code in [128 + number for number in told]

    @property
    def ended(self) -> str:
        """How it ended, in words."""
        if self.status is None:
            return "its process is gone"
        if os.WIFEXITED(self.status):
            return f"ended with exit code {os.WEXITSTATUS(self.status)}"
        number = os.WTERMSIG(self.status)
        with suppress(ValueError):
            return f"killed by {signal.Signals(number).name}"
        return f"killed by signal {number}"

    def facts(self) -> dict[str, object]:
        """For the report, in plain values."""
        return {
            "pid": self.pid,
            "state": self.state,
            "cpu_s": self.cpu_s,
            "private_bytes": self.private_bytes,
            "ended": None if self.is_alive else self.ended,
        }


class Peer:
    """A process, held from when it is certainly alive."""

    def __init__(self, identity: Identity) -> None:
        self.pid = identity.pid
        self._process: psutil.Process | None = None
        self._handle: int | None = None
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(identity.pid)
            if process.create_time() == identity.created:
                self._process = process
        if self._process is not None and hasattr(os, "pidfd_open"):
            with suppress(OSError):  # it ended meanwhile, or the kernel is older than 5.3
                self._handle = os.pidfd_open(identity.pid)

    @property
    def handle(self) -> int | None:
        """Becomes readable when the process ends; None where the system has no such thing."""
        return self._handle

    def read(self) -> Reading:
        """What can be seen of it now. Does not block.

        A zombie has ended; a process with its pid that started later is not it.
        """
        process = self._process
        try:
            if process is None or not process.is_running():
                return Reading(self.pid, GONE, status=self._status())
            with process.oneshot():
                state = process.status()
                if state == ZOMBIE:
                    return Reading(self.pid, ZOMBIE, status=self._status())
                times, memory = process.cpu_times(), process.memory_info()
            private = memory.rss - getattr(memory, "shared", 0)
            return Reading(self.pid, str(state), times.user + times.system, private)
        except psutil.NoSuchProcess:  # a ZombieProcess is one too
            return Reading(self.pid, GONE, status=self._status())
        except psutil.AccessDenied:
            return Reading(self.pid, UNKNOWN)

    def show_stacks(self) -> None:
        """Have it write the stacks of its threads where it was told to; it goes on."""
        if self._process is not None:
            with suppress(psutil.Error):
                self._process.send_signal(signal.SIGUSR1)

    def go_on(self) -> None:
        """If it is stopped."""
        if self._process is not None:
            with suppress(psutil.Error):
                self._process.send_signal(signal.SIGCONT)

    def _status(self) -> int | None:
        status = _status_of_zombie(self.pid)
        if status is None and self._handle is not None:
            status = _status_by_handle(self._handle)
        return status


def _status_of_zombie(pid: int) -> int | None:
    """Until its parent has taken it. See proc_pid_stat(5)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[-1]) if fields[0] == "Z" else None


_PIDFD_INFO = "QQ12i"
_PIDFD_GET_INFO = 3 << 30 | struct.calcsize(_PIDFD_INFO) << 16 | 0xFF << 8 | 11
_PIDFD_INFO_EXIT = 8


def _status_by_handle(handle: int) -> int | None:
    """Also after its parent has taken it, from Linux 6.15 on. See linux/pidfd.h."""
    if sys.platform != "linux":
        return None
    buffer = bytearray(struct.pack(_PIDFD_INFO, _PIDFD_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(handle, _PIDFD_GET_INFO, buffer)
    except OSError:
        return None
    values = struct.unpack(_PIDFD_INFO, buffer)
    return values[-1] if values[0] & _PIDFD_INFO_EXIT else None


@dataclass(frozen=True, slots=True)
class Process:
    """What was seen of one; a process may have ended since."""

    pid: int
    parent: int
    """Its pid; 0 if that is not of this container."""
    command: tuple[str, ...]
    """Empty if it is none of our business, or if the process has ended and was not waited for."""
    age_s: float
    is_own: bool
    """Whether it belongs to this user."""


def list_processes() -> list[Process]:
    now = time.time()
    names = ["pid", "ppid", "cmdline", "create_time", "uids"]
    return [
        Process(
            pid=seen["pid"],
            parent=seen["ppid"] or 0,
            command=tuple(seen["cmdline"] or ()),
            age_s=now - (seen["create_time"] or now),
            is_own=bool(seen["uids"]) and seen["uids"].real == os.getuid(),
        )
        for seen in (process.info for process in psutil.process_iter(names))
    ]
