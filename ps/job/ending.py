"""What a run leaves: its options at the start, and at the end the last checkpoint, the report, the
trained weights and the last line."""

from __future__ import annotations

import math
import os
import platform
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ps.host.files import replacing
from ps.host.health import Finding
from ps.host.monitors import LOCK_TIMEOUT_S, JobMonitor, Limits
from ps.host.processes import Peer
from ps.host.stacks import dump_stacks, stacks_path
from ps.host.timeouts import call_with_timeout
from ps.host.watch import Watch, leave
from ps.job import rundir
from ps.job.checkpoint import Checkpointer, Checkpoints
from ps.job.parts import ServerParts
from ps.job.preparation import Prepared
from ps.server.server import Outcome
from ps.settings.errors import LaunchError, first_line
from ps.settings.log import log
from ps.settings.topology import Topology, role_of

SAVE_BOUND_S = 25.0  # torchrun kills 30 s after its SIGTERM
DONE_BOUND_S = 600.0
RUNNING = "running"


class Ending:
    """The server's side of the run directory."""

    def __init__(
        self, job: ServerParts, topology: Topology, prepared: Prepared, link: str | None
    ) -> None:
        """link is the name of the one that joins the ranks, None at world size 1."""
        config = prepared.config
        self.run_dir = prepared.run_dir
        self.checkpointer = Checkpointer(
            Checkpoints(self.run_dir.path, config.keep), job.state, config.checkpoint_interval_s
        )
        self.side: JobMonitor | None = None
        self._job = job
        self._link = link
        self._topology = topology
        self._prepared = prepared
        self._earlier = _earlier_attempts(self.run_dir.path) if topology.restart_count else []
        self._lock = threading.Lock()
        self._outcome: Outcome | None = None  # under _lock

    def begin(self) -> None:
        """The job starts: from now on its folder says so, and it is saved.

        Raises:
            LaunchError: the folder cannot be written.
        """
        prepared = self._prepared
        try:
            self.run_dir.write_options(prepared.config.to_json(inherited_only=True), prepared.job)
            self.run_dir.write_report(self._head(RUNNING))
        except OSError as error:
            reason = f"{self.run_dir.path} cannot be written: {error.strerror}"
            raise LaunchError(reason) from None
        source = prepared.resume_from
        if source is not None and source.resolve() != self.run_dir.path.resolve():
            self.checkpointer.save()  # or this folder, the latest from now on, has none
        self.run_dir.publish()
        self.checkpointer.start()

    def watch_ranks(
        self, peers: Mapping[int, Peer], watch: Watch, limits: Limits = Limits()
    ) -> None:
        """All ranks have arrived: from now on the server looks at them."""
        config, server = self._prepared.config, self._job.server
        self.side = JobMonitor(
            server,
            peers,
            self._topology.rank,
            self.run_dir.path,
            stall_timeout_s=config.stall_timeout_s,
            memory_limit_bytes=config.memory_limit_bytes,
            on_stuck=self._end_stuck,
            limits=limits,
        )
        server.explain = self.side.explain
        server.arrived()
        watch.look_with(self.side.look, peers.values())

    def stop(
        self,
        outcome: Outcome,
        *,
        loss: Finding | None = None,
        abandoned: Iterable[int] = (),
        bound_s: float = LOCK_TIMEOUT_S,
    ) -> None:
        """End the job, for what was lost before if anything was. From any thread.

        Where the server's lock is not given back within bound_s, this process ends.
        """
        server = self._job.server

        def stop() -> None:
            if loss is not None:
                server.report(loss)
            server.stop(outcome, abandoned)

        try:
            call_with_timeout(bound_s, stop, "stop")
        except TimeoutError:
            rank = self._topology.rank
            text = f"{outcome.cause}, and its lock was not given back for {bound_s:.0f} s"
            self._end_stuck(Finding(rank, text, outcome.exit_code), {})

    def _end_stuck(self, finding: Finding, facts: Mapping[str, Any]) -> None:
        """Whoever makes no progress holds the server's lock: nothing can be saved."""
        dump_stacks(self.run_dir.path, finding.rank)
        report_without_server(self.run_dir.path, finding, facts)
        leave(finding.exit_code)

    def finish(self) -> Outcome:
        """Save and tell how it ended. Only once the job has; further calls change nothing."""
        with self._lock:
            if self._outcome is None:
                is_done = self._job.server.outcome == Outcome("done")
                if not self.checkpointer.close(DONE_BOUND_S if is_done else SAVE_BOUND_S):
                    last = self.checkpointer.last
                    log.warning("the last state is not saved; the newest checkpoint is %s", last)
                self._outcome = self._tell()
                self._remove_empty_stacks()
        return self._outcome

    def _tell(self) -> Outcome:
        outcome, numbers = self._job.server.result()
        if outcome.status == "done" and (error := self._write_model()):
            cause = f"trained to the end, but model.pt could not be written: {error}"
            outcome = Outcome("failed", 1, cause)
        failure = self._failure(outcome) if outcome.cause else None
        if failure is not None and (earlier := _reported(self.run_dir.path)):
            # By a trainer, to which this rank seemed to be gone. That is the cause then.
            later = [outcome.cause, *failure["consequences"]]
            failure = {**earlier["failure"], "consequences": later}
            outcome = Outcome("failed", earlier["exit_code"], earlier["cause"])
        report = {
            **self._head(outcome.status),
            "exit_code": outcome.exit_code,
            "cause": outcome.cause,
            "failure": failure,
            "checkpoint": str(self.checkpointer.last) if self.checkpointer.last else None,
            **numbers,
            "duration_s": time.monotonic() - self._prepared.started_at,
        }
        try:
            seen = f"see {self.run_dir.write_report(_finite(report))}"
        except OSError as error:
            seen = f"the report could not be written: {error.strerror}"
        if outcome.status == "done":
            log.info(
                "done: %d updates, %d samples in %.1f s (%.0f samples/s), test accuracy %.4f; %s",
                numbers["updates"],
                numbers["samples_trained"],
                report["duration_s"],
                numbers["samples_per_s"],
                numbers["test_accuracy"],
                seen,
            )
        else:
            log.error("%s: %s; %s", outcome.status, outcome.cause, seen)
        return outcome

    def _write_model(self) -> str | None:
        """What kept it from being written, if anything did."""
        try:
            self.run_dir.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replacing(self.run_dir.path / "model.pt") as partial:
                torch.save(self._job.store.state_dict(), partial)
        except (OSError, RuntimeError) as error:  # RuntimeError: from torch's writer
            reason = getattr(error, "strerror", None) or first_line(error)
            return reason or type(error).__name__
        return None

    def _head(self, status: str) -> dict[str, Any]:
        """What is known from the start."""
        job, topology, config = self._job, self._topology, self._prepared.config
        return {
            "status": status,
            "pid": os.getpid(),
            "attempt": topology.restart_count,
            "earlier_attempts": self._earlier,
            "world_size": topology.world_size,
            "compute": config.compute,
            "link": self._link,
            "precision": config.precision,
            "staleness": config.staleness,
            "workload": config.workload,
            "epochs": config.epochs,
            "threads": job.threads,
            "lr": job.lr,
            "resumed_from": str(job.resumed_from) if job.resumed_from else None,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }

    def _failure(self, outcome: Outcome) -> dict[str, Any]:
        facts = self.side.facts(outcome.rank) if self.side else {}
        return {
            **_failure_of(outcome.rank, self.run_dir.path),
            **self._job.server.circumstances(),
            "process": facts,
        }

    def _remove_empty_stacks(self) -> None:
        for rank in range(self._topology.world_size):
            path = stacks_path(self.run_dir.path, rank)
            with suppress(OSError):
                if not path.stat().st_size:
                    path.unlink()


def report_without_server(run_dir: Path, finding: Finding, facts: Mapping[str, Any]) -> None:
    """Report and last line where the server cannot tell them, unless somebody has already."""
    report = rundir.report_of(run_dir)
    if report.get("status", RUNNING) != RUNNING:
        return
    report |= {
        "status": "failed",
        "exit_code": finding.exit_code,
        "cause": finding.cause,
        "failure": {**_failure_of(finding.rank, run_dir), "process": dict(facts)},
    }
    try:
        seen = f"see {rundir.write(run_dir, rundir.REPORT, _finite(report))}"
    except OSError as error:
        seen = f"the report could not be written: {error.strerror}"
    log.error("failed: %s; %s", finding.cause, seen)


def _reported(run_dir: Path) -> dict[str, Any] | None:
    """The report of a failure of this run that is there already."""
    report = rundir.report_of(run_dir)
    is_told = report.get("pid") == os.getpid() and report.get("status") != RUNNING
    return report if is_told and report.get("failure") else None


def _earlier_attempts(run_dir: Path) -> list[dict[str, Any]]:
    """How they ended. One that was killed as a whole has left no cause."""
    report = rundir.report_of(run_dir)
    told = ("attempt", "exit_code", "cause", "updates")
    last = [{key: report.get(key) for key in told}] if report else []
    return [*report.get("earlier_attempts", []), *last]


def _failure_of(rank: int, run_dir: Path) -> dict[str, Any]:
    stacks = stacks_path(run_dir, rank)
    return {
        "rank": rank,
        "role": role_of(rank),
        "stacks": str(stacks) if _is_new(stacks, run_dir / rundir.REPORT) else None,
    }


def _is_new(stacks: Path, report: Path) -> bool:
    """Whether there are some, and not of an earlier attempt: each has written its report since."""
    try:
        seen = stacks.stat()
        return seen.st_size > 0 and seen.st_mtime_ns >= report.stat().st_mtime_ns
    except OSError:
        return False


def _finite(value: Any) -> Any:
    """The value as JSON can hold it: without NaN and infinity, at any depth."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
