"""What this machine offers to this process: cores, threads for each pass, and memory."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")
STATUS = Path("/proc/self/status")
SPIN_COUNT = 100_000


def usable_cores(cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> int:
    """Cores that this process may use: those of its affinity, or fewer by its cgroup's quota.

    At least 1; a quota is rounded up to whole cores.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    folders = _cgroups("cpu", cgroup, membership)
    quota = min((q for q in map(_quota_cores, folders) if q), default=None)
    return max(1, min(cores, math.ceil(quota))) if quota else cores


def _cgroups(controller: str, cgroup: Path, membership: Path) -> list[Path]:
    """The folders of this process's cgroups, of version 1 and 2, and of those they are in."""
    places = [(cgroup, "/"), (cgroup / controller, "/")]
    with suppress(OSError):
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                places += [(cgroup, path), (cgroup / "unified", path)]
            elif controller in controllers.split(","):
                places.append((cgroup / controller, path))
    folders: dict[Path, None] = {}
    for mount, path in places:
        own = mount / path.lstrip("/")
        around = [folder for folder in own.parents if folder.is_relative_to(mount)]
        folders |= dict.fromkeys([own, *around])
    return [folder for folder in folders if folder.is_dir()]


def _quota_cores(folder: Path) -> float | None:
    """The CPU quota of a cgroup of version 2 or 1, in cores; None without one."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if quota in ("max", "-1"):
        return None
    return int(quota) / int(period)


def available_memory_bytes(
    cgroup: Path = CGROUP,
    meminfo: Path = MEMINFO,
    membership: Path = MEMBERSHIP,
) -> int:
    """Bytes that can still be taken: what the host has left, or this cgroup if that is less.

    What the file cache holds counts as free.

    Raises:
        OSError: the memory of the host cannot be read, as outside Linux.
    """
    available = [_host_available_bytes(meminfo)]
    for folder in _cgroups("memory", cgroup, membership):
        for limit, current in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            try:
                used = int((folder / current).read_text())
                left = int((folder / limit).read_text()) - used
                available.append(left + _cached_bytes(folder / "memory.stat"))
            except (OSError, ValueError):
                continue  # of the other version, or without a limit
    return max(0, min(available))


def shared_memory_bytes(status: Path = STATUS) -> int:
    """Resident memory of this process that others may share; 0 outside Linux.

    That of the server is what all ranks of a job share.
    """
    try:
        match = re.search(r"^RssShmem:\s+(\d+) kB$", status.read_text(), re.M)
    except OSError:
        return 0
    return int(match[1]) * 1024 if match else 0


def _cached_bytes(stat: Path) -> int:
    try:
        match = re.search(r"^inactive_file (\d+)$", stat.read_text(), re.M)
    except OSError:
        return 0
    return int(match[1]) if match else 0


def _host_available_bytes(meminfo: Path) -> int:
    match = re.search(r"^MemAvailable: +(\d+) kB$", meminfo.read_text(), re.M)
    return int(match[1]) * 1024 if match else sys.maxsize


def threads_per_pass(cores: int, num_trainers: int) -> int:
    """Threads for one pass, forward or backward, where each trainer may have one running."""
    return max(1, cores // num_trainers)


def limit_spinning(environ: MutableMapping[str, str], spin_count: int = SPIN_COUNT) -> None:
    """Have OpenMP's threads sleep soon when they wait for each other. Before torch is loaded.

    GNU's default spins for so long that one busy neighbour on the cores costs nine tenths of
    the rate. The count was found by experiment and costs nothing on a quiet machine. What the
    user has set wins.
    """
    if "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", str(spin_count))
