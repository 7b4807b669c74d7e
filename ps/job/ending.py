"""What a run leaves: its options at the start, and at the end the last checkpoint, the report, the
trained weights and the last line."""

from __future__ import annotations

import math
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ps.host.files import replacing
from ps.host.health import Finding
from ps.host.monitors import LOCK_TIMEOUT_S
from ps.host.signals import Signals
from ps.host.stacks import dump_stacks, stacks_path
from ps.host.timeouts import Deadline, call_with_timeout
from ps.host.watch import leave
from ps.job.build import Basis
from ps.job.checkpoint import Checkpointer
from ps.job.preparation import Prepared
from ps.job.report import (
    End,
    earlier_attempts,
    failure_of,
    final_report,
    head_of,
    report_without_server,
    write_end,
)
from ps.job.rundir import report_of
from ps.server.roll import Outcome
from ps.server.server import ParameterServer
from ps.settings.errors import LaunchError, first_line
from ps.settings.log import log
from ps.settings.topology import Topology

FactsOf = Callable[[int], Mapping[str, Any]]
"""What was seen last of a rank's process."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of what an end may wait for, in seconds; all less once a request to end has come."""

    lock_timeout_s: float = LOCK_TIMEOUT_S
    """For the server's lock to be given back."""
    save_timeout_s: float = 25.0
    """For the last checkpoint of a job that has failed or was interrupted."""
    done_timeout_s: float = 600.0
    """For that of a job that is done, and for its weights."""
    report_timeout_s: float = 3.0
    """For the report. Saving leaves it so much of the time that is left after a request to end."""


class Ending:
    """The server's side of the run directory.

    Once a request to end has come, every limit of time here is taken from its one deadline.
    """

    def __init__(
        self,
        topology: Topology,
        prepared: Prepared,
        basis: Basis,
        server: ParameterServer,
        checkpointer: Checkpointer,
        link: str | None,
        signals: Signals,
        *,
        limits: Limits = Limits(),
        leave: Callable[[int], object] = leave,
    ) -> None:
        """link is the name of the one that joins the ranks, None at world size 1. leave ends this
        process from any thread."""
        self.run_dir = prepared.run_dir
        self._topology = topology
        self._prepared = prepared
        self._basis = basis
        self._server = server
        self._checkpointer = checkpointer
        self._signals = signals
        self._limits = limits
        self._leave = leave
        self._head = self._head_of(link)
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
            self.run_dir.write_report(self._head)
        except OSError as error:
            reason = f"{self.run_dir.path} cannot be written: {error.strerror}"
            raise LaunchError(reason) from None
        if prepared.resume_from is not None and not prepared.is_in_place:
            self._checkpointer.save()  # or this folder, the latest from now on, has none
        self.run_dir.publish()
        self._checkpointer.start()

    def stop(
        self,
        outcome: Outcome,
        *,
        loss: Finding | None = None,
        abandoned: Iterable[int] = (),
        timeout_s: float | None = None,
    ) -> None:
        """End the job, for what was lost before if anything was. From any thread.

        Where the server's lock is not given back within timeout_s, which is that of the limits if
        it is None, this process ends.
        """

        def stop() -> None:
            if loss is not None:
                self._server.report(loss)
            self._server.stop(outcome, abandoned)

        if timeout_s is None:
            timeout_s = self._limits.lock_timeout_s
        since = time.monotonic()
        try:
            call_with_timeout(self._left_after(timeout_s), stop, "stop")
        except TimeoutError:
            rank, waited_s = self._topology.rank, time.monotonic() - since
            text = f"{outcome.cause}, and its lock was not given back for {waited_s:.0f} s"
            self.end_stuck(Finding(rank, text, outcome.exit_code), {})

    def end_stuck(self, finding: Finding, facts: Mapping[str, Any]) -> None:
        """Whoever makes no progress holds the server's lock: nothing can be saved."""

        def tell() -> None:
            dump_stacks(self.run_dir.path, finding.rank)
            report_without_server(self.run_dir.path, finding, facts)

        try:
            call_with_timeout(self._limits.report_timeout_s, tell, "report")
        except TimeoutError:
            log.error("failed: %s; the report could not be written in time", finding.cause)
        self._leave(finding.exit_code)

    def finish(self, facts_of: FactsOf) -> Outcome:
        """Save and tell how it ended. Only once the job has; further calls change nothing."""
        with self._lock:
            if self._outcome is None:
                self._save()
                self._outcome = self._tell(facts_of)
                self._remove_empty_stacks()
        return self._outcome

    def _save(self) -> None:
        is_done = self._server.outcome == Outcome("done")
        limits = self._limits
        limit_s = limits.done_timeout_s if is_done else limits.save_timeout_s
        close = partial(self._checkpointer.close, limit_s)
        is_saved = False
        with suppress(TimeoutError):
            is_saved = call_with_timeout(self._left_to_save(limit_s), close, "last checkpoint")
        if not is_saved:
            newest = self._checkpointer.newest
            there = f"the newest one is {newest}" if newest else "there is no other"
            log.warning("no checkpoint of the end of training could be saved; %s", there)

    def _left_to_save(self, limit_s: float) -> Callable[[], float]:
        return self._left_after(limit_s, self._limits.report_timeout_s)

    def _left_after(self, limit_s: float, reserve_s: float = 0.0) -> Callable[[], float]:
        """The seconds that are left, also where a request to end comes only later.

        Of what is left after that, reserve_s are kept for something else.
        """
        own = Deadline.after(limit_s)
        return lambda: own.left_s(self._signals.left_s(math.inf) - reserve_s)

    def _tell(self, facts_of: FactsOf) -> Outcome:
        outcome, numbers = self._server.result()
        if outcome.status == "done" and (error := self._write_model()):
            cause = f"trained to the end, but model.pt could not be written: {error}"
            outcome = Outcome("failed", 1, cause)
        end = End(
            status=outcome.status,
            exit_code=outcome.exit_code,
            cause=outcome.cause,
            failure=self._failure(outcome, facts_of) if outcome.cause else None,
        )
        reported, seen = self._write_end(end, numbers)
        if reported is not end:  # a trainer has reported that this rank has failed
            outcome = Outcome("failed", reported.exit_code, reported.cause)
        if outcome.status == "done":
            log.info(
                "done: %d updates, %d samples in %.1f s (%.0f samples/s), test accuracy %.4f; %s",
                numbers["updates"],
                numbers["samples_trained"],
                time.monotonic() - self._prepared.started_at,
                numbers["samples_per_s"],
                numbers["test_accuracy"],
                seen,
            )
        else:
            log.error("%s: %s; %s", outcome.status, outcome.cause, seen)
        return outcome

    def _write_end(self, end: End, numbers: Mapping[str, Any]) -> tuple[End, str]:
        duration_s = time.monotonic() - self._prepared.started_at

        def report(reported: End) -> dict[str, Any]:
            return final_report(
                self._head,
                reported,
                checkpoint=self._checkpointer.newest,
                numbers=numbers,
                duration_s=duration_s,
            )

        write = partial(write_end, self.run_dir.path, end, os.getpid(), report)
        limit_s = self._limits.done_timeout_s
        try:
            return call_with_timeout(self._left_after(limit_s), write, "report")
        except TimeoutError:
            return end, "the report could not be written in time"

    def _write_model(self) -> str | None:
        """What kept it from being written, if anything did."""

        def write() -> None:
            self.run_dir.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replacing(self.run_dir.path / "model.pt") as partial:
                torch.save(self._basis.state.store.state_dict(), partial)

        try:
            call_with_timeout(self._left_to_save(self._limits.done_timeout_s), write, "model")
        except (OSError, RuntimeError) as error:  # RuntimeError: from torch's writer
            reason = getattr(error, "strerror", None) or first_line(error)
            return reason or type(error).__name__
        return None

    def _head_of(self, link: str | None) -> dict[str, Any]:
        previous = report_of(self.run_dir.path) if self._topology.restart_count else {}
        return head_of(
            self._prepared.config,
            self._topology,
            pid=os.getpid(),
            earlier_attempts=earlier_attempts(previous),
            link=link,
            threads=self._basis.threads,
            lr=self._basis.lr,
            resumed_from=self._basis.state.resumed_from,
            versions={"torch": torch.__version__, "python": platform.python_version()},
        )

    def _failure(self, outcome: Outcome, facts_of: FactsOf) -> dict[str, Any]:
        return {
            **failure_of(outcome.rank, self.run_dir.path),
            **self._server.roll.circumstances(),
            "process": dict(facts_of(outcome.rank)),
        }

    def _remove_empty_stacks(self) -> None:
        for rank in range(self._topology.world_size):
            path = stacks_path(self.run_dir.path, rank)
            with suppress(OSError):
                if not path.stat().st_size:
                    path.unlink()
