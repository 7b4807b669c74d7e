"""report.json: what it says, and which of several ranks writes it. Loads no torch.

The server writes it at the start, with the status "running", and at the end. If the server cannot,
the first rank that knows why writes the end for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ps.host.files import update_file
from ps.host.health import Finding
from ps.host.stacks import stacks_path
from ps.job.rundir import REPORT, from_json, to_json
from ps.settings.config import Config
from ps.settings.log import log
from ps.settings.topology import SERVER_RANK, Topology, role_of

RUNNING = "running"
LOCK_TIMEOUT_S = 1.0

Report = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """How a job ended."""

    status: str
    exit_code: int
    cause: str | None = None
    failure: Mapping[str, Any] | None = None


def head_of(
    config: Config,
    topology: Topology,
    *,
    pid: int,
    earlier_attempts: list[Report],
    link: str | None,
    threads: int,
    lr: float,
    resumed_from: Path | None,
    versions: Mapping[str, str],
) -> Report:
    """What is known from the start. pid is the server's, versions are of torch and Python."""
    return {
        "status": RUNNING,
        "pid": pid,
        "attempt": topology.restart_count,
        "earlier_attempts": earlier_attempts,
        "world_size": topology.world_size,
        "compute": config.compute,
        "link": link,
        "precision": config.precision,
        "max_lag": config.max_lag,
        "workload": config.workload,
        "epochs": config.epochs,
        "threads": threads,
        "lr": lr,
        "resumed_from": str(resumed_from) if resumed_from else None,
        **versions,
    }


def earlier_attempts(report: Mapping[str, Any]) -> list[Report]:
    """How the attempts before this one ended, from the report that the last of them has left.

    An attempt whose ranks were all killed has left no cause.
    """
    kept = ("attempt", "exit_code", "cause", "updates")
    last = [{key: report.get(key) for key in kept}] if report else []
    return [*report.get("earlier_attempts", []), *last]


def final_report(
    head: Mapping[str, Any],
    end: End,
    *,
    checkpoint: Path | None,
    numbers: Mapping[str, Any],
    duration_s: float,
) -> Report:
    """checkpoint is the newest that is there, numbers are those of the training."""
    return {
        **head,
        "status": end.status,
        "exit_code": end.exit_code,
        "cause": end.cause,
        "failure": dict(end.failure) if end.failure is not None else None,
        "checkpoint": str(checkpoint) if checkpoint else None,
        **numbers,
        "duration_s": duration_s,
    }


def respecting(reported: Mapping[str, Any], end: End, pid: int) -> End:
    """The end of the job, where a rank may already have reported that this server has failed.

    What that rank has reported is the cause then, and what the server saw is a consequence. pid is
    the server's: the report may also be of an earlier run.
    """
    is_of_this_server = reported.get("pid") == pid and reported.get("status") != RUNNING
    if end.failure is None or not is_of_this_server or not reported.get("failure"):
        return end
    later = [end.cause, *end.failure.get("consequences", ())]
    return End(
        status="failed",
        exit_code=reported["exit_code"],
        cause=reported["cause"],
        failure={**reported["failure"], "consequences": later},
    )


def write_end(
    run_dir: Path,
    end: End,
    pid: int,
    report_of: Callable[[End], Mapping[str, Any]],
    *,
    timeout_s: float = LOCK_TIMEOUT_S,
) -> tuple[End, str]:
    """Write the server's last report, which a rank that is faster may change: see respecting().

    Blocks for the disk, and before that for timeout_s if another rank is writing.

    Returns the end that was reported, and where it is to be read, or why it is not.
    """
    final = end

    def change(content: bytes | None) -> bytes:
        nonlocal final
        final = respecting(from_json(content), end, pid)
        return to_json(finite(report_of(final)))

    try:
        _update(run_dir, change, timeout_s=timeout_s, must_write=True)
        seen = f"see {run_dir / REPORT}"
    except OSError as error:
        seen = f"the report could not be written: {error.strerror}"
    return final, seen


def report_without_server(
    run_dir: Path,
    finding: Finding,
    facts: Mapping[str, Any],
    *,
    timeout_s: float = LOCK_TIMEOUT_S,
) -> None:
    """Write the report and the last line for a server that cannot, unless that was done already.

    Several ranks may call this at once: one of them writes. Blocks for the disk, and before that
    for timeout_s if another rank is writing.
    """

    def change(content: bytes | None) -> bytes | None:
        report = from_json(content)
        if report.get("status", RUNNING) != RUNNING or _is_of_another_server(
            report, finding, facts
        ):
            return None
        failure = {**failure_of(finding.rank, run_dir), "process": dict(facts)}
        ended = {"status": "failed", "exit_code": finding.exit_code, "cause": finding.cause}
        return to_json(finite({**report, **ended, "failure": failure}))

    try:
        if not _update(run_dir, change, timeout_s=timeout_s):
            return
        seen = f"see {run_dir / REPORT}"
    except TimeoutError:
        seen = "another rank writes the report"
    except OSError as error:
        seen = f"the report could not be written: {error.strerror}"
    log.error("failed: %s; %s", finding.cause, seen)


def _is_of_another_server(
    report: Mapping[str, Any], finding: Finding, facts: Mapping[str, Any]
) -> bool:
    """Whether a later attempt has begun, as far as the finding is of a server with a known pid."""
    pids = {known["pid"] for known in (report, facts) if "pid" in known}
    return finding.rank == SERVER_RANK and len(pids) > 1


def _update(
    run_dir: Path,
    change: Callable[[bytes | None], bytes | None],
    *,
    timeout_s: float,
    must_write: bool = False,
) -> bool:
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)  # somebody may have removed it
    return update_file(run_dir / REPORT, change, timeout_s=timeout_s, must_write=must_write)


def failure_of(rank: int, run_dir: Path) -> Report:
    """Who holds the cause, and the file with its stacks if there are any of this attempt."""
    stacks = stacks_path(run_dir, rank)
    return {
        "rank": rank,
        "role": role_of(rank),
        "stacks": str(stacks) if _is_newer(stacks, run_dir / REPORT) else None,
    }


def _is_newer(stacks: Path, report: Path) -> bool:
    """Whether there are some, and not of an earlier attempt: each has written its report since."""
    try:
        seen = stacks.stat()
        return seen.st_size > 0 and seen.st_mtime_ns >= report.stat().st_mtime_ns
    except OSError:
        return False


def finite(value: Any) -> Any:
    """The value as JSON can hold it: None for NaN and infinity, at any depth."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
