"""What a run leaves: its options at the start, and at the end the last checkpoint, the report, the
trained weights and the last line."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch

from ps.host.files import replacing
from ps.host.health import Finding
from ps.host.monitors import LOCK_TIMEOUT_S
from ps.host.signals import Signals
from ps.host.stacks import dump_stacks, stacks_path
from ps.host.timeouts import call_with_timeout
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

SAVE_TIMEOUT_S = 25.0
DONE_TIMEOUT_S = 600.0

FactsOf = Callable[[int], Mapping[str, Any]]
"""What was seen last of a rank's process."""


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
    ) -> None:
        """link is the name of the one that joins the ranks, None at world size 1."""
        self.run_dir = prepared.run_dir
        self._topology = topology
        self._prepared = prepared
        self._basis = basis
        self._server = server
        self._checkpointer = checkpointer
        self._link = link
        self._signals = signals
        previous = report_of(self.run_dir.path)
        self._earlier = earlier_attempts(previous) if topology.restart_count else []
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
            self.run_dir.write_report(self._head())
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
        timeout_s: float = LOCK_TIMEOUT_S,
    ) -> None:
        """End the job, for what was lost before if anything was. From any thread.

        Where the server's lock is not given back within timeout_s, this process ends.
        """

        def stop() -> None:
            if loss is not None:
                self._server.report(loss)
            self._server.stop(outcome, abandoned)

        timeout_s = self._signals.left_s(timeout_s)
        try:
            call_with_timeout(timeout_s, stop, "stop")
        except TimeoutError:
            rank = self._topology.rank
            text = f"{outcome.cause}, and its lock was not given back for {timeout_s:.0f} s"
            self.end_stuck(Finding(rank, text, outcome.exit_code), {})

    def end_stuck(self, finding: Finding, facts: Mapping[str, Any]) -> None:
        """Whoever makes no progress holds the server's lock: nothing can be saved."""
        dump_stacks(self.run_dir.path, finding.rank)
        report_without_server(self.run_dir.path, finding, facts)
        leave(finding.exit_code)

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
        timeout_s = self._signals.left_s(DONE_TIMEOUT_S if is_done else SAVE_TIMEOUT_S)
        if not self._checkpointer.close(timeout_s):
            newest = self._checkpointer.newest
            there = f"the newest one is {newest}" if newest else "there is no other"
            log.warning("no checkpoint of the end of training could be saved; %s", there)

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
                self._head(),
                reported,
                checkpoint=self._checkpointer.newest,
                numbers=numbers,
                duration_s=duration_s,
            )

        return write_end(self.run_dir.path, end, os.getpid(), report)

    def _write_model(self) -> str | None:
        """What kept it from being written, if anything did."""
        try:
            self.run_dir.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replacing(self.run_dir.path / "model.pt") as partial:
                torch.save(self._basis.state.store.state_dict(), partial)
        except (OSError, RuntimeError) as error:  # RuntimeError: from torch's writer
            reason = getattr(error, "strerror", None) or first_line(error)
            return reason or type(error).__name__
        return None

    def _head(self) -> dict[str, Any]:
        return head_of(
            self._prepared.config,
            self._topology,
            pid=os.getpid(),
            earlier_attempts=self._earlier,
            link=self._link,
            threads=self._basis.threads,
            lr=self._basis.lr,
            resumed_from=self._basis.state.resumed_from,
            versions={"torch": torch.__version__, "python": platform.python_version()},
        )

    def _failure(self, outcome: Outcome, facts_of: FactsOf) -> dict[str, Any]:
        return {
            **failure_of(outcome.rank, self.run_dir.path),
            **self._server.circumstances(),
            "process": dict(facts_of(outcome.rank)),
        }

    def _remove_empty_stacks(self) -> None:
        for rank in range(self._topology.world_size):
            path = stacks_path(self.run_dir.path, rank)
            with suppress(OSError):
                if not path.stat().st_size:
                    path.unlink()
