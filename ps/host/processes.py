"""The processes of this host: one that is watched, and the list of all. The only door to psutil.

Nothing here judges, and nothing ends a process.
"""

from __future__ import annotations

import fcntl  # noqa: TID251
import hashlib
import json
import os
import signal  # noqa: TID251
import struct
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil  # noqa: TID251

from ps.settings.errors import Orphaned

FROM_TORCHRUN = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""What it passes on to all ranks, as a request to end."""
SHOW_STACKS = signal.SIGUSR1
"""Asks a rank to write its stacks; it goes on."""
PROC = Path("/proc")
GONE, UNKNOWN = "gone", "unknown"
ZOMBIE = str(psutil.STATUS_ZOMBIE)
UNINTERRUPTIBLE = str(psutil.STATUS_DISK_SLEEP)
STOPPED = {
    str(psutil.STATUS_STOPPED): "stopped",
    str(psutil.STATUS_TRACING_STOP): "stopped by a debugger",
}


@dataclass(frozen=True, slots=True)
class Identity:
    """What tells a process from all others of the host, also from later ones with its pid."""

    pid: int
    created: float
    """On Linux in ticks since the start of the host: psutil's time moves with the host's clock."""

    @classmethod
    def of(cls, pid: int, proc: Path = PROC) -> Identity:
        """That of the process with this pid.

        Raises:
            psutil.NoSuchProcess: there is none.
        """
        fields = _stat(pid, proc)
        return cls(pid, float(fields[_STARTTIME]) if fields else psutil.Process(pid).create_time())

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Identity:
        """What to_json() gave."""
        return cls(**json.loads(text))


def fingerprint(identity: Identity, proc: Path = PROC) -> str:
    """Six hexadecimal digits that name a process, also across restarts of the host."""
    boot = ""
    with suppress(OSError):
        boot = (proc / "sys/kernel/random/boot_id").read_text()
    text = f"{boot}-{identity.pid}-{identity.created}"
    return hashlib.sha256(text.encode()).hexdigest()[:6]


@dataclass(frozen=True, slots=True)
class Reading:
    """What was seen of a process at one moment. What could not be read is None."""

    pid: int
    state: str
    """psutil's word, or GONE, or UNKNOWN where it may not be read."""
    cpu_s: float | None = None
    """User and system time since its start, in seconds of one core."""
    private_bytes: int | None = None
    """Resident memory that it shares with no other process."""
    status: int | None = None
    """How it ended, as wait(2) encodes that; None if it runs, or the kernel does not tell."""

    @property
    def is_alive(self) -> bool:
        """Whether it still runs, as far as is known."""
        return self.state not in (GONE, ZOMBIE)

    @property
    def exit_code(self) -> int | None:
        """None if it runs, was killed by a signal, or the kernel does not tell."""
        ended = self.status is not None and os.WIFEXITED(self.status)
        return os.WEXITSTATUS(self.status or 0) if ended else None

    @property
    def was_asked_to_end(self) -> bool:
        """Whether it ended for what reaches all ranks: a signal of torchrun, or torchrun's end."""
        killed = self.status is not None and os.WIFSIGNALED(self.status)
        by_signal = killed and os.WTERMSIG(self.status or 0) in FROM_TORCHRUN
        codes = [Orphaned.exit_code, *(128 + number for number in FROM_TORCHRUN)]
        return by_signal or self.exit_code in codes

    @property
    def ended(self) -> str:
        """How it ended, in words. For one that is not alive."""
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
    """A process that is watched. To be made while it is certainly alive."""

    def __init__(self, identity: Identity) -> None:
        self.pid = identity.pid
        self._process: psutil.Process | None = None
        self._handle: int | None = None
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(identity.pid)
            if Identity.of(identity.pid) == identity:
                self._process = process
        if self._process is not None and hasattr(os, "pidfd_open"):
            with suppress(OSError):  # it ended meanwhile, or the kernel is older than 5.3
                self._handle = os.pidfd_open(identity.pid)

    @property
    def handle(self) -> int | None:
        """Becomes readable when the process ends; None if it had ended, or before Linux 5.3."""
        return self._handle

    def read(self) -> Reading:
        """What can be seen of it now. Does not block. Never of a later process with its pid."""
        process = self._process
        try:
            if process is None or not process.is_running():
                return self._ended(GONE)
            with process.oneshot():
                state = process.status()
                if state == ZOMBIE:
                    return self._ended(ZOMBIE)
                times, memory = process.cpu_times(), process.memory_info()
            private = memory.rss - getattr(memory, "shared", 0)
            return Reading(self.pid, str(state), times.user + times.system, private)
        except psutil.ZombieProcess:
            return self._ended(ZOMBIE)
        except psutil.NoSuchProcess:
            return self._ended(GONE)
        except psutil.AccessDenied:
            return Reading(self.pid, UNKNOWN)

    def show_stacks(self) -> None:
        """Have it write the stacks of its threads, see stacks.show_on_request(); it goes on."""
        if self._process is not None:
            with suppress(psutil.Error):
                self._process.send_signal(SHOW_STACKS)

    def resume(self) -> None:
        """Have it go on, if it is stopped."""
        if self._process is not None:
            with suppress(psutil.Error):
                self._process.send_signal(signal.SIGCONT)

    def _ended(self, state: str) -> Reading:
        """How, if that is known: by its pid only of a zombie, as another may have got it since."""
        status = _status_of_zombie(self.pid) if state == ZOMBIE else None
        if status is None and self._handle is not None:
            status = _status_by_handle(self._handle)
        return Reading(self.pid, state, status=status)


_STATE, _STARTTIME, _EXIT_CODE = 0, 19, 49


def _stat(pid: int, proc: Path = PROC) -> list[str]:
    """The fields from the third on, see proc_pid_stat(5); empty if they cannot be read."""
    try:
        return (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _status_of_zombie(pid: int) -> int | None:
    """Known until its parent has waited for it."""
    fields = _stat(pid)
    return int(fields[_EXIT_CODE]) if fields and fields[_STATE] == "Z" else None


_PIDFD_INFO = "QQ12i"
_PIDFD_GET_INFO = 3 << 30 | struct.calcsize(_PIDFD_INFO) << 16 | 0xFF << 8 | 11
_PIDFD_INFO_EXIT = 8


def _status_by_handle(handle: int) -> int | None:
    """Known also after its parent has waited for it, from Linux 6.15 on. See linux/pidfd.h."""
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
    """One line of the list of all processes; it may have ended since."""

    pid: int
    parent: int
    """The pid of its parent; 0 if that is outside this container."""
    command: tuple[str, ...]
    """Empty if it may not be read, or if the process is a zombie."""
    age_s: float
    is_own: bool
    """Whether it belongs to this user."""


def list_processes() -> list[Process]:
    """All processes of this host that this one can see."""
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
