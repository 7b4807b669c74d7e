"""The checks that every start makes, and how a check is made and judged. Loads no torch.

A check judges readings that it is given. It starts, fetches, ends and removes nothing.
"""

from __future__ import annotations

import math
import os
import platform
import shutil
import socket  # noqa: TID251
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ps.host import resources
from ps.host.timeouts import call_with_timeout
from ps.job.footprint import RANK_BYTES
from ps.job.rundir import PARENT
from ps.settings.config import Config
from ps.settings.errors import LaunchError, PsError

CHECK_TIMEOUT_S = 5.0

OPEN_FILES = 64
OPEN_FILES_PER_RANK = 16
LEAST_DISK_BYTES = 16 << 20
TIGHT_FRACTION = 0.8

Status = Literal["ok", "warning", "failed"]
Judgement = tuple[Status, str]
Check = Callable[[], Judgement]


@dataclass(frozen=True, slots=True)
class CheckResult:
    name: str
    status: Status
    text: str
    """One line: what was seen and, if that is not ok, what to do."""


def preflight_checks(config: Config, world_size: int) -> list[CheckResult]:
    """Takes milliseconds, and CHECK_TIMEOUT_S for each check that hangs."""
    ranks = f"{count(world_size, 'rank')} without model and data"
    needed = world_size * RANK_BYTES
    checks: dict[str, Check] = {
        "platform": lambda: system(sys.platform),
        "loopback": loopback,
        "open files": lambda: open_files(*_open_file_limits(), world_size),
        "memory": lambda: memory(needed, available_memory(), config.memory_limit_bytes, ranks),
        "disk": lambda: run_disk(config, LEAST_DISK_BYTES, "what a run leaves at least"),
    }
    return make(checks, CHECK_TIMEOUT_S)


def require(results: Iterable[CheckResult]) -> None:
    """Let a run start only where no check has failed.

    Raises:
        LaunchError: names the first check that has.
    """
    for result in results:
        if result.status == "failed":
            raise LaunchError(f"{result.name}: {result.text}")


def worst(results: Iterable[CheckResult]) -> Status:
    statuses: Sequence[Status] = ("ok", "warning", "failed")
    return max((result.status for result in results), key=statuses.index, default="ok")


def make(checks: Mapping[str, Check], timeout_s: float) -> list[CheckResult]:
    """Make one check after the other. Each that hangs blocks for timeout_s, and has failed."""
    return [_make(name, check, timeout_s) for name, check in checks.items()]


def _make(name: str, check: Check, timeout_s: float) -> CheckResult:
    status: Status = "failed"
    try:
        status, text = call_with_timeout(timeout_s, check, "check")
    except PsError as error:
        text = str(error)
    except (Exception, SystemExit) as error:
        text = f"could not be checked: {type(error).__name__}: {error}"
    return CheckResult(name, status, _in_one_line(text))


def _in_one_line(text: str) -> str:
    """And without the parts of file names that cannot be printed."""
    return " ".join(text.split()).encode(errors="backslashreplace").decode()


def system(name: str) -> Judgement:
    """name is as sys.platform has it."""
    if name in ("linux", "darwin"):
        return "ok", f"{name}, Python {platform.python_version()}"
    return "failed", f"torch has no RPC on {name}; use Linux or macOS (on Windows: WSL)"


def loopback(address: str = "127.0.0.1") -> Judgement:
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            reason = f"{address} cannot be bound ({error.strerror})"
            return "failed", f"{reason}, and all ranks meet there; type: ip link set lo up"
    return "ok", f"{address} can be bound"


def open_files(soft: int | None, hard: int | None, world_size: int) -> Judgement:
    """The limits of one process; None is no limit."""
    needed = OPEN_FILES + OPEN_FILES_PER_RANK * world_size
    if soft is None or soft >= needed:
        return "ok", f"{'any number' if soft is None else soft} allowed, about {needed} needed"
    seen = f"{soft} allowed, about {needed} needed for {count(world_size, 'rank')}"
    if hard is None or hard >= needed:
        return "failed", f"{seen}; type: ulimit -n {needed}"
    return "failed", (
        f"{seen}, and the hard limit is {hard}; have it raised "
        f"(in a container: docker run --ulimit nofile={needed})"
    )


def _open_file_limits() -> tuple[int | None, int | None]:
    import resource  # not everywhere

    soft, hard = (
        None if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    return soft, hard


def memory(needed: int, available: int | None, limit: int | None, ranks: str) -> Judgement:
    """In bytes. ranks says what the memory is for.

    available is None if it is not known, limit is --memory-limit, None without one.
    """
    seen = f"an estimated {size(needed)} for {ranks}"
    if limit is not None and needed > limit:
        least = f"{math.ceil(needed / (1 << 20))}MiB"
        return "failed", (
            f"{seen}, but --memory-limit allows {size(limit)}; type --memory-limit {least} or "
            "more, or start fewer ranks"
        )
    if available is None:
        return "warning", f"{seen}; how much is free cannot be read on this system"
    advice = "start fewer ranks or free some (in a container: docker run --memory)"
    return _fits(needed, available, f"{seen}; {size(available)} available", advice)


def available_memory() -> int | None:
    """In bytes; None if it is not known."""
    try:
        return resources.available_memory_bytes()
    except OSError:
        return None


def disk(needed: int, free: int, files: str, folder: Path) -> Judgement:
    """In bytes. files says what they are for."""
    seen = f"{size(needed)} for {files}; {size(free)} free in {folder}"
    return _fits(needed, free, seen, "free some, or give --run-dir on another disk")


def run_disk(config: Config, needed: int, files: str) -> Judgement:
    """As disk(), where the run directory is or will be made."""
    folder = config.run_dir or PARENT
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not os.access(place, os.W_OK | os.X_OK):
        return "failed", f"{place} cannot be written; give another --run-dir"
    return disk(needed, shutil.disk_usage(place).free, files, place)


def _fits(needed: int, available: int, seen: str, advice: str) -> Judgement:
    if needed > available:
        return "failed", f"{seen}; {advice}"
    if needed > TIGHT_FRACTION * available:
        return "warning", f"{seen}, which is tight; {advice}"
    return "ok", seen


def size(num_bytes: int) -> str:
    """For people."""
    gib = num_bytes / (1 << 30)
    return f"{gib:.1f} GiB" if gib >= 1 else f"{num_bytes / (1 << 20):.1f} MiB"


def count(number: int, noun: str) -> str:
    """For people."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
