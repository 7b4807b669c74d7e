"""The life of rank 0: build, serve, end. At world size 1 a thread of it is the trainer."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ps.host import libc, resources
from ps.host.monitors import JobMonitor
from ps.host.processes import Identity
from ps.host.signals import Phase, Signals
from ps.host.watch import Watch, leave
from ps.job import injection, rundir
from ps.job.build import Basis, TrainerParts, build_basis, build_server
from ps.job.checkpoint import Checkpointer, Checkpoints
from ps.job.ending import Ending
from ps.job.failure import outcome_of, show_traceback
from ps.job.injection import Injection
from ps.job.preparation import Prepared
from ps.job.trainer_process import open_stacks, peer_of, work
from ps.links import channel
from ps.links.choice import choose
from ps.links.in_process import InProcessLink
from ps.links.rendezvous import Rendezvous
from ps.links.shelf import Shelf
from ps.server.roll import Outcome
from ps.settings.config import LR, Config
from ps.settings.errors import Orphaned, is_explained
from ps.settings.log import log
from ps.settings.topology import Topology


@dataclass(frozen=True, slots=True)
class Intervals:
    """In seconds."""

    tick_s: float = 1.0
    """Between two calls of ParameterServer.tick(), or less with a short --rpc-timeout."""
    goodbye_s: float = 5.0
    """For the trainers to leave after a failure, and for torchrun to see which rank has failed."""
    orphan_lock_s: float = 4.0
    """For the server's lock to be given back once torchrun is gone."""


def run_server(topology: Topology, prepared: Prepared, signals: Signals, watch: Watch) -> int:
    """Be the server or, at world size 1, both. Blocks; returns the exit code.

    Raises:
        PsError: the job could not start; nothing is left behind.
    """
    try:
        process = ServerProcess(topology, prepared, signals, watch)
    except BaseException:
        prepared.run_dir.discard()
        raise
    prepared.gate.open()
    libc.keep_freed_memory()  # not earlier: the model's first place is given back
    return process.run()


class ServerProcess:
    def __init__(
        self,
        topology: Topology,
        prepared: Prepared,
        signals: Signals,
        watch: Watch,
        *,
        intervals: Intervals = Intervals(),
        leave: Callable[[int], object] = leave,
    ) -> None:
        """Builds every part, in the order in which they need each other. Blocks.

        Raises:
            PsError: as run_server().
        """
        config, run_dir = prepared.config, prepared.run_dir.path
        self._topology, self._config = topology, config
        self._signals, self._watch = signals, watch
        self._intervals, self._leave = intervals, leave
        self._rendezvous = Rendezvous(topology, config.start_timeout, signals.check)
        self._rendezvous.extend(prepared.ready_timeout_s)
        self._shelf = None if topology.is_alone or not channel.is_supported() else Shelf()
        if self._shelf is not None:
            self._shelf.open()
        earlier = Checkpoints(prepared.resume_from) if prepared.resume_from else None
        self._basis = build_basis(topology, config, earlier)
        injection.check(config.faults, topology)
        checkpointer = Checkpointer(
            Checkpoints(run_dir, config.keep),
            self._basis.state.snapshot,
            interval_s=config.checkpoint_interval_s,
            newest=self._basis.state.resumed_from if prepared.is_in_place else None,
        )
        self._server = build_server(
            topology, config, self._basis, AfterUpdate(topology, config, checkpointer)
        )
        self._end = choose(self._server, self._basis.compute, topology.trainers, config.link)
        self._ending = Ending(
            topology, prepared, self._basis, self._server, checkpointer, self._end.name, signals
        )
        self._monitor: JobMonitor | None = None

    def run(self) -> int:
        """Returns the exit code."""
        self._watch.when_orphaned(self._end_orphaned)
        try:
            try:
                self._signals.enter(Phase.INTERRUPT)
                self._serve()
            finally:
                self._signals.enter(Phase.FINISHING)
        except BaseException as error:
            self._stop_for(error)
        self._watch.close()
        outcome = self._ending.finish(self._facts)
        # Now, as torchrun may end this rank before its exit code is seen.
        rundir.refuse_if_final(self._topology.error_file, outcome.exit_code)
        if (
            self._server.roll.all_left and self._signals.came is None
        ):  # else others may not be there
            self._end.close()
        if outcome.rank_ends:
            self._await_stop()
        return outcome.exit_code

    def _serve(self) -> None:
        """Until the job has ended, one way or the other."""
        self._ending.begin()
        open_stacks(self._watch, self._ending.run_dir.path, self._topology.rank, self._config)
        _log_plan(self._basis, self._topology, self._config, self._end.name)
        self._rendezvous.announce(self._announcement())
        self._rendezvous.barrier(Identity.of(os.getpid()).to_json(), self._config.start_timeout)
        self._basis.shuffler.start(self._server.answer_waiting)
        monitor = self._watch_ranks()
        self._end.open(self._rendezvous, self._config, monitor.disconnected)
        for trainer in self._topology.own_trainers:
            self._start_trainer(trainer)
        self._wait_until_ended()

    def _announcement(self) -> str:
        announced = {
            "config": self._config.to_json(),
            "invitation": dict(self._end.invitation),
            "shelf": asdict(self._shelf.address) if self._shelf else None,
            "run_dir": str(self._ending.run_dir.path.absolute()),
        }
        return json.dumps(announced)

    def _watch_ranks(self) -> JobMonitor:
        """All ranks have arrived: from now on the server looks at them."""
        peers = {rank: peer_of(self._rendezvous, rank) for rank in self._topology.ranks}
        self._monitor = JobMonitor(
            self._server,
            peers,
            self._topology.rank,
            self._ending.run_dir.path,
            stall_timeout_s=self._config.stall_timeout_s,
            memory_limit_bytes=self._config.memory_limit_bytes,
            on_stuck=self._ending.end_stuck,
        )
        self._server.expect_progress()
        self._watch.look_with(self._monitor.look, peers.values())
        return self._monitor

    def _start_trainer(self, trainer: int) -> None:
        """In a thread, so that the main thread goes on taking signals whatever a step does."""
        link = InProcessLink(self._server, self._basis.compute, trainer)
        faults = Injection(self._config.faults, self._topology)
        parts = TrainerParts(self._config, self._basis.workload, faults)
        threading.Thread(
            target=work, args=(self._topology, link, parts), name="trainer", daemon=True
        ).start()

    def _wait_until_ended(self) -> None:
        """After a failure the others get some time to leave."""
        goodbye_since: float | None = None
        limit_s = self._config.rpc_timeout_s or math.inf
        while not self._server.ended.wait(min(self._intervals.tick_s, limit_s / 4)):
            self._signals.check()
            self._server.tick(max_wait_s=limit_s / 2)
            if self._server.outcome is None:
                continue
            goodbye_since = goodbye_since or time.monotonic()
            if time.monotonic() - goodbye_since > self._intervals.goodbye_s:
                return

    def _stop_for(self, error: BaseException) -> None:
        """The server's own part has raised."""
        outcome = outcome_of(error, self._topology, self._signals.came)
        loss = None
        if outcome.status == "interrupted" and self._monitor is not None:
            loss = self._monitor.lost_before()
        elif not is_explained(error):
            show_traceback(error, self._topology)
        self._ending.stop(outcome, loss=loss)

    def _end_orphaned(self) -> None:
        """Save and end, not in the main thread, which may be in a long step."""
        outcome = Outcome("failed", Orphaned.exit_code, str(Orphaned()))
        trainers = self._topology.trainers
        timeout_s = self._intervals.orphan_lock_s
        self._ending.stop(outcome, abandoned=trainers, timeout_s=timeout_s)
        self._ending.finish(self._facts)
        self._leave(Orphaned.exit_code)

    def _facts(self, rank: int) -> Mapping[str, Any]:
        """What was seen last of a rank's process."""
        return self._monitor.facts(rank) if self._monitor else {}

    def _await_stop(self) -> None:
        """torchrun names the rank that exits first as the root cause: let that be the one."""
        if self._signals.came is not None:  # torchrun has seen it end, and waits for this rank
            return
        self._signals.enter(Phase.END_AT_ONCE)
        time.sleep(self._intervals.goodbye_s)


class AfterUpdate:
    """What happens with each new version, under the server's lock."""

    def __init__(self, topology: Topology, config: Config, checkpointer: Checkpointer) -> None:
        self._every = config.checkpoint_updates
        self._checkpointer = checkpointer
        # At world size 1 faults happen to the trainer.
        self._faults = Injection(() if topology.own_trainers else config.faults, topology)

    def __call__(self, version: int) -> None:
        if self._every is not None and version % self._every == 0:
            self._checkpointer.due()
        self._faults.at_update(version)


def _log_plan(basis: Basis, topology: Topology, config: Config, link: str | None) -> None:
    plan, num, state = basis.state.plan, len(topology.trainers), basis.state
    log.info(
        "workload %s: %d epoch%s of %d updates, %d training and %d test samples",
        config.workload,
        plan.epochs,
        "" if plan.epochs == 1 else "s",
        plan.updates_per_epoch,
        plan.num_train_samples,
        plan.num_test_samples,
    )
    log.info(
        "%d trainer%s%s, compute on the %s in %s, %d thread%s for each pass, %d usable cores",
        num,
        "" if num == 1 else "s",
        f" over the {link} link" if link else "",
        config.compute,
        config.precision,
        basis.threads,
        "" if basis.threads == 1 else "s",
        resources.usable_cores(),
    )
    if state.resumed_from is not None:
        updates, total = state.store.version, state.store.version + state.orders.updates_left
        log.info("going on from %s, after %d of %d updates", state.resumed_from, updates, total)
    if config.lr is None and basis.lr != LR:
        log.info("learning rate %g, for so many batches in an update; --lr overrides it", basis.lr)
