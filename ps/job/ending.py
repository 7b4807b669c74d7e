"""What a run leaves: its options at the start, and at the end the last checkpoint, the report, the
trained weights and the last line."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch

from ps.host.files import replacing
from ps.host.health import Finding
from ps.host.looks import LOCK_BOUND_S, ServerSide
from ps.host.processes import Peer
from ps.host.stacks import dump_stacks, stacks_path
from ps.host.timeouts import within
from ps.host.watch import Watch, leave
from ps.job.checkpoint import Checkpointer, Checkpoints
from ps.job.parts import ServerParts
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
from ps.server.server import Outcome
from ps.settings.errors import LaunchError, first_line
from ps.settings.log import log
from ps.settings.topology import Topology

SAVE_BOUND_S = 25.0  # torchrun kills 30 s after its SIGTERM
DONE_BOUND_S = 600.0


class Ending:
    """The server's side of the run directory."""

    def __init__(
        self, job: ServerParts, topology: Topology, prepared: Prepared, link: str | None
    ) -> None:
        """link is the name of the one that joins the ranks, None at world size 1."""
        config = prepared.config
        self.run_dir = prepared.run_dir
        source = prepared.resume_from
        self._in_place = source is not None and source.resolve() == self.run_dir.path.resolve()
        self.checkpointer = Checkpointer(
            Checkpoints(self.run_dir.path, config.keep),
            job.snapshot,
            interval_s=config.checkpoint_interval_s,
            newest=job.resumed_from if self._in_place else None,
        )
        self.side: ServerSide | None = None
        self._job = job
        self._link = link
        self._topology = topology
        self._prepared = prepared
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
        if prepared.resume_from is not None and not self._in_place:
            self.checkpointer.save()  # or this folder, the latest from now on, has none
        self.run_dir.publish()
        self.checkpointer.start()

    def watch_ranks(self, peers: Mapping[int, Peer], watch: Watch) -> None:
        """All ranks have arrived: from now on the server looks at them."""
        config, server = self._prepared.config, self._job.server
        self.side = ServerSide(
            server,
            peers,
            self._topology.rank,
            self.run_dir.path,
            stall_timeout_s=config.stall_timeout_s,
            memory_limit_bytes=config.memory_limit_bytes,
            on_stuck=self._end_stuck,
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
        bound_s: float = LOCK_BOUND_S,
    ) -> None:
        """End the job, for what was lost before if anything was. From any thread.

        Where the server's lock is not given back within bound_s, this process ends.
        """
        server = self._job.server

        def stop() -> None:
            if loss is not None:
                server.found(loss)
            server.stop(outcome, abandoned)

        try:
            within(bound_s, stop, "stop")
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
                    newest = self.checkpointer.newest
                    there = f"the newest one is {newest}" if newest else "there is no other"
                    log.warning("no checkpoint of the end of training could be saved; %s", there)
                self._outcome = self._tell()
                self._remove_empty_stacks()
        return self._outcome

    def _tell(self) -> Outcome:
        outcome, numbers = self._job.server.result()
        if outcome.status == "done" and (error := self._write_model()):
            cause = f"trained to the end, but model.pt could not be written: {error}"
            outcome = Outcome("failed", 1, cause)
        end = End(
            status=outcome.status,
            exit_code=outcome.exit_code,
            cause=outcome.cause,
            failure=self._failure(outcome) if outcome.cause else None,
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
                checkpoint=self.checkpointer.newest,
                numbers=numbers,
                duration_s=duration_s,
            )

        return write_end(self.run_dir.path, end, os.getpid(), report)

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

    def _head(self) -> dict[str, Any]:
        job = self._job
        return head_of(
            self._prepared.config,
            self._topology,
            pid=os.getpid(),
            earlier_attempts=self._earlier,
            link=self._link,
            threads=job.threads,
            lr=job.lr,
            resumed_from=job.resumed_from,
            versions={"torch": torch.__version__, "python": platform.python_version()},
        )

    def _failure(self, outcome: Outcome) -> dict[str, Any]:
        facts = self.side.facts(outcome.rank) if self.side else {}
        return {
            **failure_of(outcome.rank, self.run_dir.path),
            **self._job.server.circumstances(),
            "process": facts,
        }

    def _remove_empty_stacks(self) -> None:
        for rank in range(self._topology.world_size):
            path = stacks_path(self.run_dir.path, rank)
            with suppress(OSError):
                if not path.stat().st_size:
                    path.unlink()
